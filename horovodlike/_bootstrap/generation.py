"""Which generation of an elastic job this is: each change of its members makes the next."""

import os
from pathlib import Path

__all__ = ["file_of_generation", "number"]


def number() -> int:
    """Return the number of the generation; 1 is the one that a job begins with, and the only one of other jobs."""
    return int(os.environ.get("HOROVODLIKE_GENERATION") or 1)


def file_of_generation(file_path: str) -> str:
    """Return the file for what a generation writes: the first one's is ``file_path``, and none takes another's place.

    Later ones have ``.generation3`` before the suffix. An empty path stays empty.
    """
    path = Path(file_path)
    if not file_path or number() == 1:
        return file_path
    return str(path.with_name(f"{path.stem}.generation{number()}{path.suffix}"))
