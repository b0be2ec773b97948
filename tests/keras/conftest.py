"""Ranks that use one of Keras's backends, or tf_keras.

The test process itself does not import Keras: it can do so with one backend only, and other tests want another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import gpus
from support.ranks import RankPool

MODULES = ("horovodlike.keras",)


def _settings(backend: str) -> dict[str, str]:
    """`backend` is one of Keras 3's, or "tf_keras", which is Keras 2."""
    of_keras = {"TF_USE_LEGACY_KERAS": "1"} if backend == "tf_keras" else {"KERAS_BACKEND": backend}
    return {**of_keras, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def _keras_pools() -> Iterator[dict[tuple[str, int], RankPool]]:
    pools: dict[tuple[str, int], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop(in_haste=True)
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=("tensorflow", pytest.param("torch", marks=pytest.mark.thorough)))
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend."""
    return request.param


@pytest.fixture
def keras_ranks(_keras_pools: dict[tuple[str, int], RankPool], backend: str) -> Callable[[int], RankPool]:
    """`keras_ranks(2).run(fn, *args)`: the results by rank of a function run on 2 ranks, with Keras on the backend."""

    def pool_of(size: int) -> RankPool:
        pool = _keras_pools.get((backend, size))
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = RankPool(size, modules=MODULES, before=_settings(backend))
            _keras_pools[backend, size] = pool
        return pool

    return pool_of


@pytest.fixture
def keras_gpu_ranks(_keras_pools: dict[tuple[str, int], RankPool], fake_gpu: Path) -> Callable[[int], RankPool]:
    """As `keras_ranks`, with Keras on torch and a GPU each, of the double: see `gpus.py`."""

    def pool_of(size: int) -> RankPool:
        key = ("torch on GPUs", size)
        if key not in _keras_pools or _keras_pools[key].broken:
            if key in _keras_pools:
                _keras_pools[key].close()
            settings = gpus.settings(fake_gpu)
            _keras_pools[key] = RankPool(size, settings, modules=MODULES, before=_settings("torch"))
        return _keras_pools[key]

    return pool_of


@pytest.fixture
def fresh_keras_ranks(backend: str) -> Iterator[Callable[[int], RankPool]]:
    """`fresh_keras_ranks(2)`: ranks of the test's own, to be broken, with Keras on the backend."""
    with contextlib.ExitStack() as pools:

        def pool_of(size: int) -> RankPool:
            pool = RankPool(size, modules=MODULES, before=_settings(backend))
            pools.callback(pool.close)
            return pool

        yield pool_of
