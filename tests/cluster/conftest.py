"""Fixtures that make clusters, and the mark that says what a test needs for one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster import jobs, sshd
from cluster.hosts import Cluster
from cluster.tools import missing


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests for which this machine lacks something, and say what: `cluster("sshd", "slurm")` names tools."""
    marks = list(item.iter_markers("cluster"))
    if marks:
        tools = [tool for mark in marks for tool in mark.args]
        lacking = missing("namespaces") or "; ".join(filter(None, map(missing, dict.fromkeys(tools))))
        if lacking:
            pytest.skip(f"no cluster: {lacking}")


def _make(clusters: contextlib.ExitStack, hosts: int, *, ssh: bool = False, **options: Any) -> Cluster:
    made = clusters.enter_context(Cluster(hosts, **options))
    if ssh:
        sshd.start(made)
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Callable[..., Cluster]]:
    """`cluster(2)`: hosts that the tests of a module share, and leave as they have found them.

    Arguments are those of `Cluster`; with `ssh=True`, `ssh h1` works in all of them. The test or its module has the
    mark `cluster`.
    """
    with contextlib.ExitStack() as clusters:
        made: dict[object, Cluster] = {}

        def shared(hosts: int, **options: Any) -> Cluster:
            key = (hosts, *sorted(options.items()))
            if key not in made:
                made[key] = _make(clusters, hosts, **options)
            return made[key]

        yield shared


@pytest.fixture(autouse=True)
def ended_jobs() -> Iterator[None]:
    """End the jobs that a failed test has left running on the hosts of the next one."""
    yield
    while jobs.started:
        jobs.started.pop().end()


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[..., Cluster]]:
    """`fresh_cluster(2)`: hosts of the test's own, to be broken; arguments as those of `cluster`."""
    with contextlib.ExitStack() as clusters:
        yield functools.partial(_make, clusters)
