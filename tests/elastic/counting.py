"""A training loop whose result does not depend on the number of ranks, and what it must come to."""

from __future__ import annotations

SAMPLES = 24  # in each step


def next_total(total: int, total_of_step: int) -> int:
    return (total * 31 + total_of_step) % (2**31 - 1)


def oracle(steps: int) -> tuple[int, list[int]]:
    """What the state must be after so many steps, whoever did them."""
    total, sums = 0, []
    for step in range(steps):
        sums.append(sum((step + 1) * (sample + 1) for sample in range(SAMPLES)))
        total = next_total(total, sums[-1])
    return total, sums


def sum_of_step(step: int, prefix: str = "") -> int:
    """Collective: each rank adds up its part of the samples."""
    import numpy as np
    from collectives import allreduce

    from horovodlike import basics

    mine = sum((step + 1) * (sample + 1) for sample in range(basics.rank(), SAMPLES, basics.size()))
    return int(allreduce(f"{prefix}step", np.array([mine], np.int64))[0])


def take_step(state) -> None:
    """One step, without the commit."""
    found = sum_of_step(state.step)
    state.total = next_total(state.total, found)
    state.sums.append(found)  # in place: only a deep copy can take it back
    state.step += 1
