"""Programs that are asked something: time limits, and what is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hvdrun_process import SLACK_S, Launch, wait_gone

from horovodlike.launcher.agent import host_probe as gpus
from horovodlike.launcher.agent.external import ask
from horovodlike.launcher.agent.process import tree_of
from horovodlike.launcher.elastic import DiscoveryError, HostDiscoveryScript
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.schedulers import mpirun

HANGS = {
    "by itself": "exec sleep 1000",
    "in a child": "sleep 1000; echo late",
    "deaf": "trap '' TERM; while :; do sleep 1000; done",
    "with a child of a session of its own that holds its output": "setsid sleep 1000 & wait",
    "with its output closed": "exec >&- 2>&-; sleep 1000",
}


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Writes a program of the shell."""

    def write(text: str, name: str = "program") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.parametrize("text", HANGS.values(), ids=HANGS)
def test_a_program_that_hangs_is_ended_with_its_children(program: Callable[[str], str], text: str) -> None:
    pids: list[int] = []
    found: list[int] = []

    def note() -> bool:
        found.extend(tree_of(pids[0]))
        return False

    began = time.monotonic()
    answer = ask([program(text)], 0.3, cancelled=note, on_start=pids.append)
    assert answer.trouble == "it has not ended within 0.3 s"
    assert time.monotonic() - began < SLACK_S
    assert found
    for pid in {*found, *tree_of(pids[0])}:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_child_that_holds_the_output_open_does_not_hold_up_the_answer(program: Callable[[str], str]) -> None:
    began = time.monotonic()
    answer = ask([program("echo host:2; sleep 1000 &")], 60)
    assert (answer.status, answer.out, answer.trouble) == (0, b"host:2\n", "")
    assert time.monotonic() - began < SLACK_S


def test_a_program_that_has_closed_its_output_is_not_waited_for_when_nobody_wants_its_answer(
    program: Callable[[str], str],
) -> None:
    began = time.monotonic()
    answer = ask([program("exec >&- 2>&-; sleep 1000")], 60, cancelled=lambda: time.monotonic() > began + 0.5)
    assert (answer.trouble, answer.took_too_long) == ("its answer is not wanted any more", False)
    assert time.monotonic() - began < SLACK_S


def test_only_a_discovery_script_that_takes_too_long_is_told_of_the_time_limit(program: Callable[[str], str]) -> None:
    with pytest.raises(DiscoveryError, match="has written more than 4 MiB$"):
        HostDiscoveryScript(program("exec yes"), None, 60).find()


def test_a_program_that_never_stops_writing(program: Callable[[str], str]) -> None:
    assert ask([program("exec yes")], 60).trouble == "it has written more than 4 MiB"


def test_a_discovery_script_that_hangs_is_a_failed_look_up(program: Callable[[str], str]) -> None:
    script = program("echo asking the cluster >&2; sleep 1000")
    message = (
        f"{script} was ended: it has not ended within 0.3 s; if it needs longer, raise --discovery-timeout "
        "(HOROVODLIKE_DISCOVERY_TIMEOUT) or --elastic-timeout: asking the cluster"
    )
    with pytest.raises(DiscoveryError, match=f"^{re.escape(message)}$"):
        HostDiscoveryScript(script, seconds=0.3).find()


def test_a_discovery_script_that_hangs_at_the_start(
    launch: Callable[..., Launch], program: Callable[[str], str]
) -> None:
    script = program("setsid sleep 1000 & wait")
    words = ("--host-discovery-script", script, "--discovery-timeout", "0.4", sys.executable, "-c", "0")
    job = launch("-np", 1, "--min-np", 1, *words).finish()
    assert job.code == 1
    assert job.err.startswith(
        f"hvdrun: the hosts cannot be found out: {script} was ended: it has not ended within 0.4 s"
    )
    assert job.seconds < SLACK_S


def test_a_discovery_script_that_hangs_at_the_start_is_mentioned_and_ends_with_the_elastic_timeout(
    launch: Callable[..., Launch], program: Callable[[str], str]
) -> None:
    script = program("sleep 1000")
    words = ("--host-discovery-script", script, "--elastic-timeout", "4", sys.executable, "-c", "0")
    job = launch("-np", 1, "--min-np", 1, *words).finish()
    assert job.code == 1
    waiting, error = job.err.splitlines()
    assert waiting == f"hvdrun: waiting: --host-discovery-script {script} has not answered yet"
    assert error.startswith(f"hvdrun: the hosts cannot be found out: {script} was ended: it has not ended within 4 s")
    assert job.seconds < 4 + SLACK_S


def test_a_discovery_script_that_hangs_later_and_an_interrupt(
    launch: Callable[..., Launch], program: Callable[[str], str], tmp_path: Path
) -> None:
    """The hosts stay as they were; hvdrun ends although the script does not."""
    script = program(f"if test -e {tmp_path}/asked; then exec sleep 1000; fi; touch {tmp_path}/asked; echo localhost:1")
    text = "import signal; print('up', flush=True); signal.pause()"
    words = ("--host-discovery-script", script, "--discovery-timeout", "0.3", sys.executable, "-c", text)
    job = launch("-np", 1, "--min-np", 1, *words, stderr=subprocess.STDOUT)
    job.expect(b"up")
    job.expect(f"hvdrun: the hosts cannot be found out, and stay as they are: {script} was ended".encode())
    job.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert job.finish().code == 130
    assert time.monotonic() - began < SLACK_S
    wait_gone(job.mark, SLACK_S)


def test_mpirun_and_nvidia_smi_have_time_limits(
    program: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mpirun", "nvidia-smi"):
        program("setsid sleep 1000 & wait", name)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(gpus, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(mpirun, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert gpus.find_gpus(environ).source == f"{tmp_path}/nvidia-smi has not answered: it has not ended within 0.3 s"
    with pytest.raises(UsageError, match=r"mpirun --version does not answer \(it has not ended within 0.3 s\)"):
        mpirun.find_mpirun(environ)
