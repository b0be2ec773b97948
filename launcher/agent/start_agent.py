"""Start the agent from this file's own folder: ``python -I -S start_agent.py``.

This does the same as ``python -m horovodlike.launcher.agent.agent`` in less time: it skips ``site`` with its import
hooks, and the ``__init__`` of ``horovodlike`` and of ``horovodlike.launcher``.
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
