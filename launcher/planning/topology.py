"""What this host has, as far as ranks are concerned."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from horovodlike.launcher.planning.gpus import Gpus

__all__ = ["Host", "detect_host", "local_names", "parse_cpu_list"]


@dataclass(frozen=True)
class Host:
    """The processors that this process may use, and the GPUs.

    Attributes:
        cpus: The logical processors of the affinity mask.
        cores: The same by physical core.
        numa_nodes: The same by NUMA node.
        quota: How many processors' time the control group allows, or None.
        gpus: The GPUs, or None if nobody has asked for them.
    """

    cpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[tuple[int, ...], ...]
    quota: float | None = None
    gpus: Gpus | None = None

    @property
    def usable_cpus(self) -> int:
        """How many logical processors can work at the same time."""
        return max(1, len(self.cpus) if self.quota is None else min(len(self.cpus), int(self.quota)))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Reads the kernel's ``0-3,8``."""
    cpus: list[int] = []
    for part in re.findall(r"\d+(?:-\d+)?", text):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def detect_host(root: Path = Path("/"), gpus: Gpus | None = None) -> Host:
    """Reads the affinity mask, the kernel's description of the processors, and the control group.

    Args:
        root: Where ``proc`` and ``sys`` are.
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
    """The smallest quota on the way from this process's control group to the root, in both versions."""
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


def local_names() -> frozenset[str]:
    """The names by which a user may call this host, whatever they resolve to."""
    name = socket.gethostname()
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]})
