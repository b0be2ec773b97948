"""The batches of a training loop: read and copied to the device ahead, counted, and recorded when they are done.

A source of data is an iterable of batches. Sources of two kinds know which of their samples are done, and continue
there by themselves: a `DynamicPartition`, also one that a `RecordReader` reads, and a loader over an `ElasticSampler`.
From all other sources, the loop counts the batches that it has taken and skips as many when it continues.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from horovodlike import basics
from horovodlike.data import AsyncDataLoaderMixin, BaseDataLoader, Batch, DynamicPartition, RecordReader
from horovodlike.torch._ops import gpu
from horovodlike.torch._training.random_states import random_state, set_random_state
from horovodlike.torch.elastic import ElasticSampler
from horovodlike.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["BatchSource", "DeviceBatch", "Read"]

Read = Callable[[Any], Any]


class DeviceBatch(NamedTuple):
    """A batch on the device of the model.

    Attributes:
        inputs: The argument of the model; None in a batch without samples.
        targets: The second argument of the loss; None in a batch without samples.
        samples: The number of samples: the first dimension of the first tensor.
        weight: The factor of the loss with which the mean over the ranks is the mean over the samples of the step.
        copied: The event at the end of the copy to a GPU; None on other devices.
    """

    inputs: Any
    targets: Any
    samples: int
    weight: float
    copied: torch.cuda.Event | None


class BatchSource:
    """The data of one call of `train` or `evaluate`, in the form that the loop needs.

    Args:
        data: The iterable of batches.
        read: Makes inputs and targets of a batch that `data` yields; None if it yields such pairs.
        device: The device to which they are copied.
        ahead: The number of batches that a thread prepares ahead; with 0 there is no thread.

    Raises:
        TypeError: `data` is no iterable.
        ValueError: `data` is a partition, which has no samples, and `read` is None.
    """

    def __init__(self, data: Iterable[Any], read: Read | None, device: torch.device, ahead: int) -> None:
        if not isinstance(data, Iterable):
            raise TypeError(f"Engine: data must be an iterable of batches, got {type(data)}")
        self._data: Any = data
        self._read = read
        self._device = device
        self._stream = gpu.copy_stream(device)
        partition = data.partition if isinstance(data, RecordReader) else data
        self._partition = partition if isinstance(partition, DynamicPartition) else None
        self._sampler: Any = getattr(data, "sampler", None)
        self._parts: list[Any] = [partition, self._sampler, getattr(data, "batch_sampler", None)]
        generators = (getattr(part, "generator", None) for part in self._parts)
        self._generators = [each for each in generators if isinstance(each, torch.Generator)]
        # Such a partition takes a batch for done when the next one is asked for.
        self._ahead = 0 if self._partition is not None and self._partition.recording == "auto" else ahead

    @property
    def position(self) -> Any:
        """The object that knows which samples are done, to become part of the state; None if the loop counts."""
        return self._sampler if isinstance(self._sampler, ElasticSampler) else self._partition

    @property
    def is_dynamic(self) -> bool:
        """True if a rank may receive batches without samples."""
        return self._partition is not None

    def check_for_training(self, model: torch.nn.Module, is_elastic: bool) -> None:
        """Raise an error if a model cannot be trained with these data.

        Raises:
            TypeError: The data can be iterated once only.
            ValueError: The data have another division among the ranks than the training needs.
        """
        if isinstance(self._data, Iterator):
            raise TypeError("Engine.train: data is an iterator, which ends with one epoch: give what it iterates over")
        if is_elastic and isinstance(self._sampler, torch.utils.data.DistributedSampler):
            raise ValueError(
                "Engine.train: a DistributedSampler divides the data among the ranks of the beginning: with "
                "elastic=True use hvd.elastic.ElasticSampler or horovodlike.data.DynamicPartition"
            )
        if self.is_dynamic and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
            raise ValueError(
                "Engine.train: a rank without samples does not call the model, and SyncBatchNorm waits for all ranks: "
                "use a StaticPartition"
            )

    def random_state(self) -> bytes:
        """Return the states of all generators of random numbers of this rank, including the data's generators."""
        return random_state(self._device, self._generators)

    def set_random_state(self, state: bytes) -> None:
        """Set the generators to a state that `random_state` has returned."""
        set_random_state(state, self._device, self._generators)

    def begin(self, epoch: int) -> None:
        """Tell the data which epoch comes. Samples of this epoch that are done stay done."""
        for part in self._parts:
            is_elastic = isinstance(part, ElasticSampler)
            if hasattr(part, "set_epoch") and not (is_elastic and part.epoch == epoch):
                part.set_epoch(epoch)

    def left(self, done: int) -> int | None:
        """Return how many batches of this epoch are left after `done` batches; None if the data have no length."""
        try:
            length = len(self._data)
        except TypeError:
            return None
        return length if self.position is not None else max(length - done, 0)

    def batches(self, done: int, states: tuple[bytes, bytes] | None = None) -> Generator[DeviceBatch, None, None]:
        """Yield the rest of the epoch, after the batches that are done.

        Close the iterator: this ends its thread, and drops the batches that it has prepared.

        Args:
            done: The number of batches that are done.
            states: If the epoch is continued, the random state at its beginning, with which shuffled data have the same
                order again, and that after the last batch that is done.
        """
        skipped = 0 if self.position is not None else done
        yield from _ReadAhead(self._ahead, lambda: self._prepared(skipped, states), self._stream)

    def record(self, samples: int) -> None:
        """Record that the step with the oldest batch not yet recorded has been taken, with this number of samples."""
        if isinstance(self._sampler, ElasticSampler):
            self._sampler.record_batch(0, samples)
        elif self._partition is not None and self._partition.recording == "manual":
            self._partition.record()

    def _prepared(self, skipped: int, states: tuple[bytes, bytes] | None) -> Iterator[DeviceBatch]:
        if states is not None:
            self.set_random_state(states[0])
        items = iter(self._data)
        for _ in itertools.islice(items, skipped):
            pass
        if states is not None:  # the data's own generators continue after the skipped batches, as they may be ahead
            set_random_state(states[1], self._device, ())
        for item in items:  # not with `map`, which would end without an error if `read` raised a StopIteration
            yield self._prepare(item)

    def _prepare(self, item: Any) -> DeviceBatch:
        if self._partition is not None and not item:
            return DeviceBatch(None, None, 0, 0.0, None)
        if self._read is None and isinstance(item, Batch):
            raise ValueError("Engine: a partition yields ranges: give read, which returns their inputs and targets")
        pair = item if self._read is None else self._read(item)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise TypeError(
                f"Engine: a batch must be a pair of inputs and targets, got {type(pair)}: give read, which makes a "
                "pair of it"
            )
        samples = next((len(tensor) for tensor in _tensors(pair) if tensor.dim() > 0), 1)
        weight = len(item) * basics.size() / item.total if self._partition is not None else 1.0
        with contextlib.nullcontext() if self._stream is None else self._stream.copying() as copied:
            inputs, targets = (_moved(part, self._device) for part in pair)
        return DeviceBatch(inputs, targets, samples, weight, copied)


class _ReadAhead(AsyncDataLoaderMixin, BaseDataLoader):
    """One pass over batches that a thread prepares; they are received in the thread that trains."""

    def __init__(self, ahead: int, prepare: Callable[[], Iterable[DeviceBatch]], stream: gpu.CopyStream | None) -> None:
        super().__init__(ahead)
        self._prepare = prepare
        self._stream = stream

    def _iterate(self) -> Iterable[DeviceBatch]:
        return self._prepare()

    def _process_batch(self, batch: DeviceBatch) -> DeviceBatch:
        if self._stream is not None and batch.copied is not None:
            self._stream.receive(batch.copied, _tensors((batch.inputs, batch.targets)))
        return batch


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _moved(value: Any, device: torch.device) -> Any:
    """Return the value with all tensors, in nested dictionaries, lists and tuples, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
