"""Starts the agent from this file's own folder: ``python -I -S start_agent.py``.

The same as ``python -m horovodlike.launcher.agent.agent`` without what costs time there: ``site`` with its import
hooks, and the packages' own ``__init__``.
"""

import os
import sys
import types

for _name, _path in (
    ("horovodlike", []),
    ("horovodlike.launcher", [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]),
):
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__path__ = _path

from horovodlike.launcher.agent.agent import main  # noqa: E402 - the packages have to be there first

sys.exit(main())
