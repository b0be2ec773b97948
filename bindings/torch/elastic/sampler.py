"""`ElasticSampler`: the rest of an epoch, divided among the ranks that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from horovodlike import basics

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Divides among the ranks what has not been processed yet in this epoch.

    All ranks have to use the same batch size, and to record each batch before they commit::

        for batch, (images, labels) in enumerate(loader):
            ...
            state.sampler.record_batch(batch, batch_size)
            state.commit()
        state.sampler.set_epoch(epoch + 1)

    Ranks get the indices in turn, so what n ranks have processed in k batches is the beginning of the order, and an
    epoch that is resumed with other ranks continues behind it. So that all ranks have as many, some indices may occur
    twice at the end. Where each sample must count once, use `horovodlike.data.DynamicPartition`.

    Not for several threads at a time.

    Args:
        dataset: Whose length counts; it stays as long as it is.
        shuffle: Whether the order is another one in each epoch. It is the same on all ranks.
        seed: Of the order; the same on all ranks.

    Attributes:
        epoch: The number of the epoch.
        processed_num: How many samples all ranks together have processed in it.
        num_replicas: How many ranks share the rest.
        rank: This process's place among them.
        remaining_indices: The rest, in its order.
        num_samples: How many of them this rank gets.
        total_size: How many all ranks get.

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
        """Begin an epoch, of which nothing has been processed. To be called when the one before has ended.

        Called at the beginning it would forget what had been processed before the ranks changed.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch. It counts when the state is committed.

        Args:
            batch_idx: Not needed.
            batch_size: How many samples each rank has processed.
        """
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how much of it has been processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another sampler was, and divide the rest anew.

        Raises:
            KeyError: It is not what `state_dict` returned.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the ranks that there are now."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)  # rounded up
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices, from the beginning of the rest."""
        again_and_again = itertools.cycle(self.remaining_indices)  # it may have fewer than there are ranks
        return itertools.islice(again_and_again, self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        """Return how many indices this rank gets."""
        return self.num_samples
