"""All checks that need a GPU, one after the other: `make gpu`, or `python tests/gpu/check.py`.

The tests of this folder, the same collectives under compute-sanitizer if it is in PATH, and the measurements. Ends with
1 where there is no GPU, or if one of them fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).with_name("gpu_checks.py")  # started alone it is a job of one rank


def commands() -> dict[str, list[str]]:
    """Return the commands to run, by name."""
    # Not `python -m pytest`: it would find the source folder of the package, which is not built.
    found = {"tests": [str(Path(sys.executable).with_name("pytest")), str(ROOT / "tests" / "gpu")]}
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not in PATH: not run", flush=True)
    else:
        # Errors of calls are checked by their callers. NCCL makes some that fail, to find the kernels it has for a GPU.
        options = ["--report-api-errors", "no", "--error-exitcode", "3"]
        found["compute-sanitizer"] = [sanitizer, *options, sys.executable, str(CHECKS)]
    found["measurements"] = [sys.executable, "-m", "benchmarks", "gpu"]
    return found


def main() -> int:
    sys.path.append(str(ROOT))
    from benchmarks import gpu

    if reason := gpu.missing():
        print(f"nothing can be checked: {reason}")
        return 1
    codes = {}
    for name, words in commands().items():
        print(f"--- {name}: {' '.join(words)}", flush=True)
        codes[name] = subprocess.run(words, cwd=ROOT, env={**os.environ, "NEEDS_GPU": "1"}, check=False).returncode
    for name, code in codes.items():
        print(f"{name}: {'passed' if code == 0 else f'FAILED with {code}'}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
