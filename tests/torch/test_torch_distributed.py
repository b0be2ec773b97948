"""The backend `hvd` of torch.distributed: every collective against torch's own arithmetic, and the rules of groups."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.process_groups import own_engine, process_group

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters
from horovodlike.errors import MismatchError

SIZES = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SHAPES = ((), (0,), (1,), (7, 3), (70_001,))


def _value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + sum(shape))
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def _of_all(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [_value(rank, shape, dtype) for rank in range(dist.get_world_size())]


def _reduced(values: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    stacked = torch.stack(values)
    if op == dist.ReduceOp.SUM:
        return stacked.sum(0).to(stacked.dtype)
    if op == dist.ReduceOp.PRODUCT:
        return stacked.prod(0).to(stacked.dtype)
    return stacked.amin(0) if op == dist.ReduceOp.MIN else stacked.amax(0)


def _all_reductions(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        for shape, dtype in itertools.product(SHAPES, DTYPES):
            values = _of_all(shape, dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                wanted = _reduced(values, op)
                tensor = values[rank].clone()
                for is_async in (False, False, True):  # the second has been prepared by the first
                    tensor.copy_(values[rank])
                    work = dist.all_reduce(tensor, op, async_op=is_async)
                    assert work.wait() if is_async else work is None
                    assert torch.equal(tensor, wanted), (shape, dtype, op)
                tensor.copy_(values[rank])
                dist.reduce(tensor, size - 1, op)
                assert torch.equal(tensor, wanted if rank == size - 1 else values[rank])
                rows = torch.stack([values[rank]] * size)
                part = torch.empty_like(values[rank])
                if shape:
                    dist.reduce_scatter_single(part, rows.flatten(0, 1).contiguous(), op)
                    assert torch.equal(part, wanted)
                dist.reduce_scatter(part.zero_(), list(rows), op)
                assert torch.equal(part, wanted)
        average = torch.full((3,), float(rank))
        dist.all_reduce(average, dist.ReduceOp.AVG)
        assert torch.equal(average, torch.full((3,), (size - 1) / 2))
        scaled = torch.full((3,), float(rank))
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        assert torch.equal(scaled, torch.full((3,), size * (size - 1) / 4))
        number = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        dist.all_reduce(number)
        assert torch.equal(number, torch.tensor([1 + 2j, 3 - 1j]) * (size * (size + 1) / 2))
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            with pytest.raises(ValueError, match=f"no reduction {op.name}.*SUM, AVG.*gloo"):
                dist.all_reduce(torch.ones(1, dtype=torch.int32), op)


@pytest.mark.parametrize("size", SIZES)
def test_reductions(ranks, tmp_path, size):
    ranks(size).run(_all_reductions, tmp_path / "store")


def _all_movements(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        for shape, dtype in itertools.product(SHAPES, (*DTYPES, torch.bool, torch.uint16, torch.complex64)):
            values = [_value(each, shape).to(dtype) for each in range(size)]
            mine, last = values[rank], size - 1
            tensor = mine.clone()
            dist.broadcast(tensor, last)
            assert torch.equal(tensor, values[last])
            gathered = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(gathered, mine)
            assert all(map(torch.equal, gathered, values))
            for one in gathered:
                one.zero_()
            dist.gather(mine, gathered if rank == last else None, dst=last)
            assert rank != last or all(map(torch.equal, gathered, values))
            part = torch.empty_like(mine)
            dist.scatter(part, [one.clone() for one in values] if rank == last else None, src=last)
            assert torch.equal(part, mine)
            dist.all_to_all(gathered, [mine] * size)
            assert all(map(torch.equal, gathered, values))
            if shape:
                whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_single(whole, mine)
                assert torch.equal(whole, torch.cat(values))
                blocks = torch.empty((size, *shape), dtype=dtype)
                dist.all_to_all_single(blocks, torch.stack([mine] * size))
                assert torch.equal(blocks, torch.stack(values))


@pytest.mark.parametrize("size", SIZES)
def test_movements(ranks, tmp_path, size):
    ranks(size).run(_all_movements, tmp_path / "store")


def _uneven(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        gathered = [torch.empty(each, 2) for each in range(size)]
        dist.all_gather(gathered, torch.full((rank, 2), float(rank)))
        assert all(torch.equal(one, torch.full((each, 2), float(each))) for each, one in enumerate(gathered))
        inputs = [torch.full((each + 1,), float(rank)) for each in range(size)]
        part = torch.empty(rank + 1)
        dist.reduce_scatter(part, inputs)
        assert torch.equal(part, torch.full((rank + 1,), size * (size - 1) / 2))
        outputs = [torch.empty(rank + 1) for _ in range(size)]
        dist.all_to_all(outputs, inputs)
        assert all(torch.equal(one, torch.full((rank + 1,), float(each))) for each, one in enumerate(outputs))
        rows = torch.empty(size * (rank + 1), 3)
        sent = torch.full((size * (size + 1) // 2, 3), float(rank))
        dist.all_to_all_single(rows, sent, [rank + 1] * size, [each + 1 for each in range(size)])
        assert torch.equal(rows, torch.arange(float(size)).repeat_interleave(rank + 1)[:, None].expand(-1, 3))


@pytest.mark.parametrize("size", SIZES)
def test_ranks_may_have_parts_of_different_sizes(ranks, tmp_path, size):
    ranks(size).run(_uneven, tmp_path / "store")


def _coalesced(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        tensors = [torch.full((n,), float(rank)) for n in (1, 0, 5)]
        group.allreduce_coalesced(tensors).wait()
        assert all(torch.equal(one, torch.full_like(one, size * (size - 1) / 2)) for one in tensors)
        inputs = [torch.full((n,), float(rank)) for n in (2, 3)]
        outputs = [torch.empty(n * size) for n in (2, 3)]
        group.all_gather_single_coalesced(outputs, inputs).wait()
        for n, one in zip((2, 3), outputs, strict=True):
            assert torch.equal(one, torch.arange(float(size)).repeat_interleave(n))
        parts = [torch.empty(n) for n in (2, 3)]
        group.reduce_scatter_single_coalesced(parts, outputs).wait()
        for part in parts:
            assert torch.equal(part, torch.full_like(part, float(rank * size)))
        lists = [[torch.empty(n) for n in (2, 3)] for _ in range(size)]
        group.allgather_coalesced(lists, inputs).wait()
        for each, outputs in enumerate(lists):
            assert all(torch.equal(one, torch.full_like(one, float(each))) for one in outputs)
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for one in tensors:
                dist.all_reduce(one.fill_(1))
        manager.wait()
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            for one in tensors:
                dist.broadcast(one, 0)
        manager.wait()
        assert all(torch.equal(one, torch.full_like(one, float(size))) for one in tensors)


@pytest.mark.parametrize("size", [1, 3])
def test_coalesced_forms(ranks, tmp_path, size):
    ranks(size).run(_coalesced, tmp_path / "store")


def _old_names(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        whole, mine = torch.empty(size), torch.tensor([float(rank)])
        group._allgather_base(whole, mine).wait()
        assert whole.tolist() == list(range(size))
        group._reduce_scatter_base(mine, whole).wait()
        assert mine.item() == size * rank
        group.alltoall_base(whole, torch.full((size,), float(rank)), [], []).wait()
        assert whole.tolist() == list(range(size))
        group.allgather_into_tensor_coalesced([whole], [mine.fill_(rank)]).wait()
        group.reduce_scatter_tensor_coalesced([mine], [whole]).wait()
        assert mine.item() == size * rank
        tensor = torch.ones(2)
        group.allreduce(tensor).wait()
        group.allreduce([tensor], dist.ReduceOp.MAX).wait()
        group.broadcast(tensor, 0).wait()
        group.barrier().wait()
        assert tensor.tolist() == [size] * 2
        assert group.name() == group.getBackendName() == dist.get_backend() == "hvd"
        assert (group.rank(), group.size(), group.group_name) == (rank, size, group.getGroupName())


def test_old_names_and_calls_without_options(ranks, tmp_path):
    ranks(2).run(_old_names, tmp_path / "store")


def _strided(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        images = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
        columns = torch.zeros(6, 4)
        reversed_rows = torch.arange(12.0).view(3, 4).t()
        for tensor in (images, columns[:, 1], reversed_rows):
            wanted = tensor * size if tensor is not images else torch.full_like(images, size * (size - 1) / 2)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, wanted)
            dist.all_reduce(tensor, async_op=True).wait()
            assert torch.equal(tensor, wanted * size)
            dist.broadcast(tensor, 0)
            assert torch.equal(tensor, wanted * size)
        outputs = [torch.zeros(4, 6)[:, :3].t() for _ in range(size)]
        dist.all_gather(outputs, torch.full((4, 3), float(rank)).t())
        assert all(torch.equal(one, torch.full((3, 4), float(each))) for each, one in enumerate(outputs))
        target = torch.zeros(size * 2, 2)[:, :1]
        dist.all_gather_single(target, torch.full((2, 1), float(rank)))
        assert torch.equal(target[:, 0], torch.arange(float(size)).repeat_interleave(2))
        buffer = torch.arange(4.0 * size)
        own = buffer[4 * rank : 4 * rank + 4]
        dist.reduce_scatter_single(own, buffer)  # in place
        assert torch.equal(own, torch.arange(4.0 * rank, 4.0 * rank + 4) * size)
        buffer = torch.zeros(4 * size)
        own = buffer[4 * rank : 4 * rank + 4].fill_(rank)
        dist.all_gather_single(buffer, own)
        assert torch.equal(buffer, torch.arange(float(size)).repeat_interleave(4))


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_all_strides_and_in_place(ranks, tmp_path, size):
    ranks(size).run(_strided, tmp_path / "store")


def _strided_on_one_rank(store: Path) -> None:
    with process_group(store):
        tensor = torch.ones(4, 3).t() if dist.get_rank() == 0 else torch.ones(3, 4)
        for _ in range(3):
            dist.all_reduce(tensor)
        assert (tensor == 8).all()


def test_strides_may_differ_between_ranks(ranks, tmp_path):
    ranks(2).run(_strided_on_one_rank, tmp_path / "store")


def _works(store: Path) -> None:
    with process_group(store):
        size = dist.get_world_size()
        tensors = [torch.ones(1000) for _ in range(100)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert all(work.wait() for work in reversed(works))
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
        assert all(tensor[0] == size for tensor in tensors)
        work = dist.all_reduce(tensors[0], async_op=True)
        future = work.get_future().then(lambda done: done.value()[0] + 1)
        assert torch.equal(future.wait(), torch.full((1000,), float(size**2 + 1)))
        assert work.result()[0] is tensors[0]
        assert torch.equal(work.get_future().value()[0], tensors[0])
        columns = torch.ones(4, 2)[:, 0]
        dist.all_reduce(columns, async_op=True)  # no thread waits for it
        dist.barrier(async_op=True).get_future().wait()
        while columns[0] != size:
            time.sleep(0.001)  # another thread finishes it, which signals nothing
        works = [dist.all_gather([torch.empty(1) for _ in range(size)], torch.ones(1), async_op=True)]
        works += [dist.broadcast(torch.ones(1), 0, async_op=True), dist.barrier(async_op=True)]
        torch.futures.wait_all([work.get_future() for work in works])


@pytest.mark.parametrize("size", [1, 3])
def test_works_and_futures(ranks, tmp_path, size):
    ranks(size).run(_works, tmp_path / "store")


def _repeat(store: Path) -> None:
    with process_group(store):
        size = dist.get_world_size()
        counts = (3, 1000, 3, 70_000, 70_000, 5)
        negotiated = []
        for _ in range(6):
            negotiated.append(counters()["negotiated_in_full"])
            tensors = [torch.full((count,), float(place)) for place, count in enumerate(counts)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            assert all(work.wait() for work in reversed(works))
            assert all((tensor == size * place).all() for place, tensor in enumerate(tensors))
        assert negotiated[1] > negotiated[0] and negotiated[2:] == [negotiated[2]] * 4, negotiated


def test_repeated_operations_are_agreed_on_once(ranks, tmp_path):
    ranks(2).run(_repeat, tmp_path / "store")


def _messages(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        after, before = (rank + 1) % size, (rank - 1) % size
        for shape, dtype in itertools.product(SHAPES, (*DTYPES, torch.bool, torch.complex64)):
            received = torch.zeros(shape, dtype=dtype)
            works = [dist.isend(_value(rank, shape).to(dtype), after), dist.irecv(received, before)]
            for work in works:
                assert work.wait() and work.is_completed()
            assert torch.equal(received, _value(before, shape).to(dtype))
        columns = torch.zeros(5, 2)[:, 1]
        work = dist.isend(torch.full((2, 5), float(rank)).t()[:, 0], after, tag=7)
        assert dist.recv(columns, before, tag=7) == before
        assert torch.equal(columns, torch.full((5,), float(before)))
        work.wait()
        large = torch.full((300_000,), float(rank))
        operations = [dist.P2POp(dist.isend, large, each) for each in range(size) if each != rank]
        others = {each: torch.empty_like(large) for each in range(size) if each != rank}
        operations += [dist.P2POp(dist.irecv, one, each) for each, one in others.items()]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert all(torch.equal(one, torch.full_like(one, each)) for each, one in others.items())
        group = dist.new_group(list(range(size)))
        if rank == 0:
            found = set()
            for _ in range(size - 1):
                source = dist.recv(number := torch.empty(1))
                assert number.item() == source
                found.add(source)
            assert found == set(range(1, size))
            dist.recv(number, 1, group=group)  # was sent before
            assert number.item() == -1
        else:
            early = dist.isend(torch.tensor([-1.0]), 0, group=group) if rank == 1 else None
            dist.send(torch.tensor([float(rank)]), 0)
            assert early is None or early.wait()
        if rank < 2:
            objects = [{"from": 0}, "text"] if rank == 0 else [None, None]
            dist.send_object_list(objects, 1) if rank == 0 else dist.recv_object_list(objects, 0)
            assert objects == [{"from": 0}, "text"]
        with pytest.raises(ValueError, match="tag must be from 0"):
            dist.isend(large, after, tag=-1)


@pytest.mark.parametrize("size", [2, 3])
def test_messages(ranks, tmp_path, size):
    ranks(size).run(_messages, tmp_path / "store")


def _bad_messages(store: Path) -> None:
    with process_group(store):
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            for tensor in (torch.ones(2), torch.ones(2)):
                dist.send(tensor, 1)
            dist.send(torch.ones(3), 1)
        else:
            with pytest.raises(MismatchError, match="8.*12|12.*8"):
                dist.recv(torch.empty(3), 0)
            with pytest.raises(MismatchError, match="float32"):
                dist.recv(torch.empty(2, dtype=torch.int32), 0)
            dist.recv(torch.empty(3), 0)
            with pytest.raises(RuntimeError, match="Timed out after 0.2 s: the message with tag 3 from rank 0 of"):
                dist.irecv(torch.empty(3), 0, tag=3).wait(timedelta(seconds=0.2))
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=3)


def test_messages_that_do_not_fit_and_that_do_not_come(ranks, tmp_path):
    ranks(2).run(_bad_messages, tmp_path / "store")


def _objects(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        everything = [None] * size
        dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
        assert everything == [{"rank": each, "text": "x" * each} for each in range(size)]
        objects = [rank, "a"] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, 0)
        assert objects == [0, "a"]
        gathered = [None] * size if rank == 0 else None
        dist.gather_object(rank, gathered, 0)
        assert rank != 0 or gathered == list(range(size))
        mine: list[object] = [None]
        dist.scatter_object_list(mine, [f"for {each}" for each in range(size)] if rank == 0 else None, 0)
        assert mine == [f"for {rank}"]


def test_objects(ranks, tmp_path):
    ranks(3).run(_objects, tmp_path / "store")


def _groups(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        # The others do not need to call this. torch's name of such a group depends on how many groups a rank has.
        pair = dist.new_group([1, 3], use_local_synchronization=True)
        if rank in (1, 3):
            dist.all_reduce(tensor := torch.ones(1), group=pair)
            assert tensor.item() == 2
        for chosen in ([0, 2], [1], [1, 2, 3], [0, 1, 2, 3], [0, 2]):
            group = dist.new_group(chosen)
            if rank not in chosen:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
                continue
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(chosen)
            dist.broadcast(tensor.fill_(rank), chosen[-1], group=group)
            assert tensor.item() == chosen[-1]
            gathered = [torch.empty(1) for _ in chosen]
            dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
            assert [int(one) for one in gathered] == chosen
            part = torch.empty(1)
            dist.reduce_scatter_single(part, torch.arange(float(len(chosen))), group=group)
            assert part.item() == len(chosen) * chosen.index(rank)
            dist.gather(tensor, gathered if rank == chosen[0] else None, dst=chosen[0], group=group)
            dist.barrier(group=group)
        half, _ = dist.new_subgroups(2)
        dist.all_reduce(tensor.fill_(rank), group=half)
        assert tensor.item() == (1 if rank < 2 else 5)
        added = hvd.add_process_set([0, 2])  # those of groups do not count
        assert hvd.remove_process_set(added)
        assert size == 4
        dist.destroy_process_group(half)
        with pytest.raises(RuntimeError, match="has been destroyed"):
            half.allreduce([tensor])


def test_groups_of_some_ranks(ranks, tmp_path):
    ranks(4).run(_groups, tmp_path / "store")


def _groups_again(store: Path) -> None:
    """The groups of two default groups of one engine have the same names, and not the same ranks."""
    for number, chosen in enumerate(([0, 1], [0, 1, 2], [1, 2])):
        with process_group(Path(f"{store}{number}")):
            group = dist.new_group(chosen)
            if dist.get_rank() in chosen:
                dist.all_reduce(tensor := torch.ones(1), group=group)
                assert tensor.item() == len(chosen)


def test_groups_of_other_ranks_with_the_same_names(ranks, tmp_path):
    ranks(3).run(_groups_again, tmp_path / "store")


def _groups_come_and_go(store: Path) -> None:
    with own_engine(store):
        for chosen in ([0, 1], [1, 2], [0, 1], [1, 2], [0, 1]):
            group = dist.new_group(chosen)
            if dist.get_rank() in chosen:
                dist.all_reduce(torch.ones(1), group=group)
                dist.destroy_process_group(group)
        assert hvd.add_process_set([0]).process_set_id == 3  # groups of the same ranks share a process set


def test_groups_that_come_and_go(ranks, tmp_path):
    ranks(3).run(_groups_come_and_go, tmp_path / "store")


def _threads(store: Path) -> None:
    """Each rank uses its groups in an order of its own, since each has a thread."""
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group(list(range(size))) for _ in range(4)]
        failures = []

        def use(group: dist.ProcessGroup) -> None:
            try:
                for count in range(50):
                    tensor = torch.full((count,), float(rank))
                    dist.all_reduce(tensor, group=group)
                    assert torch.equal(tensor, torch.full((count,), size * (size - 1) / 2))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use, args=(group,)) for group in (groups[rank:] + groups[:rank])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_several_groups_from_several_threads(ranks, tmp_path):
    ranks(3).run(_threads, tmp_path / "store")


def _disagree(store: Path) -> None:
    with process_group(store):
        rank = dist.get_rank()
        for call, what in (
            (lambda: dist.all_reduce(torch.ones(2 + rank)), "shapes"),
            (lambda: dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank])), "data types"),
            (lambda: dist.all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]), "reduction"),
            (lambda: dist.broadcast(torch.ones(2), rank), "root ranks"),
            (lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(2)), "operations"),
            (lambda: dist.all_gather([torch.ones(1 + rank)] * 2, torch.ones(1 + rank)), "dimensions"),
        ):
            for _ in range(2):
                with pytest.raises(MismatchError, match=f"Mismatched .*{what}"):
                    call()
        dist.all_reduce(tensor := torch.ones(1))
        assert tensor.item() == 2


def test_ranks_that_disagree_get_an_error_at_once(ranks, tmp_path):
    ranks(2).run(_disagree, tmp_path / "store")


def _disagree_in_flight(store: Path) -> None:
    with own_engine(store):
        works = [dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)]
        works += [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(4)]
        for work in reversed(works[1:]):  # of which the ranks combine different ones, or which wait for ever
            with pytest.raises((MismatchError, dist.DistBackendError)):
                work.wait(timedelta(seconds=0.1))
        with pytest.raises(MismatchError, match=r"Mismatched .*shapes"):
            works[0].wait()
        with pytest.raises(MismatchError, match=r"cannot be used any more.* the ranks disagreed"):
            dist.all_reduce(torch.ones(1))


def test_ranks_that_disagree_when_more_is_in_flight(ranks, tmp_path):
    ranks(2).run(_disagree_in_flight, tmp_path / "store")


def _bad_input(store: Path) -> None:
    with process_group(store):
        group = dist.group.WORLD
        one = torch.ones(2)
        for call, problem in (
            (lambda: group.allreduce([one, one]), "a list of 2"),
            (lambda: group.allreduce_coalesced([one.to_sparse()]), "layout"),
            (lambda: dist.all_reduce(torch.empty(2, device="meta")), "meta"),
            (lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16)), "uint16"),
            (lambda: dist.all_gather([one], one), "list of 1 tensors for 2"),
            (
                lambda: (
                    dist.all_gather([one, one[:1]], one) if dist.get_rank() else dist.all_gather([one[:1], one], one)
                ),
                "elements",
            ),
            (lambda: dist.all_gather_single(torch.empty(3), one), "not the size"),
            (lambda: dist.reduce_scatter_single(torch.empty(2), one), "cannot be divided"),
            (lambda: dist.reduce_scatter(one, [one]), "1 tensors for 2"),
            (lambda: dist.all_to_all([one], [one, one]), "lists of 2 inputs and 1"),
            (lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3)), "cannot be divided"),
            (lambda: dist.all_to_all_single(one, one, [1, 2], [1, 1]), "output_split_sizes"),
            (lambda: group.broadcast([one], 5), "no root 5"),
        ):
            with pytest.raises(ValueError, match=problem):
                call()
        with pytest.raises(TypeError, match="no options"):
            dist.new_group([0, 1], pg_options=object())
        dist.all_reduce(one)
        assert one.tolist() == [2, 2]


def test_bad_input(ranks, tmp_path):
    ranks(2).run(_bad_input, tmp_path / "store")


def _same_bits(store: Path) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    with process_group(store):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(100_003, generator=generator).to(dtype)
            wanted = hvd.allreduce(values, op=hvd.Sum)
            dist.all_reduce(values)
            assert torch.equal(values, wanted)


def test_a_sum_has_the_bits_of_hvd(ranks, tmp_path):
    ranks(3).run(_same_bits, tmp_path / "store")


def _own(store: Path) -> None:
    with own_engine(store):
        assert hvd.is_initialized()
        hvd.init()  # does nothing: the engine is shared
        assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
        tensor = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size() ** 2
    assert hvd.size() == hvd.local_size()


@pytest.mark.parametrize("size", SIZES)
def test_an_engine_that_the_group_starts(ranks, tmp_path, size):
    for name in ("first", "second"):
        ranks(size).run(_own, tmp_path / name)
