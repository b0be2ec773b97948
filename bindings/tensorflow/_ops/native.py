"""The loaded ops, and what they know of the job."""

from __future__ import annotations

import ctypes
from typing import Any

import tensorflow as tf

from horovodlike import basics, process_set
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._engine.native import lib  # loads the engine's library, which the ops are linked to
from horovodlike.tensorflow._ops.build import library

_NOT_INITIALIZED = -1

assert lib is not None
_path = str(library())
ops: Any = tf.load_op_library(_path)
_functions = ctypes.CDLL(_path)


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


basics.on_init(_enter)
basics.on_shutdown(_leave)
process_set.on_added(lambda set_id: _set_membership(set_id, process_set.members(set_id)))
process_set.on_removed(_forget)
if basics.is_initialized():
    _functions.horovodlike_tensorflow_enter(basics.rank(), basics.local_rank(), basics.local_size())
    for known_id, known_ranks in process_set.ids_and_ranks().items():
        _set_membership(known_id, known_ranks)
