"""`horovodlike.run(..., live=True)`: the state of the job in a notebook, on a terminal and elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import LIMIT_S, MARK, marked, on_terminal, wait_gone

from horovodlike.launcher.supervisor.live import as_html, as_line
from horovodlike.monitor.board import Board
from horovodlike.monitor.collector import read_report

WORK = """
import time
import horovodlike

def work(steps, wait=0.1):
    import numpy as np
    import horovodlike as hvd
    hvd.init()
    for step in range(steps):
        time.sleep(wait * hvd.rank())
        hvd.allreduce(np.ones(1000, np.float32), name="<layer>")
        hvd.report_progress(step + 1, steps)
    print("done <b>", hvd.rank(), flush=True)
    return hvd.rank()
"""
SCRIPT = WORK + "if __name__ == '__main__': print(horovodlike.run(work, (40,), np=2, live=True))\n"


def about(rank: int) -> dict[str, Any]:
    numbers = {"rank": rank, "size": 2, "generation": 1, "pid": 1, "local_rank": rank, "worker": rank}
    return {**numbers, "host": "<i>node</i>", "boot": "1"}


@pytest.fixture
def board() -> Board:
    now = [1000.0]
    found = Board(clock=lambda: now[0], monotonic=lambda: now[0])
    hellos = [about(0), about(1)]
    for hello in hellos:
        found.take_hello(hello)
    for second in range(3):
        now[0] += 1.0
        for rank in range(2):
            counters = {"bytes": 3e6 * second, "requests": 9, "waiting_seconds": 0.25 * second, "progress": 0.2}
            found.take_report(rank, hellos[rank], read_report({"sent": now[0], "idle": 0, "counters": counters}))
        found.tick()
    return found


def test_a_line_says_how_far_the_job_is(board: Board) -> None:
    line = as_line(board.snapshot(), 60.0)
    assert line == (
        "0:01:00, 20 % done, about 0:04:00 left; 2 of 2 ranks; computing 75 %, communicating 0 %, waiting 25 %; "
        "3 MB/s of tensors"
    )
    state = board.snapshot()
    state["ranks"][0]["counters"]["progress"] = 5e-324
    assert as_line(state, 60.0).startswith("0:01:00, 0 % done; ")
    for each in state["ranks"]:
        each["state"] = "idle"
    assert "; 2 of 2 ranks, idle; " in as_line(state, 60.0)
    assert as_line(Board().snapshot(), 3.7) == "0:00:03; no rank has called init() yet"


def test_html_is_escaped(board: Board) -> None:
    state = board.snapshot()
    state["straggler"] = {"rank": 1, "seconds_each": 0.02}
    state["stall"] = {"seconds": 4.0, "stacks": [{"ranks": [0, 1], "stack": "in <module>"}]}
    state["ranks"][0]["state"] = "silent"
    board.add_event("warning", "<script>alert(1)</script>")
    state["events"] = board.snapshot()["events"]
    shown = as_html(state, 60.0)
    assert '<progress max="1" value="0.2000"' in shown
    late, stalled = "1 holds up the others: 20 ms late each time", "ranks wait, and nothing has completed for 4 s"
    for text in (late, stalled, "silent: rank 0"):
        assert f"{text}</b>" in shown
    assert "<pre>in &lt;module&gt;</pre>" in shown
    assert "<pre>&lt;script&gt;" in shown and "<script>" not in shown


def test_elsewhere_there_is_a_line_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("40", "3"))
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[0, 1]"), done.stderr
    assert re.search(r"^hvdrun: 0:00:\d\d, 100 % done; .*2 of 2 ranks have ended", done.stderr, re.MULTILINE)


@pytest.mark.slow
def test_on_a_terminal_the_lowest_line_is_kept_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended, seen = on_terminal([], {"NO_COLOR": "1"}, tmp_path, ("script.py",))
    assert ended == 0
    lines = seen.decode().replace("\r\n", "\n").split("\n")
    assert lines[-2] == "[0, 1]"
    shown = [part for line in lines for part in re.split(r"\r\x1b\[K", line) if part.startswith("hvdrun: 0:0")]
    assert len(shown) >= 3
    assert any(re.match(r"hvdrun: 0:00:0\d, \d+ % done, about 0:00:\d\d left; ", each) for each in shown)
    assert re.match(r"hvdrun: 0:00:\d\d, 100 % done; ", shown[-1])


class Notebook:
    """A kernel, in which cells are executed."""

    def __init__(self, client: Any, mark: str) -> None:
        self._client = client
        self._mark = mark

    def left_by_jobs(self) -> list[str]:
        """Return the commands of processes other than the kernel."""
        return [command for command in marked(self._mark).values() if "ipykernel" not in command]

    def run(self, code: str, on_message: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
        """Execute a cell; return its error, if any, its output, and all that has been displayed."""
        found: dict[str, Any] = {"error": None, "stdout": "", "stderr": "", "shown": []}

        def take(message: dict[str, Any]) -> None:
            content, kind = message["content"], message["msg_type"]
            if kind == "stream":
                found[content["name"]] += content["text"]
            elif kind == "error":
                found["error"] = content
            elif kind in ("display_data", "update_display_data"):
                found["shown"].append((content["transient"]["display_id"], content["data"]))
            on_message(message)

        self._client.execute_interactive(code, timeout=LIMIT_S, output_hook=take)
        return found


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    from jupyter_client.manager import start_new_kernel

    mark = f"notebook-{os.urandom(8).hex()}"
    environ = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("notebook")
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=environ)
    try:
        opened = Notebook(client, mark)
        assert opened.run(WORK)["error"] is None
        yield opened
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        wait_gone(mark, LIMIT_S)


@pytest.mark.slow
def test_a_notebook_shows_the_job(notebook: Notebook) -> None:
    found = notebook.run("horovodlike.run(work, (40,), np=2, live=True)")
    assert found["error"] is None
    assert sorted(found["stdout"].splitlines()) == ["[0]<stdout>: done <b> 0", "[1]<stdout>: done <b> 1"]
    assert "hvdrun: 0:0" not in found["stderr"]
    assert len({identity for identity, _ in found["shown"]}) == 1 and len(found["shown"]) >= 4
    _, last = found["shown"][-1]
    assert '<progress max="1" value="1.0000"' in last["text/html"]
    assert "2 of 2 ranks have ended" in last["text/html"]
    assert re.match(r"0:00:\d\d, 100 % done; ", last["text/plain"])
    assert any("rank 1 holds up the others" in data["text/html"] for _, data in found["shown"])
    assert notebook.left_by_jobs() == []


@pytest.mark.slow
def test_an_exception_is_itself_in_a_notebook(notebook: Notebook) -> None:
    found = notebook.run("""
def fail():
    import horovodlike as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("no such <key>")
    time.sleep(1000)
horovodlike.run(fail, np=2, live=True)""")
    assert (found["error"]["ename"], found["error"]["evalue"]) == ("KeyError", "'no such <key>'")
    assert "[rank 1]" in "\n".join(found["error"]["traceback"])
    assert notebook.left_by_jobs() == []


@pytest.mark.slow
def test_an_interrupt_of_the_cell_ends_the_ranks(notebook: Notebook) -> None:
    begun = 0.0

    def interrupt(message: dict[str, Any]) -> None:
        nonlocal begun
        if not begun and "2 of 2 ranks" in str(message["content"].get("data")):
            begun = time.monotonic()
            notebook._client.parent.interrupt_kernel()

    found = notebook.run("horovodlike.run(work, (10**6,), np=2, live=True)", interrupt)
    assert begun and time.monotonic() - begun < LIMIT_S
    assert found["error"]["ename"] == "KeyboardInterrupt"
    assert notebook.left_by_jobs() == []
    threads = notebook.run("import threading; print([each.name for each in threading.enumerate()])")["stdout"]
    assert "hvdrun" not in threads and "horovodlike" not in threads
    assert notebook.run("print(horovodlike.run(work, (3,), np=2))")["stdout"].endswith("[0, 1]\n")
