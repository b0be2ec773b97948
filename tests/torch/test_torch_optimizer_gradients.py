"""`DistributedOptimizer`: gradients that are missing, change or differ between ranks; and after an error."""

from __future__ import annotations

import pytest
import torch
from support.training import (
    flat_parameters,
    loss_of,
    make_batches,
    make_model,
    make_sgd,
    my_part,
)

import horovodlike.torch as hvd


def _missing_gradients() -> None:
    """A gradient that one rank lacks counts as zero; one that all lack stays None, and its parameter does not move."""
    for groups in (None, 1, 2):
        here, there, nowhere, everywhere = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
        names = zip(("here", "there", "nowhere", "everywhere"), (here, there, nowhere, everywhere), strict=True)
        plain = torch.optim.SGD([here, there, nowhere, everywhere], lr=1.0, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(plain, names, groups=groups)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.no_grad():
                for p in (here, there, nowhere, everywhere):
                    p.fill_(1.0)
            used = here if hvd.rank() == 0 else there
            (used * 2 + everywhere * 3).sum().backward()
            optimizer.step()
            n = hvd.size()
            assert nowhere.grad is None
            assert nowhere.tolist() == [1.0] * 3
            assert torch.allclose(here.grad, torch.full((3,), 2 / n))
            assert torch.allclose(everywhere.grad, torch.full((3,), 3.0))
            assert torch.allclose(here, torch.full((3,), 1 - (2 / n + 0.5)))
            if n > 1:
                assert torch.allclose(there, torch.full((3,), 1 - (2 * (n - 1) / n + 0.5)))
            else:
                assert there.grad is None
        optimizer.zero_grad()
        optimizer.step()  # no gradient at all
        assert all(p.grad is None for p in (here, there, nowhere, everywhere))
    # With Min, a rank without a gradient takes no part: its zeros would be the minimum.
    parameter, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter, other], lr=1.0), op=hvd.Min)
    (parameter * 5 + other if hvd.rank() == 0 else other).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-5.0] * 2


def _strange_gradients() -> None:
    """Gradients that change their memory, layout or dtype from step to step."""
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    tied = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*conv.parameters(), *tied.parameters()], lr=0.1))
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        image = torch.full((2, 3, 5, 5), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
        conv(image).sum().backward()
        tied(tied(torch.full((2, 4), hvd.rank() + 1.0))).sum().backward()
        optimizer.step()
        gradients = torch.cat([p.grad.flatten() for p in conv.parameters()])
        everywhere = hvd.allgather(gradients.unsqueeze(0))
        assert all(torch.equal(everywhere[0], other) for other in everywhere)
        assert torch.allclose(conv.weight.grad, torch.full_like(conv.weight, 18 * (hvd.size() + 1) / 2))
    transposed = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([transposed], lr=1.0))
    transposed.grad = torch.full((3, 2), hvd.rank() + 1.0).t()  # set by hand, without a backward pass
    optimizer.step()
    assert torch.allclose(transposed, torch.full((2, 3), -(hvd.size() + 1) / 2))
    changing = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([changing], lr=0.0))
    for size, dtype in ((4, torch.float32), (6, torch.float64), (2, torch.bfloat16)):
        changing.grad = None
        changing.data = torch.zeros(size, dtype=dtype)
        changing.sum().backward()
        optimizer.step()
        assert changing.grad.tolist() == [1.0] * size


def _backward(conv: torch.nn.Module, size: int, memory_format: torch.memory_format) -> torch.Tensor:
    """Add to the gradient of a layer, other values to each element; return what all ranks together have added."""
    mine = hvd.rank() + 1.0
    dims = conv.weight.dim() - 2
    images = torch.full((2, 3, *[size] * dims), mine).to(memory_format=memory_format)
    of_each = (torch.arange(conv.weight.numel()) % 7).reshape(conv.weight.shape)
    (conv(images).sum() + (conv.weight * of_each * mine).sum()).backward()
    positions = 2 * (size - conv.kernel_size[0] + 1) ** dims
    return hvd.size() * (hvd.size() + 1) / 2 * (positions + of_each)


def _channels_last() -> None:
    """Gradients whose channels are last are reduced where they lie."""
    for options in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}):
        flat = torch.nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)
        deep = torch.nn.Conv3d(3, 4, 2).to(memory_format=torch.channels_last_3d)
        rare = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # rank 0 alone has its gradient
        weights = [layer.weight for layer in (flat, deep, rare)]
        sgd = torch.optim.SGD([*weights, flat.bias], lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Sum, **options)
        passes = optimizer.backward_passes_per_step
        for step in range(4):
            optimizer.zero_grad(set_to_none=step != 2)
            for _ in range(passes):
                sums = [_backward(flat, 4, torch.channels_last), _backward(deep, 4, torch.channels_last_3d)]
                if hvd.rank() == 0:
                    (rare.weight * 3).sum().backward()
            places = [weight.grad.data_ptr() for weight in weights[:2]]
            optimizer.step()
            assert [weight.grad.data_ptr() for weight in weights[:2]] == places
            assert not any(weight.grad.is_contiguous() for weight in weights)
            for weight, added in zip(weights, [*sums, torch.full_like(rare.weight, 3.0)], strict=True):
                assert torch.equal(weight.grad, passes * added), (options, step)
        if not options and hvd.size() > 1:
            assert all(state.alike for state in optimizer._reduction.states)  # none of them was copied


def _gradients_in_another_order_than_their_parameters() -> None:
    """Each rank may have its gradient in another order: the parameter's is the one that is reduced."""
    last = torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)
    with_gaps = torch.ones(4, 6, 2, 2).to(memory_format=torch.channels_last)[:, :3]
    of_each = (torch.arange(last.numel()) % 7.0).reshape(last.shape)
    for start in (last, last.contiguous(), with_gaps):
        parameter = torch.nn.Parameter(start)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), op=hvd.Sum)
        for turn in range(3):
            optimizer.zero_grad()
            if (hvd.rank() + turn) % 3 == 0:
                parameter.grad = of_each.clone()
            elif (hvd.rank() + turn) % 3 == 1:
                parameter.grad = of_each.to(memory_format=torch.channels_last)
            optimizer.step()  # the third one lacks it
            number = sum((rank + turn) % 3 < 2 for rank in range(hvd.size()))
            assert torch.equal(parameter.grad, of_each * number) if number else parameter.grad is None


CASES = (
    _missing_gradients,
    _strange_gradients,
    _channels_last,
    _gradients_in_another_order_than_their_parameters,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_optimizer(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", ("always", "never"))
def test_all_whether_the_engine_overlaps_or_not(fresh_ranks, overlap):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": overlap})
    for case in CASES:
        pool.run(case)


def _different_models() -> str:
    layers = [torch.nn.Linear(2, 2) for _ in range(1 + hvd.rank())]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        optimizer.step()
    return str(caught.value)


def test_different_models_are_an_error_and_no_hang(fresh_ranks):
    for message in fresh_ranks(2).run(_different_models):
        assert "same model" in message
        assert "[2]" in message and "[4]" in message


def _mismatched_gradient() -> None:
    parameter, other = torch.nn.Parameter(torch.zeros(4 + hvd.rank())), torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter, other], lr=1.0), [("odd", parameter), ("even", other)]
    )
    (parameter.sum() + other.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"odd(?s:.*)\[4\](?s:.*)\[5\]"):
        optimizer.step()
    # The optimizer can be used again.
    with torch.no_grad():
        parameter.data = torch.zeros(4)
    optimizer.zero_grad()
    (parameter.sum() + other.sum()).backward()
    optimizer.step()
    assert parameter.tolist() == [-1.0] * 4


def test_after_an_error_the_optimizer_works_again(ranks):
    ranks(2).run(_mismatched_gradient)


def _mismatched_formats() -> None:
    conv = torch.nn.Conv2d(3, 4, 3)
    if hvd.rank() == 1:
        conv = conv.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=1.0), conv.named_parameters())
    conv(torch.ones(1, 3, 5, 5)).sum().backward()
    told = "Mismatched memory formats for allreduce 'allreduce.weight': rank 0 has row-major, rank 1 has channels_last"
    with pytest.raises(hvd.HorovodInternalError, match=told):
        optimizer.step()
    conv.to(memory_format=torch.channels_last)
    optimizer.zero_grad()
    conv(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    assert torch.equal(conv.weight.grad, torch.full_like(conv.weight, 9.0))


def test_formats_that_differ_are_an_error(ranks):
    ranks(2).run(_mismatched_formats)


def _survives_a_new_job() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    x, y = make_batches(1)[0]
    loss_of(model, my_part(x), my_part(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
    with pytest.raises((hvd.HorovodInternalError, ValueError)):
        for _ in range(1000):
            part = (my_part(x), my_part(y)) if hvd.is_initialized() else (x, y)
            loss_of(model, *part).backward()
            optimizer.step()
            optimizer.zero_grad()
    hvd.shutdown()
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    for _ in range(3):
        loss_of(model, my_part(x), my_part(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    everywhere = hvd.allgather(flat_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def test_after_a_broken_job_the_optimizer_works_in_the_next(fresh_ranks):
    fresh_ranks(2).run(_survives_a_new_job)
