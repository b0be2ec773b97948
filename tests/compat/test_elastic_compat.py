"""Elastic scripts of Horovod: names of attributes, discovery scripts, and the limit of resets."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import horovodlike.elastic
from horovodlike.launcher.elastic import HostDiscoveryScript

Run = Callable[..., "subprocess.CompletedProcess[str]"]

HOROVODS_METHODS = (
    *("check_host_updates", "commit", "on_hosts_updated", "on_reset", "register_reset_callbacks"),
    *("reset", "restore", "save", "sync"),
)
STATES = """
import horovod.torch as hvd, torch
hvd.init()
model = torch.nn.Linear(1, 1)
names = ("host", "persist", "resume", "elect_root", "is_persistent", "write_commit", "saved_to_bytes", "file", "root")
others = {name: index for index, name in enumerate(names)}
state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), commits=0, **others)

@hvd.elastic.run
def train(state):
    while state.commits < 3:
        state.commits += 1
        state.host += 10
        state.commit()

train(state)
state.commits = state.host = state.persist = 99
state.restore()
print(state.commits, state.host, state.persist, *(getattr(state, name) for name in names[2:]))
"""


def test_names_that_a_script_chooses_are_free(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STATES)
    done = run("-m", "horovodlike.compat", "train.py")
    assert (done.returncode, done.stdout) == (0, "3 30 1 2 3 4 5 6 7 8\n"), done.stderr


def test_the_names_of_a_state_are_horovods_and_persist() -> None:
    public = {name for name in dir(horovodlike.elastic.ObjectState()) if not name.startswith("_")}
    assert public == {*HOROVODS_METHODS, "persist"}


def test_a_hidden_method_can_still_be_called(tmp_path: Path) -> None:
    state = horovodlike.elastic.ObjectState(persist=1)
    with pytest.raises(ValueError, match="missing"):
        horovodlike.elastic.ObjectState.persist(state, str(tmp_path / "missing" / "state"))
    assert state.persist == 1


@pytest.mark.parametrize("name", HOROVODS_METHODS)
def test_a_name_of_a_method_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"an attribute of ObjectState cannot be called '{name}': it has one already"):
        horovodlike.elastic.ObjectState(**{name: 0})


def test_a_discovery_script_without_an_interpreter_runs_with_the_shell(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("for host in a b; do\n  echo $host:2\ndone\n")
    script.chmod(0o755)
    assert HostDiscoveryScript(str(script)).find() == {"a": 2, "b": 2}


# The hosts change after the first commit, which `--reset-limit 0` does not allow.
CHANGED = """
import horovod.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0)

@hvd.elastic.run
def train(state):
    while True:
        state.step += 1
        state.commit()
        if state.step == 1:
            open("hosts", "w").write("localhost:2")

train(state)
"""


@pytest.mark.slow
def test_a_change_of_hosts_beyond_the_limit_ends_the_job(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHANGED)
    (tmp_path / "hosts").write_text("localhost:1")
    script = tmp_path / "hosts.sh"
    script.write_text("cat hosts\n")
    script.chmod(0o755)
    words = ("-np", 1, "--host-discovery-script", "./hosts.sh", "--reset-limit", 0, "python", "train.py")
    done = run("-m", "horovodlike.launcher", "--compat", *words)
    assert done.returncode == 1
    assert "number of resets during elastic job exceeded limit: 0" in done.stderr
