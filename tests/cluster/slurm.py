"""Slurm over the hosts: munged and slurmctld on the launcher, a slurmd on each other host, nothing but Slurm's own.

All hosts read the cluster's /etc/slurm, so `srun`, `salloc`, `sbatch` and `sinfo` work as they are typed. Jobs run as
root. Processes are followed through /proc, as cgroups would be the machine's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from cluster import namespaces
from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import CommandError, wait_until
from cluster.tools import find

READY_S = 60.0
CONFIGURATION = """\
ClusterName=hosts
SlurmctldHost={launcher}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """Slurm's commands, as a user types them on the launcher.

    Tasks inherit the environment of this process without what other launchers have set, or `env`.
    """

    launcher: Host
    folder: Path

    def srun(
        self, argv: Sequence[str | Path], *, ntasks: int, nodes: int, options: Sequence[str] = (), **how: Any
    ) -> CompletedProcess[str]:
        """Run tasks on this number of nodes; `how` goes to `Host.run`."""
        return self._run(["srun", f"--ntasks={ntasks}", f"--nodes={nodes}", *options, *argv], **how)

    def salloc(
        self, argv: Sequence[str | Path], *, ntasks: int, nodes: int, options: Sequence[str] = (), **how: Any
    ) -> CompletedProcess[str]:
        """Run one program, on the launcher, inside an allocation."""
        return self._run(["salloc", "--quiet", f"--ntasks={ntasks}", f"--nodes={nodes}", *options, *argv], **how)

    def sbatch(
        self, script: str, *, ntasks: int, nodes: int, options: Sequence[str] = (), **how: Any
    ) -> CompletedProcess[str]:
        """Run a shell script as a batch job, on the first of its nodes, to its end.

        Returns:
            The job's exit code, and as output what it has written, errors included.
        """
        output = self.folder / f"batch-{secrets.token_hex(4)}.log"
        file = output.with_suffix(".sh")
        file.write_text(f"#!/bin/sh\n{script}\n")
        words = ["sbatch", "--wait", f"--ntasks={ntasks}", f"--nodes={nodes}", f"--output={output}", *options, file]
        done = self._run(words, **{**how, "check": False})
        written = output.read_text() if output.exists() else ""
        if how.get("check", True) and done.returncode != 0:
            raise CommandError(f"{script!r} ended with {done.returncode}: {written}{done.stdout}{done.stderr}")
        return CompletedProcess(words, done.returncode, written, done.stderr)

    def states(self) -> dict[str, str]:
        """The state of each node; empty while the controller does not answer."""
        words = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        done = self.launcher.run(words, check=False, env=environment())
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def wait_until_idle(self) -> None:
        """Wait until all nodes are idle.

        Raises:
            AssertionError: They are not within a minute; the message has what the daemons have logged.
        """
        try:
            wait_until(lambda: set(self.states().values()) == {"idle"}, "idle nodes", READY_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.states()}\n{self.logs()}") from None

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        ends = {file.name: file.read_text(errors="replace").splitlines()[-20:] for file in self.folder.glob("*.log")}
        return "\n".join("\n".join([f"--- {name}", *lines]) for name, lines in ends.items())

    def _run(self, words: Sequence[str | Path], **how: Any) -> CompletedProcess[str]:
        return self.launcher.run(words, **{"env": environment(), **how})


def start(cluster: Cluster, *, cpus: int = 8) -> Slurm:
    """Start Slurm's daemons and wait until all nodes are idle.

    Args:
        cluster: Its hosts become the nodes, apart from the launcher.
        cpus: How many tasks a node takes, whatever the machine has.

    Returns:
        The commands.
    """
    folder = cluster.folder / "slurm"
    munge = folder / "munge"
    for made in (folder / "etc", folder / "state", munge):
        made.mkdir(parents=True)
    configuration = CONFIGURATION.format(
        launcher=cluster.launcher.name,
        munge=munge / "socket",
        folder=folder,
        nodes=",".join(host.name for host in cluster.hosts),
        cpus=cpus,
    )
    (folder / "etc" / "slurm.conf").write_text(configuration)
    # Nothing uses cgroups, but slurmd would look for them, and a host has none.
    (folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for host in cluster.machines:
        (namespaces.ETC / host.namespace / "slurm").symlink_to(folder / "etc")
    _start_munged(cluster.launcher, munge)
    _start(cluster.launcher, folder, "slurmctld", "-i")
    for host in cluster.hosts:
        for name in ("spool", "tmp"):  # the nodes share a file system, and PMIx's folders have equal names on all
            (folder / f"{name}-{host.name}").mkdir()
        _start(host, folder, "slurmd")
    started = Slurm(cluster.launcher, folder)
    started.wait_until_idle()
    return started


def _start_munged(host: Host, folder: Path) -> None:
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    with (folder.parent / "munged.log").open("wb") as output:
        host.popen([find("munged") or "munged", "--foreground", *options], stdout=output, stderr=output)
    wait_until((folder / "socket").exists, "munged's socket")


def _start(host: Host, folder: Path, daemon: str, *options: str) -> None:
    with (folder / f"{daemon}-{host.name}.log").open("wb") as output:
        host.popen([find(daemon) or daemon, "-D", *options], stdout=output, stderr=output, env=environment())
