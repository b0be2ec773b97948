"""Fixtures that give a test its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop()
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """`ranks(3).run(fn, *args)`: the results by rank of a function run on 3 ranks, which live as long as the run."""

    def pool_of(size: int) -> RankPool:
        pool = _pools.get(size)
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = _pools[size] = RankPool(size)
        return pool

    return pool_of


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., RankPool]]:
    """`fresh_ranks(3)`: ranks of the test's own, to be broken; checks that nothing of them is left afterwards."""
    pools: list[RankPool] = []

    def pool_of(size: int, settings: dict[str, str] | None = None) -> RankPool:
        pools.append(RankPool(size, settings))
        return pools[-1]

    yield pool_of
    for pool in pools:
        pool.close()
