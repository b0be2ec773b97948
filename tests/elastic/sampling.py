"""A training loop that counts the samples it has seen: a function for `ElasticJob`, and a program for hvdrun.

`sampling.py FOLDER`: each worker that comes to the end writes FOLDER/<worker>.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

LENGTHS = [17, 40, 3, 1, 29, 60]  # of the tasks
EPOCHS = 2


def train(
    size: int = 0, tell: Callable[[int], object] = lambda commits: None
) -> tuple[list[int], list[int], list[float]]:
    """Train for two epochs, and on until there are `size` ranks.

    Returns how often samples were counted; how many ranks there were in each step that this worker took, and at the
    end; and parameters that depend on the order of steps, but not on how many ranks took them.
    """
    sys.path.append(str(Path(__file__).parent.parent))

    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics, elastic
    from horovodlike.data import DynamicPartition, Task

    basics.init()
    sizes = []

    @elastic.run
    def loop(state):
        while not state.is_done:
            state.data.set_epoch(state.epoch)
            for batch in state.data:
                counts = np.zeros(sum(LENGTHS) + 1, np.int64)
                for source, index in batch.samples():
                    counts[sum(LENGTHS[:source]) + index] += 1
                counts[-1] = len(batch)
                allreduce("step", counts)
                assert counts[-1] == batch.total
                state.counts += counts[:-1]
                state.parameters = 0.9 * state.parameters + counts[:3]
                sizes.append(basics.size())
                state.commit()
                tell(state._commits)
            assert set(state.counts) == {state.epoch + 1}
            state.epoch += 1
            state.is_done = state.epoch >= EPOCHS and basics.size() == (size or basics.size())

    tasks = [Task(source, 0, length) for source, length in enumerate(LENGTHS)]
    state = elastic.ObjectState(
        epoch=0,
        is_done=False,
        counts=np.zeros(sum(LENGTHS), np.int64),
        parameters=np.ones(3),
        data=DynamicPartition(tasks, batch_size=2, seed=1),
    )
    loop(state)
    return sorted({int(count) for count in state.counts}), [*sizes, basics.size()], state.parameters.tolist()


def check(values: list[tuple[list[int], list[int], list[float]]], size: int) -> None:
    """All that are left are `size` ranks, have counted each sample once in each epoch, and have the same bits."""
    assert len(values) == size
    assert len({str((counts, parameters)) for counts, _, parameters in values}) == 1
    for counts, sizes, _ in values:
        assert len(counts) == 1
        assert counts[0] >= EPOCHS
        assert sizes[-1] == size


def _main() -> None:
    result = train()
    (Path(sys.argv[1]) / f"{os.environ['HOROVODLIKE_WORKER']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main()
