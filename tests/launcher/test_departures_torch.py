"""SIGTERM to all processes of a job, of which those of PyTorch's data loaders end first."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.hvdrun_process import LIMIT_S, Launch

from horovodlike.elastic._state_file import StateFile

LOADER = """
import torch
import horovodlike.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.persist("state", every=1000)

class Inputs(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 4:
            print("waits", flush=True)
            while True: signal.pause()
        return torch.ones(2)

@hvd.elastic.run
def train(state):
    for inputs in torch.utils.data.DataLoader(Inputs(), num_workers=1, prefetch_factor=1):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()

import signal
train(state)
"""


@pytest.mark.slow  # test_departures.py has a short form
@pytest.mark.parametrize(("np", "kind"), [(2, ()), (3, ("--min-np", 1))])
def test_a_data_loaders_processes_end_first(
    launch: Callable[..., Launch], tmp_path: Path, np: int, kind: tuple[object, ...]
) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOADER)
    words = (*kind, "--max-np", np) if kind else ()
    job = launch("-np", np, *words, "--start-timeout", LIMIT_S, "--grace-period", LIMIT_S, sys.executable, program)
    job.expect(b"waits", np)
    for process in reversed(psutil.Process(job.process.pid).children(recursive=True)):
        process.terminate()
    job.signal(signal.SIGTERM)
    ended = job.finish(2 * LIMIT_S)
    last = re.fullmatch(
        "hvdrun: SIGTERM has ended the job; commit (\\d) is on disk; newer work is lost", ended.err.splitlines()[-1]
    )
    assert last is not None, ended.err
    assert (ended.code, StateFile(str(tmp_path / "state")).commits()) == (75, int(last[1]))
    assert 3 <= int(last[1]) <= 4
    assert b"[%d]" % np not in ended.out  # no new worker
