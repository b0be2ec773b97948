"""Nine defects of TorchMPI's parameter servers, which must not be here: a test of each, by its number."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike.errors import MismatchError
from horovodlike.torch.parameter_server import ParameterServer

LR = 0.25  # powers of two and small integers: no sum is rounded


def _make(rank: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(5, dtype=torch.float64) + 16 * rank)


def _step(optimizer: Any, param: torch.nn.Parameter, gradient: float) -> None:
    param.grad = torch.full_like(param, gradient)
    optimizer.step()


def _centre(optimizer: Any, param: torch.nn.Parameter) -> torch.Tensor:
    (centre,) = optimizer.parameter_server.receive(out=[torch.empty_like(param)]).wait()
    return centre


def _in_turns(calls: Sequence[Any]) -> None:
    """Have the ranks do one call each, one after the other."""
    for rank, call in enumerate(calls):
        hvd.barrier()
        if rank == hvd.rank():
            call()
    hvd.barrier()


def _moves_the_centre() -> None:
    param = _make()
    optimizer = hvd.EASGDOptimizer(torch.optim.SGD([param], lr=LR), update_frequency=1, init_delay=0, beta=1)
    start = param.detach().clone()
    _in_turns([lambda: (_step(optimizer, param, 16.0), optimizer.flush())] * 2)
    # Rank 0 is 4 below the centre, and half of that moves each; rank 1 then is 4 below the start, 2 below the centre.
    assert torch.equal(param, start - (2 if hvd.rank() == 0 else 3))
    assert torch.equal(_centre(optimizer, param), start - 3)
    optimizer.close()


def test_defect_1_the_centre_of_easgd_moves(ranks):
    ranks(2).run(_moves_the_centre)


def _fetches_before_the_first_integration(warm_up: int) -> None:
    param = _make()
    optimizer = hvd.DownpourOptimizer(
        torch.optim.SGD([param], lr=LR), update_frequency=4, prefetch=1, init_delay=warm_up
    )
    for _ in range(warm_up):
        _step(optimizer, param, 4.0)
    start = param.detach().clone()

    def three_steps() -> None:
        for _ in range(3):
            _step(optimizer, param, 4.0)
        optimizer.flush()

    # Rank 1 asks for the values after its third step, when those of both ranks are in: 6 in all.
    _in_turns([three_steps, three_steps])
    _in_turns([lambda: None, lambda: _step(optimizer, param, 4.0)])
    assert torch.equal(param, start - (3 if hvd.rank() == 0 else 6))
    optimizer.close()


@pytest.mark.parametrize("warm_up", (pytest.param(0, marks=pytest.mark.slow), 3))
def test_defect_2_the_first_integration_has_values_that_were_fetched_for_it(ranks, warm_up):
    ranks(2).run(_fetches_before_the_first_integration, warm_up)


def _accumulates_from_the_beginning() -> None:
    param = _make()
    optimizer = hvd.DownpourOptimizer(torch.optim.SGD([param], lr=LR), init_delay=3, send_frequency=2)
    for _ in range(3):
        _step(optimizer, param, 32.0)
    start = param.detach().clone()
    assert torch.equal(_centre(optimizer, param), start)
    hvd.barrier()
    for _ in range(2):
        _step(optimizer, param, 4.0)
    optimizer.flush()
    hvd.barrier()
    assert torch.equal(_centre(optimizer, param), start - LR * 2 * 4.0 * hvd.size())
    optimizer.close()


def test_defect_3_gradients_of_the_warm_up_are_not_sent(ranks):
    ranks(2).run(_accumulates_from_the_beginning)


def _sends_once_for_each_set() -> None:
    sets = [hvd.add_process_set(pair) for pair in ([0, 1], [2, 3])]
    param = _make()
    start = param.detach().clone()
    optimizer = hvd.DownpourOptimizer(
        torch.optim.SGD([param], lr=LR), update_frequency=1, init_delay=0, data_parallel_set=sets[hvd.rank() // 2]
    )
    optimizer.zero_grad()
    (param * 8.0 * hvd.rank()).sum().backward()
    optimizer.step()
    optimizer.flush()
    hvd.barrier()
    mean_of_sets = (0 + 8) / 2, (16 + 24) / 2
    assert torch.equal(_centre(optimizer, param), start - LR * sum(mean_of_sets))
    same = hvd.allgather(param.detach()[None], process_set=sets[hvd.rank() // 2])
    assert torch.equal(same[0], same[1])
    optimizer.close()
    for one in sets:
        hvd.remove_process_set(one)


def test_defect_4_only_the_first_rank_of_a_data_parallel_set_sends(ranks):
    ranks(4).run(_sends_once_for_each_set)


def _honours_arguments() -> None:
    for root in range(hvd.size()):
        server = ParameterServer([_make(hvd.rank())], root=root)
        (got,) = server.receive(out=[torch.zeros(5, dtype=torch.float64)]).wait()
        assert torch.equal(got, _make(root))
        server.close()
    server = ParameterServer([_make(hvd.rank())], init="own")
    (got,) = server.receive(out=[torch.zeros(5, dtype=torch.float64)]).wait()
    assert torch.equal(got, torch.cat([_make(0)[:3], _make(1)[3:]]))
    with pytest.raises(ValueError, match=r"none.*(add.*|copy.*){2}"):
        server.send([_make()], "none")
    server.close()
    only = hvd.add_process_set([1])
    if hvd.rank() == 1:
        server = ParameterServer([_make(1)], process_set=only, root=1)
        server.close()
    hvd.remove_process_set(only)


def test_defect_5_arguments_count_and_unknown_rules_are_errors_of_the_client(ranks):
    ranks(2).run(_honours_arguments)


def _checks_lengths() -> None:
    server = ParameterServer([_make()])
    for wrong in ([torch.zeros(6, dtype=torch.float64)], [torch.zeros(5)]):
        with pytest.raises(ValueError, match="must have"):
            server.send(wrong)
        with pytest.raises(ValueError, match="must have"):
            server.receive(out=wrong)
    hvd.barrier()
    (got,) = server.receive(out=[torch.zeros(5, dtype=torch.float64)]).wait()
    assert torch.equal(got, _make())
    server.close()


def test_defect_6_lengths_are_checked(ranks):
    """Commands that are wrong all the same are sent to a server in `tests/native/parameters`."""
    ranks(2).run(_checks_lengths)


def _await_stop(pid: int) -> None:
    """Wait until all threads of a process are stopped."""
    deadline = time.monotonic() + 10
    threads = Path(f"/proc/{pid}/task")
    while not all("T (stopped)" in (thread / "status").read_text() for thread in threads.iterdir()):
        assert time.monotonic() < deadline
        os.sched_yield()


def _trains_beside_a_stopped_client() -> None:
    """Rank 1 stops amid its sends of 8 MiB; a step of rank 0, at the same server, is not later for it."""
    pids = hvd.allgather_object(os.getpid())
    alone = hvd.add_process_set([0])
    large = ParameterServer([torch.zeros(1 << 20, dtype=torch.float64)])
    param = _make()
    if hvd.rank() == 1:
        handles = [large.send([torch.ones(1 << 20, dtype=torch.float64)]) for _ in range(5)]
        os.kill(os.getpid(), signal.SIGSTOP)
        for handle in handles:
            handle.wait(30)
    else:
        _await_stop(pids[1])
        optimizer = hvd.DownpourOptimizer(
            torch.optim.SGD([param], lr=LR), update_frequency=1, init_delay=0, process_set=alone
        )
        begun = time.monotonic()
        for _ in range(10):
            _step(optimizer, param, 4.0)
        assert time.monotonic() - begun < 5.0
        assert torch.equal(param, _make() - 10)
        optimizer.close()
        os.kill(pids[1], signal.SIGCONT)
    hvd.barrier()
    (got,) = large.receive(out=[torch.empty(1 << 20, dtype=torch.float64)]).wait()
    assert (got == 5).all()
    large.close()


def test_defect_7_a_stopped_client_stalls_no_other(fresh_ranks):
    fresh_ranks(2).run(_trains_beside_a_stopped_client)


def _rules_and_reductions() -> None:
    """Small, then large, then small again: no buffer is that of another size."""
    for count in (3, 300_007, 5):
        value = torch.arange(count, dtype=torch.float32) * (1 if hvd.rank() else -1)
        largest = torch.arange(count, dtype=torch.float32)
        assert torch.equal(hvd.allreduce(value, op=hvd.Max), largest)
        assert torch.equal(hvd.allreduce(value, op=hvd.Min), -largest)
        for rule, expected in (("max", largest), ("min", -largest)):
            server = ParameterServer([torch.zeros(count)])
            server.send([value], rule).wait()
            hvd.barrier()
            (got,) = server.receive(out=[torch.empty(count)]).wait()
            assert torch.equal(got, expected)
            server.close()


def test_defect_8_max_is_max_and_min_is_min_for_every_size(ranks):
    ranks(2).run(_rules_and_reductions)


def _trains_until_a_server_is_lost(method: str) -> tuple[float, str]:
    param = _make()
    wrap = {"downpour": hvd.DownpourOptimizer, "easgd": hvd.EASGDOptimizer}[method]
    optimizer = wrap(torch.optim.SGD([param], lr=LR), update_frequency=1, init_delay=0)
    hvd.barrier()
    print("ready", flush=True)
    if hvd.rank() == 1:
        signal.pause()
    with pytest.raises(hvd.HorovodInternalError) as raised, optimizer:
        while True:
            _step(optimizer, param, 4.0)
    failed = time.monotonic()
    with pytest.raises(RuntimeError, match="has left its servers"):
        optimizer.step()
    return failed, str(raised.value)


@pytest.mark.parametrize("method", (pytest.param("downpour", marks=pytest.mark.slow), "easgd"))
def test_defect_9_a_lost_server_is_an_error_of_each_rank_in_time(fresh_ranks, method):
    pool = fresh_ranks(3)
    pool.start(_trains_until_a_server_is_lost, [(method,)] * 3)
    deadline = time.monotonic() + 30
    while not all("ready" in pool.output(rank) for rank in range(3)):
        assert time.monotonic() < deadline
        os.sched_yield()
    pool.kill(1)
    killed = time.monotonic()
    outcomes = pool.collect(30)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].error
        failed, error = outcomes[rank].value
        assert failed - killed < 1.0
        assert "the parameter server of rank 1" in error


def _fails_in_close() -> None:
    def fail(accumulated: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        raise ArithmeticError("no update")

    param = _make()
    update = fail if hvd.rank() == 1 else "gradient"
    optimizer = hvd.DownpourOptimizer(
        torch.optim.SGD([param], lr=LR), init_delay=0, send_frequency=2, local_update=update
    )
    _step(optimizer, param, 4.0)
    if hvd.rank() == 1:
        with pytest.raises(ArithmeticError, match="no update"):
            optimizer.close()
    else:
        optimizer.close()
    assert optimizer.parameter_server is None
    with pytest.raises(TypeError if hvd.rank() == 1 else MismatchError, match="expected a module with parameters"):
        ParameterServer("text" if hvd.rank() == 1 else param)
    hvd.barrier()


def test_a_rank_that_fails_in_close_leaves_no_other_waiting(ranks):
    ranks(2).run(_fails_in_close)


def _begins_with_the_first_ranks_parameters() -> None:
    """Rank 1 receives the first values when rank 0 would have made many steps, if it did not wait for rank 1."""
    param = _make(hvd.rank())
    if hvd.rank() == 1:
        receive = ParameterServer.receive

        def receive_late(self: ParameterServer, out: Any = None) -> Any:
            ParameterServer.receive = receive  # type: ignore[method-assign]
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                handle = receive(self, [torch.empty_like(param)])
                handle.wait()
            return receive(self, out)

        ParameterServer.receive = receive_late  # type: ignore[method-assign]
    optimizer = hvd.DownpourOptimizer(torch.optim.SGD([param], lr=LR), init_delay=0)
    start = param.detach().clone()
    if hvd.rank() == 0:
        _step(optimizer, param, 4.0)
        optimizer.flush()
    assert torch.equal(start, torch.arange(5, dtype=torch.float64))
    optimizer.close()


def test_all_ranks_begin_with_the_first_ones_parameters(ranks):
    ranks(2).run(_begins_with_the_first_ranks_parameters)
