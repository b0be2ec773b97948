"""The layers of the launcher: none imports from one above it, and the agent needs the standard library only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import horovodlike.launcher
from horovodlike.launcher.agent import START_AGENT

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
