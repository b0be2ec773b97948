"""``python -m horovodlike.compat train.py``: runs a script that imports horovod, with horovodlike in its place."""

import sys

# What Python has put before the search path is the current folder, which may be a checkout whose source is not what is
# installed, or the folder of this file, as hvdrun starts it by its path. The program gets an entry of its own.
if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    del sys.path[0]

from horovodlike.compat.program import main  # noqa: E402 - after the search path was put in order

if __name__ == "__main__":
    main(sys.argv[1:])
