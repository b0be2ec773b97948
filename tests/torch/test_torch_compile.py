"""The collectives in functions that are compiled as one graph: values, gradients, order, and that none is left out."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike import basics
from horovodlike._engine.ops import counters
from horovodlike.torch import _compiled_ops as compiled_ops
from horovodlike.torch._ops import custom_ops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not custom_ops.IS_AVAILABLE, reason="torch is too old for operators with effects"),
]

BACKENDS = (pytest.param("eager", marks=pytest.mark.thorough), "aot_eager")  # the second does more
# Compiles C++, which takes its time on a busy machine.
INDUCTOR_SECONDS = 280
Function = Callable[..., list[torch.Tensor]]


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """A compiler that remembers nothing, and whose own warnings are no errors."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _x(rows: int = 4) -> torch.Tensor:
    return torch.arange(1.0, 2 * rows + 1).reshape(rows, 2).mul(hvd.rank() + 1).requires_grad_()


def _w() -> torch.Tensor:
    return torch.linspace(-1, 1, 5).mul(hvd.rank() + 2).requires_grad_()


def _allreduce(x, w):
    return [
        hvd.allreduce(x),
        hvd.allreduce(x * 2, op=hvd.Sum, name="named"),
        hvd.allreduce(w, op=hvd.Sum, prescale_factor=2, postscale_factor=0.25),
        hvd.allreduce(w, compression=hvd.Compression.fp16),
        hvd.allreduce(w.sum()),
        hvd.allreduce(x.detach(), average=False),
        hvd.allreduce(x.detach(), op=hvd.Max),
        hvd.allreduce((x.detach() * 3).to(torch.int64), op=hvd.Sum),
        hvd.allreduce(x.t()),  # not contiguous
        hvd.allreduce(w.detach(), op=hvd.Adasum),
    ]


def _grouped_allreduce(x, w):
    counts = torch.ones(3, dtype=torch.int64)
    return [
        *hvd.grouped_allreduce([x, w], op=hvd.Sum),
        *hvd.grouped_allreduce([x, counts, w.double()], op=hvd.Sum, name="grouped"),
        *hvd.grouped_allreduce((x, w), compression=hvd.Compression.bf16),
    ]


def _allgather(x, w):
    rows = x[: hvd.rank() + 1]
    return [hvd.allgather(rows) * 2, hvd.allgather(w, name="gathered"), hvd.allgather(rows[:0])]


def _grouped_allgather(x, w):
    return [*hvd.grouped_allgather([x[hvd.rank() :], w]), *hvd.grouped_allgather((w,), name="gathered")]


def _broadcast(x, w):
    last = hvd.size() - 1
    return [hvd.broadcast(x, 0), hvd.broadcast(w, last, name="sent"), *hvd.grouped_broadcast([x, w], last)]


def _alltoall(x, w):
    splits = [1] * hvd.size()
    return [
        hvd.alltoall(x.expand(hvd.size(), -1, -1)),
        *hvd.alltoall(x, splits),
        *hvd.alltoall(w, torch.tensor(splits, dtype=torch.int32), name="exchanged"),
    ]


def _grouped_alltoall(x, w):
    splits = [1] * hvd.size()
    counts = torch.arange(2 * hvd.size())
    even, exchanged, (rows, received) = hvd.grouped_alltoall(
        [x.expand(hvd.size(), -1, -1), counts, w], [None, None, torch.tensor(splits)], name="exchanged"
    )
    pairs = hvd.grouped_alltoall((x, w), (splits, splits))
    return [even, exchanged, rows, received, *pairs[0], *pairs[1], *hvd.grouped_alltoall([counts])]


def _reducescatter(x, w):
    return [
        hvd.reducescatter(x),
        hvd.reducescatter(w, op=hvd.Sum, name="scattered", prescale_factor=0.5),
        hvd.reducescatter(w, compression=hvd.Compression.bf16),
        hvd.reducescatter(hvd.allgather(x)),  # of rows that are not known before
    ]


def _grouped_reducescatter(x, w):
    return [*hvd.grouped_reducescatter([x, w], op=hvd.Sum), *hvd.grouped_reducescatter((w,), name="scattered")]


def _in_place(x, w):
    first, second, third = x.detach() * 2, w.detach() + 1, x * 3
    results = [hvd.allreduce_(first), hvd.broadcast_(second, 0, name="sent"), hvd.allreduce_(third, op=hvd.Sum)]
    hvd.grouped_allreduce_([first, second], name="grouped")
    hvd.grouped_broadcast_([first, third], 0)
    hvd.allreduce_(x.detach()[1:3], op=hvd.Max)  # part of an input
    return [*results, first, second, x * 1]


def _place(x, w):
    hvd.barrier()
    hvd.barrier(name="with a name")
    where = hvd.rank() + 10 * hvd.size() + hvd.local_rank() + hvd.local_size() + hvd.cross_rank() + hvd.cross_size()
    return [x * where if hvd.is_initialized() else x, w * hvd.global_process_set.size()]


CASES = (
    _allreduce,
    _grouped_allreduce,
    _allgather,
    _grouped_allgather,
    _broadcast,
    _alltoall,
    _grouped_alltoall,
    _reducescatter,
    _grouped_reducescatter,
    _in_place,
    _place,
)


def _everything(x, w):
    return [result for case in CASES for result in case(x, w)]


def _outcome(function: Function) -> list[torch.Tensor]:
    """The results of a function, what they weigh differently on each rank, and the gradients of its arguments."""
    x, w = _x(), _w()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        results = function(x, w)
    sum(((hvd.rank() + 1.0) * result).sum() for result in results if result.requires_grad).backward()
    return [*(result.detach().clone() for result in results), x.grad, w.grad, x.detach()]


def _is_as_without(function: Function, backend: str) -> None:
    with _compiler():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        expected = [_outcome(function) for _ in range(2)]
        for outcome in expected:
            for mine, theirs in zip(_outcome(compiled), outcome, strict=True):
                torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("size", (1, 2, pytest.param(3, marks=pytest.mark.thorough)))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_is_as_without_compiler(ranks, case, backend, size):
    ranks(size).run(_is_as_without, case, backend, timeout=INDUCTOR_SECONDS)


@pytest.mark.thorough
def test_inductor(ranks):
    ranks(2).run(_is_as_without, _everything, "inductor", timeout=INDUCTOR_SECONDS)


def _no_graph_break() -> None:
    from torch import _dynamo  # of `torch._dynamo.config`, cloudpickle would pickle the module, if it is imported here

    with _compiler(), _dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for case in CASES:
            x, w = _x(), _w()
            explained = _dynamo.explain(case)(x, w)
            assert (explained.graph_count, explained.graph_break_count) == (1, 0), case


def test_no_graph_break(ranks):
    ranks(1).run(_no_graph_break)


def _as_with_older_releases() -> None:
    with _compiler(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd.allreduce, "_torchdynamo_disable", True, raising=False)
        explained = torch._dynamo.explain(_allreduce)(_x(), _w())
        assert explained.graph_break_count > 0
        torch._dynamo.reset()
        compiled = torch.compile(_allreduce, backend="eager")
        for mine, theirs in zip(_outcome(compiled), _outcome(_allreduce), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_as_with_older_releases(ranks):
    ranks(2).run(_as_with_older_releases)


def _in_order(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    first = hvd.allreduce(x, name="first")
    second = hvd.allreduce(wide, op=hvd.Sum)
    hvd.barrier()
    third = hvd.allgather(x, name="third")
    last = hvd.broadcast(x, 0)
    return first.sin().sum() + third.sum() + (second * 2).sum() + last.cos().sum()


@contextlib.contextmanager
def _recorded(module: object, attribute: str) -> Iterator[list[str]]:
    names: list[str] = []
    original = getattr(module, attribute)

    def recording(*arguments: object) -> object:
        call = original(*arguments)
        names.append(call.name)
        return call

    setattr(module, attribute, recording)
    yield names
    setattr(module, attribute, original)


def _keeps_order(backend: str) -> None:
    with _compiler(), _recorded(custom_ops, "_call") as names:
        compiled = torch.compile(_in_order, backend=backend, fullgraph=True)
        for _ in range(2):
            names.clear()
            compiled(_x(), torch.ones(1000, requires_grad=True)).backward()
            assert names[0] == names[-1] == "allreduce.first"
            assert names[2] == names[5] == "allgather.third"
            second, last = names[1], names[3]
            assert second.startswith("allreduce.noname.")
            assert last == f"broadcast.noname.{int(second.rpartition('.')[2]) + 1}"
            assert names[4:] == names[3::-1]


@pytest.mark.parametrize("backend", (*BACKENDS, pytest.param("inductor", marks=pytest.mark.thorough)))
def test_order(ranks, backend):
    ranks(2).run(_keeps_order, backend, timeout=INDUCTOR_SECONDS)


def _nothing_is_left_out(backend: str) -> None:
    def alike(x: torch.Tensor) -> torch.Tensor:
        hvd.allreduce(x, name="unused")
        hvd.barrier()
        hvd.allgather(x)
        return hvd.allreduce(x, name="alike") + hvd.allreduce(x, name="alike") + hvd.allreduce(x) + hvd.allreduce(x)

    with _compiler():
        compiled = torch.compile(alike, backend=backend, fullgraph=True)
        for _ in range(3):
            before = counters()["requests"]
            compiled(torch.ones(3))
            assert counters()["requests"] - before == 7


@pytest.mark.parametrize("backend", (*BACKENDS, pytest.param("inductor", marks=pytest.mark.thorough)))
def test_nothing_is_left_out(ranks, backend):
    ranks(2).run(_nothing_is_left_out, backend, timeout=INDUCTOR_SECONDS)


def _one_rank_compiles(backend: str, fullgraph: bool) -> None:
    with _compiler():
        compiled = torch.compile(_everything, backend=backend, fullgraph=fullgraph)
        expected = [_outcome(_everything) for _ in range(3)]
        for outcome in expected:
            for mine, theirs in zip(_outcome(compiled if hvd.rank() else _everything), outcome, strict=True):
                torch.testing.assert_close(mine, theirs)


# Without, a graph ends where a size is to be found out.
@pytest.mark.parametrize("fullgraph", (True, pytest.param(False, marks=pytest.mark.thorough)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_compiles_and_the_other_does_not(ranks, backend, fullgraph):
    ranks(2).run(_one_rank_compiles, backend, fullgraph, timeout=INDUCTOR_SECONDS)


def _sizes_change(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return hvd.allgather(hvd.allreduce(x, op=hvd.Sum) * 2) + 1

    with _compiler():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for rows in (3, 3, 5, 7, 0, 1):
            result = compiled(torch.full((rows, 2), 1.0 + hvd.rank()))
            assert result.shape == (rows * hvd.size(), 2)
            assert (result == 2 * sum(range(hvd.size() + 1)) + 1).all()
        for step in range(4):  # differently on each rank
            gathered = torch.compile(hvd.allgather, backend=backend)(torch.full((step * hvd.rank() + 1,), 1.0))
            assert len(gathered) == sum(step * rank + 1 for rank in range(hvd.size()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_change(ranks, backend):
    ranks(2).run(_sizes_change, backend, timeout=INDUCTOR_SECONDS)


def _place_changes() -> None:
    place = basics._place
    assert place is not None
    with _compiler():
        compiled = torch.compile(lambda x: x * hvd.size(), backend="eager", fullgraph=True)
        one = torch.ones(1)
        assert compiled(one).item() == hvd.size()
        try:
            for size in (7, 8):
                basics._place = replace(place, size=size)
                assert compiled(one).item() == size
        finally:
            basics._place = place
        assert compiled(one).item() == hvd.size()


def test_compiled_anew_for_another_job(ranks):
    ranks(1).run(_place_changes)


def _process_sets() -> None:
    mine = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]
    others = hvd.add_process_set([0, 2])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        alone = hvd.allreduce(x, op=hvd.Sum, process_set=mine)
        results = [alone, hvd.reducescatter(alone, process_set=mine), hvd.alltoall(x, process_set=mine)]
        if hvd.rank() != 1:
            results += [hvd.allreduce(x, process_set=others), hvd.reducescatter(x, process_set=others)]
        return [*results, hvd.allreduce(x)]

    with _compiler():
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        x = torch.full((5,), float(hvd.rank()))
        expected = function(x)
        for result, of_eager in zip(compiled(x), expected, strict=True):
            assert torch.equal(result, of_eager)


@pytest.mark.thorough
def test_process_sets(fresh_ranks):
    fresh_ranks(3).run(_process_sets)


def _what_is_wrong() -> None:
    with _compiler():
        compiled = torch.compile(lambda x, **options: hvd.allreduce(x, **options), backend="aot_eager")
        with pytest.raises(ValueError, match="op must be one of"):
            compiled(torch.ones(2), op=99)
        with pytest.raises(ValueError, match="op supersedes average"):
            compiled(torch.ones(2), op=hvd.Sum, average=True)
        with pytest.raises(ValueError, match="complex64"):
            compiled(torch.ones(2, dtype=torch.complex64))
        with pytest.raises(ValueError, match="the list of tensors is empty"):
            torch.compile(lambda: hvd.grouped_allreduce([]), backend="eager")()
        smallest = compiled(torch.ones(2, requires_grad=True), op=hvd.Min)
        with pytest.raises(NotImplementedError, match="op=Average and op=Sum"):
            smallest.sum().backward()


def test_what_is_wrong(ranks):
    ranks(1).run(_what_is_wrong)


def _operators_are_well_defined() -> None:
    operators = compiled_ops._operators  # `torch.ops` cannot be sent to a rank
    x, w, number = _x(), _w(), torch.tensor(0)
    options = (hvd.Sum, -1, 1.0, 1.0, 0)
    samples = [
        (operators.allreduce.default, ([x, w], None, "grouped_allreduce", "checked", None, *options)),
        (operators.allreduce.default, ([x], None, "allreduce", None, number, *options)),
        (operators.broadcast.default, ([x], None, "broadcast", "checked", None, hvd.Sum, 0, 1.0, 1.0, 0)),
        (operators.reducescatter.default, ([x, w], [4, 5], "grouped_reducescatter", "checked", None, *options)),
        (operators.allgather.default, ([x, w], [custom_ops.FOUND_OUT] * 2, "allgather", "checked", None, *options)),
        (operators.alltoall.default, ([x], [], [False], 1, "alltoall", "checked", None, 0)),
        (
            operators.alltoall.default,
            ([x, w], [torch.tensor([2])], [False, True], 1, "grouped_alltoall", None, number, 0),
        ),
    ]
    with _compiler():
        for operator, arguments in samples:
            torch.library.opcheck(operator, arguments)


def test_operators_are_well_defined(ranks):
    ranks(1).run(_operators_are_well_defined)


@pytest.mark.parametrize(("called", "traced"), compiled_ops.TRACED, ids=lambda function: function.__name__)
def test_signature(called, traced):
    of_called, of_traced = ([*inspect.signature(each).parameters.values()] for each in (called, traced))
    assert [(each.kind, each.default) for each in of_called] == [(each.kind, each.default) for each in of_traced]
