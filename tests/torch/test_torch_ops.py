"""The collectives over sizes, counts, dtypes, operations and forms, against what torch computes on one rank."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.torch_results import DTYPES, FLOATS, OPS, check, input_of, inputs_of_all, reduced

import horovodlike.torch as hvd
from horovodlike.torch import mpi_ops
from horovodlike.torch.compression import Compressor

SIZES = (1, 2, 3, 4)
SHAPES = ((0,), (1,), (), (17,), (3, 0, 2), (3, 5, 2), (1, 2, 1, 2, 1, 2, 1, 2, 3))
LARGER_THAN_A_SLOT = 1_000_003


def _valid(dtype: torch.dtype, op: int) -> bool:
    return not (dtype is torch.bool and op == hvd.Average)


def _allreduce_at_once(dtype: torch.dtype, op: int) -> None:
    """All shapes in flight at the same time."""
    inputs = {shape: inputs_of_all(dtype, shape) for shape in SHAPES}
    targets = {shape: tensors[hvd.rank()].clone() for shape, tensors in inputs.items()}
    handles = {
        shape: (
            hvd.allreduce_async(tensors[hvd.rank()], op=op),
            hvd.allreduce_async_(targets[shape], op=op, name=f"{shape}"),
        )
        for shape, tensors in inputs.items()
    }
    for shape, (new, in_place) in handles.items():
        expected = reduced(inputs[shape], op)
        check(hvd.synchronize(new), expected, (dtype, op, shape))
        assert hvd.synchronize(in_place) is targets[shape]
        check(targets[shape], expected, (dtype, op, shape, "in place"))


def _allreduce_forms(dtype: torch.dtype, op: int, shape: tuple[int, ...], name: str) -> None:
    what = (dtype, op, shape)
    inputs = inputs_of_all(dtype, shape)
    mine, expected = inputs[hvd.rank()], reduced(inputs, op)
    before = mine.clone()
    check(hvd.allreduce(mine, op=op), expected, what)
    check(hvd.synchronize(hvd.allreduce_async(mine, op=op, name=name)), expected, what)
    assert torch.equal(mine, before), what
    for _ in range(2):  # the second time as a known request
        target = mine.clone()
        assert hvd.allreduce_(target, op=op, name=name) is target
        check(target, expected, what)
    target = mine.clone()
    assert hvd.synchronize(hvd.allreduce_async_(target, op=op)) is target
    check(target, expected, what)


def _allreduce_grid() -> None:
    shapes = itertools.cycle(SHAPES)
    for dtype, op in itertools.product(DTYPES, OPS):
        if _valid(dtype, op):
            _allreduce_at_once(dtype, op)
            _allreduce_forms(dtype, op, next(shapes), "grid")


def _allreduce_large() -> None:
    for dtype, op in ((torch.float32, hvd.Average), (torch.bfloat16, hvd.Sum), (torch.int8, hvd.Max)):
        _allreduce_forms(dtype, op, (LARGER_THAN_A_SLOT,), "large")


def _grouped_allreduce() -> None:
    for op in OPS:
        dtypes = [dtype for dtype in DTYPES if _valid(dtype, op)]
        inputs = [inputs_of_all(dtype, shape) for dtype, shape in zip(dtypes, SHAPES * 2, strict=False)]
        expected = [reduced(tensors, op) for tensors in inputs]

        def mine(inputs: list[list[torch.Tensor]] = inputs) -> list[torch.Tensor]:
            return [tensors[hvd.rank()].clone() for tensors in inputs]

        targets = mine()
        results = {
            "sync": hvd.grouped_allreduce(mine(), op=op),
            "in place": hvd.grouped_allreduce_(targets, op=op, name="grouped"),
            "async": hvd.synchronize(hvd.grouped_allreduce_async(mine(), op=op)),
            "async in place": hvd.synchronize(hvd.grouped_allreduce_async_(mine(), op=op, name="grouped")),
        }
        assert [type(result) for result in results.values()] == [list, list, tuple, tuple]
        assert all(result is target for result, target in zip(results["in place"], targets, strict=True))
        for form, result in results.items():
            for actual, wanted in zip(result, expected, strict=True):
                check(actual, wanted, (form, op))


def _scaling() -> None:
    for dtype in (*FLOATS, torch.int32, torch.int64):
        inputs = inputs_of_all(dtype, (17,))
        mine = inputs[hvd.rank()]
        scaled = [tensor * 2 for tensor in inputs]
        for op in (hvd.Sum, hvd.Average, hvd.Max):
            check(hvd.allreduce(mine, op=op, prescale_factor=2.0), reduced(scaled, op), (dtype, op, "pre"))
        expected = (reduced(inputs, hvd.Sum).to(torch.float64) * 0.5).to(dtype)
        check(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.5), expected, (dtype, "post"))
        both = hvd.grouped_allreduce([mine], op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
        check(both[0], reduced(scaled, hvd.Sum) * 3, (dtype, "both"))


def _integer_average_truncates_toward_zero() -> None:
    # Sums of -7 and 7: no size from 2 to 4 divides them.
    for sign in (-1, 1):
        mine = torch.tensor([sign * 7 if hvd.rank() == 0 else 0], dtype=torch.int32)
        expected = int(sign * 7 / hvd.size())
        assert hvd.allreduce(mine).item() == expected
    # Accumulated wide: the sum does not fit into the dtype, the average does.
    assert hvd.allreduce(torch.full((3,), 200, dtype=torch.uint8)).tolist() == [200] * 3


class Doubled(Compressor):
    """A compression of one's own, without which sums of a dtype that is not summed would be wrong."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        return tensor.double() * 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        assert tensor.dtype is torch.float64
        return (tensor / 2).to(ctx)


def _compression() -> None:
    whole = torch.arange(7) + hvd.rank()
    expected = reduced([torch.arange(7) + rank for rank in range(hvd.size())], hvd.Sum)
    check(hvd.allreduce(whole, op=hvd.Sum, compression=Doubled), expected, "own")
    check(hvd.grouped_allreduce([whole], op=hvd.Sum, compression=Doubled)[0], expected, "own, grouped")
    share = expected.tensor_split(hvd.size())[hvd.rank()]
    check(hvd.reducescatter(whole, op=hvd.Sum, compression=Doubled), share, "own, scattered")
    mine = torch.linspace(-1, 1, 101, dtype=torch.float64) * (hvd.rank() + 1)
    expected = reduced([torch.linspace(-1, 1, 101, dtype=torch.float64) * (r + 1) for r in range(hvd.size())], hvd.Sum)
    for compression, tolerance in ((hvd.Compression.fp16, 2e-2), (hvd.Compression.bf16, 1e-1)):
        rounded = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
        assert rounded.dtype == torch.float64
        assert torch.allclose(rounded, expected, rtol=0, atol=tolerance)
        counts = hvd.grouped_allreduce([mine, torch.tensor([70001])], op=hvd.Max, compression=compression)[1]
        assert counts.item() == 70001  # integers are sent as they are


def _allgather_forms() -> None:
    for dtype in DTYPES:
        for tail in ((), (3,), (2, 1, 5), (0,)):
            for rows in ([1] * hvd.size(), [2 * rank for rank in range(hvd.size())], [0] * hvd.size()):
                parts = [input_of(rank, dtype, (rows[rank], *tail)) for rank in range(hvd.size())]
                mine, expected = parts[hvd.rank()], torch.cat(parts)
                check(hvd.allgather(mine), expected, (dtype, tail, rows))
                check(hvd.synchronize(hvd.allgather_async(mine, name="gather")), expected, (dtype, tail, rows))


def _allgather_outlives_its_handle() -> None:
    gathered = [hvd.allgather(torch.full((1000,), float(i + hvd.rank()))) for i in range(50)]
    for i, tensor in enumerate(gathered):
        assert tensor.view(hvd.size(), 1000).unique(dim=1).flatten().tolist() == [i + r for r in range(hvd.size())]


def _grouped_allgather() -> None:
    def part(rank: int) -> list[torch.Tensor]:
        return [input_of(rank, dtype, (rank + i, 2)) for i, dtype in enumerate(DTYPES)]

    parts = [part(rank) for rank in range(hvd.size())]
    for result in (
        hvd.grouped_allgather(part(hvd.rank())),
        hvd.synchronize(hvd.grouped_allgather_async(part(hvd.rank()), name="grouped")),
    ):
        assert isinstance(result, tuple)
        for i, actual in enumerate(result):
            check(actual, torch.cat([tensors[i] for tensors in parts]), DTYPES[i])


def _broadcast_forms() -> None:
    for dtype in DTYPES:
        for root in {0, hvd.size() - 1}:
            for shape in SHAPES:
                inputs = inputs_of_all(dtype, shape)
                mine, expected = inputs[hvd.rank()], inputs[root]
                before = mine.clone()
                check(hvd.broadcast(mine, root), expected, (dtype, root, shape))
                check(hvd.synchronize(hvd.broadcast_async(mine, root, name="b")), expected, (dtype, root, shape))
                assert torch.equal(mine, before)
                for target in (mine.clone(), mine.clone()):
                    assert hvd.broadcast_(target, root, name="b") is target
                    check(target, expected, (dtype, root, shape))
                target = mine.clone()
                assert hvd.synchronize(hvd.broadcast_async_(target, root)) is target
                check(target, expected, (dtype, root, shape))
    large = torch.arange(LARGER_THAN_A_SLOT) * (hvd.rank() + 1)
    assert torch.equal(hvd.broadcast(large, 0), torch.arange(LARGER_THAN_A_SLOT))
    root = hvd.size() - 1
    mine = [
        torch.full((n,), hvd.rank(), dtype=dtype)
        for n, dtype in ((3, torch.int8), (0, torch.float32), (9, torch.bfloat16))
    ]
    expected = [torch.full_like(tensor, root) for tensor in mine]
    results = hvd.grouped_broadcast(mine, root), hvd.synchronize(hvd.grouped_broadcast_async(mine, root))
    assert all(torch.equal(*pair) for result in results for pair in zip(result, expected, strict=True))
    assert all((tensor == hvd.rank()).all() for tensor in mine)
    assert all(a is b for a, b in zip(hvd.grouped_broadcast_(mine, root), mine, strict=True))
    assert all(torch.equal(*pair) for pair in zip(mine, expected, strict=True))
    again = [torch.full((2,), float(hvd.rank())), torch.full((1,), hvd.rank())]
    hvd.synchronize(hvd.grouped_broadcast_async_(again, 0))
    assert again[0].tolist() == [0.0, 0.0] and again[1].item() == 0


def _strides() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "transposed": lambda t: t.t(),
        "column": lambda t: t[:, 2],
        "stepped": lambda t: t[::2, ::3],
        "offset": lambda t: t[1:, :],
        "channels last": lambda t: t.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    for name, view in views.items():
        memory = base.clone() * (rank + 1)
        tensor = view(memory)
        expected = view(base) * total
        check(hvd.allreduce(tensor, op=hvd.Sum), expected, name)
        check(hvd.allgather(tensor)[: tensor.shape[0]], view(base), name)
        for _ in range(2):
            target = view(base.clone() * (rank + 1))
            strides = target.stride()
            assert hvd.allreduce_(target, op=hvd.Sum, name=f"strides.{name}") is target
            assert target.stride() == strides
            check(target, expected, name)
        target = view(base.clone() * (rank + 1))
        hvd.synchronize(hvd.broadcast_async_(target, size - 1))
        check(target, view(base) * size, name)
    # Only the view is written.
    memory = base.clone() * (rank + 1)
    hvd.allreduce_(memory[:, 2], op=hvd.Sum)
    untouched = [0, 1, 3, 4, 5]
    check(memory[:, untouched], base[:, untouched] * (rank + 1), "neighbours")
    # A lazily negated view is not the memory that it shows.
    negated = torch.complex(torch.zeros(1), torch.full((1,), rank + 1.0)).conj().imag
    assert negated.is_neg()
    assert hvd.allreduce(negated, op=hvd.Sum).item() == -total


def _handles() -> None:
    handle = hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name="handle")
    assert isinstance(handle, int)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 5
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(123456789) is None
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)
    # The result of an operation whose tensor the caller has forgotten, waited for in another order than started.
    handles = [hvd.allreduce_async_(torch.full((1000,), float(i)), op=hvd.Max) for i in range(20)]
    for i in reversed(range(20)):
        assert hvd.synchronize(handles[i]).unique().tolist() == [i]


def _different_order_on_each_rank() -> None:
    names = [f"order.{i}" for i in range(20)]
    mine = names if hvd.rank() % 2 == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.tensor([float(names.index(name))]), name=name) for name in mine}
    assert [hvd.synchronize(handles[name]).item() for name in names] == list(range(20))


def _place() -> None:
    assert hvd.is_initialized() and mpi_ops.is_homogeneous()
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    assert [hvd.local_rank(), hvd.local_size()] == [hvd.rank(), hvd.size()]
    assert [hvd.cross_rank(), hvd.cross_size()] == [0, 1]


def _barrier_and_arguments() -> None:
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)
    ones = torch.ones(2)
    with pytest.warns(DeprecationWarning, match="op=Average"):
        assert hvd.allreduce(ones, average=False).tolist() == [hvd.size()] * 2
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce(ones, average=True).tolist() == [1, 1]
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(ones, average=True, op=hvd.Sum)
    # Positional arguments in Horovod's order.
    assert hvd.allreduce(ones, None, "positional", hvd.Compression.none, hvd.Sum, 2.0, 0.5).tolist() == [hvd.size()] * 2
    assert hvd.allreduce_(ones, None, "positional_", hvd.Sum, 2.0, 0.5).tolist() == [hvd.size()] * 2
    assert hvd.global_process_set.size() == hvd.size()
    assert hvd.global_process_set.rank() == hvd.rank()
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.included()


def _barriers_of_several_threads() -> None:
    names = ["one", "two"] if hvd.rank() == 0 else ["two", "one"]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda name: hvd.barrier(name=name), names)) == [None, None]


def _in_place_on_parameters() -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    assert hvd.broadcast_(parameter, hvd.size() - 1) is parameter
    assert parameter.tolist() == [hvd.size() - 1] * 3
    assert parameter.is_leaf and parameter.requires_grad
    transposed = torch.nn.Parameter(torch.full((3, 2), float(hvd.rank())).t())
    hvd.allreduce_(transposed, op=hvd.Sum)
    assert transposed.unique().tolist() == [sum(range(hvd.size()))]
    # Overwriting what autograd has saved is an error, as it is with torch's own in-place operations.
    saved = torch.ones(3)
    product = (parameter * saved).sum()
    hvd.allreduce_(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        assert hvd.allreduce_(torch.ones(2), op=hvd.Sum, name="inference").tolist() == [hvd.size()] * 2


CASES = (
    _allreduce_grid,
    _allreduce_large,
    _grouped_allreduce,
    _scaling,
    _integer_average_truncates_toward_zero,
    _compression,
    _allgather_forms,
    _allgather_outlives_its_handle,
    _grouped_allgather,
    _broadcast_forms,
    _strides,
    _handles,
    _different_order_on_each_rank,
    _place,
    _barrier_and_arguments,
    _barriers_of_several_threads,
    _in_place_on_parameters,
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_collective(ranks, case, size):
    ranks(size).run(case)


def _compiled() -> None:
    @torch.compile(backend="eager")
    def normalised(tensor: torch.Tensor) -> torch.Tensor:
        total = hvd.allreduce(tensor * 2, op=hvd.Sum, name="compiled")
        hvd.allreduce_(total, op=hvd.Max, name="compiled_")
        return total / hvd.size()

    for i in range(3):
        tensor = torch.full((4,), float(i))
        assert normalised(tensor).tolist() == [2.0 * i] * 4


def test_collectives_in_a_compiled_function(ranks):
    ranks(2).run(_compiled)
