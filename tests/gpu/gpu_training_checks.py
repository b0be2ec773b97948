"""Checks that tests run on ranks with a GPU: what is built on collectives does there what it does on the CPU.

Also a program, as `gpu_checks.py` is.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))  # for a program: pytest has done so

from support.on_gpu import check, choose_gpu, run_all
from support.process_groups import process_group
from support.torch_results import FLOATS, inputs_of_all, reduced

import horovodlike as arrays
import horovodlike.torch as hvd
from horovodlike.torch.parameter_server import ParameterServer

Train = Callable[[nn.Module, torch.device], object]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)).double()


def batch(step: int, device: torch.device, rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
    return torch.randn(rows, 20, dtype=torch.float64, generator=generator).to(device)


def compare(train: Train, shared: bool, make: Callable[[], nn.Module] = model, **tolerances: float) -> None:
    """Check that training gives the same parameters on the GPU and on the CPU."""
    trained = {}
    for device in (choose_gpu(shared), torch.device("cpu")):
        module = make().to(device)
        train(module, device)
        trained[device.type] = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    for name, on_cpu in trained["cpu"].items():
        torch.testing.assert_close(trained["cuda"][name], on_cpu, **tolerances)


def optimize(module: nn.Module, device: torch.device, steps: int = 5, **options: Any) -> None:
    named = [(f"{device.type}.{name}", parameter) for name, parameter in module.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), named_parameters=named, **options)
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(step, device)).square().mean().backward()
        optimizer.step()


@contextlib.contextmanager
def group_of_all() -> Iterator[None]:
    """The default process group, of all ranks, over the backend `hvd`."""
    with tempfile.TemporaryDirectory() as own:
        with process_group(Path(hvd.broadcast_object(own)) / "store"):
            yield
        hvd.barrier()


def check_process_group(shared: bool) -> None:
    """The operations of torch.distributed, through the engine."""
    device = choose_gpu(shared)
    size, rank = hvd.size(), hvd.rank()
    with group_of_all():
        for dtype in FLOATS:
            tensors = inputs_of_all(dtype, (size * 30, 3))
            mine = tensors[rank].to(device)
            total = reduced(tensors, hvd.Sum)
            for is_async in (False, True):
                summed = mine.clone()
                work = dist.all_reduce(summed, async_op=is_async)
                if is_async:
                    work.wait()
                check(summed, total, dtype)
            gathered = torch.empty(size * mine.shape[0], 3, dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, mine)
            check(gathered, torch.cat(tensors), dtype)
            part = torch.empty(30, 3, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(part, mine)
            check(part, total[rank * 30 : (rank + 1) * 30], dtype)
            exchanged = torch.empty_like(mine)
            dist.all_to_all_single(exchanged, mine)
            check(exchanged, torch.cat([tensor.chunk(size)[rank] for tensor in tensors]), dtype)
            dist.broadcast(mine, size - 1)
            check(mine, tensors[-1], dtype)
        dist.barrier()


def check_process_group_messages(shared: bool) -> None:
    device = choose_gpu(shared)
    size, rank = hvd.size(), hvd.rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    with group_of_all():
        tensors = inputs_of_all(torch.float32, (100_003,))
        received = torch.empty(100_003, device=device)
        sending = dist.isend(tensors[rank].to(device), after)
        dist.recv(received, before)
        sending.wait()
        check(received, tensors[before], "message")


def check_ddp(shared: bool) -> None:
    """DistributedDataParallel over the backend `hvd`."""
    with group_of_all():

        def train(module: nn.Module, device: torch.device) -> None:
            parallel = DistributedDataParallel(module, bucket_cap_mb=0.002)
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            for step in range(5):
                optimizer.zero_grad()
                parallel(batch(step, device)).square().mean().backward()
                optimizer.step()

        compare(train, shared)


def check_optimizer_options(shared: bool) -> None:
    """Groups, Adasum, a predivide factor, weights by samples, compression."""
    for options in (
        {"groups": 2},
        {"op": hvd.Adasum},
        {"gradient_predivide_factor": 2.0},
        {"weight": lambda: hvd.rank() + 1},
    ):
        compare(lambda module, device, options=options: optimize(module, device, **options), shared)
    lossy = {"compression": hvd.Compression.fp16}
    compare(lambda module, device: optimize(module, device, **lossy), shared, rtol=1e-2, atol=1e-3)


def check_sync_batch_norm(shared: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(20, 6), hvd.SyncBatchNorm(6), nn.Linear(6, 2)).double()

    compare(optimize, shared, make)


def check_channels_last(shared: bool) -> None:
    """Gradients whose channels are last, of a convolution."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last)

    def train(module: nn.Module, device: torch.device) -> None:
        named = [(f"{device.type}.{name}", parameter) for name, parameter in module.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), named_parameters=named)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(3):
            images = torch.randn(4, 3, 9, 9, dtype=torch.float64, generator=generator).to(device)
            optimizer.zero_grad()
            module(images.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()

    compare(train, shared, make)


def check_sparse_gradients(shared: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Embedding(50, 7, sparse=True).double()

    def train(module: nn.Module, device: torch.device) -> None:
        named = [(f"{device.type}.{name}", parameter) for name, parameter in module.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), named_parameters=named)
        for step in range(3):
            optimizer.zero_grad()
            words = torch.arange(step, step + 6, device=device) * (hvd.rank() + 1)
            module(words).square().sum().backward()
            optimizer.step()

    with torch.sparse.check_sparse_tensor_invariants():  # without, PyTorch 2.11 warns of its own tensors
        compare(train, shared, make)


def check_training_loop(shared: bool) -> None:
    """Engine, with batches that are copied to the GPU ahead."""

    def train(module: nn.Module, device: torch.device) -> None:
        samples = batch(0, torch.device("cpu"), rows=64).pin_memory()
        data = [(part, part[:, :4]) for part in samples.split(16)]
        engine = hvd.Engine(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1), progress=False)
        engine.train(data, epochs=2)

    compare(train, shared)


def check_split_layers(shared: bool) -> None:
    """Layers that are split among ranks."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(hvd.nn.ParallelMLP(20, 24), hvd.nn.ColumnParallelLinear(20, 8)).double()

    def train(module: nn.Module, device: torch.device) -> None:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            rows = torch.randn(16, 20, dtype=torch.float64, generator=generator).to(device)
            optimizer.zero_grad()
            module(rows).square().mean().backward()
            optimizer.step()

    compare(train, shared, make)


def check_data_parallel(shared: bool) -> None:
    def train(module: nn.Module, device: torch.device) -> None:
        parallel = hvd.DataParallel(module, [device])
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            parallel(batch(step, torch.device("cpu"))).square().mean().backward()
            optimizer.step()

    compare(train, shared)


def check_parameter_server(shared: bool) -> None:
    device = choose_gpu(shared)
    module = nn.Linear(20, 30).to(device)
    with ParameterServer(module) as server:
        before = [parameter.detach().cpu().clone() for parameter in module.parameters()]
        hvd.broadcast_parameters(module.state_dict(), 0)
        server.receive().wait()
        hvd.barrier()
        server.send([torch.ones_like(parameter) for parameter in module.parameters()], "add").wait()
        hvd.barrier()
        server.receive().wait()
        hvd.barrier()
        for parameter, first in zip(module.parameters(), before, strict=True):
            wanted = hvd.broadcast(first, 0) + hvd.size()
            torch.testing.assert_close(parameter.detach().cpu(), wanted)


def check_downpour(shared: bool) -> None:
    """The optimizer of one client at a time, since the order of several is that of time."""

    def train(module: nn.Module, device: torch.device) -> None:
        sgd = torch.optim.SGD(module.parameters(), 0.01)
        with hvd.DownpourOptimizer(sgd, module.named_parameters(), update_frequency=2, init_delay=0) as optimizer:
            for turn in range(hvd.size()):
                for step in range(4 if turn == hvd.rank() else 0):
                    optimizer.zero_grad()
                    module(batch(step, device)).square().mean().backward()
                    optimizer.step()
                optimizer.flush()
                hvd.barrier()
            optimizer.pull()

    compare(train, shared)


def check_compiled_step(shared: bool) -> None:
    """A compiled model with collectives in it; the compiler leaves them out of CUDA's graphs."""
    device = choose_gpu(shared)
    module = model().to(device)

    def average(rows: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(module(rows), name="compiled") * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns of its own modules and graphs
        compiled = torch.compile(average, mode="reduce-overhead")
        for step in range(4):
            rows = batch(step, device)
            torch.testing.assert_close(compiled(rows), average(rows))


def check_graph_capture(shared: bool) -> None:
    """A collective refuses to be captured, and the engine works afterwards."""
    device = choose_gpu(shared)
    tensor = torch.ones(10, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        with pytest.raises(ValueError, match="captured into a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce_(tensor, op=hvd.Sum)
    check(hvd.allreduce(tensor, op=hvd.Sum), torch.full((10,), float(hvd.size())), "after the capture")


def check_other_libraries(shared: bool) -> None:
    """Arrays of CuPy and JAX, where these are installed."""
    choose_gpu(shared)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # otherwise JAX takes most of the memory that others need
    wanted = float(hvd.size() * (hvd.size() + 1) / 2)
    for name in ("cupy", "jax.numpy"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            print(f"{name} is not installed", flush=True)
            continue
        array = library.full(1000, float(hvd.rank() + 1), dtype="float32")
        result = arrays.allreduce(array, op=arrays.Sum, name=f"{name}.sum")
        assert type(result) is type(array), type(result)
        assert float(result.min()) == float(result.max()) == wanted
        rows = arrays.allgather(array, name=f"{name}.rows")
        assert (type(rows), rows.shape) == (type(array), (1000 * hvd.size(),))


def check_elastic_state(shared: bool) -> None:
    """The state is copied on the GPU, restored to it, and the same as on rank 0 after `sync`."""
    device = choose_gpu(shared)
    module = model().to(device)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=module, optimizer=optimizer, batch=0)
    saved = copy.deepcopy(module.state_dict())
    module(batch(0, device)).square().mean().backward()
    optimizer.step()
    state.restore()
    for name, value in module.state_dict().items():
        assert value.is_cuda, name
        assert torch.equal(value, saved[name]), name
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += hvd.rank() + 1
    state.sync()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, saved[name] + 1)


TRAINING_CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_process_group, check_process_group_messages, check_ddp, check_optimizer_options),
        *(check_sync_batch_norm, check_channels_last, check_sparse_gradients, check_training_loop, check_split_layers),
        *(check_data_parallel, check_parameter_server, check_downpour, check_elastic_state, check_compiled_step),
        *(check_graph_capture, check_other_libraries),
    )
}


if __name__ == "__main__":
    run_all(TRAINING_CHECKS)
