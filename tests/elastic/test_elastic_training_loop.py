"""The training loop `Engine` in an elastic job: a worker is killed and another one joins, and all comes to the same."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from elastic_job import ElasticJob

VICTIM, KILLED_AT = 1, 8
SAMPLES, EPOCHS = 50, 3


def _train_shares() -> tuple[int, np.ndarray, np.ndarray]:
    """Train until there are three ranks again; return the epochs, the parameters, and those of one rank alone."""
    import torch
    from elastic_job import tell
    from support.training import flat_parameters, make_batches, make_model, my_part

    import horovodlike.torch as hvd
    from horovodlike._bootstrap import driver_client

    hvd.init()
    number = driver_client.current().number

    class Shares:
        def __iter__(self):
            return ((my_part(x), my_part(y)) for x, y in make_batches()[:6])

    def kill_one(loop):
        if (number, loop.step) == (VICTIM, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)

    epochs: list[int] = []

    def stop(loop):
        loop.stop = loop.epoch + 1 >= EPOCHS and hvd.size() == 3
        epochs.append(loop.epoch + 1)

    model, mse = make_model(), torch.nn.functional.mse_loss
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    hooks = {"backward": kill_one, "after_update": lambda loop: tell(loop.step), "end_epoch": stop}
    engine = hvd.Engine(model, mse, adam, hooks=hooks, elastic=True, commit_every=2, progress=False)
    engine.train(Shares(), 10**9)
    alone = make_model()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    for _ in range(epochs[-1]):
        for x, y in make_batches()[:6]:
            plain.zero_grad()
            mse(alone(x), y).backward()
            plain.step()
    return epochs[-1], flat_parameters(model).numpy(), flat_parameters(alone).numpy()


def _train_partition(kind: str) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Count in the committed state how often each sample was trained; return the extremes after each epoch."""
    import torch
    from elastic_job import tell
    from support.training import flat_parameters, make_model

    import horovodlike.torch as hvd
    from horovodlike._bootstrap import driver_client
    from horovodlike.data import DynamicPartition, cut_into_tasks

    hvd.init()
    number = driver_client.current().number

    class Counts:
        def __init__(self) -> None:
            self.counts = torch.zeros(SAMPLES)
            self.extremes: list[tuple[int, int]] = []

        def state_dict(self):
            return vars(self).copy()

        def load_state_dict(self, state):
            vars(self).update(state)

    counts = Counts()
    samples = torch.randn(SAMPLES, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    samples[:, 6] = torch.arange(SAMPLES)

    def read(batch):
        chosen = samples[[index for _, index in batch.samples()]]
        return chosen, chosen[:, :3]

    def kill_one(loop):
        if (number, loop.step) == (VICTIM, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)

    def count(loop):
        now = torch.zeros(SAMPLES)
        if loop.sample[0] is not None:
            now[loop.sample[0][:, 6].long()] = 1
        counts.counts = counts.counts + hvd.allreduce(now, op=hvd.Sum, name="counts")

    def end_epoch(loop):
        counts.extremes = [*counts.extremes, (int(counts.counts.min()), int(counts.counts.max()))]

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, inputs):
            return self.model(inputs[:, :6])

    hooks = {"backward": kill_one, "after_update": [count, lambda loop: tell(loop.step)], "end_epoch": end_epoch}
    model = First()
    engine = hvd.Engine(
        model,
        torch.nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        hooks=hooks,
        read=read if kind == "partition" else None,
        elastic=True,
        commit_every=2,
        state={"counts": counts},
        progress=False,
    )
    if kind == "partition":
        data = DynamicPartition(cut_into_tasks({"a": SAMPLES}, 7), 2, seed=5, record="manual")
    else:
        sampler = hvd.elastic.ElasticSampler(samples, seed=5)
        pairs = torch.utils.data.TensorDataset(samples, samples[:, :3])
        data = torch.utils.data.DataLoader(pairs, batch_size=2, sampler=sampler)
    engine.train(data, EPOCHS)
    return counts.extremes, flat_parameters(model).numpy()


@pytest.mark.slow
def test_a_worker_is_killed_and_the_parameters_are_those_of_one_rank_alone():
    with ElasticJob(3, _train_shares, modules=["horovodlike.torch"]) as job:
        job.wait_to_hear(0, KILLED_AT)
        job.add()
        values = job.values(VICTIM)
        assert job.sizes == [3, 2, 3] and len(values) == 3
        for epochs, parameters, alone in values:
            assert epochs == values[0][0] >= EPOCHS
            np.testing.assert_array_equal(parameters, values[0][1])
            np.testing.assert_allclose(parameters, alone, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("partition", "sampler"))
def test_every_sample_is_trained_once_in_each_epoch(kind):
    with ElasticJob(3, _train_partition, kind, modules=["horovodlike.torch"]) as job:
        values = job.values(VICTIM)
        assert job.sizes == [3, 2] and len(values) == 2
        for extremes, parameters in values:
            np.testing.assert_array_equal(parameters, values[0][1])
            assert [least for least, _ in extremes] == [1, 2, 3]
            # The sampler repeats samples so that all ranks get as many; the partition does not.
            most = [most for _, most in extremes]
            assert most == [1, 2, 3] if kind == "partition" else most[-1] <= 2 * EPOCHS
