"""Detects the processors and GPUs of a host, and checks that the job can run there. Standard library only."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovodlike.launcher.agent.external import ask
from horovodlike.launcher.agent.protocol import from_native, to_native

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE_S = 20.0
_NAME = re.compile(r"[0-9]+|(GPU|MIG)-[\w/-]+", re.ASCII)
_LISTED = re.compile(r"^(GPU |\s+MIG ).*\(UUID: ((?:GPU|MIG)-[\w/-]+)\)\s*$", re.ASCII | re.MULTILINE)
# Runs in its own process: CUDA must not be initialised in one that forks, nor in one that lives as long as the job.
_COUNT = """
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv[1]]
from horovodlike._engine.gpu_libraries import find
found = find()
print(found.num_gpus)
print(found.why_no_cuda)
"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that the ranks of a host may use.

    Attributes:
        names: Their names in ``CUDA_VISIBLE_DEVICES``: numbers, or UUIDs of GPUs or of their MIG instances.
        source: The source of this list, or the reason why it is empty.
    """

    names: tuple[str, ...]
    source: str


def find_gpus(environ: Mapping[str, str]) -> Gpus:
    """Find the GPUs of this host without initialising CUDA in this process.

    If ``CUDA_VISIBLE_DEVICES`` is set, they are the GPUs listed there, since a scheduler or the user has chosen them.
    Else they are all GPUs that nvidia-smi lists: its UUIDs do not depend on the order of devices, and also name MIG
    instances. Without nvidia-smi, they are numbered up to the count of the CUDA driver.

    Args:
        environ: The environment of the ranks.
    """
    visible = environ.get(VISIBLE)
    if visible is not None:
        return _listed(visible)
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    return _ask_driver(environ) if program is None else _ask_nvidia_smi(program, environ)


def _listed(visible: str) -> Gpus:
    words = [word.strip() for word in visible.split(",")]
    names = tuple(itertools.takewhile(_NAME.fullmatch, words))  # as CUDA does, end the list at the first invalid name
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return Gpus((), f"{VISIBLE}={visible} names {twice} twice, which CUDA refuses")
    return Gpus(names, f"{VISIBLE}={visible}")


def _ask_nvidia_smi(program: str, environ: Mapping[str, str]) -> Gpus:
    output, trouble = _run([program, "-L"], environ)
    if trouble:
        return Gpus((), trouble)
    names: list[str] = []
    whole = None  # the GPU that was listed last; MIG instances that follow replace it
    for kind, uuid in _LISTED.findall(output):
        if kind == "GPU ":
            whole = uuid
            names.append(uuid)
        else:
            names = [*(name for name in names if name != whole), uuid]
    return Gpus(tuple(names), f"{program} -L lists {len(names) or 'none'}")


def _ask_driver(environ: Mapping[str, str]) -> Gpus:
    packages = str(Path(__file__).resolve().parents[3])
    output, trouble = _run([sys.executable, "-c", _COUNT, packages], environ)
    if trouble:
        return Gpus((), f"there is no nvidia-smi, and the GPUs cannot be counted: {trouble}")
    number, why, *_ = [*output.splitlines(), "", ""]
    source = f"there is no nvidia-smi, and {why}" if why else f"the CUDA driver counts {number}"
    return Gpus(tuple(map(str, range(int(number)))), source)


def _run(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Run a program; return its output, and the error if there was one."""
    try:
        answer = ask(words, _PATIENCE_S, environ)
    except OSError as error:
        return "", f"{words[0]} cannot be executed: {error.strerror}"
    if answer.trouble:
        return "", f"{words[0]} has not answered: {answer.trouble}"
    out, err = (text.decode(errors="replace") for text in (answer.out, answer.err))
    if answer.status != 0:
        said = (out + err).strip().splitlines()
        return "", f"{words[0]} ended with {answer.status}: {said[-1] if said else 'it said nothing'}"
    return out, ""


@dataclass(frozen=True)
class Host:
    """The processors that this process may use, and the GPUs.

    Attributes:
        cpus: The logical processors of the affinity mask.
        cores: These processors, grouped by physical core.
        numa_nodes: These processors, grouped by NUMA node.
        quota: The CPU time that the control group allows, as a number of processors; None without a limit.
        gpus: The GPUs, or None if they were not asked for.
    """

    cpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[tuple[int, ...], ...]
    quota: float | None = None
    gpus: Gpus | None = None

    @property
    def usable_cpus(self) -> int:
        """The number of logical processors that can work at the same time."""
        return max(1, len(self.cpus) if self.quota is None else min(len(self.cpus), int(self.quota)))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a list of processors as the kernel writes it, such as ``0-3,8``."""
    cpus: list[int] = []
    for part in re.findall(r"\d+(?:-\d+)?", text):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def detect_host(root: Path = Path("/"), gpus: Gpus | None = None) -> Host:
    """Read the affinity mask, the kernel's description of the processors, and the control group.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
        gpus: The GPUs, if they have been looked for.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    system = root / "sys/devices/system"
    cores = {_allowed(_read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list"), cpus) or (cpu,) for cpu in cpus}
    nodes = {_allowed(_read(path), cpus) for path in (system / "node").glob("node[0-9]*/cpulist")} - {()}
    return Host(cpus, tuple(sorted(cores)), tuple(sorted(nodes)) or (cpus,), _quota(root), gpus)


def _allowed(text: str, cpus: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(cpu for cpu in parse_cpu_list(text) if cpu in cpus)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _quota(root: Path) -> float | None:
    """Return the smallest quota of this process's control groups and their ancestors, in cgroup v1 and v2."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            quotas += [_quota_v2(path) for path in _groups(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            for mount in (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"):
                quotas += [_quota_v1(path) for path in _groups(mount, group)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(mount: Path, group: str) -> list[Path]:
    path = mount / group.strip("/")
    return [path, *(parent for parent in path.parents if parent.is_relative_to(mount))]


def _quota_v2(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


@dataclass(frozen=True)
class HostDescription:
    """A host, as its agent sees it.

    Attributes:
        version: The version of horovodlike there.
        host: Its processors, and its GPUs if they were asked for.
        seen_from: The addresses of the launcher and of this host, as the host's ssh server sees them; None without ssh.
        problems: The reasons why the job cannot run there; empty if it can.
        free_port: A port that no process there uses.
    """

    version: str
    host: Host
    seen_from: tuple[str, str] | None
    problems: tuple[str, ...]
    free_port: int = 0


def find_free_port() -> int:
    """Return a port that no process of this host listens at."""
    with socket.create_server(("", 0), family=socket.AF_INET) as listener:
        return int(listener.getsockname()[1])


def has_served(port: int) -> bool:
    """Return whether a TCP connection to a port of this host is open, or was less than a minute ago."""
    end = f":{port:04X}"
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            if any(row[1].endswith(end) or row[2].endswith(end) for row in rows):  # the local and the remote address
                return True
    return False


def installed_version() -> str:
    """Return the version of the package that this file belongs to, whether or not it is on the search path."""
    packages = str(Path(__file__).resolve().parents[3])
    found = importlib.metadata.Distribution.discover(name="horovodlike", path=[packages])
    return next((distribution.version for distribution in found), "of unknown version")


def encode_needs(cwd: str, program: str, gpus: bool = False, files: Sequence[str] = ()) -> dict[str, Any]:
    """Encode the argument of :func:`describe`: the ranks' folder and program, GPU use, and the files they write."""
    text = [from_native(os.fsencode(each)) for each in (cwd, program, *files)]
    return {"cwd": text[0], "program": text[1], "gpus": gpus, "files": text[2:]}


def describe(needs: Mapping[str, Any]) -> dict[str, Any]:
    """Describe this host, in the form that :func:`decode_description` reads."""
    cwd, program = (os.fsdecode(to_native(needs[name])) for name in ("cwd", "program"))
    words = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "version": installed_version(),
        "host": dataclasses.asdict(detect_host(gpus=find_gpus(os.environ) if needs["gpus"] else None)),
        "seen_from": [words[0], words[2]] if len(words) == 4 else None,
        "problems": _problems(cwd, program, [os.fsdecode(to_native(each)) for each in needs["files"]]),
        "free_port": find_free_port(),
    }


def _problems(cwd: str, program: str, files: Sequence[str]) -> list[str]:
    if not os.path.isdir(cwd):
        return [f"there is no folder {cwd}, in which hvdrun was started; start it in one that all hosts have"]
    path = os.path.join(cwd, program)
    if shutil.which(path) is None:
        return [f"there is no program {path}, which the ranks are to execute; install it there too"]
    paths = [os.path.join(cwd, file) for file in files]
    return [f"{path} cannot be written: {trouble}" for path in paths if (trouble := why_unwritable(path))]


def _decode_gpus(value: Any) -> Gpus | None:
    return None if value is None else Gpus(tuple(map(str, value["names"])), str(value["source"]))


def decode_description(value: Any) -> HostDescription:
    """Read the result of :func:`describe`.

    Raises:
        ValueError: The value has another form: the agent is of another version.
    """
    try:
        fields = dict(value["host"])
        host = Host(
            cpus=tuple(fields["cpus"]),
            cores=tuple(map(tuple, fields["cores"])),
            numa_nodes=tuple(map(tuple, fields["numa_nodes"])),
            quota=fields["quota"],
            gpus=_decode_gpus(fields.get("gpus")),
        )
        client, server = value["seen_from"] or (None, None)
        seen_from = None if client is None else (str(client), str(server))
        problems, free_port = tuple(map(str, value["problems"])), int(value.get("free_port", 0))
        return HostDescription(str(value["version"]), host, seen_from, problems, free_port)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its description makes no sense ({type(error).__name__})") from None


def why_unwritable(path: str) -> str:
    """Return why a file cannot be written on this host, or an empty string; create nothing."""
    if os.path.islink(path):
        path = os.path.realpath(path)
    folder = os.path.dirname(path) or os.curdir
    try:
        if not os.path.isdir(folder):
            return f"there is no folder {folder}"
        os.lstat(path)
    except FileNotFoundError:
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write to the folder {folder}"
    except OSError as error:
        return error.strerror or str(error)
    if os.path.isdir(path):
        return "it is a folder"
    return "" if os.access(path, os.W_OK) else "no permission to write it"
