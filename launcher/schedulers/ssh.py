"""Agents that ssh starts: the command, and the explanation of its failure. Pure."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence

from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.schedulers import AGENT, JobAllocation, Scheduler

_REMEDIES = (
    ("Could not resolve hostname", "check its spelling, /etc/hosts and DNS"),
    ("Permission denied", "set up a key (ssh-copy-id), or name one with --ssh-identity-file"),
    ("Host key verification failed", "check the key and accept it once by hand, with ssh"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "check the key and accept it once by hand, with ssh"),
    ("Connection refused", "is ssh's server running there, on this port (--ssh-port)?"),
    ("No route to host", "is the host up?"),
    ("timed out", "is the host up? If it only needs longer, raise --start-timeout"),
)


class Ssh(Scheduler):
    """No scheduler: the user names the hosts. Schedulers that only give hosts derive from it: ssh starts the agents."""

    name = "ssh"
    program = "ssh"

    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """See :meth:`Scheduler.hosts`."""
        return None

    def start_command(self, host: str, remote: RemoteStart, timeout: float) -> list[str]:
        """See :meth:`Scheduler.start_command`."""
        words = ["ssh", *ssh_words(remote)]  # before hvdrun's own: ssh takes the first value of an option
        words += ["-x", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={math.ceil(timeout)}"]
        # A shared connection would outlive this ssh, and forwarding fails if the port is in use.
        words += ["-o", "ControlPath=none", "-o", "ClearAllForwardings=yes"]
        # Every login shell knows "exec": the agent replaces the shell and becomes a direct child of ssh's server.
        return [*words, "--", host, "exec " + shlex.join(AGENT)]


def ssh_words(remote: RemoteStart) -> list[str]:
    """Return the options for ssh from the user's settings: extra options, port and identity file."""
    words = [*remote.ssh_options]
    if remote.ssh_port is not None:
        words += ["-p", str(remote.ssh_port)]
    if remote.ssh_identity_file is not None:
        words += ["-i", remote.ssh_identity_file]
    return words


def explain_failure(program: str, status: int, words: Sequence[str]) -> str:
    """Explain why an agent has not answered.

    Args:
        program: The program that should have started the agent, such as ssh.
        status: The exit code of the program, or the negated number of the signal that killed it.
        words: The lines that the program, or the agent, has written to standard error.
    """
    said = "; ".join(words) or "nothing was said about it"
    if status in (126, 127):
        return f"{sys.executable} cannot be executed there ({said}); Python must be installed at the same path as here"
    if "can't open file" in said or "No module named" in said:
        return f"horovodlike is not installed there: {said}; it must be installed at the same path as here"
    remedy = next((f"; {remedy}" for text, remedy in _REMEDIES if text in said), "")
    if status == 255 or remedy:
        return f"{program} says: {said}{remedy}"
    return f"{program} ended with {status} before the agent answered: {said}"
