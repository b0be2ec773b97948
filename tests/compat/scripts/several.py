"""Runs scripts one after the other in the same processes: to import a framework takes longer than each of them."""

import runpy
import sys

scripts, sys.argv[1:] = sys.argv[1:], []
for path in scripts:
    runpy.run_path(path, run_name="__main__")
