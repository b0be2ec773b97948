"""Adasum against its definition, for any number of ranks, and the optimizer that adds up steps by it."""

from __future__ import annotations

import pytest
import torch

import horovodlike.torch as hvd

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    factor_a = 1 - product / (2 * of_a) if of_a > 0 else 1.0
    factor_b = 1 - product / (2 * of_b) if of_b > 0 else 1.0
    return factor_a * a + factor_b * b


def _adasum(vectors: list[torch.Tensor]) -> torch.Tensor:
    while len(vectors) > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [_pair(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return vectors[0]


def _vector(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * rank + length)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def _definition() -> None:
    ranks = range(hvd.size())
    for dtype, tolerance in TOLERANCE.items():
        for length in (0, 1, 7, 1009, 200_003):
            expected = _adasum([_vector(rank, length, dtype).double() for rank in ranks])
            result = hvd.allreduce(_vector(hvd.rank(), length, dtype), op=hvd.Adasum, name=f"{dtype}.{length}")
            assert result.dtype is dtype
            assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance), (dtype, length)
            bits = result.view(torch.int64 if dtype is torch.float64 else torch.int16)
            assert len({tuple(other) for other in hvd.allgather_object(bits[:100].tolist())}) == 1
    tensors = [_vector(hvd.rank(), length, torch.float32) for length in (3, 1009)]
    for length, result in zip((3, 1009), hvd.grouped_allreduce(tensors, op=hvd.Adasum), strict=True):
        expected = _adasum([_vector(rank, length, torch.float32).double() for rank in ranks])  # each for itself
        assert torch.allclose(result.double(), expected, atol=1e-5)
    scaled = hvd.allreduce(tensors[0], op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.25)
    assert torch.allclose(scaled, hvd.allreduce(tensors[0], op=hvd.Adasum) / 2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_definition(ranks, size):
    ranks(size).run(_definition)


def _properties() -> None:
    own = torch.zeros(4)
    own[hvd.rank()] = 3.0
    assert hvd.allreduce(own, op=hvd.Adasum).tolist() == [3.0] * hvd.size() + [0.0] * (4 - hvd.size())
    assert hvd.allreduce(torch.full((5,), 2.0), op=hvd.Adasum).tolist() == [2.0] * 5
    assert hvd.allreduce(torch.zeros(5), op=hvd.Adasum).tolist() == [0.0] * 5
    learned = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="Average and op=Sum only"):
        hvd.allreduce(learned, op=hvd.Adasum, name="learned").sum().backward()
    chosen = hvd.add_process_set([0, 2])
    if chosen.included():
        expected = _adasum([_vector(rank, 11, torch.float32).double() for rank in (0, 2)])
        result = hvd.allreduce(_vector(hvd.rank(), 11, torch.float32), op=hvd.Adasum, process_set=chosen)
        assert torch.allclose(result.double(), expected, atol=1e-5)
    assert hvd.remove_process_set(chosen)


@pytest.mark.slow
def test_sum_of_what_is_orthogonal_mean_of_what_is_parallel(ranks):
    ranks(3).run(_properties)


def _check_mean(ranks: list[int], process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
    for dtype, tolerance in TOLERANCE.items():
        for length in (0, 1, 1009, 600_011):  # small vectors again after large ones, whose memory is given back
            expected = torch.stack([_vector(rank, length, dtype).double() for rank in ranks]).mean(0)
            own = _vector(hvd.rank(), length, dtype)
            result = hvd.allreduce(own, op=hvd.Adasum, name=f"{dtype}.{length}", process_set=process_set)
            assert result.dtype is dtype
            assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance), (dtype, length)


def _mean_of_a_host() -> None:
    _check_mean([0, 1, 2])
    chosen = hvd.add_process_set([0, 2])
    if chosen.included():
        _check_mean([0, 2], chosen)
    assert hvd.remove_process_set(chosen)
    if hvd.rank() != 1:
        _check_mean([0, 2])
    hvd.join()
    _check_mean([0, 1, 2])


@pytest.mark.thorough
def test_the_average_of_one_host(fresh_ranks):
    fresh_ranks(3, {"HOROVODLIKE_HIERARCHICAL_ADASUM": "1"}).run(_mean_of_a_host)


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def _batch(rank: int, step: int) -> torch.Tensor:
    return _vector(10 * step + rank, 8, torch.float64).reshape(2, 4)


def _steps(options: dict[str, float], count: int, with_closure: bool) -> None:
    model = _model()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **options), model.named_parameters(), op=hvd.Adasum
    )
    assert isinstance(wrapped, torch.optim.SGD)
    others = [_model() for _ in range(hvd.size())]  # what each rank does by itself
    optimizers = [torch.optim.SGD(other.parameters(), **options) for other in others]
    for step in range(count):

        def loss(step: int = step) -> torch.Tensor:
            wrapped.zero_grad()
            value = model(_batch(hvd.rank(), step)).square().sum()
            value.backward()
            return value

        if with_closure:
            assert wrapped.step(loss) is not None
        else:
            loss()
            wrapped.synchronize()  # nothing to wait for
            wrapped.step()
        starts = [parameter.detach().clone() for parameter in others[0].parameters()]
        for rank, (other, optimizer) in enumerate(zip(others, optimizers, strict=True)):
            optimizer.zero_grad()
            other(_batch(rank, step)).square().sum().backward()
            optimizer.step()
        for start, parameters in zip(starts, zip(*(other.parameters() for other in others), strict=True), strict=True):
            total = start + _adasum([parameter.detach() - start for parameter in parameters])
            for parameter in parameters:
                parameter.data.copy_(total)
    for actual, expected in zip(model.parameters(), others[0].parameters(), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(AssertionError, match="nothing to skip"), wrapped.skip_synchronize():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("with_closure", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_optimizer_that_adds_up_steps(ranks, size, with_closure):
    ranks(size).run(_steps, {"lr": 0.1, "momentum": 0.9}, 4, with_closure)
