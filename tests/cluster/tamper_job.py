"""Program of the ranks of a job whose connections are tampered with: the function `main`.

Everything that another rank interprets is sent, in pickles that note the result of unpickling. At the end a rank prints
one line of JSON: the class and the text of its error, the objects that it has unpickled although no rank has sent them,
and whether tensors had the right values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

CANARY = "canary!" * 64
NUMBER = 1234.56789  # of all tensors, so its bytes are easy to find
unexpected: list[str] = []


class Canary:
    """Is unpickled by a call that tells."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, (self.text,)


def unpickle(text: str) -> Canary:
    if text != CANARY:
        unexpected.append(text)
    return Canary(text)


def train() -> bool:
    """Return whether all tensors had the right values."""
    from support.collectives import allreduce

    import horovodlike
    from horovodlike import basics, elastic, objects

    basics.init()
    right = True
    for step in range(2):
        total = allreduce("total", np.full(4096, NUMBER))
        right = right and bool((total == NUMBER * basics.size()).all())
        received, other = np.zeros(4096), (1 - basics.rank()) % basics.size()
        horovodlike.sendrecv(np.full(4096, NUMBER), other, received)
        right = right and bool((received == NUMBER).all())
        for root in range(basics.size()):
            objects.broadcast_object(Canary(CANARY), root, f"object.{root}")
        objects.broadcast_object({"step": step, "canary": Canary(CANARY)})
        state = elastic.ObjectState(step=step, canary=Canary(CANARY))
        state.sync()
        state.commit()
        if hasattr(objects, "allgather_object"):  # not in releases before objects were authenticated
            objects.allgather_object(Canary(CANARY), "all")
    basics.shutdown()
    return right


def main() -> None:
    error, text, right = "", "", True
    try:
        right = train()
    except Exception as problem:
        error, text = type(problem).__name__, str(problem)
    told = json.dumps({"error": error, "text": text, "unexpected": unexpected, "right": right})
    if folder := os.environ.get("TAMPER_FOLDER"):
        Path(folder, f"{os.getpid()}.told").write_text(told)
    print(told, flush=True)
