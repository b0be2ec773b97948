"""The package ``horovod`` as a script sees it, above the frameworks' modules.

The modules below have Horovod's names and shapes because scripts import them; each leads to horovodlike's own.
"""

from horovodlike.compat import API_VERSION
from horovodlike.compat.horovod.runner import run

__version__ = API_VERSION

__all__ = ["__version__", "run"]
