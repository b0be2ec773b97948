"""Tensors on a GPU, with a double of CUDA: who waits for whom, what is kept alive, and errors."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from support.gpus import double, pretend, settings

import horovodlike.torch as hvd
from horovodlike._engine.ops import Destinations, Kind
from horovodlike.errors import HorovodInternalError, MismatchError
from horovodlike.torch._ops import custom_ops

SIZES = [1, 2, 3]
COUNT = 1000


def _total(of_rank_0: float) -> float:
    """The sum over the ranks, of which each has one more than the one before."""
    return sum(of_rank_0 + rank for rank in range(hvd.size()))


def _made_later(gpu, values: torch.Tensor) -> torch.Tensor:
    """A tensor that gets its values when the current stream, which is held, gets on."""
    tensor = torch.full_like(values, -1)
    gpu.double.compute(gpu.stream, tensor, values)
    return tensor


def _synchronize_leaves_waiting_to_the_stream() -> None:
    with pretend(eager=False) as gpu:
        gpu.double.hold(gpu.stream)
        before = len(gpu.double.calls())
        tensor = _made_later(gpu, torch.full((COUNT,), 1.0 + hvd.rank()))
        handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="later")
        if hvd.size() > 1:  # through the host's memory, which the engine waits for
            assert not hvd.poll(handle)
            gpu.double.release(gpu.stream)
        result = hvd.synchronize(handle)
        if hvd.size() == 1:
            assert (tensor == -1).all()
            gpu.double.release(gpu.stream)
        gpu.double.synchronize(gpu.stream)
        assert result.tolist() == [_total(1.0)] * COUNT
        calls = gpu.double.calls()[before:]
        assert not [call for call in calls if "Synchronize" in call]
        users = [call for call in calls if call.endswith(" test") and not call.startswith("cuStreamIsCapturing")]
        assert users == ["cuEventRecord test", "cuStreamWaitEvent test"]


def _poll_is_true_before_the_result_is_there() -> None:
    with pretend(eager=False) as gpu:
        gpu.double.hold(gpu.stream)
        tensor = _made_later(gpu, torch.ones(COUNT))
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="polled")
        while not hvd.poll(handle):
            pass
        assert (tensor == -1).all()
        assert hvd.synchronize(handle) is tensor
        gpu.double.release(gpu.stream)
        gpu.double.synchronize(gpu.stream)
        assert (tensor == 1).all()


def test_poll_at_one_rank(gpu_ranks):
    gpu_ranks(1).run(_poll_is_true_before_the_result_is_there)


def _another_stream_waits() -> None:
    """Memory must not be given out again too early if another stream waits for it than the one that it was made on."""
    with pretend() as gpu:
        started_on, tensor, other = gpu.stream, torch.ones(COUNT), gpu.double.make_stream()
        strided = torch.ones(4, COUNT)[:, ::2]
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum), hvd.allgather_async(strided)]
        with gpu.on(other):
            reduced, gathered = (hvd.synchronize(handle) for handle in handles)
        assert reduced is tensor and gathered.shape == (4 * hvd.size(), COUNT // 2)
        assert {stream for stream, _ in gpu.kept} == {other}
        assert {tensor.data_ptr(), gathered.data_ptr()} <= {address for _, address in gpu.kept}
        assert strided.data_ptr() not in {address for _, address in gpu.kept}  # its copy is what the engine uses
        gpu.kept.clear()
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum))
        assert gpu.stream == started_on and not gpu.kept


def _tensors_in_flight_are_kept() -> None:
    with pretend(eager=False) as gpu:
        gpu.double.hold(gpu.stream)
        tensors = [_made_later(gpu, torch.full((COUNT,), 1.0 + hvd.rank())) for _ in range(3)]
        kept = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        handles = [
            hvd.allreduce_async_(tensors[0], op=hvd.Sum, name="in place"),
            hvd.allreduce_async(tensors[1], op=hvd.Sum, name="new"),
            hvd.allgather_async(tensors[2], name="gathered"),
        ]
        del tensors
        gc.collect()
        assert all(storage() is not None for storage in kept)
        gpu.double.release(gpu.stream)
        # Memory of the host is freed at once, that of a GPU when the stream gets there: so it is to be there already.
        last = torch.ones(2)
        hvd.allreduce_(last, op=hvd.Sum, name="last")
        gpu.double.synchronize(gpu.stream)
        results = [hvd.synchronize(handle) for handle in handles]
        gpu.double.synchronize(gpu.stream)
        assert all((result == _total(1.0)).all() for result in results[:2])
        assert [part[0].item() for part in results[2].chunk(hvd.size())] == [1.0 + rank for rank in range(hvd.size())]
        del results
        gc.collect()
        assert all(storage() is None for storage in kept[1:])


def _what_is_abandoned_is_kept_until_the_gpu_is_done() -> None:
    from horovodlike.torch._ops import handles as handles_module

    with pretend(eager=False) as gpu:
        gpu.double.hold(gpu.stream)
        tensor = _made_later(gpu, torch.ones(COUNT))
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="abandoned")
        storage = weakref.ref(tensor.untyped_storage())
        del tensor
        while not hvd.poll(handle):
            pass
        handles_module.abandon([handle], [])
        gc.collect()
        assert storage() is not None
        gpu.double.release(gpu.stream)
        gpu.double.synchronize(gpu.stream)
        hvd.synchronize(
            hvd.allreduce_async_(torch.ones(2), op=hvd.Sum, name="next")
        )  # after it, on the engine's stream
        gpu.double.synchronize(gpu.stream)
        handles_module.abandon([], [])
        gc.collect()
        assert storage() is None


def test_what_is_abandoned_at_one_rank(gpu_ranks):
    gpu_ranks(1).run(_what_is_abandoned_is_kept_until_the_gpu_is_done)


def _captured_streams_are_refused() -> None:
    with pretend() as gpu:
        gpu.double.capture(gpu.stream, True)
        for start in (
            lambda: hvd.allreduce_async_(torch.ones(2), name="captured"),
            lambda: hvd.allgather(torch.ones(2), name="captured"),
            lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="captured"),
        ):
            with pytest.raises(ValueError, match=r"captured: .*captured into a CUDA graph.*the ranks agree"):
                start()
        gpu.double.capture(gpu.stream, False)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="captured").tolist() == [hvd.size()] * 2


def _one_rank_has_it_on_the_cpu() -> None:
    on_cpu = (torch.float32,) if hvd.rank() == 1 else ()
    with pretend(on_cpu=on_cpu):
        for operation in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(HorovodInternalError, match="Mismatched devices for .*somewhere.*rank 1 has"):
                operation(torch.ones(6), name="somewhere")
        with pytest.raises(HorovodInternalError, match="Mismatched devices for .*somewhere"):
            hvd.broadcast_parameters({"somewhere": torch.ones(3)}, 0)
        assert hvd.allreduce(torch.ones(2, dtype=torch.float64), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_has_it_on_the_cpu(gpu_ranks, size):
    gpu_ranks(size).run(_one_rank_has_it_on_the_cpu)


def _cpu_and_gpu_in_one_job() -> None:
    with pretend(on_cpu=(torch.float64,)):
        handles = [
            hvd.allreduce_async_(torch.full((5,), 1.0 + hvd.rank(), dtype=dtype), op=hvd.Sum)
            for dtype in (torch.float32, torch.float64, torch.float16, torch.float64)
        ]
        for handle in reversed(handles):
            assert hvd.synchronize(handle).tolist() == [_total(1.0)] * 5
        rows, received = hvd.alltoall(torch.arange(hvd.size()), splits=[1] * hvd.size())
        assert rows.tolist() == [hvd.rank()] * hvd.size() and received.dtype is torch.int32
    assert double().violations() == ""


def _an_output_of_another_size_than_its_place() -> None:
    """It is lost, in memory of the GPU, on the one rank that has no place for it."""
    from horovodlike.torch._ops import gpu as gpu_module
    from horovodlike.torch._ops import handles as handles_module

    with pretend():
        allocator, lost = gpu_module.allocator, []

        def allocate(shape, dtype):
            lost.append(allocator(None)(shape, dtype))
            return lost[-1]

        gpu_module.allocator = lambda like: allocate
        is_short = hvd.rank() == 0
        sent, whole = torch.full((2,), 1.0 + hvd.rank()), torch.zeros(2 * hvd.size() - is_short)
        destinations = Destinations([(whole.data_ptr(), whole.nbytes)])
        call = handles_module.Call(Kind.ALLGATHER, "placed")
        handle = handles_module.start(
            call, [sent], (), [sent, whole, destinations], lambda _: destinations.check("placed"), (), destinations
        )
        if is_short:
            with pytest.raises(MismatchError, match=f"placed: .* {whole.nbytes} bytes, .* sent {whole.nbytes + 4}: "):
                hvd.synchronize(handle)
            assert not whole.any() and [one.nbytes for one in lost] == [whole.nbytes + 4]
        else:
            hvd.synchronize(handle)
            assert whole.tolist() == [1.0 + rank for rank in range(hvd.size()) for _ in range(2)] and not lost
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="after").tolist() == [hvd.size()] * 2


CASES = [
    _synchronize_leaves_waiting_to_the_stream,
    _another_stream_waits,
    _tensors_in_flight_are_kept,
    _captured_streams_are_refused,
    _cpu_and_gpu_in_one_job,
    _an_output_of_another_size_than_its_place,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_on_a_gpu(gpu_ranks, case, size):
    gpu_ranks(size).run(case)


def _no_memory_for_an_output() -> str:
    from horovodlike.torch._ops import gpu as gpu_module

    def allocator(like: torch.Tensor):
        def allocate(shape, dtype):
            raise RuntimeError(f"out of memory for {list(shape)}")

        return allocate

    with pretend() as gpu:
        gpu_module.allocator = allocator
        handle = hvd.allgather_async(torch.ones(3, 2), name="large")
        try:
            hvd.synchronize(handle)
        except HorovodInternalError as error:
            assert isinstance(error.__cause__, RuntimeError)
            return str(error)
        finally:
            gpu.double.synchronize(gpu.stream)
    return ""


def test_no_memory_for_an_output_breaks_the_job_and_says_so(fake_gpu, fresh_ranks):
    (message,) = fresh_ranks(1, settings(fake_gpu)).run(_no_memory_for_an_output)
    assert "'allgather.large'" in message and "out of memory for [3, 2]" in message


def _a_state_is_not_saved_from_a_job_that_breaks() -> str:
    from horovodlike.torch.elastic import TorchState

    with pretend(eager=False) as gpu:
        model = torch.nn.Linear(2, 1)
        before = model.weight.detach().clone()
        state = TorchState(model=model)
        gpu.double.hold(gpu.stream)
        gpu.double.compute(gpu.stream, model.weight.data, torch.full_like(before, 7.0))  # of what is not there
        gpu.double.fail("ncclAllReduce", 1)
        with contextlib.suppress(HorovodInternalError):
            hvd.allreduce_(model.bias.data, op=hvd.Sum, name="breaks")
        gpu.double.release(gpu.stream)
        with pytest.raises(HorovodInternalError) as raised:
            state.save()
        assert (model.weight == 7).all()  # it has waited
        state.restore()
        assert torch.equal(model.weight, before)
        return str(raised.value)


def test_a_state_is_not_saved_from_a_job_that_breaks(fake_gpu, fresh_ranks):
    (message,) = fresh_ranks(1, settings(fake_gpu)).run(_a_state_is_not_saved_from_a_job_that_breaks)
    assert "ncclAllReduce" in message or "NCCL" in message


@pytest.mark.skipif(not custom_ops.IS_AVAILABLE, reason="torch is too old for operators with effects")
def test_compiled_operators_stay_out_of_cuda_graphs():
    operators = torch.ops.horovodlike
    for operator in (operators.allreduce, operators.allgather_backward, operators.alltoall, operators.barrier):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags
