"""The steps of a job whose ranks MPI's mpirun starts."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.host_probe import detect_host
from horovodlike.launcher.agent.process import die_with_parent
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.planning.addresses import LOOPBACK, reachable_addresses
from horovodlike.launcher.planning.plan import forwarded
from horovodlike.launcher.schedulers.mpirun import find_mpirun, make_command, make_environ, make_ssh_variables
from horovodlike.launcher.schedulers.registry import SCHEDULERS
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.launcher.supervisor.static_job import Launch

_LAUNCHERS_OWN = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", *chain(*(each.prefixes for each in SCHEDULERS)))
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class MpirunLaunch(Launch):
    """A job whose ranks mpirun starts, watches and ends; this process's signals reach it. For the main thread only."""

    def resolve(self) -> None:
        """Find mpirun."""
        self._mpirun = find_mpirun(self._environ)

    def serve(self) -> None:
        """Start the rendezvous server on addresses that all hosts can reach."""
        others = dict.fromkeys(_others(self._spec))
        found = reachable_addresses(others, self._spec.network_interface) if others else [LOOPBACK]
        self._serve_ranks(JobKey(bytes.fromhex(self._identity.key)), self._spec.num_proc, ",".join(found))

    def plan(self) -> None:
        """Decide the variables of the ranks, except rank, size and the like, which come from mpirun."""
        self._variables, self._said = make_environ(
            self._spec, self._command, detect_host(), self._identity, self._environ
        )

    def prepare_environment(self) -> None:
        """Decide mpirun's command and its environment variables."""
        spec, mpirun = self._spec, self._mpirun
        names = sorted(_passed_on(self._variables)) if _others(spec) else []
        for_ssh = make_ssh_variables(mpirun, spec.remote)
        self._words = make_command(mpirun, spec, self._command, names, is_root=os.geteuid() == 0)
        self._variables |= for_ssh
        if spec.verbose:
            self._said += [*self._reasons, f"{mpirun.path} is {mpirun.flavor.value}'s", " ".join(self._words)]
            self._said += [f"{name}={value}" for name, value in for_ssh.items()]

    def supervise(self) -> None:
        """Run mpirun."""
        for line in self._said:
            print(f"hvdrun: {line}", file=sys.stderr)
        self._exit_code = _run(self._words, self._variables)

    def attribute(self) -> Outcome:
        """Return mpirun's exit code, which is a failed rank's exit code; or 128 plus the number of a signal."""
        return Outcome(self._exit_code)


def _others(spec: JobSpec) -> list[str]:
    """Name the hosts of the job other than this machine."""
    return [placement.name for placement in spec.placements if placement.name != spec.here]


def _passed_on(environ: Mapping[str, str]) -> list[str]:
    return [name for name in forwarded(environ) if _NAME.fullmatch(name) and not name.startswith(_LAUNCHERS_OWN)]


def _run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)  # only hvdrun passes a terminal's signals on to mpirun
        die_with_parent(parent, signal.SIGTERM)  # mpirun then ends its ranks

    process = subprocess.Popen(words, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=prepare)
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        process.send_signal(number)

    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, pass_on)
    try:
        code = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if came:
        return 128 + came[0]
    return code if code >= 0 else 128 - code
