"""Print the way of one small allreduce through the core: python tests/native/operation_path.py.

It runs two ranks on a core without optimisation whose functions report their entry. The functions that rank 1, which
has no coordinator, enters between enqueue and result are listed in the order of their first entry. Translation units,
and the changes of folder in that order, are those of functions in source files: those in headers belong to no unit.
`base` is not counted. Operations differ in where a rank waits: the one in the middle is shown. Needs `make dev`.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "horovodlike" / "native"
BUILD = ROOT / "build" / "path"
TRACE = BUILD / "trace.txt"
MOST_UNITS = 24
MOST_CHANGES = 32

NUM_WARMUPS = 50  # after which the request is known by its id, and all memory is there
NUM_TRACED = 25
RECORDER = """
static void *entered[1 << 16];
static int num_entered, is_active;
void __cyg_profile_func_enter(void *function, void *caller) {
  if (!__atomic_load_n(&is_active, __ATOMIC_SEQ_CST)) return;
  int at = __atomic_fetch_add(&num_entered, 1, __ATOMIC_SEQ_CST);
  if (at < 1 << 16) entered[at] = function;
}
void __cyg_profile_func_exit(void *function, void *caller) {}
void start_trace(void) { num_entered = 0; __atomic_store_n(&is_active, 1, __ATOMIC_SEQ_CST); }
int stop_trace(void ***functions) {
  __atomic_store_n(&is_active, 0, __ATOMIC_SEQ_CST);
  *functions = entered;
  return num_entered < 1 << 16 ? num_entered : 1 << 16;
}
"""


def build() -> None:
    """Build the core, and the library that records entries, or what has changed of them since the last call."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = "-O0 -g1 -finstrument-functions -finstrument-functions-exclude-file-list=/usr/"
    options = ["-DHVL_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={flags}"]
    subprocess.run(["cmake", "-S", CORE, "-B", BUILD, "-G", "Ninja", *options], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", BUILD], check=True, stdout=sys.stderr)
    compiler = ["cc", "-shared", "-fPIC", "-o", BUILD / "recorder.so", "-x", "c", "-"]
    subprocess.run(compiler, input=RECORDER, text=True, check=True)


def run_rank() -> None:
    """Run one of the ranks; rank 1 writes a line for each operation: the addresses of the functions, in order."""
    from horovodlike import basics  # noqa: PLC0415 - the parent process runs without it
    from horovodlike._engine.ops import wait_all  # noqa: PLC0415
    from horovodlike._engine.requests import Request, RequestList  # noqa: PLC0415
    from horovodlike._engine.types import DType, Kind  # noqa: PLC0415

    recorder = ctypes.CDLL(str(BUILD / "recorder.so"))
    functions = ctypes.POINTER(ctypes.c_void_p)()
    basics.init()
    mapped = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "libhorovodlike" in line)
    base = int(mapped.split("-")[0], 16)
    data = (ctypes.c_float * 256)()
    requests = RequestList([Request(Kind.ALLREDUCE, "traced", [(DType.float32, (256,))])])
    lines = []
    for _ in range(NUM_WARMUPS + NUM_TRACED):
        handles: list[int] = []
        recorder.start_trace()
        requests.enqueue_inplace([ctypes.addressof(data)], handles)
        wait_all(handles)
        count = recorder.stop_trace(ctypes.byref(functions))
        lines.append(" ".join(f"{each - base:#x}" for each in dict.fromkeys(functions[:count])))
    if basics.rank() == 1:
        TRACE.write_text("\n".join(lines[NUM_WARMUPS:]))
    basics.shutdown()


def places_of(addresses: list[str]) -> dict[str, tuple[str, str]]:
    """Return the source file, relative to the core, and the name of each function."""
    command = ["addr2line", "-f", "-C", "-e", BUILD / "libhorovodlike.so"]
    lines = subprocess.run(command, input="\n".join(addresses), capture_output=True, text=True, check=True).stdout
    names, files = lines.splitlines()[::2], lines.splitlines()[1::2]
    found = {}
    for address, name, file in zip(addresses, names, files, strict=True):
        path = Path(os.path.realpath(file.rsplit(":", 1)[0]))
        if path.is_relative_to(CORE) and path.relative_to(CORE).parts[0] != "base":
            found[address] = str(path.relative_to(CORE)), name
    return found


def main() -> int:
    build()
    environ = {**os.environ, "LD_LIBRARY_PATH": str(BUILD), "LD_PRELOAD": str(BUILD / "recorder.so")}
    command = [Path(sys.executable).parent / "hvdrun", "-np", "2", sys.executable, __file__, "--rank"]
    subprocess.run(command, env=environ, check=True)
    traces = [line.split() for line in TRACE.read_text().splitlines()]
    places = places_of(sorted({address for trace in traces for address in trace}))
    paths = [[places[address] for address in trace if address in places] for trace in traces]

    counts = []
    for index, path in enumerate(paths):
        sources = [file for file, _ in path if file.endswith(".cc")]
        counts.append((len([*groupby(Path(file).parent for file in sources)]) - 1, len(set(sources)), index))
    changes, units, index = statistics.median_low(counts)
    for folder, entered in groupby(paths[index], key=lambda place: Path(place[0]).parent):
        print(f"{folder}/")
        for file, of_file in groupby(entered, key=lambda place: place[0]):
            print(f"  {Path(file).name}: {', '.join(name for _, name in of_file)}")
    print(f"{len(paths[index])} functions of {len({file for file, _ in paths[index]})} files, in this one")
    print(f"{units} translation units (at most {MOST_UNITS}), {changes} changes of folder (at most {MOST_CHANGES})")
    print(f"all operations, units and changes: {sorted((units, changes) for changes, units, _ in counts)}")
    return int(units > MOST_UNITS or changes > MOST_CHANGES)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        run_rank()
    else:
        sys.exit(main())
