"""The GPUs of a host, and which of them each of its ranks sees."""

import itertools
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovodlike.launcher.agent.external import ask
from horovodlike.launcher.errors import UsageError, counted, given

__all__ = ["VISIBLE", "Gpus", "find_gpus", "gpu_variables"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE_S = 20.0
_NAME = re.compile(r"[0-9]+|(GPU|MIG)-[\w/-]+", re.ASCII)
_LISTED = re.compile(r"^(GPU |\s+MIG ).*\(UUID: ((?:GPU|MIG)-[\w/-]+)\)\s*$", re.ASCII | re.MULTILINE)

# CUDA is not to be initialised in a process that forks, nor in one that lives as long as the job.
_COUNT = """
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv[1]]
from horovodlike._engine.gpu_libraries import find
found = find()
print(found.num_gpus)
print(found.why_no_cuda)
"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that the ranks of a host may use.

    Attributes:
        names: As ``CUDA_VISIBLE_DEVICES`` names them: numbers, or UUIDs of GPUs or of parts of them (MIG).
        source: Who says so; where there are none, why.
    """

    names: tuple[str, ...]
    source: str


def find_gpus(environ: Mapping[str, str]) -> Gpus:
    """Finds the GPUs of this host without initialising CUDA in this process.

    Those that ``CUDA_VISIBLE_DEVICES`` lists, if it is set, since a scheduler or the user has chosen them. Else all: by
    nvidia-smi, whose UUIDs mean the same whatever the order of devices is, and which knows the parts that GPUs are
    split into; without nvidia-smi, as many as the CUDA driver counts.

    Args:
        environ: The environment of the ranks.
    """
    visible = environ.get(VISIBLE)
    if visible is not None:
        return _listed(visible)
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    return _ask_driver(environ) if program is None else _ask_nvidia_smi(program, environ)


def gpu_variables(
    per_rank: int, gpus: Gpus | None, ranks: int, called: str = "--gpus-per-rank"
) -> list[dict[str, str]]:
    """Gives each local rank the next GPUs. Pure.

    Args:
        per_rank: How many each rank gets; with 0 nothing is set.
        gpus: Those of the host.
        ranks: How many ranks the host has.
        called: By what the user has asked for them.

    Returns:
        By local rank, the variables that say so.

    Raises:
        UsageError: There are too few.
    """
    if per_rank == 0:
        return [{} for _ in range(ranks)]
    assert gpus is not None
    have = len(gpus.names)
    if per_rank * ranks > have:
        few = have // per_rank
        fewer = f"use at most {counted(few, 'rank')} on this host, or " if few else ""
        raise UsageError(
            f"{given(called, per_rank)}: {counted(ranks, 'rank')} need{'s' * (ranks == 1)} "
            f"{counted(per_rank * ranks, 'GPU')}, but this host has {have or 'none'} ({gpus.source}); {fewer}leave "
            f"{called} out: then all ranks see all GPUs"
        )
    shares = (gpus.names[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks))
    return [{VISIBLE: ",".join(share)} for share in shares]


def _listed(visible: str) -> Gpus:
    words = [word.strip() for word in visible.split(",")]
    names = tuple(itertools.takewhile(_NAME.fullmatch, words))  # CUDA ends the list where it does not understand it
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return Gpus((), f"{VISIBLE}={visible} names {twice} twice, which CUDA refuses")
    return Gpus(names, f"{VISIBLE}={visible}")


def _ask_nvidia_smi(program: str, environ: Mapping[str, str]) -> Gpus:
    output, trouble = _run([program, "-L"], environ)
    if trouble:
        return Gpus((), trouble)
    names: list[str] = []
    whole = None  # the GPU that was listed last, as long as no part of it was
    for kind, uuid in _LISTED.findall(output):
        if kind == "GPU ":
            whole = uuid
            names.append(uuid)
        else:
            names = [*(name for name in names if name != whole), uuid]
    return Gpus(tuple(names), f"{program} -L lists {len(names) or 'none'}")


def _ask_driver(environ: Mapping[str, str]) -> Gpus:
    packages = str(Path(__file__).resolve().parents[3])
    output, trouble = _run([sys.executable, "-c", _COUNT, packages], environ)
    if trouble:
        return Gpus((), f"there is no nvidia-smi, and the GPUs cannot be counted: {trouble}")
    number, why, *_ = [*output.splitlines(), "", ""]
    source = f"there is no nvidia-smi, and {why}" if why else f"the CUDA driver counts {number}"
    return Gpus(tuple(map(str, range(int(number)))), source)


def _run(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """What a program says, and what went wrong."""
    try:
        answer = ask(words, _PATIENCE_S, environ)
    except OSError as error:
        return "", f"{words[0]} cannot be executed: {error.strerror}"
    if answer.trouble:
        return "", f"{words[0]} has not answered: {answer.trouble}"
    out, err = (text.decode(errors="replace") for text in (answer.out, answer.err))
    if answer.status != 0:
        said = (out + err).strip().splitlines()
        return "", f"{words[0]} ended with {answer.status}: {said[-1] if said else 'it said nothing'}"
    return out, ""
