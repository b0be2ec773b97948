"""`Engine`: a training loop over the ranks of a job, with hooks, checkpoints and elastic training.

    engine = hvd.Engine(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.train(loader, epochs=3)
    engine.evaluate(test_loader)["loss"]

The name is TorchMPI's. This class has nothing to do with the engine that runs the collectives, which is the core of the
package (docs/developers/glossary.md): all that it sends goes through the public functions of `horovodlike.torch`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from horovodlike import basics
from horovodlike._engine.arguments import reduce_op
from horovodlike.elastic import ObjectState
from horovodlike.errors import MismatchError
from horovodlike.objects import allgather_object, highest
from horovodlike.progress import report_progress
from horovodlike.torch._training.batches import BatchSource, DeviceBatch, Read
from horovodlike.torch._training.hooks import (
    HOOKS,
    Hook,
    LoopState,
    checked_function,
    checked_functions,
    checked_hooks,
    count,
)
from horovodlike.torch._training.reports import Averages, report_line, shown_progress
from horovodlike.torch.consistency import check_consistency
from horovodlike.torch.elastic import TorchState, run
from horovodlike.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovodlike.torch.mpi_ops import join
from horovodlike.torch.optimizer import DistributedOptimizer

__all__ = ["HOOKS", "Engine", "LoopState"]

Mode = Literal["synchronous", "overlapped"]
_NEVER = 1 << 30  # more backward passes than a step can have, so that no hook of a parameter hands a gradient over


class _RankState(NamedTuple):
    """The part of a commit that differs between the ranks: two random states, and the sums of the epoch's averages."""

    epoch_begin: bytes
    now: bytes
    totals: dict[str, float]


class Engine:
    """Trains and evaluates a model on all ranks of a job.

    In each step, every rank computes the gradients of a batch of its own; they are averaged over the ranks, and every
    rank makes the same step. Training begins with rank 0's parameters, buffers and optimizer state on all ranks. `data`
    of `train` gives each rank its share.

    *Hooks* are functions that take a `LoopState`. They are called at these points: `start`, `start_epoch`; for each
    batch `sample` (it is on the device), `forward` and `loss`, which may replace the sample, the output and the loss,
    `backward` (of this rank; in mode "overlapped" its gradients may be in flight and must not be changed),
    `before_update` (`param.grad` is reduced: the place to clip), `after_update`; `end_epoch` (`metrics` has the
    epoch's), `end`. All ranks call `start`, `start_epoch`, `end_epoch` and `end`, so these may communicate; others only
    if all ranks have equally many batches with samples.

    *If a rank raises an exception*, in a hook, the data or the model, it shuts the job down, so that all others raise a
    `HorovodInternalError` instead of waiting for it; this names the rank and the exception.

    *If ranks have different numbers of batches*, those that are done `join` the others, and at the end of the epoch
    take their parameters and optimizer state.

    *Only one engine or `DistributedOptimizer` of a model* may exist while the model is trained: all of them reduce its
    gradients.

    One thread may use it. The public attributes are constant.

    Args:
        model: The model, on the device on which it is trained: `model(inputs)`.
        loss: `loss(output, targets)` returns a tensor of one element: the mean over the samples of the batch.
        optimizer: An optimizer of the model's parameters, not wrapped in a `DistributedOptimizer`.
        mode: "overlapped": gradients are reduced during the backward pass, as `DistributedOptimizer` does it;
            "synchronous": after it, all together as one group. The results have the same bits.
        op: Average, or Sum, for which the learning rate must be scaled.
        prefetch: The number of batches that a thread reads and copies to the device ahead, on a GPU on a stream of its
            own; with 0 there is no thread. A `DynamicPartition` is read ahead only if it has `record="manual"`.
        check: Compare the parameters of all ranks after every `check` steps, with `check_consistency`; 0: never.
        hooks: A function, or several, for each point.
        metrics: Functions `metric(output, targets)`, by name, that return a number or a tensor of one element: the mean
            over the samples of the batch.
        read: Makes `(inputs, targets)` of a batch of the data, in the thread that reads ahead; needed for partitions.
        checkpoint: A file to which rank 0 writes the state, and from which a new job continues (`State.persist`). The
            states of all ranks' generators of random numbers belong to it, and are used if there are as many ranks.
        commit_every: Commit, and write the file, also after every `commit_every` steps; 0: at the end of each epoch
            only. A commit copies the state in memory.
        elastic: Continue when ranks come and go, as `horovodlike.torch.elastic.run` does, from the last commit.
        state: More values that change, by name, such as learning rate schedules: checkpoints and new ranks have them.
        progress: Have rank 0 print a line for each epoch, and show a bar on terminals where `rich` is installed.

    Attributes:
        model: The model.
        optimizer: The `DistributedOptimizer` around the optimizer.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument cannot be used, or `init()` has not been called.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        mode: Mode = "overlapped",
        op: int = basics.Average,
        prefetch: int = 2,
        check: int = 0,
        hooks: Mapping[str, Hook | Sequence[Hook]] | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        read: Read | None = None,
        checkpoint: str | None = None,
        commit_every: int = 0,
        elastic: bool = False,
        state: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Engine: model must be a torch.nn.Module, got {type(model)}")
        if mode not in get_args(Mode):
            raise ValueError(f"Engine: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        op = reduce_op(op, "Engine")
        if op not in (basics.Average, basics.Sum):
            raise ValueError("Engine: op must be hvd.Average or hvd.Sum; others need a loop of your own")
        self._hooks = checked_hooks(hooks or {})
        self._functions = checked_functions(loss, metrics or {})
        self._read = None if read is None else checked_function("read", read)
        self._prefetch = count("prefetch", prefetch)
        self._check = count("check", check)
        self._commit_every = count("commit_every", commit_every)
        self._elastic = elastic
        self._progress = progress
        self.model = model
        options: dict[str, Any] = {}
        if mode == "synchronous":
            options = {"groups": 1, "backward_passes_per_step": _NEVER}
        self.optimizer = DistributedOptimizer(optimizer, model.named_parameters(), op=op, **options)
        self._op = op
        self._commits = elastic or checkpoint is not None
        self._state = self._new_state(dict(state or {}))
        if checkpoint is not None:
            self._state.persist(checkpoint)
        self._loop = LoopState(model, self.optimizer)
        self._epoch_begin = b""  # the random state with which the data of the epoch are iterated

    def _new_state(self, more: dict[str, Any]) -> Any:
        """Return the state of the training; without commits it is only the position, which takes no memory."""
        own: dict[str, Any] = {"epoch": 0, "batch": 0, "step": 0, "stopped": False, "metrics": {}, "ranks": {}}
        if not self._commits:
            return ObjectState(**own)
        own |= {"model": self.model, "optimizer": self.optimizer, "data": None}
        if taken := sorted(own.keys() & more.keys()):
            raise ValueError(f"Engine: state has the names {', '.join(taken)}, which the engine's own values have")
        return TorchState(**own, **more)

    def train(self, data: Iterable[Any], epochs: int) -> dict[str, float]:
        """Train until `epochs` epochs are done, including epochs of earlier calls and of the job that is continued.

        Collective. An epoch that was interrupted continues after the last commit: with the samples that are left if
        `data` is a `DynamicPartition` or a `DataLoader` over an `ElasticSampler`, else after as many batches. Those are
        skipped, so `data` must yield the same batches again. `set_epoch(epoch)` of the data, its `sampler` and
        `batch_sampler` is called where it exists.

        Args:
            data: An iterable that yields this rank's batches of an epoch: pairs `(inputs, targets)`, or arguments of
                `read`. Tensors in nested dictionaries, lists and tuples are copied to the model's device. If `elastic`,
                each iteration must divide the data among the ranks that there are then.
            epochs: The number of epochs.

        Returns:
            The loss and the metrics of the last epoch: means over the samples of all ranks. A metric that a job did not
            have when its epoch was interrupted is NaN.

        Raises:
            MismatchError: The parameters differ between the ranks (`check`); all ranks raise it. The job continues.
            HorovodInternalError: The job is broken, or another rank has raised an exception.
            TypeError: `data`, a batch or an argument has a wrong type.
            ValueError: `data` cannot be used, or no rank receives a batch; or `epochs` is negative.
        """
        epochs = count("epochs", epochs)
        source = self._source(data)
        source.check_for_training(self.model, self._elastic)
        self._loop.stop = self._state.stopped = False
        if self._commits:
            self._state.data = source.position
        (run(self._train) if self._elastic else self._train_once)(self._state, source, epochs)
        return dict(self._state.metrics)

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Return the loss and the metrics of the model, averaged over the samples of all ranks.

        Collective; nothing is sent before the end, so ranks may have any numbers of batches. The model is in evaluation
        mode meanwhile. With `elastic`, call this in a hook.

        Args:
            data: As for `train`. Each sample that a rank yields counts once.

        Raises:
            HorovodInternalError: The job is broken, or another rank has raised an exception.
            TypeError: As for `train`.
            ValueError: No rank has a sample; or `data` is a `DynamicPartition`.
        """
        source = self._source(data)
        if source.is_dynamic:
            raise ValueError(
                "Engine.evaluate: a DynamicPartition records which samples have been trained: use a StaticPartition"
            )
        averages = Averages([*self._functions])
        with _others_do_not_wait():
            with _evaluation(self.model), torch.no_grad(), contextlib.closing(source.batches(0)) as batches:
                for batch in batches:
                    if batch.samples:
                        output = self.model(batch.inputs)
                        averages.add([each(output, batch.targets) for each in self._functions.values()], batch.samples)
            result = averages.of_all_ranks("horovodlike.torch.evaluate")
        if not result:
            raise ValueError("Engine.evaluate: no rank has a sample: data is empty on all of them")
        return result

    def _source(self, data: Iterable[Any]) -> BatchSource:
        parameter = next(self.model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        return BatchSource(data, self._read, device, self._prefetch)

    def _train_once(self, state: Any, source: BatchSource, epochs: int) -> None:
        """Begin with rank 0's state, or with the checkpoint's state, and train; an error ends the job."""
        with _others_do_not_wait(), state._departure():
            if not self._commits:
                broadcast_parameters(self.model.state_dict(), 0)
                broadcast_optimizer_state(self.optimizer, 0)
            elif not state._commits:
                state._resume()
            state.sync()
            self._train(state, source, epochs)

    def _train(self, state: Any, source: BatchSource, epochs: int) -> None:
        loop = self._loop
        loop.sample, loop.output, loop.loss = (None, None), None, None  # of a step that an elastic job has lost
        loop.metrics = state.metrics
        self._call("start")
        before = self._continue_from_commit(source)
        while state.epoch < epochs and not state.stopped:
            self._train_epoch(source, epochs, before)
            before = []
        self._call("end")

    def _continue_from_commit(self, source: BatchSource) -> list[dict[str, float]]:
        """After an interruption, continue the random numbers if there are as many ranks; return this rank's totals."""
        ranks, self._state.ranks = self._state.ranks, {}
        if len(ranks) == basics.size():
            mine = ranks[basics.rank()]
            self._epoch_begin = mine.epoch_begin
            source.set_random_state(mine.now)
        return [each.totals for each in ranks.values()] if basics.rank() == 0 else []

    def _commit(self, source: BatchSource, totals: dict[str, float]) -> None:
        if self._commits:
            mine = _RankState(self._epoch_begin, source.random_state(), totals)
            name = "horovodlike.torch.train.commit"
            self._state.ranks = dict(allgather_object((basics.rank(), mine), name))
            self._state.commit()
            self._state.ranks = {}

    def _train_epoch(self, source: BatchSource, epochs: int, before: list[dict[str, float]]) -> None:
        state, loop, begun = self._state, self._loop, time.perf_counter()
        text = f"epoch {state.epoch + 1}/{epochs}"
        is_continued, now = state.batch > 0, source.random_state()
        source.begin(state.epoch)
        self.model.train()
        self._call("start_epoch")
        averages = Averages([*self._functions], before)
        if not is_continued:
            self._epoch_begin = source.random_state()
        states = (self._epoch_begin or now, now) if is_continued else None
        left = source.left(state.batch)
        batches_of_epoch = math.inf if left is None else max(state.batch + left, 1)
        with (
            shown_progress(text, left, self._progress) as advance,
            contextlib.closing(source.batches(state.batch, states)) as batches,
        ):
            for batch in batches:
                self._step(batch, averages)
                source.record(batch.samples)
                state.batch += 1
                state.step += 1
                if self._check and state.step % self._check == 0:
                    check_consistency(self.model.named_parameters())
                if self._commit_every and state.step % self._commit_every == 0:
                    self._commit(source, averages.totals())
                advance()
                report_progress(state.epoch + min(state.batch / batches_of_epoch, 1.0), epochs)
                if loop.stop:
                    break
        self._meet()
        state.metrics = loop.metrics = averages.of_all_ranks("horovodlike.torch.train") or state.metrics
        report_line(text, loop.metrics, begun, self._progress)
        report_progress(state.epoch + 1, epochs, loop.metrics)
        self._call("end_epoch")
        (stops,) = highest("horovodlike.torch.train.stop", [loop.stop])
        state.epoch, state.batch, state.stopped = state.epoch + 1, 0, bool(stops)
        source.begin(state.epoch)
        self._commit(source, {})

    def _step(self, batch: DeviceBatch, averages: Averages) -> None:
        loop, optimizer = self._loop, self.optimizer
        optimizer.zero_grad()
        if batch.samples:
            loop.sample = (batch.inputs, batch.targets)
            self._call("sample")
            loop.output = self.model(loop.sample[0])
            self._call("forward")
            loop.loss = self._functions["loss"](loop.output, loop.sample[1])
            self._call("loss")
            is_weighted = self._op == basics.Average and batch.weight != 1.0
            (loop.loss * batch.weight if is_weighted else loop.loss).backward()
            self._call("backward")
            with torch.no_grad():
                others = [each(loop.output, loop.sample[1]) for name, each in self._functions.items() if name != "loss"]
            averages.add([loop.loss, *others], batch.samples)
        optimizer.synchronize()
        self._call("before_update")
        with optimizer.skip_synchronize():
            optimizer.step()
        self._call("after_update")
        loop.sample, loop.output, loop.loss = (None, None), None, None

    def _meet(self) -> None:
        """Wait until all ranks have had their batches; bring them to the same state if some have had more than others.

        Raises:
            ValueError: No rank has had a batch; all ranks raise it.
        """
        state = self._state
        last = join()
        most, fewest = highest("horovodlike.torch.train.batches", [state.batch, -state.batch])
        if most == 0:
            raise ValueError(f"Engine.train: no rank has got a batch in epoch {state.epoch}: data is empty on all")
        if most != -fewest:
            broadcast_parameters(self.model.state_dict(), last)
            broadcast_optimizer_state(self.optimizer, last)
            state.step += most - state.batch
            state.batch = most

    def _call(self, point: str) -> None:
        loop, state = self._loop, self._state
        for hook in self._hooks.get(point, ()):
            loop.epoch, loop.batch, loop.step = state.epoch, state.batch, state.step
            hook(loop)


@contextlib.contextmanager
def _others_do_not_wait() -> Iterator[None]:
    """Shut the job down after an exception that other ranks may not raise."""
    try:
        yield
    except MismatchError:  # on all ranks
        raise
    except BaseException as error:
        if basics.is_initialized() and basics.size() > 1:
            basics.shutdown(error)
        raise


@contextlib.contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, and its modules back to their modes in the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
