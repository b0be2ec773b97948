"""Checks that tests run on ranks with a GPU: every collective, compared with torch's result on the CPU.

Also a program, which runs all of them: alone, under compute-sanitizer, or as `hvdrun -np 2 python gpu_checks.py`.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))  # for a program: pytest has done so

from support.on_gpu import SHAPES, check, choose_gpu, run_all
from support.torch_results import DTYPES, FLOATS, INTEGERS, OPS, inputs_of_all, reduced

import horovodlike as arrays
import horovodlike.torch as hvd
from horovodlike.torch._optimizer.reduction import Reduction


def check_allreduce(shared: bool) -> None:
    device = choose_gpu(shared)
    for dtype, op in itertools.product(DTYPES, OPS):
        if dtype is torch.bool and op == hvd.Average:
            continue
        handles = []
        for shape in SHAPES:
            tensors = inputs_of_all(dtype, shape)
            mine = tensors[hvd.rank()].to(device)
            handles.append((hvd.allreduce_async(mine, op=op), hvd.allreduce_async_(mine.clone(), op=op), tensors))
        for new, in_place, tensors in handles:
            what = (dtype, op, tensors[0].shape)
            check(hvd.synchronize(new), reduced(tensors, op), what)
            check(hvd.synchronize(in_place), reduced(tensors, op), (*what, "in place"))


def check_factors(shared: bool) -> None:
    device = choose_gpu(shared)
    for dtype in FLOATS:
        tensors = inputs_of_all(dtype, (1001,))
        mine = tensors[hvd.rank()].to(device)
        result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        check(result, reduced(tensors, hvd.Sum) * 2, dtype)


def check_adasum(shared: bool) -> None:
    device = choose_gpu(shared)
    tensors = inputs_of_all(torch.float32, (1001,))
    on_cpu = hvd.allreduce(tensors[hvd.rank()], op=hvd.Adasum, name="adasum.cpu")
    on_gpu = hvd.allreduce(tensors[hvd.rank()].to(device), op=hvd.Adasum, name="adasum.gpu")
    torch.testing.assert_close(on_gpu.cpu(), on_cpu)


def check_grouped(shared: bool) -> None:
    device = choose_gpu(shared)
    sets = [inputs_of_all(torch.float32, shape) for shape in SHAPES]
    results = hvd.grouped_allreduce([tensors[hvd.rank()].to(device) for tensors in sets], op=hvd.Sum, name="grouped")
    for result, tensors in zip(results, sets, strict=True):
        check(result, reduced(tensors, hvd.Sum), tensors[0].shape)


def check_allgather(shared: bool) -> None:
    device = choose_gpu(shared)
    for dtype, columns in itertools.product(DTYPES, (1, 7)):
        rows = [rank + 2 for rank in range(hvd.size())]
        tensors = [inputs_of_all(dtype, (rows[rank], columns))[rank] for rank in range(hvd.size())]
        check(hvd.allgather(tensors[hvd.rank()].to(device)), torch.cat(tensors), (dtype, columns))


def check_broadcast(shared: bool) -> None:
    device = choose_gpu(shared)
    for dtype, shape, root in itertools.product(DTYPES, SHAPES, range(hvd.size())):
        tensors = inputs_of_all(dtype, shape)
        check(hvd.broadcast(tensors[hvd.rank()].to(device), root), tensors[root], (dtype, shape, root))


def check_alltoall(shared: bool) -> None:
    device = choose_gpu(shared)
    size, rank = hvd.size(), hvd.rank()
    splits = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    for dtype in DTYPES:
        tensors = [inputs_of_all(dtype, (sum(splits[source]), 5))[source] for source in range(size)]
        received, counts = hvd.alltoall(tensors[rank].to(device), splits=torch.tensor(splits[rank]))
        parts = [tensor.split(splits[source])[rank] for source, tensor in enumerate(tensors)]
        check(received, torch.cat(parts), dtype)
        assert counts.tolist() == [splits[source][rank] for source in range(size)]


def check_reducescatter(shared: bool) -> None:
    device = choose_gpu(shared)
    size, rank = hvd.size(), hvd.rank()
    for dtype, op, rows in itertools.product((*FLOATS, *INTEGERS), (hvd.Sum, hvd.Average), (2 * size, 2 * size + 1)):
        tensors = inputs_of_all(dtype, (rows, 3))
        first = rows // size * rank + min(rank, rows % size)
        count = rows // size + (rank < rows % size)
        result = hvd.reducescatter(tensors[rank].to(device), op=op)
        check(result, reduced(tensors, op)[first : first + count], (dtype, op, rows))


def check_arrays_through_dlpack(shared: bool) -> None:
    """Collectives on arrays take tensors of any stream, and return tensors on the same GPU."""
    device = choose_gpu(shared)
    stream = torch.cuda.Stream(device)
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        with torch.cuda.stream(stream):
            tensors = inputs_of_all(dtype, (1001, 3))
            mine = tensors[hvd.rank()].to(device)
            torch.cuda._sleep(10_000_000)
            mine = mine * 1
            check(arrays.allreduce(mine, op=hvd.Sum), reduced(tensors, hvd.Sum), dtype)
            check(arrays.allgather(mine), torch.cat(tensors), dtype)
            check(arrays.alltoall(mine[: hvd.size()]), torch.stack([tensor[hvd.rank()] for tensor in tensors]), dtype)
            columns = mine[:, 1]
            assert arrays.broadcast_(columns, 0) is columns
            check(mine[:, 1], tensors[0][:, 1], (dtype, "in place"))


def check_order_on_streams(shared: bool) -> None:
    """A collective comes after what its stream was given before, and before what it is given later."""
    device = choose_gpu(shared)
    stream = torch.cuda.Stream(device)
    for number in range(20):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 22, device=device)
            torch.cuda._sleep(10_000_000)
            tensor += hvd.rank() + number
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="ordered")
            del tensor  # whose memory others may have as soon as nothing needs it
            torch.full((1 << 22,), -1.0, device=device)
            result = hvd.synchronize(handle) * 2
            smallest, largest = float(result.min()), float(result.max())
        assert smallest == largest == 2 * sum(rank + number for rank in range(hvd.size()))


def check_training(shared: bool) -> None:
    """DistributedOptimizer does on the GPU what it does on the CPU, also at one rank, where it is made to reduce."""
    Reduction.communicates = property(lambda _: True)
    trained = {}
    for device in (choose_gpu(shared), torch.device("cpu")):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)).double().to(device)
        named = [(f"{device.type}.{name}", parameter) for name, parameter in module.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), named_parameters=named)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(5):
            batch = torch.randn(16, 20, dtype=torch.float64, generator=generator).to(device)
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
        trained[device.type] = [parameter.detach().cpu() for parameter in module.parameters()]
    for on_gpu, on_cpu in zip(trained["cuda"], trained["cpu"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu)


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_allreduce, check_factors, check_adasum, check_grouped, check_allgather, check_broadcast),
        *(check_alltoall, check_reducescatter, check_arrays_through_dlpack, check_order_on_streams, check_training),
    )
}


if __name__ == "__main__":
    run_all(CHECKS)
