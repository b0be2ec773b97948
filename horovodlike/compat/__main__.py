"""``python -m horovodlike.compat train.py``: runs a script that imports horovod, with horovodlike in its place."""

import sys

# Python has put an entry in front of the search path: with -m, the current folder, where a checkout would hide the
# installed package; with a path, as hvdrun starts this, the folder of this file. The program gets an entry of its own.
if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    del sys.path[0]

from horovodlike.compat.program import main  # noqa: E402 - after the search path was put in order

if __name__ == "__main__":
    main(sys.argv[1:])
