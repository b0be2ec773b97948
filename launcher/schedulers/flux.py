"""Flux: hosts from ``flux resource list``, agents by ``flux run``.

An instance of Flux, as ``flux batch`` and ``flux alloc`` start it, has hosts of its own. No variable holds them; only
Flux's commands list them, says flux-environment(7). The agent of a host is a job of the instance, which takes the whole
host. ``flux exec`` starts processes without a job, as flux-exec(1) advises for tools, but it prints an agent's output
only up to the next zero byte, and each frame has zero bytes. ``flux run`` passes all bytes on, in base64 where they are
not text (RFC 24 of Flux), and with ``--unbuffered`` without delay.
"""

from collections import Counter
from collections.abc import Mapping

from horovodlike._bootstrap.hostlist import expand_hosts
from horovodlike.launcher.errors import counted
from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.planning.hosts import HostSlots, merge_hosts
from horovodlike.launcher.schedulers import AGENT, JobAllocation, Scheduler

_PATIENCE_S = 20.0


class Flux(Scheduler):
    """The scheduler Flux; see the module's docstring."""

    name = "Flux"
    job_variable = "FLUX_URI"
    program = "flux"
    prefixes = ("FLUX_",)

    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """See :meth:`Scheduler.hosts`."""
        from horovodlike.launcher.agent.external import ask  # not at the top: only a job of Flux needs it

        if environ.get("FLUX_JOB_ID"):  # set in a task, but not in a batch script
            return None
        words = [self.program, "resource", "list", "--states=up", "--no-header", "--format={nodelist} {rlist}"]
        answer = ask(words, _PATIENCE_S, environ)
        if answer.trouble or answer.status != 0:
            said = answer.err.decode(errors="replace").strip()
            raise ValueError(f"flux resource list: {answer.trouble or said or f'it ended with {answer.status}'}")
        return JobAllocation(self.name, parse_resources(answer.out.decode(errors="replace")))

    def start_command(self, host: str, remote: RemoteStart, timeout: float) -> list[str]:
        """See :meth:`Scheduler.start_command`."""
        share = ["--nodes=1", "--ntasks=1", "--exclusive", f"--requires=host:{host}"]
        off = ["--setopt=cpu-affinity=off", "--setopt=gpu-affinity=off"]  # the launcher binds ranks and assigns GPUs
        return [self.program, "run", *share, *off, "--unbuffered", *AGENT]


def parse_resources(text: str) -> tuple[HostSlots, ...]:
    """Read ``a,b[1-2] rank[0-1]/core[0-7] rank2/core[0-7],gpu[0-3]``: the hosts in rank order, and cores and GPUs.

    Flux gives cores and GPUs, not tasks. A host has a slot for each GPU or, if it has no GPU, for each core.

    Raises:
        ValueError: The text has another form, or there is no host.
    """
    hosts, *groups = text.split() or [""]
    slots: dict[int, int] = {}
    for group in groups:
        ranks, _, parts = group.partition("/")
        kinds = Counter(part.rstrip("0123456789") for part in expand_hosts(parts))
        slots |= {int(rank.removeprefix("rank")): kinds["gpu"] or kinds["core"] for rank in expand_hosts(ranks)}
    names = expand_hosts(hosts)
    if len(names) != len(slots):
        raise ValueError(f"{text.strip()!r} names {counted(len(names), 'host')}, but has parts of {len(slots)}")
    return merge_hosts(HostSlots(name, slots[rank]) for name, rank in zip(names, sorted(slots), strict=True))
