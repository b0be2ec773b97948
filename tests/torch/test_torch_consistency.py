"""check_consistency: the same verdict and the same words on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters
from horovodlike.errors import MismatchError

ODD_VALUES = torch.tensor([float("nan"), float("inf"), -0.0, 1e-310], dtype=torch.float64)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def _tensors() -> dict[str, torch.Tensor | None]:
    base = torch.arange(12)
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2)
    return {
        **{str(dtype): base.to(dtype) for dtype in dtypes},
        "scalar": torch.tensor(1.5),
        "nothing in it": torch.empty(0, 3),
        "odd values": ODD_VALUES.clone(),
        "turned": base.reshape(3, 4).t(),
        "conjugate": base.to(torch.complex64).conj(),
        "none": None,
    }


def _the_same() -> None:
    model = _model()
    hvd.check_consistency(model)
    hvd.check_consistency(model.state_dict())
    hvd.check_consistency(model.named_parameters())
    hvd.check_consistency(pair for pair in _tensors().items())
    hvd.check_consistency({})
    # Order, strides and views do not matter, only what is there.
    tensors = _tensors()
    if hvd.rank() % 2:
        tensors = dict(reversed(tensors.items()))
        del tensors["none"]
        tensors["turned"] = tensors["turned"].contiguous()
        tensors["conjugate"] = tensors["conjugate"].resolve_conj()
    hvd.check_consistency(tensors)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def _little_is_sent() -> None:
    model = torch.nn.Linear(300, 300)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = counters()
    hvd.check_consistency(model)
    after = counters()
    if hvd.size() > 1:
        assert after["requests"] - before["requests"] == 1 and after["bytes"] - before["bytes"] < 100 * hvd.size()


def _after_training() -> None:
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(_model())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    hvd.check_consistency(model)


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize(
    "case", (_the_same, _little_is_sent, _after_training), ids=lambda case: case.__name__.strip("_")
)
def test_ranks_that_agree(ranks, case, size):
    ranks(size).run(case)


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    state = _model().state_dict()
    state[name] = change(state[name])
    return state


def _verdict(differ: dict[int, Callable[[], object]]) -> str:
    """The error says which ranks hold something else; afterwards the job continues."""
    mine = differ.get(hvd.rank(), lambda: _model().state_dict())()
    with pytest.raises(MismatchError) as caught:
        hvd.check_consistency(mine)
    assert isinstance(caught.value, hvd.HorovodInternalError)
    hvd.check_consistency(_model())
    return str(caught.value)


def _plus_one(name: str) -> dict[str, torch.Tensor | None]:
    return _changed(name, lambda tensor: tensor + 1)


BEGIN = "the ranks do not hold the same model: "
ONE = " (1 of 9 tensors differ)"
# By size of the job: what ranks hold instead, and what is said about it.
DIFFERENCES = (
    (4, {1: lambda: _plus_one("0.weight")}, "0.weight: values: rank 1 differs from ranks 0, 2, 3" + ONE),
    (4, {0: lambda: _plus_one("2.bias")}, "2.bias: values: rank 0 differs from ranks 1, 2, 3" + ONE),
    (2, {0: lambda: _plus_one("2.bias")}, "2.bias: values: rank 1 differs from rank 0" + ONE),
    (
        4,
        {2: lambda: _plus_one("1.running_var"), 3: lambda: _plus_one("1.running_var")},
        "1.running_var: values: ranks 2, 3 differ from ranks 0, 1" + ONE,
    ),
    (
        4,
        {0: lambda: _plus_one("0.bias"), 3: lambda: _changed("0.bias", lambda tensor: tensor - 1)},
        "0.bias: values: rank 0 and rank 3 differ from ranks 1, 2 and from each other" + ONE,
    ),
    (
        3,
        {2: lambda: _plus_one("1.num_batches_tracked"), 1: lambda: _plus_one("2.weight")},
        "1.num_batches_tracked: values: rank 2 differs from ranks 0, 1 (2 of 9 tensors differ)",
    ),
    (
        3,
        {1: lambda: _changed("1.weight", lambda _: None)},
        "1.weight: missing on rank 1, present on ranks 0, 2" + ONE,
    ),
    (
        3,
        {1: lambda: {**_model().state_dict(), "new": torch.ones(1)}},
        "new: missing on ranks 0, 2, present on rank 1 (1 of 10 tensors differ)",
    ),
    (
        3,
        {0: lambda: _changed("0.weight", lambda tensor: tensor.t())},
        "0.weight: shape is [4, 3] on ranks 1, 2, [3, 4] on rank 0" + ONE,
    ),
    (
        3,
        {2: lambda: _changed("0.bias", lambda tensor: tensor.double())},
        "0.bias: dtype is float32 on ranks 0, 1, float64 on rank 2" + ONE,
    ),
    # The same bytes by another name.
    (
        2,
        {1: lambda: _changed("0.bias", lambda tensor: tensor.view(torch.int32))},
        "0.bias: dtype is float32 on rank 0, int32 on rank 1" + ONE,
    ),
)


@pytest.mark.parametrize(
    ("differ", "text", "size"),
    [pytest.param(differ, text, size, id=f"{text.split(' (')[0]}-{size}") for size, differ, text in DIFFERENCES],
)
def test_ranks_that_differ(ranks, differ, text, size):
    assert ranks(size).run(_verdict, differ) == [BEGIN + text] * size


def _smallest_differences() -> list[str]:
    """One bit of a NaN or of a zero, a buffer that is not saved, and names that are of another order of bytes."""
    texts = []

    def expect(name: str, differs: Callable[[], object], same: Callable[[], object]) -> None:
        with pytest.raises(MismatchError, match=f": {name}: values: rank 1 differs from rank 0 ") as caught:
            hvd.check_consistency(differs() if hvd.rank() == 1 else same())
        texts.append(str(caught.value))

    bits = ODD_VALUES.clone()
    bits.view(torch.int64)[0] ^= 1
    expect("odd values", lambda: {"odd values": bits}, _tensors_with_odd_values)
    zero = ODD_VALUES.clone()
    zero[2] = 0.0
    expect("odd values", lambda: [("odd values", zero)], _tensors_with_odd_values)
    expect("unsaved", lambda: _module_with_buffer(1.0), lambda: _module_with_buffer(2.0))
    expect("größe\n", lambda: {"größe\n": torch.ones(2)}, lambda: {"größe\n": torch.zeros(2)})
    return texts


def _tensors_with_odd_values() -> dict[str, torch.Tensor]:
    return {"odd values": ODD_VALUES.clone()}


def _module_with_buffer(value: float) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    module.register_buffer("unsaved", torch.tensor(value), persistent=False)
    return module


def test_smallest_differences(ranks):
    first, second = ranks(2).run(_smallest_differences)
    assert first == second


def _no_models() -> None:
    for wrong, text in (
        (3, "expected a module"),
        ("weights", "expected a module"),
        (torch.ones(3), "expected a module"),
        ([torch.ones(3)], "pairs of name and tensor"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "a: the name occurs twice"),
        ({"a": 3}, "a: expected a tensor"),
        ({"a": torch.eye(2).to_sparse()}, r"a: .*sparse_coo.*to_dense"),
        ({"a": torch.ones(2, device="meta")}, "a: the tensor has no values"),
        (torch.nn.LazyLinear(3), "weight: the tensor has no values"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.check_consistency(wrong)
    hvd.check_consistency(_model())


def test_what_is_no_model_is_refused_at_once(ranks):
    ranks(2).run(_no_models)
