"""One rank of the measurements of GPUs: `gpu_rank.py FOLDER name=value...`, under hvdrun; see benchmarks/gpu.py."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a file: the checkout goes last, so that `horovodlike` is the installed package and not the source folder.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import horovodlike.torch as hvd  # noqa: E402
from benchmarks import models  # noqa: E402
from benchmarks.gpu import share_covered  # noqa: E402

Row = dict[str, Any]
Step = Callable[[], object]

MANY, MANY_BYTES = 400, 1024
PROFILED_STEPS = 5


@dataclass(frozen=True)
class Job:
    """The task of this rank, and its device."""

    folder: Path
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    models: tuple[str, ...]
    rounds: int
    quick: bool
    device: torch.device
    gpus: int
    shared: bool

    @property
    def through(self) -> str:
        """The way of the data."""
        return "staging" if self.shared or self.device.type != "cuda" else "nccl"

    @property
    def peer(self) -> str:
        """The backend of torch.distributed that can do the same."""
        return "nccl" if self.through == "nccl" else "gloo"

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def read_job(words: Sequence[str]) -> Job:
    """Read the command line, and choose this rank's device."""
    options = dict(word.split("=", 1) for word in words[1:])
    gpus = torch.cuda.device_count() if options["device"] == "cuda" else 0
    shared = options["shared"] == "True"
    device = torch.device("cuda", 0 if shared else hvd.local_rank()) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    return Job(
        folder=Path(words[0]),
        parts=tuple(options["parts"].split(",")),
        sizes=tuple(map(int, options["sizes"].split(","))),
        models=tuple(options["models"].split(",")),
        rounds=int(options["rounds"]),
        quick=options["quick"] == "True",
        device=device,
        gpus=gpus,
        shared=shared,
    )


def take_turns(job: Job, steps: dict[str, Step], iterations: int, case: Row) -> list[Row]:
    """Time the steps of each peer, another first in each round; a row for each.

    Returns:
        Rows with "seconds" of one iteration, and "host_seconds" until a step on an idle device returns, by round.
    """
    seconds: dict[str, list[float]] = {peer: [] for peer in steps}
    host: dict[str, list[float]] = {peer: [] for peer in steps}
    peers = list(steps)
    for number in range(-1, job.rounds):  # the first round warms up
        first = number % len(peers)
        for peer in (*peers[first:], *peers[:first]):
            whole, calling = _time(job, steps[peer], iterations)
            if number >= 0:
                seconds[peer].append(whole)
                host[peer].append(calling)
    return [{"case": {"peer": peer, **case}, "seconds": seconds[peer], "host_seconds": host[peer]} for peer in peers]


def _time(job: Job, step: Step, iterations: int) -> tuple[float, float]:
    for _ in range(max(2, iterations // 5)):
        step()
    job.synchronize()
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    job.synchronize()
    whole = (time.perf_counter() - start) / iterations
    calls = []
    for _ in range(max(3, iterations // 5)):
        hvd.barrier()
        start = time.perf_counter()
        step()
        calls.append(time.perf_counter() - start)
        job.synchronize()
    return whole, statistics.median(calls)


def measure_allreduce(job: Job) -> list[Row]:
    """In-place sums of one tensor of each size, and of many small ones, all in flight together."""
    rows = []
    for nbytes in job.sizes:
        tensor = torch.zeros(nbytes // 4, device=job.device)
        ours = functools.partial(hvd.allreduce_, tensor, name=f"sum.{nbytes}", op=hvd.Sum)
        _check(tensor, ours)
        steps: dict[str, Step] = {"horovodlike": ours, job.peer: functools.partial(dist.all_reduce, tensor)}
        iterations = 3 if job.quick else max(5, min(200, (1 << 30) // nbytes))
        rows += take_turns(job, steps, iterations, {"nbytes": nbytes, "count": 1, "through": job.through})
    tensors = [torch.zeros(MANY_BYTES // 4, device=job.device) for _ in range(MANY)]
    steps = {"horovodlike": lambda: _all_at_once(tensors), job.peer: lambda: _all_at_once_by_torch(tensors)}
    case = {"nbytes": MANY_BYTES, "count": MANY, "through": job.through}
    return rows + take_turns(job, steps, 3 if job.quick else 20, case)


def _check(tensor: torch.Tensor, step: Step) -> None:
    tensor.fill_(hvd.rank() + 1)
    step()
    wanted = hvd.size() * (hvd.size() + 1) // 2
    if not bool((tensor == wanted).all()):
        raise RuntimeError(f"wrong result for {tensor.numel()} elements: {tensor.unique().tolist()}, not {wanted}")
    tensor.zero_()


def _all_at_once(tensors: Sequence[torch.Tensor]) -> None:
    handles = [hvd.allreduce_async_(tensor, name=f"many.{number}", op=hvd.Sum) for number, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def _all_at_once_by_torch(tensors: Sequence[torch.Tensor]) -> None:
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def measure_training(job: Job) -> list[Row]:
    """Time steps without communication, with DistributedOptimizer, and with DistributedDataParallel."""
    reduce_also_alone()
    rows = []
    for model in job.models:
        steps: dict[str, Step] = {
            "plain": _plain_step(job, model),
            "horovodlike": _optimizer_step(job, model),
            "ddp": _ddp_step(job, model),
        }
        rows += take_turns(job, steps, 1 if job.quick else 30, {"model": model})
    return rows


def reduce_also_alone() -> None:
    """Have optimizers hand their gradients to the engine at one rank as well, which sends nothing otherwise."""
    from horovodlike.torch._optimizer.reduction import Reduction

    Reduction.communicates = property(lambda _: True)  # type: ignore[assignment,method-assign]


def _plain_step(job: Job, model: str) -> Step:
    module = models.build(model).to(job.device)
    return models.step(model, module, models.sgd(module), hvd.rank(), job.device)


def _optimizer_step(job: Job, model: str) -> Step:
    module = models.build(model).to(job.device)
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    named = [(f"{model}.{name}", parameter) for name, parameter in module.named_parameters()]
    optimizer = hvd.DistributedOptimizer(models.sgd(module), named_parameters=named)
    return models.step(model, module, optimizer, hvd.rank(), job.device)


def _ddp_step(job: Job, model: str) -> Step:
    devices = [job.device] if job.device.type == "cuda" else None
    # Buffers are each rank's own with the peer, too.
    module = DistributedDataParallel(models.build(model).to(job.device), device_ids=devices, broadcast_buffers=False)
    return models.step(model, module, models.sgd(module), hvd.rank(), job.device)


def measure_overlap(job: Job) -> list[Row]:
    """Return the share of communication on the device during which the device computes, in a few profiled steps.

    A CPU has no such intervals, and so no rows.
    """
    rows = []
    for model in job.models:
        step = _optimizer_step(job, model)
        for _ in range(3):
            step()
        job.synchronize()
        hvd.barrier()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if job.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(1 if job.quick else PROFILED_STEPS):
                step()
            job.synchronize()
        trace = job.folder / f"trace.{hvd.rank()}"
        profile.export_chrome_trace(str(trace))
        found = split_trace(json.loads(trace.read_text()))
        case = {"model": model, "through": job.through}
        if job.device.type == "cuda" and not found[0]:
            raise RuntimeError(f"the profiler has seen no communication of {model} on the device")
        if found[0]:
            rows.append({"case": case, "share": share_covered(*found), "communicating": _length(found[0])})
    return rows


def split_trace(trace: Row) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the device's intervals of communication and of computation, in microseconds, from the profiler's trace.

    Communication is NCCL's kernels, and copies between host and device: the training itself makes none.
    """
    communication: list[tuple[float, float]] = []
    computation: list[tuple[float, float]] = []
    for event in trace["traceEvents"]:
        kind, name = event.get("cat", ""), event.get("name", "")
        interval = (float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0)))
        if kind == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            communication.append(interval)
        elif kind == "kernel":
            (communication if "nccl" in name.lower() else computation).append(interval)
    return communication, computation


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e6


PARTS = {"allreduce": measure_allreduce, "training": measure_training, "overlap": measure_overlap}


def main() -> None:
    """Measures the parts, and writes FOLDER/<rank>.json."""
    hvd.init()
    job = read_job(sys.argv[1:])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{job.folder / 'store'}"
    dist.init_process_group(job.peer, init_method=store, rank=hvd.rank(), world_size=hvd.size())
    report: Row = {name: PARTS[name](job) for name in job.parts}
    report["gpus"] = job.gpus
    report["device"] = {
        "name": torch.cuda.get_device_name(job.device) if job.gpus else "CPU",
        "CUDA of PyTorch": torch.version.cuda,
        "NCCL": hvd.nccl_built(),
    }
    (job.folder / f"{hvd.rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
