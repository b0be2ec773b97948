"""The names of `horovodlike`, that they are found when they are used, and what importing the package costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import horovodlike as hvd
from horovodlike import basics, errors, process_set
from horovodlike.arrays import functions, hierarchy, messages, rooted

CPU_SECONDS = 0.1
MEMORY_MIB = 25
FRAMEWORKS = {"numpy", "torch", "tensorflow", "keras", "jax", "cupy", "mpi4py"}
JOB = {"horovodlike.basics", "horovodlike.arrays", "horovodlike.launcher", "psutil", "cloudpickle"}

SIGNATURES = {
    "allreduce": "array, name, op, prescale_factor, postscale_factor, process_set",
    "allgather": "array, name, process_set",
    "broadcast": "array, root_rank, name, process_set",
    "reducescatter": "array, name, op, process_set, prescale_factor, postscale_factor",
    "alltoall": "array, splits, name, process_set",
}
IN_PLACE = ("allreduce", "broadcast")


def run(script):
    done = subprocess.run(
        [sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_the_names_are_those_of_the_modules():
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    modules = [
        *functions.__all__,
        *hierarchy.__all__,
        *messages.__all__,
        *rooted.__all__,
        *basics.__all__,
        *process_set.__all__,
        *classes,
    ]
    assert sorted(hvd.__all__) == sorted(
        [
            *modules,
            *("__version__", "collective_availability", "flight_recorder", "metrics", "report_progress", "run"),
            *("on_metrics", "start_timeline", "step", "stop_timeline"),
        ]
    )
    for module in (functions, hierarchy, messages, rooted, basics, process_set, errors):
        for name in getattr(module, "__all__", classes if module is errors else ()):
            assert getattr(hvd, name) is getattr(module, name), name
    assert set(hvd.__all__) <= set(dir(hvd))
    with pytest.raises(AttributeError, match="'horovodlike' has no attribute 'allreduce2'"):
        hvd.allreduce2  # noqa: B018  # it raises


def test_the_forms_of_an_operation_have_the_same_arguments():
    for name, parameters in SIGNATURES.items():
        forms = [name, f"{name}_async", *([f"{name}_", f"{name}_async_"] if name in IN_PLACE else [])]
        for form in forms:
            assert ", ".join(inspect.signature(getattr(hvd, form)).parameters) == parameters
            grouped = inspect.signature(getattr(hvd, f"grouped_{form}")).parameters
            assert ", ".join(grouped) == parameters.replace("array", "arrays", 1)


def test_everything_can_be_imported_at_once():
    assert run(
        "from horovodlike import *; import json; print(json.dumps([Average, Sum, Adasum, Min, Max, Product]))"
    ) == [*range(6)]


IMPORT = """
import json, sys, time
before, begin = set(sys.modules), time.process_time()
import horovodlike as hvd
seconds = time.process_time() - begin
with open("/proc/self/status") as status:
    peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
print(json.dumps([seconds, peak / 1024, sorted(set(sys.modules) - before)]))
"""


def test_importing_the_package_costs_little():
    seconds, peak, _ = map(min, zip(*(run(IMPORT) for _ in range(3)), strict=True))
    assert seconds < CPU_SECONDS
    assert peak < MEMORY_MIB
    modules = run(IMPORT)[2]
    assert not [name for name in modules if name.split(".")[0] in FRAMEWORKS or name in JOB]


def test_joining_a_job_needs_no_numpy():
    script = "import horovodlike as hvd, json, sys; hvd.init(); hvd.rank(); print(json.dumps([*sys.modules]))"
    assert not FRAMEWORKS & set(run(script))
