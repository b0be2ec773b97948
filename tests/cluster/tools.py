"""The tools that this machine lacks for a cluster, with what to do about it.

As a program, it prints the Debian packages that are missing.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess

# By the name of a tool, the program or file that shows that a tool is there, and Debian's package.
PROGRAMS = {
    "ip": ("ip", "iproute2"),
    "unshare": ("unshare", "util-linux"),
    "sshd": ("sshd", "openssh-server"),
    "ssh": ("ssh", "openssh-client"),
    "iperf3": ("iperf3", "iperf3"),
    "slurm": ("slurmctld", "slurm-wlm"),
    "munge": ("munged", "munge"),
    "mpirun": ("mpirun", "openmpi-bin"),
    "mpich": ("mpiexec.hydra", "mpich"),
    # Slurm's plugin looks for the library by the name without a version.
    "pmix": ("/usr/lib/*/libpmix.so", "libpmix-dev"),
    "loss": ("nft", "nftables"),
    "ping": ("ping", "iputils-ping"),
    "java": ("java", "openjdk-17-jre-headless"),  # for Spark
    "buildah": ("buildah", "buildah"),
    "debootstrap": ("debootstrap", "debootstrap"),
    "chromium": ("chromium", "chromium"),
    "prometheus": ("prometheus", "prometheus"),
}
# Made and shaped in a nameless namespace, which ends with the command.
TRIAL = (
    "ip link add name veth0 type veth peer name veth1 && ip link add name br0 type bridge && "
    "tc qdisc add dev veth0 root tbf rate 1gbit burst 128kb limit 1mb"
)
NETEM_TRIAL = "ip link add name veth0 type veth peer name veth1 && tc qdisc add dev veth0 root netem delay 1ms"


# The folders of servers count even where PATH lacks them, also for what these tests start.
os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Return the path of a program, or of a file that a pattern stands for."""
    return next(glob.iglob(program), None) if program.startswith("/") else shutil.which(program)


@functools.cache
def _trial(commands: str) -> str:
    """Run commands in a new network namespace; what went wrong, or nothing."""
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", commands], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else " ".join(done.stderr.split())


@functools.cache
def missing(tool: str) -> str:
    """Say what is missing for a tool: one of PROGRAMS, `namespaces` or `netem`. Empty: nothing is."""
    if tool == "namespaces":
        return _missing_for_namespaces()
    if tool == "netem":
        reason = _trial(NETEM_TRIAL)
        return f"the kernel lacks sch_netem: {reason}" if reason else ""
    program, package = PROGRAMS[tool]
    return "" if find(program) else f"{program} is not installed: make tools, or apt-get install {package}"


def _missing_for_namespaces() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := missing("ip") or missing("unshare"):
        return lacking
    reason = _trial(TRIAL)
    return f"this machine lets nobody make network namespaces, veth pairs, bridges or tbf: {reason}" if reason else ""


def _main() -> None:
    print(*sorted({package for program, package in PROGRAMS.values() if not find(program)}))


if __name__ == "__main__":
    _main()
