"""All that the documentation names exists: commands, options, files, settings, functions; and its example runs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image
from support.profiles import MS, MadeJob

import horovodlike.torch as hvd
from horovodlike import config
from horovodlike._engine.ops import DType
from horovodlike.launcher import options
from horovodlike.timeline import merge_profile

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HVDRUN = Path(sys.executable).parent / "hvdrun"
HVDRUN_RECORDS = HVDRUN.with_name("hvdrun-records")

# What `hvd` is in pages that are not about PyTorch.
FRAMEWORKS = {"tensorflow.md": "horovodlike.tensorflow", "arrays.md": "horovodlike", "records.md": "horovodlike"}
FRAMEWORKS |= {"parameter_server.md": "horovodlike", "monitor.md": "horovodlike"}

# Programs that users bring along, and scripts that stand for their own.
FOREIGN = {"torchrun", "mpirun", "mpiexec", "srun", "salloc", "sbatch", "openssl", "export", "mkdir", "umask", "py-spy"}
FOREIGN |= {"flux", "git", "ray", "spark-submit", "pytest", "ip", "ssh", "wg", "wg-quick"}
FOREIGN |= {"docker", "echo", "kubectl"}
USERS_SCRIPT = "train.py"

# Pages about another module than horovodlike.torch. Their names are looked at by the tests of that module.
OTHER_MODULES = {"keras.md"}

# A page with a section about each framework: its names are those of any of them, and all of its programs run.
PAGE_OF_SEVERAL = "uneven_batches.md"

# What hvdrun sets for scripts that read it.
PLACE = {f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")}
PLACE |= {"HOROVOD_HOSTNAME", "HOROVOD_SPARK_START_TIMEOUT"}

# Variables that are no settings of the ranks: the user gives them.
SECRETS = {"HOROVODLIKE_SECRET_KEY", "HOROVODLIKE_SECRET_KEY_FILE", "HOROVODLIKE_FAULT_PLAN"}
MEETING = {
    *("HOROVODLIKE_RENDEZVOUS_ADDR", "HOROVODLIKE_RENDEZVOUS_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
}


def blocks(page: Path, language: str) -> Iterator[str]:
    for block in re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        yield textwrap.dedent(block)


def commands() -> list[tuple[str, str]]:
    found = [(page.name, line) for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    return [(page, line.strip()) for page, line in found if line.strip()]


@pytest.fixture(scope="module")
def hvdrun_help() -> str:
    return subprocess.run([HVDRUN, "--help"], capture_output=True, text=True, check=True).stdout


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert words[0] in targets


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    for extra in re.findall(r"\[([a-z,]+)\]", words[1]):
        assert set(extra.split(",")) <= set(extras)


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        module = ROOT / words[1].replace("horovodlike.tensorflow", "bindings.tensorflow").replace(".", "/")
        assert (module / "__main__.py").exists() or '__name__ == "__main__"' in module.with_suffix(".py").read_text()
    elif words[0] != "-c":
        assert words[0] == USERS_SCRIPT or (ROOT / words[0]).exists()


def check_hvdrun(words: list[str], help_text: str) -> None:
    while words and words[0].startswith("-"):
        option, has_value, _ = words.pop(0).partition("=")
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text), f"hvdrun has no {option}"
        if option == "--attach":
            check_attach(words[0], words[1:])
            return
        if not has_value and option not in (
            "--check-build",
            "--compat",
            "--verbose",
            "--help",
            "--autotune",
            "--selftest",
            "--mpi",
            "--no-detect",
            "--monitor",
        ):
            words.pop(0)
    if words and words[0] == "python":
        check_python(words[1:])
    elif words:
        check_python(words)


def check_attach(pid: str, words: list[str]) -> None:
    command = [HVDRUN, "--attach", pid, words[0], "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(word in shown for word in words if word.startswith("-"))


def test_pages_have_commands() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize(("page", "line"), commands())
def test_command_exists(page: str, line: str, hvdrun_help: str) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        check_make(words)
    elif program == "pip":
        check_pip(words)
    elif program == "python":
        check_python(words)
    elif program in ("hvdrun", "horovodrun"):
        check_hvdrun(words, hvdrun_help)
    elif program == "hvdrun-records":
        shown = subprocess.run([HVDRUN_RECORDS, "--help"], capture_output=True, text=True, check=True).stdout
        assert all(word in shown for word in words if word.startswith("-"))
    else:
        assert program in FOREIGN, f"{page} uses {program}"


def test_options_of_hvdrun_in_the_table_exist(hvdrun_help: str) -> None:
    rows = re.findall(r"^\| `(-[\w-]+)", (ROOT / "docs" / "users" / "launching.md").read_text(), flags=re.MULTILINE)
    assert len(rows) >= 5
    for option in rows:
        assert option in hvdrun_help


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_mentioned_exist(page: Path) -> None:
    known = {variable for setting in config.SETTINGS.values() for variable in setting.variables}
    known |= PLACE | SECRETS | MEETING | config.WITHOUT_EFFECT.keys()
    assert set(re.findall(r"\bHOROVOD(?:LIKE)?_[A-Z_]*[A-Z]\b", page.read_text())) <= known


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHER_MODULES], ids=lambda page: page.name)
def test_functions_that_are_mentioned_exist(page: Path) -> None:
    modules = [importlib.import_module(FRAMEWORKS.get(page.name, hvd.__name__))]
    if page.name == PAGE_OF_SEVERAL:
        modules.append(importlib.import_module("horovodlike.tensorflow"))
    for name in set(re.findall(r"\bhvd\.([A-Za-z_]+)", page.read_text())):
        assert any(hasattr(module, name) for module in modules), f"{page.name} mentions hvd.{name}"


def test_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "users" / "settings.md").read_text()
    assert config.render_markdown() in page and config.render_without_effect() in page, "run `make docs`"


def test_the_configuration_file_has_every_key() -> None:
    (text,) = blocks(ROOT / "docs" / "users" / "launching.md", "yaml")
    content = yaml.safe_load(text)
    assert {f"{section}.{key}" for section, keys in content.items() for key in keys} == {
        option.key for option in options.OPTIONS if option.key is not None
    }
    assert options.from_mapping(content, "launching.md")["HOROVODLIKE_FUSION_THRESHOLD"] == str(64 << 20)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_is_well_formed(page: Path) -> None:
    for block in blocks(page, "yaml"):
        assert all(yaml.safe_load_all(block))


@pytest.mark.slow
def test_readme_script_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    assert [*blocks(ROOT / "docs" / "index.md", "python")] == [script]
    (tmp_path / "train.py").write_text(script)
    ((command, *printed),) = (block.splitlines() for block in blocks(ROOT / "README.md", "text"))
    assert command == "$ hvdrun -np 2 python train.py"
    done = subprocess.run(
        [HVDRUN, "-np", "2", sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == printed


@pytest.mark.parametrize(
    "page",
    [
        "arrays.md",
        pytest.param("asynchronous.md", marks=pytest.mark.slow),
        "data_parallel.md",
        pytest.param("parameter_server.md", marks=pytest.mark.slow),
        "settings.md",
    ],
)
def test_the_blocks_of_a_page_run_as_one_script(page: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks(ROOT / "docs" / "users" / page, "python")))
    command = [HVDRUN, "-np", "2", sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_section_about_the_training_loop_runs_as_one_script(tmp_path: Path) -> None:
    section = re.split(r"^## ", (ROOT / "docs" / "users" / "trainers.md").read_text(), flags=re.MULTILINE)[1]
    assert section.startswith("`hvd.Engine`")
    (tmp_path / "train.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)))
    command = [HVDRUN, "-np", "2", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_about_records_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "users" / "records.md"
    for number in range(70):
        path = tmp_path / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    (tmp_path / "train.py").write_text("\n".join(blocks(page, "python")))
    (commands_of_page,) = blocks(page, "sh")
    for line in commands_of_page.splitlines()[1:]:  # the first one installs
        program, *words = shlex.split(line)
        words = [sys.executable if word == "python" else word for word in words]
        command = [HVDRUN.with_name(program), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "images-00000-of-00001.parquet").exists()


def test_the_page_about_profiles_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "users" / "profiling.md"
    job = MadeJob(["a", "a"], delays={1: 20 * MS})
    merge_profile(job.write(tmp_path / "profile"))
    (tmp_path / "timeline.json").write_text(json.dumps(job.timeline(0)))
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("python")]
    lines += re.findall(r"`(python -m horovodlike\.timeline [^`]*)`", page.read_text())
    assert len(lines) == 3
    printed = []
    for line in lines:
        command = [sys.executable, *shlex.split(line)[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    (example,) = blocks(page, "text")
    for head in ("rank ", "late rank ", "tensor ", "self time of "):
        assert (
            next(each for each in example.splitlines() if each.startswith(head)).split()
            == next(each for each in printed[0].splitlines() if each.startswith(head)).split()
        )


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [pytest.param([0], id="torch"), pytest.param([1, 2], id="tensorflow and keras")])
def test_the_page_about_uneven_batches_runs(tmp_path: Path, numbers: list[int]) -> None:
    scripts = list(blocks(ROOT / "docs" / "users" / "uneven_batches.md", "python"))
    script = tmp_path / "train.py"
    script.write_text("\n".join(scripts[number] for number in numbers))
    command = [HVDRUN, "-np", "2", sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# What the blocks of quickstart.md have before: data, and a model for each.
OF_QUICKSTART = """
import torch
train_set = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(0, 3, (512,)))
model = torch.nn.Linear(8, 3)
loss, epoch = torch.zeros(()), 0
"""


def test_the_blocks_of_the_quick_start_run(tmp_path: Path) -> None:
    start, share, scale, broadcast, wrap, *report_and_recipes = blocks(
        ROOT / "docs" / "users" / "quickstart.md", "python"
    )
    parts = [start]
    for block in report_and_recipes:
        parts += [OF_QUICKSTART, share, scale, broadcast, *([] if "DistributedOptimizer(" in block else [wrap]), block]
        if "checkpoint.pt" in block:
            parts += [block, "assert first == 3"]
    (tmp_path / "train.py").write_text("\n".join(parts))
    command = [HVDRUN, "-np", "2", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# What the scripts of keras.md have before: data, and a model.
OF_KERAS = """
import keras, numpy as np, tensorflow as tf
x, y = np.random.default_rng(1).standard_normal((16, 4)), np.zeros((16, 3))
dataset = tf.data.Dataset.range(9)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
"""


@pytest.mark.slow
def test_the_page_about_keras_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OF_KERAS + "\n".join(blocks(ROOT / "docs" / "users" / "keras.md", "python")))
    command = [HVDRUN, "-np", "2", sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, f"{page.name}", "exec")


def test_no_command_of_the_makefile_imports_two_frameworks() -> None:
    """TensorFlow and Triton, which PyTorch's compiler imports, can abort in one process."""
    commands = re.findall(r"-c '([^']*)'", (ROOT / "Makefile").read_text())
    assert any("torch" in command for command in commands) and any("tensorflow" in command for command in commands)
    assert not any("torch" in command and "tensorflow" in command for command in commands)


@pytest.mark.slow
def test_two_frameworks_in_the_order_of_the_page() -> None:
    (block,) = blocks(ROOT / "docs" / "users" / "troubleshooting.md", "python")
    subprocess.run([sys.executable, "-c", block], timeout=120, check=True)


def test_make_help_lists_every_target() -> None:
    make = shutil.which("make")
    assert make is not None
    shown = subprocess.run([make, "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[0]
    for target in targets.replace("\\", "").split():
        assert f"make {target} " in shown


def test_every_name_of_horovods_is_there_or_said_to_be_missing():
    table = (ROOT / "docs" / "users" / "horovod_names.md").read_text()
    names: set[str] = set()
    for row in re.findall(r"^\| `.*$", table, flags=re.MULTILINE):
        listed, tests, differs = (cell.strip() for cell in row.strip("|").split("|"))
        row_names = set(re.findall(r"`(\w+)`", listed))
        names |= row_names
        if "not in this release" in differs:
            assert not any(hasattr(hvd, name) for name in row_names)
            continue
        assert all(hasattr(hvd, name) for name in row_names), row_names
        assert tests, row_names
        for test in re.findall(r"`(\w+)`", tests):
            assert list((ROOT / "tests").rglob(f"{test}.py")), test
    new = set(re.findall(r"`(\w+)`", table.split("New are")[1].split(";")[0]))
    assert names | new >= set(hvd.__all__)


def test_the_page_of_data_types_has_those_of_the_engine() -> None:
    page = (ROOT / "docs" / "users" / "arrays.md").read_text().partition("## Data types")[2]
    cells = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(DType.__members__)


def test_the_messages_of_the_page_are_those_of_the_source() -> None:
    """At least four words of each message stand in the source one after the other."""
    files = [path for part in ("horovodlike", "bindings", "launcher") for path in (ROOT / part).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".cc", ".h")]
    source = " ".join(re.sub(r'"\s*f?"', "", " ".join(texts)).split())
    page = (ROOT / "docs" / "users" / "messages.md").read_text()
    messages = [text.split() for text in re.findall(r"^\| `((?:\w+: |hvdrun|node-1).*?)` \|", page, flags=re.MULTILINE)]
    assert len(messages) > 30
    for words in messages:
        if words[1] == "Mismatched":  # it is put together of single words, and other tests compare it
            continue
        assert any(" ".join(words[at : at + 4]) in source for at in range(len(words) - 3)), " ".join(words)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_the_page_about_model_parallelism_runs(tmp_path: Path, framework: str) -> None:
    *of_torch, of_keras = blocks(ROOT / "docs" / "users" / "model_parallel.md", "python")
    script = tmp_path / "train.py"
    script.write_text("\n".join(of_torch) if framework == "torch" else of_keras)
    command = [HVDRUN, "-np", "4", sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if framework == "torch":
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
        assert len(losses) == 4 and max(losses) < 2.0


def test_a_script_of_torch_distributed_runs_without_a_launcher(tmp_path: Path) -> None:
    _, alone = blocks(ROOT / "docs" / "users" / "torch_distributed.md", "python")
    command = [sys.executable, "-c", alone]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout == "rank 0 of 1\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(0, "2 ranks have trained"), (1, " of 2\n")])
def test_the_scripts_of_torch_distributed_run(tmp_path: Path, number: int, expected: str) -> None:
    (tmp_path / "train.py").write_text([*blocks(ROOT / "docs" / "users" / "torch_distributed.md", "python")][number])
    for words in (
        [HVDRUN, "-np", "2", sys.executable],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ):
        done = subprocess.run(
            [*words, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 and done.stdout.count(expected) == 2, done.stdout + done.stderr
