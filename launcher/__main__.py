"""``python -m horovodlike.launcher`` is ``hvdrun``."""

import sys

from horovodlike.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
