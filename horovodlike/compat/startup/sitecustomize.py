"""The module that Python imports when it starts, where `horovodlike.compat.environment` has changed PYTHONPATH.

It gives the process Horovod's names. Then it removes its folder from the search path, and runs the `sitecustomize` that
it has hidden.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
try:
    from horovodlike.compat import install
except ModuleNotFoundError as error:
    if error.name != "horovodlike":
        raise
    # This is another Python, which the program has started.
else:
    install()

_hidden = PathFinder.find_spec("sitecustomize")
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
