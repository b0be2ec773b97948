"""A long training in which a random worker is killed, or hosts' slots change, every few seconds.

    python tests/elastic/soak.py --seconds 900

It ends well if the training gets to its target, no commit is lost, all ranks hold the same parameters in the end, and
nothing is left. Commits go to disk as well, because all that have the state may be killed one after the other before
others have got it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train_until_told(folder: Path) -> None:
    """Run the worker's function: a regression until there is a file named `stop`."""
    import torch

    import horovodlike.torch as hvd
    from horovodlike.data import DynamicPartition, cut_into_tasks

    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    inputs = torch.randn(4000, 16)
    truth = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    outputs = truth(inputs).detach()
    outputs = (outputs - outputs.mean()) / outputs.std() + 0.1 * torch.randn(4000, 1)
    torch.manual_seed(os.getpid())  # a new worker must get its parameters from the others
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters(), op=hvd.Sum)
    partition = DynamicPartition(cut_into_tasks({"inputs": 4000}, 100), 16, seed=1)
    state = hvd.elastic.TorchState(model, optimizer, partition=partition, epoch=0, steps=0, stop=False)
    state.persist(str(folder / "state"))

    @hvd.elastic.run
    def train(state: Any) -> list[Any]:
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks begin at step {state.steps}", flush=True)
        while not state.stop:
            partition.set_epoch(state.epoch)
            for batch in partition:
                index = torch.tensor([sample for _, sample in batch.samples()], dtype=torch.int64)
                optimizer.zero_grad()
                # The sum over the samples of all ranks, divided by their number.
                loss = ((model(inputs[index]) - outputs[index]) ** 2).sum() / batch.total
                loss.backward()
                optimizer.step()
                state.steps += 1
                time.sleep(0.01)
                if state.steps % 5 == 0:
                    state.commit()
            state.epoch += 1
            state.stop = hvd.broadcast_object((folder / "stop").exists(), 0)
            state.commit()
        return hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])

    parameters = train(state)
    with torch.no_grad():
        loss = float(((model(inputs) - outputs) ** 2).mean())
    if hvd.rank() == 0:
        result = {
            "loss": loss,
            "steps": state.steps,
            "epochs": state.epoch,
            "equal": all(each == parameters[0] for each in parameters),
        }
        (folder / "result").write_text(json.dumps(result))
    hvd.shutdown()


def living_members(log: str) -> list[int]:
    """The processes of the members of the last generation, as far as they live, by what hvdrun has explained."""
    generations = re.findall(r"^hvdrun: generation \d+: workers ([\d, ]+);", log, re.MULTILINE)
    pids = dict(re.findall(r"^hvdrun: worker (\d+) is process (\d+) ", log, re.MULTILINE))
    gone = set(re.findall(r"^hvdrun: worker (\d+) ended with status", log, re.MULTILINE))
    members = generations[-1].split(", ") if generations else []
    return [int(pids[number]) for number in members if number not in gone]


def main() -> int:
    """Run the soak; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two changes")
    parser.add_argument(
        "--target", type=float, default=0.03, help="mean squared error: 1 at the beginning, and 0.01 is noise"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train_until_told(arguments.train)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the job too
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    choose = random.Random(seed)
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts, script = folder / "hosts", folder / "hosts.sh"
        hosts.write_text("localhost:4\n")
        script.write_text(f"#!/bin/sh\ncat {hosts}\n")
        script.chmod(0o700)
        options = ["-np", "4", "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script), "--verbose"]
        with (folder / "log").open("w") as log:
            job = subprocess.Popen(
                [Path(sys.executable).with_name("hvdrun"), *options, sys.executable, __file__, "--train", folder],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        counts = {"killed": 0, "slots changed": 0}
        try:
            while "ranks begin at step" not in (folder / "log").read_text() and job.poll() is None:
                time.sleep(0.1)
            end = time.monotonic() + arguments.seconds
            while time.monotonic() < end and job.poll() is None:
                time.sleep(arguments.every)
                members = living_members((folder / "log").read_text())
                if members and (not counts["killed"] or choose.random() < 0.7):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                        os.kill(choose.choice(members), signal.SIGKILL)
                        counts["killed"] += 1
                else:
                    (folder / "new").write_text(f"localhost:{choose.randint(2, 4)}\n")
                    (folder / "new").rename(hosts)
                    counts["slots changed"] += 1
            (folder / "stop").touch()
            try:
                code = job.wait(timeout=120)
            except subprocess.TimeoutExpired:
                code = -1
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(30)
            written = (folder / "log").read_text()
        result = json.loads((folder / "result").read_text()) if (folder / "result").exists() else {}
    left = {entry for entry in set(os.listdir("/dev/shm")) - before if "horovodlike" in entry}
    begun = [int(step) for step in re.findall(r"ranks begin at step (\d+)", written)]
    print(f"exit code {code}; {counts}; {len(begun)} generations; {result}; left: {left}")
    print(f"generations began at steps {begun}")
    is_forward = all(later >= earlier for earlier, later in zip(begun, begun[1:], strict=False))
    well = code == 0 and result.get("loss", 1.0) < arguments.target and result["equal"] and is_forward and not left
    well = well and counts["killed"] > 0
    if not well:
        print(written[-20000:])
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
