"""The top-level package ``horovod`` as scripts see it, without the modules of the frameworks.

The modules in it have the names and contents of Horovod's, because scripts import them; they call horovodlike's code.
"""

from horovodlike.compat import API_VERSION
from horovodlike.compat.horovod.runner import run

__version__ = API_VERSION

__all__ = ["__version__", "run"]
