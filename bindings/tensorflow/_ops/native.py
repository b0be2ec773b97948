"""The loaded ops, and the rank and sizes that they read when they run."""

from __future__ import annotations

import ctypes
from typing import Any

import tensorflow as tf

from horovodlike import basics, process_set
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._engine import steps
from horovodlike._engine.native import lib  # loads the engine's library, which the ops are linked to
from horovodlike.tensorflow._ops.build import library

_NOT_INITIALIZED = -1

assert lib is not None
_path = str(library())
ops: Any = tf.load_op_library(_path)
_functions = ctypes.CDLL(_path)
_functions.horovodlike_tensorflow_steps.restype = ctypes.c_int64


def _enter(place: RankInfo) -> None:
    _functions.horovodlike_tensorflow_enter(place.rank, place.local_rank, place.local_size)
    _set_membership(0, list(range(place.size)))


def _leave() -> None:
    _functions.horovodlike_tensorflow_enter(_NOT_INITIALIZED, _NOT_INITIALIZED, 0)


def _set_membership(set_id: int, ranks: list[int]) -> None:
    own = ranks.index(basics.rank()) if basics.rank() in ranks else -1
    _functions.horovodlike_tensorflow_set_membership(set_id, len(ranks), own)


def _forget(set_id: int) -> None:
    _functions.horovodlike_tensorflow_set_membership(set_id, 0, -1)


def _steps_of_graphs() -> tuple[int, float]:
    duration = ctypes.c_int64()
    count = _functions.horovodlike_tensorflow_steps(ctypes.byref(duration))
    return count, duration.value / 1e9


steps.count_graphs(_steps_of_graphs)
basics.on_init(_enter)
basics.on_shutdown(_leave)
process_set.on_added(lambda set_id: _set_membership(set_id, process_set.members(set_id)))
process_set.on_removed(_forget)
if basics.is_initialized():
    _functions.horovodlike_tensorflow_enter(basics.rank(), basics.local_rank(), basics.local_size())
    for known_id, known_ranks in process_set.ids_and_ranks().items():
        _set_membership(known_id, known_ranks)


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
    """Return this process's local rank, as it is when the op runs (int32)."""
    return ops.horovodlike_local_rank(name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this process is in a process set when the op runs, else 0 (int32)."""
    return ops.horovodlike_process_set_included(process_set=process_set_id, name=name)
