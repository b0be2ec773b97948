"""`hvdrun --compat`: public Horovod style scripts run unchanged, and job scripts keep their options."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from horovodlike.config import WITHOUT_EFFECT
from horovodlike.launcher import cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "horovod").glob("*.py"))
HVDRUN = ("-m", "horovodlike.launcher")
HOROVODRUN = ("-c", "import sys; from horovodlike.launcher.cli import horovodrun; sys.exit(horovodrun())")

PLACE = """
import os
import horovod.torch as hvd
hvd.init()
told = [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
assert told == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()], told
print("rank", hvd.rank(), "of", hvd.size(), "by", hvd.__name__)
"""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem == "plain" else pytest.mark.thorough) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_a_script_written_for_horovod_learns(run: Run, path: Path) -> None:
    text = path.read_text()
    assert (
        re.search("^import horovod[.](torch|tensorflow.keras) as hvd$", text, re.MULTILINE)
        and "horovodlike" not in text.lower()
    )
    done = run(*HVDRUN, "--compat", "-np", 2, "python", path, TF_USE_LEGACY_KERAS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    [accuracy] = re.findall(r"^\[0\]<stdout>: final accuracy on 2 ranks: (0\.\d+|1\.0+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 0.92
    assert "[1]<stdout>" not in done.stdout, "only rank 0 prints"


def test_there_are_four_scripts() -> None:
    assert [path.stem for path in SCRIPTS] == ["accumulate", "amp", "legacy_keras", "plain"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["train.py"], marks=pytest.mark.slow),
        pytest.param(["python", "-u", "train.py"], marks=pytest.mark.thorough),
        pytest.param(["python", "-m", "train"], marks=pytest.mark.thorough),
        pytest.param(["sh", "-c", "python train.py"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_forms_of_a_command(run: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text(PLACE)
    done = run(*HVDRUN, "--compat", "-np", 2, *command)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<stdout>: rank {rank} of 2 by horovodlike.torch" for rank in (0, 1)
    ]


def test_without_compat_there_is_no_horovod(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch")
    done = run(*HVDRUN, "-np", 1, "train.py")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'horovod'" in done.stderr


@pytest.mark.slow
def test_a_function_that_imports_horovod(run: Run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import horovod.torch as hvd\ndef place():\n    return hvd.rank(), hvd.size()\n"
    )
    (tmp_path / "train.py").write_text(
        "import horovod, horovod.torch as hvd\n"
        "import beside\n"
        "def train(first, second):\n"
        "    import horovod.torch\n"
        "    assert horovod.torch is hvd\n"
        "    hvd.init()\n"
        "    return first + second, beside.place()\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(train, (1,), {'second': 2}, np=2))\n"
        "    print(horovod.runner.run(hvd.__class__, ('name',), num_proc=1, use_gloo=None))\n"
    )
    done = run("-m", "horovodlike.compat", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(3, (0, 2)), (3, (1, 2))]\n[<module 'name'>]\n"


def test_horovodruns_options_reach_the_ranks_or_are_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("controller: gloo\nparams: {cache_capacity: 7, torus_allreduce: true}\n")
    show = (
        "import os; print(*(os.environ['HOROVODLIKE_' + n] for n in ('FUSION_THRESHOLD', 'CYCLE_TIME', 'LOG_LEVEL')))"
    )
    (tmp_path / "train.py").write_text(f"import horovod\n{show}\nprint(os.environ['HOROVODLIKE_CACHE_CAPACITY'])\n")
    done = run(
        *(*HOROVODRUN, "-np", 1, "-H", "localhost:1", "--gloo", "--network-interfaces", "lo,eth0", "-p", 22),
        *("--fusion-threshold-mb", 32, "--cycle-time-ms", 5, "--log-level", "INFO"),
        *("--config-file", "job.yaml", "python", "train.py"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0]<stdout>: 33554432 5 INFO\n[0]<stdout>: 7\n"
    assert done.stderr.splitlines() == ["horovodrun: without effect here: --gloo, controller, params.torus_allreduce"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", 3, "-H", "localhost:1,other:1", "python", "x.py"], r"Requested more processes \(3\)"),
        (["python", "x.py"], "how many ranks.* horovodrun -np 2 python train.py"),
        (["-np", 2], "no command given.* horovodrun -np 2 python train.py"),
    ],
)
def test_what_horovodrun_cannot_do(run: Run, tmp_path: Path, words: list[object], message: str) -> None:
    (tmp_path / "x.py").touch()
    done = run(*HOROVODRUN, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"horovodrun: {message}", done.stderr)


def test_variables_without_effect_are_named_by_verbose_and_at_level_debug(run: Run) -> None:
    note = f"HOROVOD_THREAD_AFFINITY has no effect: {WITHOUT_EFFECT['HOROVOD_THREAD_AFFINITY']}"
    text = "import horovodlike.basics as b; b.init()"
    environ = {"HOROVOD_THREAD_AFFINITY": "0"}
    assert note not in run(*HVDRUN, "-np", 2, "python", "-c", text, **environ).stderr
    assert run(*HVDRUN, "-np", 2, "--verbose", "python", "-c", text, **environ).stderr.count(note) == 1
    done = run(*HVDRUN, "-np", 2, "--log-level", "debug", "python", "-c", text, **environ)
    assert done.stderr.count(f"[0]<stderr>: horovodlike debug: {note}\n") == done.stderr.count(note) == 1


def test_the_second_name_is_a_distribution_of_its_own() -> None:
    ours = (ROOT / "pyproject.toml").read_text()
    other = (ROOT / "packaging" / "horovodrun" / "pyproject.toml").read_text()
    assert "horovodrun" not in ours.split("[project.scripts]")[1].split("\n\n")[0]
    [target] = re.findall(r'^horovodrun = "(.*)"$', other, re.MULTILINE)
    assert EntryPoint("horovodrun", target, "console_scripts").load() is cli.horovodrun
    assert re.findall(r'^version = "(.*)"$', other, re.MULTILINE) == [version("horovodlike")]


def test_a_rank_that_fails_ends_the_job_with_its_own_traceback_and_code(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.common.util\ndef train():\n    1 / 0\ntrain()\n")
    done = run(*HVDRUN, "--compat", "-np", 1, "train.py")
    assert done.returncode == 1
    shown = re.findall(r'^\[0\]<stderr>:   File "([^"]*)", line (\d)', done.stderr, re.MULTILINE)
    assert shown == [(str(tmp_path / "train.py"), "4"), (str(tmp_path / "train.py"), "3")]
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)")
    assert run(*HVDRUN, "--compat", "-np", 1, "train.py").returncode == 7


FAILING = """
import os, signal, horovod

def train(how):
    if how == "raise":
        raise KeyError("the key")
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    for how in ("raise", "die"):
        try:
            horovod.run(train, (how,), num_proc=1)
        except RuntimeError as error:
            print(*str(error).splitlines()[:3], repr(error.__cause__), sep="|")
    try:
        horovod.run(train, num_proc=0)
    except ValueError as error:
        print(type(error).__name__)
"""


def test_the_failure_of_a_function_is_a_runtime_error_as_horovods(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    done = run("-m", "horovodlike.compat", "train.py")
    assert done.returncode == 0, done.stderr
    raised, died, refused = done.stdout.splitlines()
    words = "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
    words += "terminated. The first process to do so was:|Process name: 0|Exit code: "
    assert raised == f"{words}1|KeyError('the key')"
    assert died.startswith(f"{words}137|RankFailedError('rank 0 (pid ")
    assert refused == "UsageError"
