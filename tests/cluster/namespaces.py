"""The commands behind a cluster, and the removal of one, also of those that a dead process has left.

All that belongs to a cluster has the cluster's name at the front, which says whose it is: the process that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.tools import find

PREFIX = "nscluster"
NAME = re.compile(PREFIX + r"-(\d+)-(\d+)-\d+")  # process id, its start time, number
NETNS = Path("/run/netns")
LOCK = Path("/run/nscluster.lock")
ETC = Path("/etc/netns")  # `ip netns exec` binds what is in ETC/NAME over /etc
RUN = Path("/run")
SHM = Path("/dev/shm")
POLL_S = 0.01
KILL_S = 20.0

_numbers = itertools.count()


class CommandError(AssertionError):
    """A command ended with an error, or did not end; the message has all that it wrote."""


def command(*argv: str | Path, input: str | None = None, timeout: float = 60.0) -> str:
    """Run a command and return its output.

    Raises:
        CommandError: It failed, or took longer than `timeout` seconds.
    """
    words = [str(word) for word in argv]
    words[0] = find(words[0]) or words[0]
    try:
        done = subprocess.run(words, input=input, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as expired:
        raise CommandError(f"{words} took more than {timeout} s: {expired.stdout!r} {expired.stderr!r}") from None
    if done.returncode != 0:
        raise CommandError(f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait for a condition that nothing announces.

    Raises:
        AssertionError: `what` has not come within this number of seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(POLL_S)


def _start_time(pid: int | str) -> str | None:
    """When a process started, in the kernel's ticks; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat[stat.rindex(")") + 2 :].split()[19]


def new_name() -> str:
    """A name for a cluster of this process."""
    return f"{PREFIX}-{os.getpid()}-{_start_time('self')}-{next(_numbers)}"


def _traces(beginning: str) -> dict[str, list[Path]]:
    """Return what clusters whose names begin so have left: by the cluster's name, namespaces first."""
    found: dict[str, list[Path]] = {}
    for folder in (NETNS, ETC, RUN, SHM):
        for path in sorted(folder.glob(f"{beginning}*")):
            if name := NAME.match(path.name):
                found.setdefault(name[0], []).append(path)
    return found


def traces(name: str) -> list[Path]:
    """Return the namespaces and files of a cluster."""
    return _traces(name).get(name, [])


def processes(*spaces: str) -> dict[int, str]:
    """The processes in network namespaces, zombies apart: their command lines by process id."""
    found = {}
    for space in spaces:
        for pid in command("ip", "netns", "pids", space).split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found[int(pid)] = b" ".join(words).decode(errors="replace").strip()
    return found


def processes_of(name: str) -> dict[int, str]:
    """The processes of all hosts of a cluster, as far as they have been made."""
    return processes(*(path.name for path in traces(name) if path.parent == NETNS))


def kill_processes(name: str, reap: Callable[[], object] = lambda: None) -> None:
    """End all processes of a cluster's hosts; `reap` waits for those that are children of this process."""

    def all_gone() -> bool:
        left = processes_of(name)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        return not left

    wait_until(all_gone, f"the end of the processes of {name}", KILL_S)


def remove(name: str) -> None:
    """Remove what there is of a cluster without processes.

    Raises:
        AssertionError: Something is left.
    """
    for path in traces(name):
        if path.parent == NETNS:
            subprocess.run([find("ip") or "ip", "netns", "delete", path.name], capture_output=True, check=False)
        else:
            shutil.rmtree(path, ignore_errors=True)
    left = traces(name)
    assert not left, f"left of the cluster {name}: {left}"


def sweep() -> list[str]:
    """Remove the clusters of processes that are dead; their names."""
    swept = []
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may be about the same
        for name in _traces(f"{PREFIX}-"):
            owner = NAME.match(name)
            assert owner is not None
            if _start_time(owner[1]) != owner[2]:
                kill_processes(name)
                remove(name)
                swept.append(name)
    return swept


def enter(namespace: str, hostname: str, shm: Path, argv: Sequence[str]) -> list[str]:
    """The command line that runs a program in a host.

    It gets the network namespace, the host's /etc files, a host name and a /dev/shm of its own. Each step is an exec,
    so the process id stays that of the program. The program is killed when the process that has started it dies.
    """
    script = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /dev/shm && shift && exec "$@"'
    return [
        *(find("ip") or "ip", "netns", "exec", namespace),
        *("unshare", "--uts", "sh", "-c", script, hostname, str(shm)),
        *("setpriv", "--pdeathsig", "KILL", "--", *argv),
    ]
