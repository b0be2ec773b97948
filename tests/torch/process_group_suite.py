"""Run the tests of process groups that PyTorch's wheel contains, with `hvd` in the place of Gloo, and with Gloo.

Each test is a job of forked ranks. A test names the backends that it is for: in the source of the tests the word `gloo`
becomes `hvd`. Prints a table of all tests that one of the two backends does not pass, and fails if `hvd` passes fewer.

    python tests/torch/process_group_suite.py --np 2,3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "hvd")
PASSED = "passed"
TIMEOUT_SECONDS = 60  # of one test; the longest takes 20


def load_tests(backend: str) -> types.ModuleType:
    """Return PyTorch's module of tests, in which `backend` has the place of Gloo."""
    from torch.testing._internal import common_distributed, distributed

    common_distributed.TIMEOUT_DEFAULT = TIMEOUT_SECONDS
    common_distributed.TIMEOUT_OVERRIDE.clear()
    path = Path(distributed.__path__[0]) / "distributed_test.py"
    source = path.read_text()
    if backend != "gloo":
        for names in common_distributed.DistTestCases.backend_feature.values():
            if "gloo" in names:
                names.add(backend)
        source = re.sub(r'"gloo"', f'"{backend}"', source.replace("dist.Backend.GLOO", f'"{backend}"'))
        # Those that Gloo has not got and MPI has: an alltoall of tensors of the CPU.
        source = source.replace('BACKEND != "mpi"', f'BACKEND not in ("mpi", "{backend}")')
        common_distributed.DistTestCases.backend_feature["plugin"].add(backend)  # it is available
    module = types.ModuleType("process_group_tests")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    if backend != "gloo":
        for listed in (module.PROFILING_SUPPORTED_BACKENDS, module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            listed.remove(backend)  # its events are not looked at: they are of another kind than those of Gloo
    return module


def make_case(module: Any) -> type[unittest.TestCase]:
    """Return the tests as a class, whose ranks are forked: a rank that imports PyTorch anew takes seconds."""
    import torch.multiprocessing

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


class Outcomes(unittest.TestResult):
    """The outcome of each test, by its name, and the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, tuple[str, str]] = {}

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        self.outcomes[test._testMethodName] = (outcome, why)
        print(test._testMethodName, outcome, why[-300:].replace("\n", " | "), file=sys.stderr, flush=True)

    def addSuccess(self, test: Any) -> None:  # noqa: N802, D102
        self._note(test, PASSED)

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802, D102
        self._note(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802, D102
        self._note(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure  # noqa: N815


def run(backend: str, pattern: str) -> dict[str, tuple[str, str]]:
    """Run the tests whose names match, with WORLD_SIZE ranks; return what became of each, and why."""
    case = make_case(load_tests(backend))
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if re.search(pattern, name)]
    result = Outcomes()
    unittest.TestSuite(case(name) for name in names).run(result)
    return result.outcomes


def rows(outcomes: dict[tuple[str, int], dict[str, tuple[str, str]]]) -> Iterator[str]:
    """Yield the lines of the table: tests which are not passed, or skipped, by both backends alike."""
    sizes = sorted({size for _, size in outcomes})
    yield "| test | ranks | Gloo | hvd |"
    yield "|---|---|---|---|"
    for size in sizes:
        gloo, hvd = outcomes["gloo", size], outcomes["hvd", size]
        for name in sorted(gloo):
            both = gloo[name][0], hvd.get(name, ("missing", ""))[0]
            if both[0] != both[1] or both[0] == "failed":
                yield f"| `{name}` | {size} | {both[0]} | {both[1]} |"


def main() -> int:
    """Run both backends, each in a process of its own; return 1 if `hvd` passes fewer tests than Gloo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", default="2,3", help="numbers of ranks")
    parser.add_argument("--only", default="", help="tests whose names match this expression")
    parser.add_argument("--backend", choices=BACKENDS, help="run this one here and write what became of each test")
    parser.add_argument("--output", type=Path, help="the file for that")
    args = parser.parse_args()
    if args.backend:
        args.output.write_text(json.dumps(run(args.backend, args.only)))
        return 0
    outcomes: dict[tuple[str, int], dict[str, tuple[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, args.np.split(",")):
            for backend in BACKENDS:
                output = Path(folder) / f"{backend}{size}.json"
                command = [sys.executable, __file__, "--backend", backend, "--only", args.only, "--output", str(output)]
                environment = {**os.environ, "WORLD_SIZE": str(size), "BACKEND": backend, "TEMP_DIR": folder}
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                outcomes[backend, size] = json.loads(output.read_text())
    print("\n".join(rows(outcomes)))
    fewer = 0
    for (backend, size), tests in outcomes.items():
        counts = Counter(outcome for outcome, _ in tests.values())
        print(f"{backend}, {size} ranks: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
        if backend == "hvd":
            gloo = sum(outcome == PASSED for outcome, _ in outcomes["gloo", size].values())
            fewer += counts[PASSED] < gloo
    return min(fewer, 1)


if __name__ == "__main__":
    sys.exit(main())
