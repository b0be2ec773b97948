"""Numbers of this process's place in the job, as they are when the op runs."""

from __future__ import annotations

import tensorflow as tf

from horovodlike.tensorflow._ops.native import ops

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set, as it is when the op runs (int32)."""
    return ops.horovodlike_size(process_set=process_set_id, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of this host, as it is when the op runs (int32)."""
    return ops.horovodlike_local_size(name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank, as it is when the op runs (int32)."""
    return ops.horovodlike_rank(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank among those of its host, as it is when the op runs (int32)."""
    return ops.horovodlike_local_rank(name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this process is in a process set when the op runs, else 0 (int32)."""
    return ops.horovodlike_process_set_included(process_set=process_set_id, name=name)
