"""`ElasticSampler`: a sampler that divides the rest of an epoch among the job's current ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from horovodlike import basics

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Divides the samples that have not been processed yet in this epoch among the ranks.

    All ranks have to use the same batch size, and to record each batch before they commit::

        for batch, (images, labels) in enumerate(loader):
            ...
            state.sampler.record_batch(batch, batch_size)
            state.commit()
        state.sampler.set_epoch(epoch + 1)

    Ranks receive the indices in turn. So the indices that all ranks have processed after a batch are the first ones of
    the epoch's order, and an epoch that is resumed with other ranks continues after them. Indices may be repeated at
    the end, so that all ranks receive the same number. If each sample must count once, use
    `horovodlike.data.DynamicPartition`.

    Not thread-safe.

    Args:
        dataset: The data set. Only its length is used, which must not change.
        shuffle: True for a different order in each epoch, the same on all ranks.
        seed: The seed of the order; the same on all ranks.

    Attributes:
        epoch: The number of the epoch.
        processed_num: Number of samples that all ranks together have processed in this epoch.
        num_replicas: Number of ranks that share the remaining indices.
        rank: The rank of this process.
        remaining_indices: The indices that were not processed at the last `reset`, in the epoch's order.
        num_samples: Number of indices that each rank receives.
        total_size: Number of indices that all ranks together receive.

    Raises:
        ValueError: Not initialised.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with no samples processed yet. Call this at the end of the previous epoch.

        A call at the beginning of an epoch that is resumed would drop the count of samples processed before.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch. The next commit of the state makes this permanent.

        Args:
            batch_idx: Not needed.
            batch_size: Number of samples that each rank has processed.
        """
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of samples that have been processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state of another sampler, and divide its remaining indices among the current ranks.

        Raises:
            KeyError: The argument lacks a key of `state_dict`.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the current ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)  # rounded up
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's indices."""
        again_and_again = itertools.cycle(self.remaining_indices)  # there may be fewer indices than ranks
        return itertools.islice(again_and_again, self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        """Return the number of indices that this rank receives."""
        return self.num_samples
