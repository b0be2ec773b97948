"""Every option, key, argument and setting with good, bad and absurd values: a clear error or a start, in-process."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import horovodlike
from horovodlike import config
from horovodlike.launcher import cli, run
from horovodlike.launcher.agent.host_probe import why_unwritable
from horovodlike.launcher.elastic import elastic_job
from horovodlike.launcher.launch import launch
from horovodlike.launcher.options import ELASTIC_ARGUMENTS, OPTIONS
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.schedulers import mpirun
from horovodlike.launcher.supervisor import mpirun_job, node_job, static_job

PYTHON = sys.executable  # before a test changes it
HUGE = "99999999999999999999"
ABSURD = (
    "",
    "-1",
    "0",
    HUGE,
    "1" * 5000,
    "nan",
    "inf",
    "1e308",
    "\udcff\udcfe",
    "x" * 70000,
    "a\nb",
    "/none/x",
    "/",
    "²",
)

# By option: the words that go with it, a good value, a bad one. None: any text will do.
N, S = (("4", "many"), ("2.5", "soon"))
VALUES: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "--num-proc": ((), "2", "two"),
    "--config-file": ((), "good.yaml", "bad.yaml"),
    "--servers": ((), "2", "0"),
    "--server-module": (("--servers", "1"), "my_rules", "rules.py/"),
    "--output-filename": ((), "logs", "file"),
    "--show-ranks": ((), "0", "first"),
    "--bind-to": ((), "numa", "socket"),
    "--hosts": ((), "localhost:2", "localhost"),
    "--hostfile": ((), "hosts", "none"),
    "--nnodes": (("--node-rank", "0", "--rendezvous", "localhost:1", "--secret-key-file", "key"), "1", "one"),
    "--node-rank": (("--nnodes", "2", "--rendezvous", "localhost:1", "--secret-key-file", "key"), "1", "2"),
    "--rendezvous": (("--nnodes", "1", "--node-rank", "0", "--secret-key-file", "key"), "localhost:1", "localhost"),
    "--secret-key-file": (("--nnodes", "1", "--node-rank", "0", "--rendezvous", "localhost:1"), "key", "file"),
    "--ssh-port": ((), "22", "99999"),
    "--ssh-identity-file": ((), "key", None),
    "--ssh-options": ((), "-l user", "'"),
    "--network-interface": ((), "lo", None),
    "--mpi-args": (("--mpi",), "-v", "'"),
    "--min-np": ((), "1", "3"),
    "--max-np": ((), "4", "1"),
    "--host-discovery-script": ((), "./script", "./file"),
    "--discover": ((), "dns:localhost", "pods"),
    "--slots": (("--min-np", "1"), *N),
    "--reset-limit": (("--min-np", "1"), *N),
    "--blacklist-cooldown-range": (("--min-np", "1"), "1 2", "2 1"),
    "--chaos": ((), "plan.yaml", "bad.yaml"),
    "--monitor": ((), "8080", "x"),
    "--metrics-file": ((), "metrics.prom", None),
    "--start-timeout": ((), *S),
    "--network-timeout": ((), *S),
    "--elastic-timeout": ((), *S),
    "--discovery-timeout": ((), *S),
    "--heartbeat-timeout": ((), *S),
    "--grace-period": ((), *S),
    "--gpus-per-rank": ((), "0", "many"),
    "--fusion-threshold-mb": ((), *N),
    "--cycle-time-ms": ((), *S),
    "--cache-capacity": ((), *N),
    "--autotune-log-file": ((), "tuned.csv", "none/tuned.csv"),
    "--autotune-warmup-samples": ((), *N),
    "--autotune-steps-per-sample": ((), *N),
    "--stall-check-warning-time-seconds": ((), *S),
    "--stall-check-shutdown-time-seconds": ((), *S),
    "--timeline-filename": ((), "timeline.json", "none/timeline.json"),
    "--log-level": ((), "INFO", "loud"),
}
# Of horovodrun: accepted, and without effect whatever their value.
IGNORED = {
    *("--num-nccl-streams", "--gloo-timeout-seconds", "--autotune-bayes-opt-max-samples"),
    *("--autotune-gaussian-process-noise", "--thread-affinity", "--binding-args"),
}
# It starts no job, and goes with no other option: tests/monitor/test_attach.py.
ALONE = {"attach"}


class Started(BaseException):
    """Everything was checked, and the first process would start now."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the files that values name; what starts something raises."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "good.yaml": "params: {cycle_time_ms: 2}\n",
        "bad.yaml": "params: [\n",
        "plan.yaml": "[]\n",
        "hosts": "localhost slots=2\n",
        "key": "ab" * 32,
        "file": "",
        "script": "#!/bin/sh\necho localhost:2\n",
    }.items():
        Path(name).write_text(text)
        Path(name).chmod({"key": 0o600, "script": 0o755}.get(name, 0o644))

    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(static_job, "start_agents", start)
    monkeypatch.setattr(node_job, "_gather", start)
    monkeypatch.setattr(node_job, "connect_node", start)
    monkeypatch.setattr(elastic_job, "Driver", start)
    monkeypatch.setattr(mpirun_job, "_run", start)
    flavor = mpirun.Mpirun("mpirun", mpirun.Flavor.OPEN_MPI)
    monkeypatch.setattr(mpirun_job, "find_mpirun", lambda environ: flavor)
    return tmp_path


def options() -> Iterator[argparse.Action]:
    """The options of hvdrun and horovodrun that have a value."""
    for action in cli._make_parser("hvdrun", compat=True)._actions:
        if action.nargs != 0 and action.option_strings and action.dest not in ALONE:
            yield action


def name_of(action: argparse.Action) -> str:
    return next((name for name in action.option_strings if name in VALUES), action.option_strings[-1])


def outcome(words: list[str]) -> tuple[int, str]:
    """The exit code of hvdrun and what it says; 0 if it would start the ranks."""
    screen = io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")  # as standard error is
    with contextlib.redirect_stderr(screen):
        try:
            code: Any = cli.main([*words, PYTHON, "-c", "0"])
        except Started:
            code = 0
        except SystemExit as end:
            code = end.code
    screen.seek(0)
    said = screen.read()
    assert "Traceback" not in said
    return code, said


def words_of(action: argparse.Action, value: str) -> list[str]:
    more, *_ = VALUES.get(name_of(action), ((), "", None))
    number = [] if name_of(action) == "--num-proc" else ["-np", "2"]
    values = (value.split(" ") * 2)[:2] if action.nargs == 2 else None
    given = [name_of(action), *values] if values else [f"{name_of(action)}={value}"]
    compat = ["--compat"] if name_of(action) in IGNORED else []
    return [*compat, *number, *more, *given]


def test_every_option_has_values_here() -> None:
    names = {name_of(action) for action in options()}
    assert names == VALUES.keys() | IGNORED, "give a new option a good and a bad value in VALUES"
    assert {
        option.flag for option in OPTIONS if option.setting is not None and option.opposite is None
    } <= VALUES.keys()


@pytest.mark.parametrize("action", list(options()), ids=name_of)
def test_an_option(action: argparse.Action) -> None:
    name = name_of(action)
    _, good, bad = VALUES.get(name, ((), "x", None))
    code, said = outcome(words_of(action, good))
    assert code == 0, said
    for value in [*([] if bad is None else [bad]), *ABSURD]:
        code, said = outcome(words_of(action, value))
        assert code in ((2,) if value == bad else (0, 2)), (value[:20], said)
        if code == 2:
            names = {*action.option_strings, *(each.lstrip("-") for each in action.option_strings), "host input"}
            assert any(each in said for each in names), (value[:20], said[-300:])


@pytest.mark.parametrize("value", ["99999", "0", "-1", HUGE])
def test_a_port_of_ssh_is_checked_on_one_host_too(value: str) -> None:
    code, said = outcome(["-np", "2", f"-p={value}"])
    assert (code, said) == (2, f"hvdrun: -p {value} cannot be used: it must be an integer >= 1, and at most 65535\n")


@pytest.mark.parametrize("flag", ["--timeline-filename", "--autotune-log-file"])
@pytest.mark.parametrize(("path", "why"), [("none/x", "there is no folder none"), (".", "it is a folder")])
def test_files_are_checked_before_anything_starts(flag: str, path: str, why: str) -> None:
    message = f"hvdrun: {flag} {path} cannot be written: {why}; name a file in a folder that exists\n"
    assert outcome(["-np", "2", flag, path]) == (2, message)


def test_the_variable_that_names_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "none/t.json")
    code, said = outcome(["-np", "2"])
    assert (code, "HOROVOD_TIMELINE=none/t.json cannot be written" in said) == (2, True)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.usefixtures("folder")
def test_the_log_of_autotuning_is_written_where_rank_0_is(node: int) -> None:
    nodes = ["--nnodes", "2", "--node-rank", str(node), "--rendezvous", "localhost:1", "--secret-key-file", "key"]
    code, said = outcome(["-np", "2", *nodes, "--autotune-log-file", "none/log"])
    assert (code, "none/log cannot be written" in said) == ((2, True) if node == 0 else (0, False)), said


def test_a_file_may_be_a_link_to_one_that_is_still_to_be_written(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "later.json")
    assert why_unwritable(str(link)) == ""
    link.unlink()
    link.symlink_to(tmp_path / "none" / "later.json")
    assert why_unwritable(str(link)) == f"there is no folder {tmp_path}/none"


def flow(value: Any) -> str:
    """A value as YAML, in one line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


YAML = (None, True, -1, 0, int(HUGE), float("nan"), float("inf"), "", "x" * 9999, [], {}, [[1]])


@pytest.mark.parametrize("key", [option.key for option in OPTIONS if option.key])
def test_a_key_of_the_configuration_file(key: str, folder: Path) -> None:
    section, _, name = key.partition(".")
    for value in YAML:
        (folder / "c.yaml").write_text(f"{section}:\n  {name}: {flow(value)}\n")
        code, said = outcome(["-np", "2", "--config-file", "c.yaml"])
        assert code in (0, 2)
        assert code == 0 or key in said


@pytest.mark.parametrize(
    "text", ["2020-13-45", "params: {cycle_time_ms: 0b_}", "[" * 5000, "a: \0", "1" * 5000, "? [a]\n: 1"]
)
def test_files_that_are_no_configuration(text: str, folder: Path) -> None:
    (folder / "c.yaml").write_text(text)
    code, said = outcome(["-np", "2", "--config-file", "c.yaml"])
    assert (code, "c.yaml" in said) == (2, True)


@pytest.mark.parametrize("setting", list(config.SETTINGS.values()), ids=lambda setting: setting.name)
def test_a_setting_in_the_environment(setting: config.Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ABSURD:
        monkeypatch.setenv(setting.variable, value)
        code, said = outcome(["-np", "2"])
        assert code in (0, 2)
        assert code == 0 or setting.variable in said
    for value in (HUGE, "1e308", "inf", "nan"):
        if setting.type in (int, float):
            with pytest.raises(config.ConfigError, match=setting.variable):
                config.load({setting.variable: value})


ARGUMENTS = {*inspect.signature(horovodlike.run).parameters, *ELASTIC_ARGUMENTS} - {"func", "args", "kwargs", "horovod"}
WRONG = ("", "-1", HUGE, "\udcff", "x" * 9999, "a\nb", "/none/x", "/", -1, 10**30, float("nan"))
MORE_WRONG = (float("inf"), 1e308, [], {}, [1], {1: 2}, object(), b"\xff")


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_an_argument_of_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: JobSpec, *what: Any, **how: Any) -> Any:
        if spec.elastic is None:
            raise Started
        return launch(spec, *what, **how)

    monkeypatch.setattr(run, "launch", refuse)
    for value in (*WRONG, *MORE_WRONG):
        more: dict[str, Any] = {} if name in ("num_proc", "np", "hosts", "hostfile") else {"np": 2}
        if name in ELASTIC_ARGUMENTS - {"min_np", "min_num_proc"}:
            more["min_np"] = 1
        try:
            run.run(print, **{**more, name: value})
        except Started:
            pass
        except (ValueError, RuntimeError) as error:
            assert type(error).__module__.startswith("horovodlike."), error
            assert any(each in str(error) for each in (name, name.replace("_", "-"), "host input")), (
                repr(type(value)),
                error,
            )
