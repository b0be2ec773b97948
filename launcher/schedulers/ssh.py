"""The command that starts the agent of another host, and the explanation if it fails. Pure."""

import math
import shlex
import sys
from collections.abc import Sequence

from horovodlike.launcher.agent import START_AGENT
from horovodlike.launcher.planning.job_spec import RemoteStart

__all__ = ["explain_failure", "remote_command", "ssh_words"]

_REMEDIES = (
    ("Could not resolve hostname", "check its spelling, /etc/hosts and DNS"),
    ("Permission denied", "set up a key (ssh-copy-id), or name one with --ssh-identity-file"),
    ("Host key verification failed", "check the key and accept it once by hand, with ssh"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "check the key and accept it once by hand, with ssh"),
    ("Connection refused", "is ssh's server running there, on this port (--ssh-port)?"),
    ("No route to host", "is the host up?"),
    ("timed out", "is the host up? If it only needs longer, raise --start-timeout"),
)


_AGENT = (sys.executable, "-I", "-S", "-X", "utf8", START_AGENT)
"""The words that are executed on another host, where everything has the same paths as here."""


def remote_command(host: str, remote: RemoteStart, timeout: float) -> list[str]:
    """Return the command that starts the agent of another host.

    Args:
        host: The host.
        remote: How its agent is started.
        timeout: How long ssh may take to connect, in seconds.
    """
    if remote.slurm:
        cpus = remote.cpus.get(host)
        share = [f"--cpus-per-task={cpus}"] if cpus else []  # or the step would get one processor
        step = [
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            f"--nodelist={host}",
            "--overlap",
            "--mem=0",
            "--cpu-bind=none",
        ]
        return ["srun", *step, *share, "--mpi=none", "--unbuffered", "--quiet", *_AGENT]
    words = ["ssh", *ssh_words(remote)]  # of several values, ssh takes the first
    words += ["-x", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={math.ceil(timeout)}"]
    # A shared connection would outlive its client, and forwarded ports can be taken.
    words += ["-o", "ControlPath=none", "-o", "ClearAllForwardings=yes"]
    # "exec" is a word of every login shell; with it no shell stands between ssh's server and the agent.
    return [*words, "--", host, "exec " + shlex.join(_AGENT)]


def ssh_words(remote: RemoteStart) -> list[str]:
    """Return the options for ssh from the user's settings: extra options, port and identity file."""
    words = [*remote.ssh_options]
    if remote.ssh_port is not None:
        words += ["-p", str(remote.ssh_port)]
    if remote.ssh_identity_file is not None:
        words += ["-i", remote.ssh_identity_file]
    return words


def explain_failure(remote: RemoteStart, status: int, words: Sequence[str]) -> str:
    """Explain why an agent has not answered.

    Args:
        remote: How it was started.
        status: The exit code of ssh or srun, or minus the signal.
        words: The lines that they, or the agent, have written to standard error.
    """
    said = "; ".join(words) or "nothing was said about it"
    program = "srun" if remote.slurm else "ssh"
    if status in (126, 127):
        return f"{sys.executable} cannot be executed there ({said}); Python must be installed at the same path as here"
    if "can't open file" in said or "No module named" in said:
        return f"horovodlike is not installed there: {said}; it must be installed at the same path as here"
    remedy = next((f"; {remedy}" for text, remedy in _REMEDIES if text in said), "")
    if status == 255 or remedy:
        return f"{program} says: {said}{remedy}"
    return f"{program} ended with {status} before the agent answered: {said}"
