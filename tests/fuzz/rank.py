"""The program of a rank of `api_fuzz.py`: it reads seeds, runs their sequences, and writes what is wrong with each."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import mutations
import numpy as np
import torch

import horovodlike.torch as hvd

ACTIONS = {  # with their weights
    "start": 14,
    "blocking": 4,
    "wait": 5,
    "thread_waits": 2,
    "objects": 2,
    "parameters": 1,
    "train": 5,
    "sets": 1,
    "mismatch": 2,
    "again": 1,
    "threads": 1,
    "fork": 1,
    "interrupt": 2,
    "join": 1,
    "garbage": 2,
    "never": 1,
    "shared": 2,
    "small": 4,
}
OTHERS = {"tensorflow": {"tensorflow": 6, "variables": 4}, "numpy": {"numpy": 6}}
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16)
# Several slots' worth, and so much that the allocator maps it for itself.
LENGTHS = (0, 1, 2, 7, 61, 1009, 20_011, 300_007, 1_500_007)
KINDS = (
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "broadcast_",
    "grouped_broadcast_",
    "reducescatter",
    "grouped_reducescatter",
    "alltoall",
    "sparse",
    "transposed",
)
CHILD_SECONDS = 10.0
CHILDREN = 3  # the sanitizer's own lock may be another thread's at the time of a fork, and is held in the child then
# What the API documents; ValueError and RuntimeError are also torch's own, for tensors that have been changed.
EXPECTED = (hvd.HorovodInternalError, ValueError, RuntimeError, KeyError)


class Interruption(Exception):
    """The exception that the handler of a signal raises."""


class Over(Exception):
    """The job has been shut down, since a rank could not take part in what the others do."""


@dataclass(eq=False)
class Operation:
    """An operation in flight: handle, tensors handed over, and a check of the result unless they were changed."""

    what: str
    handle: Any  # of a sparse allreduce: a function that waits
    tensors: list[torch.Tensor]
    check: Callable[[Any], None]
    changed: bool = False
    mutable: bool = True  # on all ranks alike: what one rank changes is in the results of all


@dataclass
class Sequence:
    """One sequence on one rank."""

    seed: int
    without: frozenset[str]
    actions: dict[str, int]
    pending: list[Operation] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    number: int = 0

    def run(self) -> None:
        """Carry out the actions, from `init()` to `shutdown()`."""
        self.common = random.Random(self.seed)
        hvd.init()
        self.own = random.Random(f"{self.seed} of rank {hvd.rank()}")
        names = [name for name in self.actions if name not in self.without]
        weights = [self.actions[name] for name in names]
        try:
            for _ in range(self.common.randint(5, 40)):
                self.number += 1
                action = self.common.choices(names, weights)[0]
                if os.environ.get("FUZZ_TRACE"):
                    print(self.number, action, file=sys.stderr, flush=True)
                getattr(self, action)()
            if self.own.random() < 0.7:
                self._wait_for_all()
            if self.own.random() < 0.7:
                hvd.barrier()
        except Over:
            pass
        except EXPECTED:  # the job has ended: another rank has shut it down
            if hvd.is_initialized() and not self._is_over():
                raise
        finally:
            hvd.shutdown()
        for operation in self.pending:  # of a job that has ended
            self._finish(operation)

    def _is_over(self) -> bool:
        from horovodlike._engine import ops

        return ops.has_ended() is not None

    def _data(self, rank: int, length: int, dtype: torch.dtype, index: int = 0) -> torch.Tensor:
        """Small integers, whose sums are exact in every dtype."""
        generator = np.random.default_rng([self.seed, self.number, index, rank])
        return torch.from_numpy(generator.integers(0, 3, length)).to(dtype)

    def _draw(self) -> tuple[int, torch.dtype]:
        return self.common.choice(LENGTHS), self.common.choice(DTYPES)

    def _enqueue(self, kind: str) -> Operation:
        """Enqueue an operation that the common stream has chosen."""
        length, dtype = self._draw()
        chosen, name = hvd.global_process_set, f"{self.number}"
        ranks = range(hvd.size())
        data = [self._data(rank, length, dtype) for rank in ranks]
        mine = data[hvd.rank()].clone()
        second = mine.flip(0)
        total = torch.stack(data).sum(0).to(dtype)
        options: dict[str, Any] = {"name": name, "process_set": chosen}
        tensors = [mine, second] if kind.startswith("grouped") else [mine]
        root = self.common.randrange(hvd.size())
        if kind == "transposed":
            rows = max(1, length // 7)
            mine = torch.ones(rows, 7, dtype=dtype).t()
            handle = hvd.allreduce_async_(mine, op=hvd.Sum, **options)
            expected = torch.full((7, rows), hvd.size(), dtype=dtype)
            return Operation(kind, handle, [mine], _equal(expected))
        if kind == "sparse":
            index = torch.arange(0, length, 2).reshape(1, -1)
            mine = torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (length + 1,))
            handle = hvd.sparse_allreduce_async(mine, name=name, op=hvd.Sum)
            return Operation(kind, handle, [mine, mine._values()], lambda _: None)
        if "allreduce" in kind:
            call = getattr(hvd, _async_name(kind))
            handle = call(tensors if len(tensors) > 1 else mine, op=hvd.Sum, **options)
            return Operation(kind, handle, tensors, _equal(total, total.flip(0)))
        if "allgather" in kind:
            handle = getattr(hvd, f"{kind}_async")(tensors if len(tensors) > 1 else mine, **options)
            return Operation(kind, handle, tensors, _equal(torch.cat(data), torch.cat([one.flip(0) for one in data])))
        if "broadcast" in kind:
            call = getattr(hvd, _async_name(kind))
            handle = call(tensors if len(tensors) > 1 else mine, root, **options)
            return Operation(kind, handle, tensors, _equal(data[root], data[root].flip(0)))
        if "reducescatter" in kind:
            handle = getattr(hvd, f"{kind}_async")(tensors if len(tensors) > 1 else mine, op=hvd.Sum, **options)
            return Operation(kind, handle, tensors, _equal(_share(total), _share(total.flip(0))))
        splits = [len(range(part, length, hvd.size())) for part in ranks]
        begin = sum(splits[: hvd.rank()])
        expected = torch.cat([one[begin : begin + splits[hvd.rank()]] for one in data])
        handle = hvd.alltoall_async(mine, splits, **options)
        return Operation(kind, handle, tensors, lambda result: _equal(expected)(result[0]))

    def start(self) -> None:
        """Enqueue something, and change its tensors while it is in flight."""
        operation = self._or_give_up(lambda: self._enqueue(self.common.choice(KINDS)))
        operation.mutable = self.common.random() < 0.7
        self.pending.append(operation)
        if self.own.random() < 0.8:
            self._mutate(operation)
        if self.own.random() < 0.1 and not callable(operation.handle):
            hvd.poll(operation.handle)

    def shared(self) -> None:
        """Enqueue views of one storage, also such as overlap."""
        length, dtype = self._draw()
        storage = torch.ones(length + 100, dtype=dtype)
        parts = [storage[:length], storage[length:], storage[: length // 2], storage.view(-1)[10:50]]
        for index, part in enumerate(parts):
            name = f"{self.number}.{index}"
            handle = self._or_give_up(lambda part=part, name=name: hvd.allreduce_async_(part, op=hvd.Max, name=name))
            self.pending.append(Operation("shared", handle, [part], lambda _: None, changed=True))
        if self.own.random() < 0.5:
            self._mutate(self.own.choice(self.pending[-4:]))

    def _or_give_up(self, call: Callable[[], Any]) -> Any:
        """Return what a call gives; if it fails, shut down: the other ranks would wait for this one."""
        try:
            return call()
        except EXPECTED as error:
            self._note(error)
            raise Over from error

    def _note(self, error: BaseException) -> None:
        """Raise again what a user could make nothing of."""
        if not str(error):
            raise AssertionError(f"an error without a text: {error!r}") from error

    def _mutate(self, operation: Operation, without: Collection[str] = ()) -> None:
        if not operation.mutable:
            return
        operation.changed = True
        if not operation.tensors:  # this rank has let go of them
            return
        names = [name for name in mutations.MUTATIONS if name not in self.without and name not in without]
        for _ in range(self.own.randint(1, 2)):
            name, tensor = self.own.choice(names), self.own.choice(operation.tensors)
            if os.environ.get("FUZZ_TRACE"):
                print(f"  {name} of {operation.what} {tuple(tensor.shape)}", file=sys.stderr, flush=True)
            mutations.mutate(name, tensor, self.own)
        if self.own.random() < 0.3:
            operation.tensors.clear()
        if self.own.random() < 0.1:
            gc.collect()

    def _finish(self, operation: Operation) -> None:
        try:
            result = operation.handle() if callable(operation.handle) else hvd.synchronize(operation.handle)
            if self.own.random() < 0.05 and not callable(operation.handle):
                hvd.synchronize(operation.handle)
        except EXPECTED as error:
            self._note(error)
            if "is of the job before" in str(error):  # this rank has shut down and begun again since
                return
            if not operation.changed and not self._is_over() and hvd.is_initialized():
                raise
            return
        if not operation.mutable and not operation.changed and result is not None:
            try:
                operation.check(result)
            except AssertionError as error:
                raise AssertionError(f"{operation.what}: wrong result {error}") from error

    def _wait_for_all(self) -> None:
        self.own.shuffle(self.pending)
        while self.pending:
            self._finish(self.pending.pop())

    def wait(self) -> None:
        """Wait for some of what is in flight, in any order."""
        self.own.shuffle(self.pending)
        for _ in range(self.own.randint(0, len(self.pending))):
            self._finish(self.pending.pop())

    def thread_waits(self) -> None:
        """Have other threads wait, two of them sometimes for the same handle."""
        if not self.pending:
            return
        operation = self.pending.pop(self.own.randrange(len(self.pending)))
        operation.changed = True  # of two that wait, one gets the result
        self._in_threads(self.own.randint(1, 2), lambda _: self._finish(operation))

    def _in_threads(self, count: int, call: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def guarded(index: int) -> None:
            try:
                call(index)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        if self.own.random() < 0.5 and self.pending:
            self._mutate(self.own.choice(self.pending), mutations.NOT_BESIDE_A_WAIT)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def small(self) -> None:
        """Reduce small tensors under names that are used again, and wait for them in threads, in any order."""
        for _ in range(self.common.randint(1, 4)):
            operations = []
            for index in range(self.common.randint(2, 20)):
                tensor, name = torch.ones(5), f"small.{index}"
                handle = self._or_give_up(
                    lambda tensor=tensor, name=name: hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)
                )
                operations.append(Operation("small", handle, [tensor], lambda _: None))
            for operation in operations:
                if self.own.random() < 0.3:
                    self._mutate(operation)
            self.own.shuffle(operations)
            failures: list[BaseException] = []

            def wait(part: list[Operation], failures: list[BaseException] = failures) -> None:
                try:
                    for operation in part:
                        result = None
                        with contextlib.suppress(*EXPECTED if operation.changed or self._is_over() else ()):
                            result = hvd.synchronize(operation.handle)
                        if not operation.changed and not self._is_over():
                            assert torch.equal(result, torch.full((5,), float(hvd.size()))), f"small: {result}"
                except EXPECTED as error:
                    if not self._is_over() and hvd.is_initialized():
                        failures.append(error)
                except BaseException as error:
                    failures.append(error)

            parts = [operations[number::2] for number in range(2)]
            threads = [threading.Thread(target=wait, args=(part,)) for part in parts]
            for thread in threads:
                thread.start()
            for operation in operations:
                if operation.changed:
                    self._mutate(operation, mutations.NOT_BESIDE_A_WAIT)
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]

    def threads(self) -> None:
        """Reduce in several threads at once."""
        count, each = self.common.randint(2, 3), self.common.randint(1, 5)

        def reduce(index: int) -> None:
            for turn in range(each):
                tensor = torch.ones(1000 * index + 1)
                hvd.allreduce_(tensor, op=hvd.Sum, name=f"{self.number}.{index}.{turn}")
                assert float(tensor[0]) == hvd.size(), "a sum of a thread"

        self._in_threads(count, reduce)

    def blocking(self) -> None:
        """Call the synchronous form."""
        length, dtype = self._draw()
        tensor = torch.ones(length, dtype=dtype)
        kind = self.common.choice(("allreduce", "allreduce_", "allgather", "broadcast_", "barrier", "autograd"))
        if kind == "allreduce":
            assert bool((hvd.allreduce(tensor, op=hvd.Sum) == hvd.size()).all()), "the sum"
        elif kind == "allreduce_":
            hvd.allreduce_(tensor, op=hvd.Max, name="again")
        elif kind == "allgather":
            rows = hvd.allgather(torch.ones(length * hvd.rank(), 3))
            assert rows.shape[0] == length * sum(range(hvd.size())), "the rows"
        elif kind == "broadcast_":
            hvd.broadcast_(tensor, 0)
        elif kind == "autograd":
            needs = torch.ones(length + 1, requires_grad=True)
            hvd.allreduce(needs * 2, op=hvd.Sum).sum().backward()
        else:
            hvd.barrier()

    def objects(self) -> None:
        """Exchange objects."""
        value = {"rank": hvd.rank(), "bytes": bytes(self.common.choice(LENGTHS))}
        if self.common.random() < 0.5:
            assert hvd.broadcast_object(value, 0)["rank"] == 0
        else:
            assert [each["rank"] for each in hvd.allgather_object(value)] == list(range(hvd.size()))

    def parameters(self) -> None:
        """Bring a model and its optimizer to one state."""
        model = torch.nn.Sequential(torch.nn.Linear(61, 300), torch.nn.BatchNorm1d(300))
        adam = torch.optim.Adam(model.parameters())
        model(torch.rand(4, 61)).sum().backward()
        adam.step()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(adam, 0)

    def train(self) -> None:
        """Take steps with a `DistributedOptimizer`, and change gradients between `backward()` and `step()`."""
        torch.manual_seed(self.common.randrange(1 << 30))
        width = self.common.choice((3, 61, 700))
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        options: dict[str, Any] = {"backward_passes_per_step": self.common.choice((1, 1, 2))}
        if self.common.random() < 0.3:
            options["num_groups"] = self.common.choice((1, 2))
        if self.common.random() < 0.2:
            options["compression"] = hvd.Compression.fp16
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=self.common.choice((0.0, 0.9)))
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), **options)
        changed = self.common.random() < 0.8
        cast = False
        for _ in range(self.common.randint(1, 4)):
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.grad.shape != parameter.shape:
                    parameter.grad = None  # a change in place, also of its shape: torch itself cannot add to it
            for _ in range(options["backward_passes_per_step"]):
                model(torch.rand(2, width)).sum().backward()
            if changed and self.own.random() < 0.7:
                names = [name for name in mutations.OF_GRADIENTS if name not in self.without]
                name = self.own.choice(names)
                cast |= name == "module_to"
                if os.environ.get("FUZZ_TRACE"):
                    print(f"  {name} between backward and step", file=sys.stderr, flush=True)
                mutations.mutate_gradients(name, model, self.own)
            if self.own.random() < 0.1:  # never stepped here, and given up there
                gc.collect()
            if cast:
                del optimizer, sgd, model
                gc.collect()
                raise Over
            self._or_give_up(optimizer.step)
            if self.own.random() < 0.5:
                optimizer.zero_grad(set_to_none=self.own.random() < 0.5)
        if not changed:
            mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            assert bool((hvd.allgather(mine.unsqueeze(0)) == mine).all()), "parameters differ between the ranks"
        if self.own.random() < 0.3:
            self.left.append(optimizer)

    def sets(self) -> None:
        """Add a process set, use it, and remove it, perhaps while something is in flight on it."""
        added = hvd.add_process_set([0, hvd.size() - 1] if self.common.random() < 0.5 and hvd.size() > 2 else [0])
        handles = []
        if added.included():
            handles = [hvd.allreduce_async_(torch.ones(1000), name=f"{self.number}", process_set=added)]
        if self.common.random() < 0.5:
            for handle in handles:
                hvd.synchronize(handle)
            handles = []
        hvd.remove_process_set(added)
        for handle in handles:
            try:
                hvd.synchronize(handle)
            except EXPECTED as error:
                self._note(error)

    def mismatch(self) -> None:
        """Disagree in shape, dtype, operation or root: all ranks get the error, or none."""
        how = self.common.choice(("shape", "dtype", "op", "kind", "root"))
        own = hvd.rank() == 0
        tensor = torch.ones(
            1001 if how == "shape" and own else 1000, dtype=torch.float64 if how == "dtype" and own else None
        )
        name = f"{self.number}"
        if how == "kind" and own:
            handle = hvd.allgather_async(tensor, name=name)
        elif how == "root":
            handle = hvd.broadcast_async_(tensor, 0 if own else hvd.size() - 1, name=name)
        else:
            handle = hvd.allreduce_async_(tensor, op=hvd.Max if how == "op" and own else hvd.Sum, name=name)
        if how == "kind":  # another full name, which only this rank knows: no rank waits
            self.left.append(handle)
            return
        self.pending.append(Operation(f"mismatch in {how}", handle, [tensor], lambda _: None, changed=True))
        if self.own.random() < 0.5:
            self._mutate(self.pending[-1])

    def again(self) -> None:
        """Shut down with things in flight, and begin a new job."""
        if self.own.random() < 0.3:
            self._wait_for_all()
        hvd.shutdown()
        if self.own.random() < 0.5:
            self._wait_for_all()
        if self.own.random() < 0.3:
            gc.collect()
        hvd.init()

    def fork(self) -> None:
        """Have a child use what it has inherited, or begin a job of its own."""
        what = self.own.choice(("exits", "leaves", "uses", "waits", "begins", "trains", "churns"))
        for _ in range(CHILDREN):
            status = self._have_child(what)
            if status is not None:
                assert status == 0, f"a child that {what} ended with {status}"
                return
        raise AssertionError(f"{CHILDREN} children that {what} took longer than {CHILD_SECONDS:.0f} s each")

    def _have_child(self, what: str) -> int | None:
        """Return a child's exit status; None if it took too long."""
        child = os.fork()
        if child == 0:
            self._live_as_child(what)
        deadline = time.monotonic() + CHILD_SECONDS
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _live_as_child(self, what: str) -> None:
        status = 1
        try:
            if what == "uses":
                for operation in self.pending:
                    for tensor in operation.tensors:
                        if mutations.has_memory(tensor):
                            with contextlib.suppress(RuntimeError):  # resized while lent: torch cannot write to it
                                tensor.zero_()
                _refuses(lambda: hvd.allreduce(torch.ones(3)))
            elif what == "waits":
                self._finish_as_child()
                hvd.shutdown()
            elif what == "begins":
                for name in [name for name in os.environ if name.startswith("HOROVODLIKE_")]:
                    del os.environ[name]
                hvd.init()
                assert float(hvd.allreduce(torch.ones(3), op=hvd.Sum)[0]) == 1.0 and hvd.size() == 1
                self._finish_as_child()
                hvd.shutdown()
            elif what == "churns":
                self.pending.clear()
                gc.collect()
            elif what == "trains":
                model = torch.nn.Linear(3, 3)
                model(torch.ones(3)).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            if what == "leaves":
                import atexit

                atexit._run_exitfuncs()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _finish_as_child(self) -> None:
        for operation in self.pending:  # only what had ended before the fork has a result
            with contextlib.suppress(*EXPECTED):
                self._finish(operation)

    def interrupt(self) -> None:
        """Have a signal raise in a wait, and wait again, or never."""
        operation = self._or_give_up(lambda: self._enqueue(self.common.choice(KINDS)))
        is_slow = self.common.randrange(hvd.size()) == hvd.rank()
        interrupted = self.own.random() < 0.7
        try:
            if interrupted:
                signal.setitimer(signal.ITIMER_REAL, self.own.choice((0.0001, 0.001, 0.01)))
            if is_slow:
                time.sleep(0.005)
            _ = operation.handle() if callable(operation.handle) else hvd.synchronize(operation.handle)
            if interrupted:
                time.sleep(0.02)
        except Interruption:
            operation.changed = operation.changed or self.own.random() < 0.5
            if operation.changed:
                self._mutate(operation)
            if callable(operation.handle):  # interrupted when it had the result, which it then says it has returned
                operation.changed = True
            if self.own.random() < 0.7:
                self.pending.append(operation)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def join(self) -> None:
        """Have all ranks join, after different numbers of batches."""
        self._wait_for_all()
        batches = [self.common.randrange(3) for _ in range(hvd.size())]
        for batch in range(batches[hvd.rank()]):
            hvd.allreduce(torch.ones(100), name=f"{self.number}.{batch}")
        hvd.join()

    def garbage(self) -> None:
        """Let go of what is referred to, and have its memory used again."""
        for operation in self.pending:
            if self.own.random() < 0.5:
                operation.tensors.clear()
                operation.changed = True
        self.left.clear()
        gc.collect()
        self.left.append([torch.rand(self.own.choice(LENGTHS)) for _ in range(3)])

    def never(self) -> None:
        """Forget handles, for which no thread waits from now on."""
        while self.pending and self.own.random() < 0.7:
            self.pending.pop()

    def numpy(self) -> None:
        """Use Keras's functions on arrays."""
        import horovodlike.keras as hvd_keras

        array = np.ones(self.common.choice(LENGTHS), np.float32)
        kind = self.common.choice(("allreduce", "allgather", "broadcast", "reducescatter"))
        if kind == "allreduce":
            assert (np.asarray(hvd_keras.allreduce(array, op=hvd.Sum)) == hvd.size()).all()
        elif kind == "allgather":
            assert len(np.asarray(hvd_keras.allgather(array))) == len(array) * hvd.size()
        elif kind == "broadcast":
            self.left.append(hvd_keras.broadcast(array, 0))
        else:
            self.left.append(hvd_keras.reducescatter(array))

    def tensorflow(self) -> None:
        """Use TensorFlow's collectives eagerly and in a function, from a thread or two."""
        import tensorflow as tf

        import horovodlike.tensorflow as hvd_tf

        tensor = tf.ones(self.common.choice(LENGTHS))
        name = f"{self.number}"
        kind = self.common.choice(("allreduce", "grouped", "allgather", "broadcast", "alltoall", "reducescatter"))
        call = {
            "allreduce": lambda x: hvd_tf.allreduce(x, op=hvd_tf.Sum, name=name),
            "grouped": lambda x: hvd_tf.grouped_allreduce([x, x], op=hvd_tf.Sum, name=name)[0],
            "allgather": lambda x: hvd_tf.allgather(x, name=name),
            "broadcast": lambda x: hvd_tf.broadcast(x, 0, name=name),
            "alltoall": lambda x: hvd_tf.alltoall(x[: len(x) // hvd.size() * hvd.size()], name=name)[0],
            "reducescatter": lambda x: hvd_tf.reducescatter(x, op=hvd_tf.Sum, name=name),
        }[kind]
        self.left.append((tf.function(call) if self.common.random() < 0.3 else call)(tensor))

    def variables(self) -> None:
        """Overwrite variables of TensorFlow, while another thread assigns to them."""
        import tensorflow as tf

        import horovodlike.tensorflow as hvd_tf

        variables = [tf.Variable(tf.ones(length)) for length in self.common.choices(LENGTHS, k=3)]
        stop = threading.Event()

        def assign() -> None:
            while not stop.is_set():
                for variable in variables:
                    variable.assign(tf.zeros_like(variable))

        thread = threading.Thread(target=assign)
        if self.own.random() < 0.5:
            thread.start()
        try:
            if self.common.random() < 0.5:
                hvd_tf.broadcast_variables(variables, 0)
            else:
                for index, variable in enumerate(variables):
                    self.left.append(hvd_tf.allreduce(variable, name=f"{self.number}.{index}"))
        finally:
            stop.set()
            if thread.is_alive():
                thread.join()


def _async_name(kind: str) -> str:
    return f"{kind[:-1]}_async_" if kind.endswith("_") else f"{kind}_async"


def _share(total: torch.Tensor) -> torch.Tensor:
    counts = [len(range(part, len(total), hvd.size())) for part in range(hvd.size())]
    begin = sum(counts[: hvd.rank()])
    return total[begin : begin + counts[hvd.rank()]]


def _equal(*expected: torch.Tensor) -> Callable[[Any], None]:
    def check(result: Any) -> None:
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for one, right in zip(results, expected, strict=False):
            assert one.dtype == right.dtype and torch.equal(one, right), f"{one} instead of {right}"

    return check


def _refuses(call: Callable[[], object]) -> None:
    try:
        call()
    except EXPECTED:
        return
    raise AssertionError("a child has used what it has inherited")


def _interrupt(*_: object) -> None:
    raise Interruption


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the fuzz
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGALRM, _interrupt)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    actions = dict(ACTIONS)
    for framework in sys.argv[1].split(","):
        actions |= OTHERS.get(framework, {})
    for line in sys.stdin:
        print(f"sequence {line.strip()}", file=sys.stderr, flush=True)
        try:
            Sequence(int(line), frozenset(sys.argv[2].split(",")), actions).run()
            answer = "well"
        except Exception as error:
            traceback.print_exc()
            answer = repr(error).replace("\n", " ")
        print(answer, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
