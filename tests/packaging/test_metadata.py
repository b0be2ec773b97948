"""The files that describe the package agree: on the version, the tools, the workflows, the targets of make."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import horovodlike

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
VERSION = re.findall(r'^version = "(.*)"$', PROJECT, re.MULTILINE)[0]


@pytest.fixture(scope="module")
def wheels():
    """The program of `make wheels`; its folder has the name of a library, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "packaging" / "wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements():
    lines = (ROOT / "packaging" / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def jobs():
    return [
        pytest.param(job, id=f"{name}-{each}") for name, flow in WORKFLOWS.items() for each, job in flow["jobs"].items()
    ]


def test_the_version_is_that_of_the_project():
    assert horovodlike.__version__ == importlib.metadata.version("horovodlike") == VERSION


def test_the_changelog_begins_with_the_version():
    assert re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION


def test_the_version_stands_in_no_other_file():
    sources = [path for part in ("horovodlike", "bindings", "launcher") for path in (ROOT / part).rglob("*")]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".h", ".cc", ".c", ".txt")}
    assert texts and not [path for path, text in texts.items() if VERSION in text]


def test_the_tools_are_pinned_and_those_that_the_project_asks_for():
    pinned = {each.name: each.specifier for each in requirements()}
    assert all(re.fullmatch(r"==[\w.]+", str(specifier)) for specifier in pinned.values())
    asked = re.findall(r'"(.*?)"', re.findall(r"^requires = \[(.*)\]$", PROJECT, re.MULTILINE)[0])
    assert asked
    for each in map(Requirement, asked):
        (version,) = pinned[each.name]
        assert each.specifier.contains(version.version), each


@pytest.mark.parametrize(
    ("platform", "within"),
    [
        ("manylinux_2_17_x86_64", True),
        ("manylinux_2_28_x86_64", True),
        ("manylinux_2_29_x86_64", False),
        ("manylinux_2_17_aarch64", False),
        ("linux_x86_64", False),
    ],
)
def test_a_wheel_that_needs_more_than_its_name_says(wheels, platform, within):
    assert wheels.is_within(platform, "x86_64") is within


def test_a_report_of_auditwheel_without_a_platform(wheels, monkeypatch):
    monkeypatch.setattr(wheels, "run", lambda *_: "This does not look like a\nplatform wheel")
    with pytest.raises(RuntimeError, match="names no platform for a.whl: This does not look like a platform wheel"):
        wheels.platform(Path("a.whl"))


def test_what_is_built_takes_the_place_of_other_versions(wheels, tmp_path):
    built, folder = tmp_path / "built", tmp_path / "dist"
    new = ["a-0.3.0.tar.gz", "a-0.3.0-cp310-abi3-manylinux_2_28_x86_64.whl"]
    old = [name.replace("0.3.0", version) for name in new for version in ("0.2.0", "0.3.0", "0.3.0.dev1+local")]
    others = ["a-0.2.0-cp310-abi3-manylinux_2_28_aarch64.whl", "ab-0.2.0.tar.gz", "a-0.2.0.zip"]
    for path in (*map(built.joinpath, new), *map(folder.joinpath, old + others)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.parent.name)
    for name in new:
        assert wheels.put(built / name, folder) == folder / name
    assert {path.name for path in folder.iterdir()} == {*new, *others}
    assert [(folder / name).read_text() for name in new] == ["built", "built"]


def test_a_step_that_fails_shows_its_output(wheels):
    with pytest.raises(RuntimeError, match=r"(?s)-c .*ended with 3:\nsaid\n\nno such"):
        wheels.run("-c", "import sys; print('said'); print('no such', file=sys.stderr); sys.exit(3)")


def test_there_are_the_workflows():
    assert WORKFLOWS.keys() == {"tests.yml", "nightly.yml", "wheels.yml", "docs.yml"}


@pytest.mark.parametrize("job", jobs())
def test_a_job_is_bounded_and_runs_what_exists(job):
    assert 0 < job["timeout-minutes"] <= 90 and job["steps"]
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert set(re.findall(r"^make (\S+)", step.get("run", ""), re.MULTILINE)) <= set(targets)
        assert re.fullmatch(r"[\w./-]+@\S+", step.get("uses", "a@b"))


def test_the_tests_run_on_each_python_that_the_project_names():
    versions = WORKFLOWS["tests.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    lowest = re.findall(r'^requires-python = "(.*)"$', PROJECT, re.MULTILINE)[0]
    assert f">={versions[0]}" == lowest and all(version in SpecifierSet(lowest) for version in versions)


def test_only_the_job_that_publishes_may_write_and_only_after_the_others():
    flow = WORKFLOWS["wheels.yml"]
    assert flow["permissions"] == {"contents": "read"} and flow[True]["push"] == {"tags": ["v*"]}  # YAML's `on`
    having = [name for name, job in flow["jobs"].items() if "permissions" in job]
    publish = flow["jobs"]["publish"]
    assert having == ["publish"] and publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "install" and flow["jobs"]["install"]["needs"] == "build"
    assert "refs/tags/" in publish["if"] and publish["environment"] == "pypi"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
