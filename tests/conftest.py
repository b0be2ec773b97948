"""Fixtures that give a test its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from ranks import RankPool


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n 2 --dist loadgroup`, each pool of ranks is started by one of the workers only."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            item.add_marker(pytest.mark.xdist_group(f"ranks-{parameters.get('size', 2)}"))


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop(in_haste=True)
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
    with contextlib.ExitStack() as pools:

        def pool_of(size: int, settings: dict[str, str] | None = None) -> RankPool:
            pool = RankPool(size, settings)
            pools.callback(pool.close)
            return pool

        yield pool_of
