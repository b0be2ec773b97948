"""The layers of the launcher: none imports from one above it, and the agent needs the standard library only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovodlike.launcher
from horovodlike.launcher.agent import START_AGENT
from horovodlike.launcher.schedulers import Scheduler, registry
from horovodlike.launcher.schedulers.registry import SCHEDULERS

PACKAGE = "horovodlike.launcher"
LAYERS = (
    *("errors", "agent", "planning", "schedulers", "supervisor", "elastic", "options", "horovod_options"),
    *("launch", "tools", "run", "cli"),
)
FOLDER = Path(str(horovodlike.launcher.__file__)).parent


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_no_layer_imports_from_one_above_it() -> None:
    upwards = []
    for file in FOLDER.rglob("*.py"):
        layer = file.relative_to(FOLDER).parts[0].removesuffix(".py")
        above = LAYERS[LAYERS.index(layer) + 1 :] if layer in LAYERS else ()
        upwards += [
            (file.name, name) for name in imports(file) if name.removeprefix(f"{PACKAGE}.").split(".")[0] in above
        ]
    assert not upwards


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.name)
def test_a_scheduler_is_named_in_its_own_module_and_the_registry_only(scheduler: Scheduler) -> None:
    own = {sys.modules[type(scheduler).__module__].__file__, registry.__file__}
    words = {scheduler.name, scheduler.program, scheduler.node_name, *scheduler.prefixes} - {"ssh", ""}
    pattern = re.compile(rf"\b({'|'.join(words)})", re.IGNORECASE)
    assert [file for file in FOLDER.rglob("*.py") if str(file) not in own and pattern.search(file.read_text())] == []


def test_the_agent_needs_the_standard_library_only() -> None:
    program = f"""
import sys
sys.argv[:] = [{START_AGENT!r}]
source = open({START_AGENT!r}).read().replace("sys.exit(main())", "")
exec(compile(source, {START_AGENT!r}, "exec"), {{"__file__": {START_AGENT!r}, "__name__": "agent"}})
import {PACKAGE}.agent.host_probe
own = {{name for name in sys.modules if name.startswith("{PACKAGE}.") and name != "{PACKAGE}.agent"}}
print(sorted(name for name in own if not name.startswith("{PACKAGE}.agent.")))
"""
    words = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
