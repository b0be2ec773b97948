"""Ranks that use one of Keras's backends.

The test process itself does not import Keras: it can do so with one backend only, and other tests want another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import RankPool

BACKENDS = ("tensorflow", "torch")
# Of Keras, its backend and, at the first time, the compilation of the ops: on a machine that has other things to do.
IMPORT_SECONDS = 240


def _import() -> None:
    import horovodlike.keras  # noqa: F401


def _settings(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def _keras_pools() -> Iterator[dict[tuple[str, int], RankPool]]:
    pools: dict[tuple[str, int], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop(in_haste=True)
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=BACKENDS)
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
            pool = RankPool(size, _settings(backend))
            _keras_pools[backend, size] = pool
            pool.run(_import, timeout=IMPORT_SECONDS)
        return pool

    return pool_of


@pytest.fixture
def fresh_keras_ranks(fresh_ranks: Callable[..., RankPool], backend: str) -> Callable[[int], RankPool]:
    """`fresh_keras_ranks(2)`: ranks of the test's own, to be broken, with Keras on the backend."""

    def pool_of(size: int) -> RankPool:
        pool = fresh_ranks(size, _settings(backend))
        pool.run(_import, timeout=IMPORT_SECONDS)
        return pool

    return pool_of
