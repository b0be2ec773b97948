"""LSF and PBS: hosts from a file or a variable that the scheduler has written, agents by ssh."""

from collections.abc import Mapping
from pathlib import Path

from horovodlike.launcher.planning.hosts import HostSlots, merge_hosts, parse_hostfile
from horovodlike.launcher.schedulers import JobAllocation
from horovodlike.launcher.schedulers.ssh import Ssh


class Lsf(Ssh):
    """The scheduler LSF; see the module's docstring."""

    name = "LSF"
    job_variable = "LSB_JOBID"

    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """See :meth:`Scheduler.hosts`."""
        path = environ.get("LSB_DJOB_HOSTFILE")
        if path:
            return JobAllocation(self.name, parse_hostfile(Path(path).read_text(), path))
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        if not words:
            return None
        if len(words) % 2 or not all(number.isdigit() for number in words[1::2]):
            raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)!r} is no list of hosts and numbers")
        pairs = zip(words[::2], words[1::2], strict=True)
        return JobAllocation(self.name, merge_hosts(HostSlots(name, int(slots)) for name, slots in pairs))


class Pbs(Ssh):
    """The scheduler PBS; see the module's docstring."""

    name = "PBS"
    job_variable = "PBS_JOBID"

    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """See :meth:`Scheduler.hosts`."""
        path = environ.get("PBS_NODEFILE")
        return JobAllocation(self.name, parse_hostfile(Path(path).read_text(), path)) if path else None
