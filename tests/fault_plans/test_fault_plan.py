"""Fault plans: what they may say, and what happens when a rank gets to a point."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovodlike import testing
from horovodlike.errors import ConfigError
from horovodlike.testing import ACTIONS, POINTS, Fault, FaultPlan, InjectedFault

PLAN = """
- {rank: 1, step: 20, point: data, action: SIGKILL}
- {rank: 0, step: 35, point: commit, action: slow, seconds: 3}
- rank: 2
  step: 5
  generation: 2
  point: rendezvous
  action: raise
"""


def test_a_file_is_loaded(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    assert FaultPlan.load(path).faults == (
        Fault(1, 20, "data", "SIGKILL"),
        Fault(0, 35, "commit", "slow", seconds=3),
        Fault(2, 5, "rendezvous", "raise", generation=2),
    )


def faults():
    numbers = st.integers(0, 1000)
    action = st.sampled_from([each for each in ACTIONS if each != "slow"])
    slow = st.builds(Fault, numbers, numbers, st.sampled_from(POINTS), st.just("slow"), st.floats(0.01, 1e6))
    return slow | st.builds(Fault, numbers, numbers, st.sampled_from(POINTS), action, generation=st.integers(1, 99))


@settings(deadline=None)
@given(st.lists(faults()))
def test_a_plan_survives_json(entries):
    plan = FaultPlan(tuple(entries))
    text = plan.to_json()
    assert "\n" not in text
    assert FaultPlan.from_json(text) == plan


GOOD = {"rank": 1, "step": 2, "point": "step", "action": "raise"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**GOOD, "rank": -1}, "rank must be an integer of at least 0, got -1"),
        ({**GOOD, "step": "2"}, "step must be an integer of at least 0, got '2'"),
        ({**GOOD, "generation": 0}, "generation must be an integer of at least 1"),
        ({**GOOD, "rank": True}, "rank must be an integer"),
        ({**GOOD, "point": "backward"}, "point must be one of rendezvous, negotiation, data, commit, sync, step, got"),
        ({**GOOD, "action": "SIGHUP"}, "action must be one of raise, SIGKILL, SIGSTOP, SIGTERM, close, slow, got"),
        ({**GOOD, "action": "slow"}, "the action slow needs seconds"),
        ({**GOOD, "action": "slow", "seconds": -1}, "the action slow needs seconds"),
        ({**GOOD, "seconds": 1}, "seconds are for the action slow, not for raise"),
        ({**GOOD, "seconds": "1"}, "seconds must be a number"),
        ({**GOOD, "host": "a"}, "unknown key host; there are rank, step, point, action, seconds, generation"),
        ({"rank": 1, "point": "step"}, "step, action is missing"),
        ([1, 2], "is not a mapping with the keys rank, step"),
        (None, "is not a mapping"),
    ],
)
def test_a_bad_entry_is_named(tmp_path, entry, words):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps([GOOD, entry]))  # YAML, too
    with pytest.raises(ConfigError) as raised:
        FaultPlan.load(path)
    assert str(raised.value).startswith(f"{path}: entry 2: ")
    assert words in str(raised.value)


@pytest.mark.parametrize("text", ["", "rank: 1", "no list", "[1, 2", "\x00"])
def test_what_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.yaml: "):
        FaultPlan.load(path)


@pytest.mark.parametrize("text", ["", "{", "{}", '"text"', "3"])
def test_what_is_no_json_of_a_plan_is_refused(text):
    with pytest.raises(ConfigError, match="a fault plan is"):
        FaultPlan.from_json(text)


def test_an_empty_plan_is_one():
    assert FaultPlan.from_json("[]") == FaultPlan()


@pytest.mark.parametrize("point", ["data", "negotiation", "end"])
def test_a_point_that_no_script_gets_to_is_refused(point):
    with pytest.raises(ValueError, match="point must be one of rendezvous, commit, sync, step"):
        testing.reach(point)


PLACE = {
    f"HOROVODLIKE_{name}": str(value)
    for name, value in {
        "RANK": 2,
        "SIZE": 4,
        "LOCAL_RANK": 2,
        "LOCAL_SIZE": 4,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "JOB_ID": "test",
    }.items()
}


def run_with(plan, script, **variables):
    """Run a script in a process of its own with a plan, as rank 2; returns the finished process."""
    environment = {"HOROVODLIKE_FAULT_PLAN": plan, **PLACE, **variables}
    script = "import os\nfrom horovodlike import testing\n" + script
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def plan_of(*faults):
    return FaultPlan(faults).to_json()


STEPS = """
for step in range(4):
    for point in ("step", "commit"):
        try:
            testing.reach(point, step)
        except testing.InjectedFault as fault:
            print(step, point, fault)
"""


def test_without_a_plan_nothing_happens():
    assert testing._active is None
    testing.reach("step", 3)
    done = run_with("", STEPS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fault_happens_at_its_step_and_point_on_its_rank_alone():
    plan = plan_of(
        Fault(2, 1, "commit", "raise"),
        Fault(1, 2, "step", "raise"),
        Fault(2, 3, "step", "raise"),
        Fault(2, 0, "step", "raise", generation=2),
    )
    done = run_with(plan, STEPS)
    assert done.stderr == ""
    happened = [line.split()[:2] for line in done.stdout.splitlines()]
    assert happened == [["1", "commit"], ["3", "step"]]
    again = run_with(plan, STEPS, HOROVODLIKE_GENERATION="2")
    assert [line.split()[:2] for line in again.stdout.splitlines()] == [["0", "step"]]


def test_a_fault_happens_once_though_its_step_comes_again():
    done = run_with(plan_of(Fault(2, 1, "step", "raise")), STEPS * 2)
    assert len(done.stdout.splitlines()) == 1


def test_the_step_is_that_of_the_last_call():
    script = "testing.reach('step', 3)\ntesting.reach('commit')"
    done = run_with(plan_of(Fault(2, 3, "commit", "raise")), script)
    assert "InjectedFault: injected by the fault plan: Fault(rank=2, step=3, point='commit'" in done.stderr


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_signal_ends_the_process(name):
    done = run_with(plan_of(Fault(2, 0, "sync", name)), "testing.reach('sync')\nprint('still here')")
    assert (done.returncode, done.stdout) == (-signal.Signals[name], "")


def test_sigstop_stops_the_process_until_it_is_continued(tmp_path):
    script = "from horovodlike import testing\ntesting.reach('rendezvous')\nprint('still here')"
    environment = {"HOROVODLIKE_FAULT_PLAN": plan_of(Fault(2, 0, "rendezvous", "SIGSTOP")), **PLACE}
    process = subprocess.Popen([sys.executable, "-P", "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert output == "still here\n"


def test_slow_takes_its_time():
    script = "import time\nsince = time.monotonic()\ntesting.reach('step', 1)\nprint(time.monotonic() - since)"
    done = run_with(plan_of(Fault(2, 1, "step", "slow", 0.5)), script)
    assert float(done.stdout) >= 0.5


def test_close_shuts_down_tcp_connections_and_nothing_else():
    script = """
import socket
server = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(server.getsockname())
theirs, _ = server.accept()
local, other = socket.socketpair()
testing.reach("step", 1)
print(ours.recv(1), theirs.recv(1))
local.send(b"x")
print(other.recv(1))
"""
    done = run_with(plan_of(Fault(2, 1, "step", "close")), script)
    assert (done.stdout, done.stderr) == ("b'' b''\nb'x'\n", "")


@pytest.mark.parametrize(
    ("plan", "words"), [("no", "HOROVODLIKE_FAULT_PLAN: a fault plan is JSON"), ("[1]", "entry 1")]
)
def test_a_bad_variable_is_named(plan, words):
    done = run_with(plan, "")
    assert done.returncode == 1
    assert "ConfigError: HOROVODLIKE_FAULT_PLAN: " in done.stderr
    assert words in done.stderr


def test_what_the_engine_does_needs_an_engine():
    done = run_with(plan_of(Fault(2, 1, "data", "SIGKILL")), "testing.reach('step', 1)")
    assert "NotInitializedError" in done.stderr


def test_an_injected_fault_is_no_error_of_the_job():
    from horovodlike.errors import HorovodInternalError

    assert not issubclass(InjectedFault, HorovodInternalError)
