"""Decides which rank caused the end of a job, and the exit code. Pure: each decision comes with its reason."""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

SETTLE_S = 2.0
"""How long the other ranks have, after the first failure, to notice it and to end by themselves."""

TRACEBACK = b"Traceback (most recent call last):"
"""The first line of a traceback."""
_LOST_PEER = ("HorovodInternalError", "JobBrokenError", "ShutDownError")
_CONSEQUENCE = re.compile(rf"(\w+\.)*({'|'.join(_LOST_PEER)})\b".encode())
_EXCEPTION = re.compile(rb"[\w.]+(: |$)")  # in a traceback, the line below the indented ones

# The lines of a rank that SIGTERM has asked to leave: horovodlike/elastic/_state.py.
_LEAVES = re.compile(rb"leaves( at the next commit)?, as SIGTERM has asked")
_HAS_ENDED = b"the training has ended; "
_ON_DISK = re.compile(rb"; (no commit|commit (\d+)) is on disk(; nothing newer is lost)?")

# The rendezvous server's message about a rank that is the cause although its exit code is 0.
_LEFT_EARLY = re.compile(rb"rank \d+ \(pid [^)]*\) exited with code 0 before it called init\(\)( again)?")

# Parts of the errors that Keras 3 raises in scripts for Keras 2, and the text to write instead.
_OF_KERAS_2 = {
    b"argument 'experimental_run_tf_function'": "remove experimental_run_tf_function=... from compile()",
    b"keras.backend' has no attribute 'set_value'": "write optimizer.learning_rate = value in place of set_value()",
    b"Argument(s) not recognized: {'lr':": "write learning_rate=... in place of lr=...",
}


@dataclass(frozen=True)
class Failure:
    """A rank that exited with an error.

    Attributes:
        rank: The rank.
        pid: Its process id.
        status: Its exit code, or minus the signal that killed it.
        last_lines: The last lines that it wrote to standard error.
        raised: The name of the exception's class if the rank's answer has it, as with ``horovodlike.run``; else "".
        host: The host on which it ran, or None if that is the launcher's.
        departure: The last words of a job that SIGTERM has ended.
    """

    rank: int
    pid: int
    status: int
    last_lines: tuple[bytes, ...] = ()
    host: str | None = None
    raised: str = ""
    departure: str = ""


def exit_code(status: int) -> int:
    """Return the exit code that a shell would show for a status: a signal counts as 128 plus its number."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGKILL``, or ``signal`` and its number if it has none (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_consequence(failure: Failure) -> bool:
    """Return True if the rank failed because a peer had gone, according to the last exception that it raised.

    The exception may be above the last line: some packages print a message when the interpreter exits.
    """
    if failure.raised:
        return failure.raised in _LOST_PEER
    lines = failure.last_lines
    raised = [
        line for above, line in zip(lines, lines[1:], strict=False) if above[:1] == b" " and _EXCEPTION.match(line)
    ]
    return any(map(names_lost_peer, (raised or lines)[-1:]))


def names_lost_peer(line: bytes) -> bool:
    """Return True if a line belongs to an exception that a rank raises because a peer has gone."""
    return _CONSEQUENCE.match(line) is not None


def choose(failures: Sequence[Failure], waiting_over: bool) -> tuple[Failure | None, str]:
    """Decide which failure ends the job.

    It is the first one. But a rank that raises takes a moment to exit (its interpreter shuts down), and peers that
    notice may exit earlier: so a failure that reports a lost peer counts only if no other failure comes in time.

    Args:
        failures: The failures so far, in the order in which the ranks exited.
        waiting_over: No rank is left, or the time of the others is over.

    Returns:
        The failure, or None to wait; and the reason.
    """
    for failure in failures:
        if not is_consequence(failure):
            return failure, f"rank {failure.rank} is the first that failed by itself"
    if failures and waiting_over:
        return failures[0], f"rank {failures[0].rank} failed first"
    return None, "the ranks that failed have lost a peer, whose end is awaited" if failures else "no rank has failed"


def leaves(written: bytes) -> bool:
    """Return whether SIGTERM has asked a rank to leave, according to its standard error."""
    return _LEAVES.search(written) is not None and _HAS_ENDED not in written


def departure(written: bytes, killed: str) -> tuple[int, str] | None:
    """Return exit code and last words of a job that SIGTERM has ended; None if no rank was killed or has commits.

    Args:
        written: The last lines of all ranks on standard error.
        killed: The ranks that were killed, if any.
    """
    found = [*_ON_DISK.finditer(written)]
    newest = max(found, key=lambda match: (bool(match[3]), int(match[2] or 0)), default=None)
    words = "SIGTERM has ended the job"
    if newest is not None and newest[3]:
        return exit_code(-signal.SIGTERM), words + newest[0].decode()
    if killed:
        words += f"; {killed} had to be killed"
    if newest is not None or leaves(written):
        on_disk = "; no rank has said which commit is on disk" if newest is None else newest[0].decode()
        words += f"{on_disk}; newer work is lost"
    elif not killed:
        return None
    return os.EX_TEMPFAIL, words


def describe(failure: Failure, noun: str = "rank", *, is_above: bool = False) -> list[bytes]:
    """Describe a failure, line by line.

    Args:
        failure: The failure.
        noun: The noun for a process: ``worker`` in an elastic job.
        is_above: The lines just above on the screen are the traceback, which is not repeated.
    """
    if failure.departure:
        return [f"hvdrun: {failure.departure}".encode()]
    what = f"hvdrun: {how_it_ended(failure.rank, failure.pid, failure.status, failure.host, noun)}"
    if failure.status == 0:  # only a worker's
        what += " before its training function had returned, and without a call of shutdown()"
    if not failure.last_lines:
        return [f"{what}; it wrote nothing to stderr".encode()]
    if is_above:
        lines = [f"{what}; its traceback is above".encode()]
    else:
        lines = [f"{what}; its last lines:".encode(), *(b"    " + line for line in failure.last_lines)]
    for text, advice in _OF_KERAS_2.items():
        if any(text in line for line in failure.last_lines):
            lines.append(f"hvdrun: for Keras 3 {advice}; TF_USE_LEGACY_KERAS=1 keeps Keras 2 (keras.md)".encode())
    waited_for = _LEFT_EARLY.search(failure.last_lines[-1])
    return lines if waited_for is None else [b"hvdrun: " + waited_for[0] + b", and others waited for it", *lines]


def how_it_ended(rank: int, pid: int, status: int, host: str | None = None, noun: str = "rank") -> str:
    """Describe how a rank has ended: ``rank 1 (pid 123 on node-2) exited with code 0``."""
    where = "" if host is None else f" on {host}"
    if status >= 0:
        how = f"exited with code {status}"
    else:
        name = signal_name(-status)
        how = f"was killed by signal {-status}" + (f" ({name})" if name.startswith("SIG") else "")
    return f"{noun} {rank} (pid {pid}{where}) {how}"
