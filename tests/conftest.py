"""Fixtures that give a test its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # PyTorch's compiler imports it; loaded after TensorFlow, it aborts the process
    import triton  # noqa: F401

from support import gpus, selection
from support.generations import Generation
from support.ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return selection.is_left_out(config, collection_path) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.select(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `pytest -n 3 --dist loadgroup`, have one worker make what several tests share.

    These are pools of ranks, frameworks that are imported, wheels, the site, a Ray cluster and sessions of Spark. The
    mark `xdist_group` would say the same, but xdist 3.8 ignores it under pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByPool(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if "tests/keras/" in nodeid:
                return "keras on torch" if "[torch" in nodeid else "keras on tensorflow"
            if "tests/ray/" in nodeid:
                return "ray"
            if re.search("test_spark_(run|estimators)", nodeid):
                return "spark"
            framework = re.search(r"tests/(torch|tensorflow)/", nodeid)
            if framework is None:
                shares = re.search("/(cluster|packaging)/|/test_(aliases|site|error_messages|straggler_cases)", nodeid)
                return nodeid.partition("::")[0] if shares else nodeid
            size = re.search(r"[-[](\d)]$", nodeid)  # the parameter `size`, which comes last
            return f"{framework[1]} on {size[1] if size else 2} ranks"

    return ByPool(config, log)


class _AtOnce:
    """Show each failure when it happens: a run that is cut off has reported what it found."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            self._reporter.write_line(report.longreprtext)


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")
    if reporter is not None and os.environ.get("CI"):
        plugins.register(_AtOnce(reporter))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in a line of its own what was not tested because this machine has no cluster (`tests/cluster`)."""
    reports = terminalreporter.getreports("skipped")
    reasons = [str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)]
    for reason, number in Counter(reason for reason in reasons if "no cluster: " in reason).items():
        terminalreporter.write_line(
            f"NOT TESTED on several hosts: {number} tests, {reason.partition('no cluster: ')[2]}"
        )


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_source(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run in another folder: Python looks for modules where it is started, and here it would find the source."""
    os.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A test run that was started in the background, or by nohup, ignores signals, and so would what it starts."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, tuple[str, ...]], RankPool]]:
    pools: dict[tuple[int, tuple[str, ...]], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop(in_haste=True)
    for pool in pools.values():
        pool.close()


FRAMEWORKS = {
    "torch": ("torch", "horovodlike.torch"),
    "gpu": ("torch", "horovodlike.torch"),
    "tensorflow": ("tensorflow", "horovodlike.tensorflow"),
}


@pytest.fixture
def modules(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the modules that the ranks of a test have imported when they begin."""
    return FRAMEWORKS.get(request.path.parent.name, ())


@pytest.fixture
def ranks(_pools: dict[tuple[int, tuple[str, ...]], RankPool], modules: tuple[str, ...]) -> Callable[[int], RankPool]:
    """`ranks(3).run(fn, *args)`: the results by rank of a function run on 3 ranks, which live as long as the run."""

    def pool_of(size: int) -> RankPool:
        pool = _pools.get((size, modules))
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = _pools[size, modules] = RankPool(size, modules=modules)
        return pool

    return pool_of


@pytest.fixture(scope="session")
def fake_gpu() -> Path:
    """The file of the double of the CUDA driver and of NCCL; FAKE_GPU_COUNT says how many GPUs it has."""
    return gpus.build()


@pytest.fixture
def gpu_ranks(
    _pools: dict[tuple[int, tuple[str, ...]], RankPool], modules: tuple[str, ...], fake_gpu: Path
) -> Callable[[int], RankPool]:
    """As `ranks`, with a GPU each, of the double: see `gpus.py`."""

    def pool_of(size: int) -> RankPool:
        key = (size, (*modules, "on GPUs"))
        if key not in _pools or _pools[key].broken:
            if key in _pools:
                _pools[key].close()
            _pools[key] = RankPool(size, gpus.settings(fake_gpu), modules=modules)
        return _pools[key]

    return pool_of


@pytest.fixture
def fresh_ranks(modules: tuple[str, ...]) -> Iterator[Callable[..., RankPool]]:
    """`fresh_ranks(3)`: ranks of the test's own, to be broken; checks that nothing of them is left afterwards."""
    with contextlib.ExitStack() as pools:

        def pool_of(size: int, settings: dict[str, str] | None = None) -> RankPool:
            pool = RankPool(size, settings, modules=modules)
            pools.callback(pool.close)
            return pool

        yield pool_of


@pytest.fixture
def generations() -> Iterator[Callable[..., list[Generation]]]:
    """`generations(2, 3)`: a job of 2 ranks and one of 3, in the same processes."""
    from horovodlike._bootstrap.bootstrap import RendezvousServer

    with contextlib.ExitStack() as servers:

        def open_jobs(*sizes: int) -> list[Generation]:
            jobs = []
            for size in sizes:
                key = secrets.token_bytes(32)
                server = RendezvousServer(key, size)
                server.start()
                servers.callback(server.close)
                jobs.append(Generation(size, server.port, key))
            return jobs

        yield open_jobs
