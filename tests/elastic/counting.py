"""A training loop whose result does not depend on the number of ranks, and what it must come to."""

from __future__ import annotations

SAMPLES = 24  # in each step


def next_total(total: int, total_of_step: int) -> int:
    return (total * 31 + total_of_step) % (2**31 - 1)


def oracle(steps: int) -> tuple[int, list[int]]:
    """Return the state after a number of steps, whatever rank made them."""
    total, sums = 0, []
    for step in range(steps):
        sums.append(sum((step + 1) * (sample + 1) for sample in range(SAMPLES)))
        total = next_total(total, sums[-1])
    return total, sums


def sum_of_step(step: int, prefix: str = "") -> int:
    """Collective: each rank adds up its part of the samples."""
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    mine = sum((step + 1) * (sample + 1) for sample in range(basics.rank(), SAMPLES, basics.size()))
    return int(allreduce(f"{prefix}step", np.array([mine], np.int64))[0])


def take_step(state) -> None:
    """One step, without the commit."""
    found = sum_of_step(state.step)
    state.total = next_total(state.total, found)
    state.sums.append(found)  # in place: only a deep copy can take it back
    state.step += 1


def train(faults: list[tuple[int, int, str]], steps: int, size: int = 0, generation: int = 1) -> dict[str, object]:
    """Train for so many steps, and on until there are `size` ranks and five more steps are done.

    Args:
        faults: Which worker kills itself at which step, and where in it.
        steps: How many.
        size: How many ranks there have to be at the end; 0 whatever number.
        generation: In which generation of the job the end may come.
    """
    import os
    import signal
    import threading

    from elastic_job import tell

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client

    basics.init()
    number = driver_client.current().number
    mine = {(step, point) for worker, step, point in faults if worker == number}
    executed: list[int] = []
    begins: list[tuple[int, int]] = []  # the step and the number of ranks each time
    doomed = False
    syncs = 0
    committed = 0

    class State(elastic.ObjectState):
        def sync(self):
            nonlocal syncs
            syncs += 1
            super().sync()

    def fail(step: int, point: str) -> None:
        if (step, point) in mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def fail_later(step: int) -> None:
        nonlocal doomed
        for fault_step, point in mine:
            if fault_step == step and point.startswith("after "):
                doomed = True
                threading.Timer(float(point[6:]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        if doomed and step + 1 == steps:
            threading.Event().wait()  # the end must not come first

    @elastic.run
    def loop(state):
        nonlocal committed
        begins.append((state.step, basics.size()))
        assert state.step >= committed, f"{committed} steps were committed, and only {state.step} are left"
        assert state._commits == state.step
        may_end = size in (0, basics.size()) and int(os.environ["HOROVODLIKE_GENERATION"]) >= generation
        state.last = max(steps, state.step + 5) if size else steps
        while state.step < state.last or not may_end:
            step = state.step
            fail_later(step)
            fail(step, "begin")
            take_step(state)
            executed.append(step)
            fail(step, "commit")
            state.commit()
            committed = state.step
            fail(step, "end")
            tell(step)

    state = State(step=0, total=0, sums=[], last=0)
    loop(state)
    return {
        "step": state.step,
        "total": state.total,
        "sums": state.sums,
        "size": basics.size(),
        "begins": begins,
        "executed": executed,
        "syncs": syncs,
    }


def check(values: list[dict[str, object]], size: int) -> None:
    """All have the same state, and it is the oracle's."""
    assert len(values) == size
    for value in values:
        assert value["step"] == values[0]["step"]
        assert (value["total"], value["sums"]) == oracle(value["step"])
        assert value["size"] == size
