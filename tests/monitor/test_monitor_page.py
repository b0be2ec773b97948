"""The page in a real browser, and the metrics in a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monitors import fetch, port_of, running, token_of, wait_for
from PIL import Image
from support.browser import Page, browser
from test_board import Job
from test_monitored_jobs import ELASTIC, TRAIN

from horovodlike.monitor.slow_ranks import WINDOW

DOCS = Path(__file__).resolve().parents[2] / "docs"
MINUTE = 60
"""Scrapes, one a second."""
pytestmark = pytest.mark.slow


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("chromium is not installed: `make tools` does")
    folder = tmp_path / "browser"
    folder.mkdir()
    with browser(folder) as opened:
        yield opened
        assert opened.problems == []
        assert len({re.sub(r"^(http://[^/]*/).*", r"\1", each) for each in opened.requests if each[:4] == "http"}) <= 1


def test_a_straggler_is_shown_by_name(
    page: Page, watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> None:
    job, url = watched("-np", 2, sys.executable, program(TRAIN))
    wait_for(url, lambda found: len(found["ranks"]) == 2)
    page.open(url)
    lines = "[...document.querySelectorAll('#verdict .bad')].map(each => each.textContent)"
    page.wait_for(f"{lines}.find(each => each.startsWith('▲ Rank 1 on localhost holds up the others'))")
    page.wait_for("document.querySelector('#output').textContent.includes('begun 0')")
    page.open("about:blank")
    (tmp_path / "stop").touch()
    assert job.finish().code == 0


def test_a_stall_and_a_loss_are_shown(page: Page) -> None:
    job = Job(3)
    job.now = time.monotonic()
    job.board._monotonic = time.monotonic
    with running(job.board) as monitor:
        assert monitor.url is not None
        for _ in range(2):
            job.second({})
        page.open(monitor.url)
        page.wait_for("document.querySelectorAll('#ranks tr').length === 3")
        assert page.value("document.querySelector('#stall').hidden")

        def all_stop(waiting: set[int]) -> None:
            for rank in range(3):
                stack = "in synchronize" if rank in waiting else "File train.py, in <b>load</b>"
                counters = {"in_flight": int(rank in waiting)}
                job.report(rank, sent=time.monotonic(), idle=4.0, stack=stack, counters=counters)
                job.board._ranks[rank].heard_at = time.monotonic() + 1000

        all_stop(set())
        page.wait_for(
            "document.querySelector('#verdict').innerText.includes('No rank has been in a collective for 4 s')"
        )
        page.wait_for("document.querySelector('#ranks').innerText.includes('◌ idle')")
        assert page.value("document.querySelector('#stall').hidden")
        all_stop({0, 2})
        text = page.wait_for("!document.querySelector('#stall').hidden && document.querySelector('#stall').innerText")
        assert "Rank 1\nFile train.py, in <b>load</b>" in text.replace("\n\n", "\n")
        assert page.audit() == []
        job.board.add_event("elastic", "worker 2 is lost")
        from monitors import about

        job.board.take_hello(about(0, 2, generation=2))
        job.board.take_hello(about(1, 2, generation=2))
        page.wait_for("document.querySelectorAll('#ranks tr').length === 2")
        assert "generation 2: 2 ranks" in page.wait_for("document.querySelector('#events').innerText")


def test_a_slow_rank_is_shown_with_the_evidence(page: Page) -> None:
    job = Job(3)
    with running(job.board) as monitor:
        assert monitor.url is not None
        page.open(monitor.url)
        for _ in range(WINDOW + 2):
            job.second({1: 0.06}, process=lambda rank: {"cpu_seconds": job.now / 2, "run_delay_seconds": 7.0})
        line = page.wait_for(
            "[...document.querySelectorAll('#verdict .bad')].map(l => l.textContent).find(l => l.includes('slower'))"
        )
        assert line.startswith("▲ Rank 1 is ") and "slower in input: for " in line
        assert "▲ slow: rank 1 is " in page.value("document.querySelector('#events').innerText")


def test_an_elastic_loss_and_recovery_are_shown(
    page: Page, watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> None:
    job, url = watched("-np", 2, "--min-np", 2, "--max-np", 2, sys.executable, program(ELASTIC))
    page.open(url)
    page.wait_for("document.querySelectorAll('#ranks tr').length === 2")
    (tmp_path / "kill").touch()
    page.wait_for("document.querySelector('#events').innerText.includes('worker 1 has failed: it is replaced at once')")
    page.wait_for("document.querySelector('#events').innerText.includes('generation 2: 2 ranks')")
    page.wait_for("document.querySelectorAll('#ranks tr').length === 2")
    page.wait_for("document.querySelector('#figures').innerText.includes('2 of 2')")
    page.open("about:blank")
    (tmp_path / "stop").touch()
    assert job.finish().code == 0


def test_transports_queue_and_batches_are_shown(page: Page) -> None:
    job = Job(2)
    with running(job.board) as monitor:
        assert monitor.url is not None
        page.open(monitor.url)
        for second in range(1, 5):
            counts = {"executed": 400 * second, "batches": 100 * second, "bytes": 6e8 * second, "in_flight": 7}
            job.second({}, **counts, bytes_by_shared_memory=5e8 * second, bytes_by_tcp=1e8 * second)
        text = "600 MB/s of tensors on each rank; by shared memory 500 MB/s; by TCP 100 MB/s. Full scale is 500 MB/s."
        page.wait_for(f"document.querySelector('#rate-text').textContent === '{text}'")
        assert page.value("document.querySelector('#rate-key').innerText") == "shared memory TCP"
        text = page.value("document.querySelector('#queue-text').textContent")
        assert text.startswith(
            "7 requests are in flight on the rank with most; 100 batches/s of 4.0 requests and 6.0 MB "
        )
        drawn = "[...document.querySelector('#queue').getContext('2d').getImageData(0,0,2000,90).data].some(v => v)"
        assert page.value(drawn)


@pytest.mark.parametrize("size", [2, 1024])
def test_sizes_screens_and_keys(page: Page, size: int, tmp_path: Path) -> None:
    job = Job(size)
    for _ in range(3):
        job.second({size - 1: 0.08}, steps=2, progress=0.25)
    job.board._monotonic = time.monotonic
    for state in job.board._ranks.values():
        state.heard_at = time.monotonic() + 1000
    with running(job.board) as monitor:
        assert monitor.url is not None
        page.resize(1200, 1600)
        page.open(monitor.url)
        page.wait_for(f"document.querySelectorAll('#ranks tr').length === {min(size, 128)}")
        assert "progress\n25 %" in page.value("document.querySelector('#figures').innerText")
        page.value("document.querySelector('#heat').focus()")
        page.press("ArrowDown", 40)
        page.wait_for("document.querySelector('#heat-text').textContent.startsWith('Rank 1 on')")
        assert page.value("document.querySelector('#output-of').textContent") == "rank 1"
        for width, scheme in ((1200, "light"), (1200, "dark"), (360, "light")):
            page.resize(width, 1600, scheme)
            page.wait_for(f"innerWidth === {width}")
            assert page.value("document.documentElement.scrollWidth <= innerWidth")
            assert page.audit(*(() if (width, scheme) == (1200, "light") else ("color-contrast", "target-size"))) == []
            page.save(tmp_path / f"{size}-{width}-{scheme}.png")
        drawn = "[...document.querySelector('#heat').getContext('2d').getImageData(0,0,300,100).data].some(v => v)"
        assert page.value(drawn)


def test_the_picture_in_the_documentation(page: Page, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """`make pictures` writes it; here it is only made."""
    job, chance = Job(8), random.Random(0)
    communicating = 0.0
    for second in range(300):
        late = {rank: chance.random() * 2e-3 for rank in range(8)}
        if second > 230:
            late[5] = 0.02 + 0.01 * chance.random()
        communicating += 0.12 + 0.03 * chance.random()
        number = job.number
        more = {"executed": number, "batches": number / 3, "negotiation_seconds": number * 4e-3, "bytes": number * 9e6}
        more |= {"bytes_by_shared_memory": number * 2e6, "bytes_by_tcp": number * 7e6, "in_flight": chance.randrange(6)}
        more |= {"communicating_seconds": communicating, "shared_memory_bytes": 1.5e6}

        def process(rank: int, second: int = second) -> dict[str, float]:
            delayed = 0.4 * max(0, second - 230) if rank == 5 else 0.0
            return {"resident_bytes": 612e6, "cpu_seconds": 0.97 * second - delayed, "run_delay_seconds": delayed}

        for state in job.board._ranks.values():
            state.counters["steps"], state.step_seconds = number // 4, 0.33
        job.second(late, hosts=2, steps=11 + chance.randrange(3), process=process, **more)
    with running(job.board) as monitor:
        assert monitor.url is not None
        page.resize(1100, 1370)
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.open(monitor.url)
        assert "Rank 5 on node-1 holds up the others" in page.wait_for(
            "document.querySelector('#verdict .bad')?.innerText"
        )
        picture = DOCS / "users" / "monitor.png"
        made = picture if pytestconfig.getoption("pictures") else tmp_path / "monitor.png"
        page.save(made)
        with Image.open(made) as image:
            image.quantize(64).save(made, optimize=True)
    for path in (made, picture):
        assert path.stat().st_size < 100_000
        with Image.open(path) as image:
            assert image.size == (1100, 1370)


def test_the_page_loads_nothing_from_elsewhere(page: Page) -> None:
    with running() as monitor:
        assert monitor.url is not None
        page.open(monitor.url)
        page.wait_for("document.querySelector('#connection').textContent.startsWith('As of')")
        headers = fetch(monitor.url, "/")[1]
        assert "script-src 'sha256-" in headers["Content-Security-Policy"]
        blocked = "fetch('http://localhost:1/').then(() => 'sent', () => 'blocked')"
        answer = page.call("Runtime.evaluate", expression=blocked, awaitPromise=True, returnByValue=True)
        assert answer["result"]["value"] == "blocked"
        page.value("0")
        assert any("Content Security Policy" in each or "violates" in each for each in page.problems)
        page.problems.clear()
        page.requests[:] = [each for each in page.requests if ":1/" not in each]


@contextlib.contextmanager
def prometheus(url: str, folder: Path) -> Iterator[Callable[[str], list[Any]]]:
    """Scrape the monitor each second; yield a function that returns the result of a query."""
    if not Path("/usr/bin/prometheus").exists():
        pytest.skip("prometheus is not installed: `make tools` does")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: training
  authorization: {{credentials: {token_of(url)}}}
  static_configs: [{{targets: ["127.0.0.1:{port_of(url)}"]}}]
""")
    words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    server = subprocess.Popen([*words, f"--storage.tsdb.path={folder}/data"], stderr=subprocess.DEVNULL)

    def query(expression: str) -> list[Any]:
        """Nothing is found while it starts."""
        assert server.poll() is None
        address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return []
        except OSError:
            return []
        return found

    try:
        yield query
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def test_a_real_prometheus(watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path) -> None:
    job, url = watched("-np", 4, sys.executable, program(TRAIN))
    wait_for(url, lambda found: len(found["ranks"]) == 4)
    with prometheus(url, tmp_path) as query:
        checked = subprocess.run(["promtool", "check", "metrics"], input=fetch(url, "/metrics")[2], capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, b"")
        deadline = time.monotonic() + 30
        while not (found := query("count(rate(horovodlike_batches_total[5s]) > 0)")) or found[0]["value"][1] != "4":
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
    (tmp_path / "stop").touch()
    assert job.finish().code == 0


@pytest.mark.thorough
def test_a_minute_of_a_real_prometheus(
    watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> None:
    """No scrape fails, each has the same series, and no counter falls."""
    job, url = watched("-np", 4, sys.executable, program(TRAIN))
    wait_for(url, lambda found: len(found["ranks"]) == 4 and all(each["parts"] for each in found["ranks"]))
    with prometheus(url, tmp_path) as query:
        deadline = time.monotonic() + 120
        while not (found := query("count_over_time(up[5m])")) or int(found[0]["value"][1]) < MINUTE:
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        [scrapes] = query("up[5m]")
        [sizes] = query("scrape_samples_scraped[5m]")
        counters = query('{__name__=~"horovodlike_.*_total"}[5m]')
    (tmp_path / "stop").touch()
    assert job.finish().code == 0
    assert {value for _, value in scrapes["values"]} == {"1"}
    assert len({value for _, value in sizes["values"]}) == 1
    for each in counters:
        values = [float(value) for _, value in each["values"]]
        assert values == sorted(values), each["metric"]
        assert len(values) >= MINUTE - 1
    grown = {
        (each["metric"]["__name__"], each["metric"].get("rank"))
        for each in counters
        if each["values"][0][1] != each["values"][-1][1]
    }
    assert grown >= {("horovodlike_batches_total", str(rank)) for rank in range(4)}
