"""``hvdrun --attach PID``: profiles of a running job, and the stacks of its ranks.

The monitor of the job (:mod:`horovodlike.monitor.attach`, which describes the protocol) does the work and sends the
files, so this writes them. Its end, also by Ctrl-C, ends the session.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike.launcher.errors import UsageError
from horovodlike.monitor import attach

__all__ = ["run"]

_HOW = "start it with hvdrun --monitor or --metrics-file"
_NAMES_OF_LAUNCHER = ("hvdrun", "horovodrun", "horovodlike.launcher")


class AttachError(RuntimeError):
    """The job has not done what it was asked for; the text says why."""


def run(pid: str, words: Sequence[str], program: str) -> int:
    """Do what the command line asks of a job; return the exit code.

    Args:
        pid: The process id of its hvdrun, as the user has given it.
        words: The rest of the command line.
        program: The name of this program.

    Raises:
        UsageError: Something is missing or not accepted, or there is no such job.
    """
    options = _parse(words, f"{program} --attach {pid}")
    try:
        with contextlib.closing(_connect(pid)) as connected, connected.makefile("rb") as answers:
            for signum in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                    signal.signal(signum, _leave)
            if options.what == "stacks":
                _send(connected, {"do": "stacks", "ranks": options.ranks})
                print(_describe_stacks(next(_read(answers))["stacks"]))
            else:
                _profile(options, connected, answers)
    except (AttachError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(words: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(program, description="Look into a running job.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="profile|stacks")
    profile = commands.add_parser(
        "profile", help="record what the ranks do in the next steps", prog=f"{program} profile"
    )
    stacks = commands.add_parser("stacks", help="print where the Python of each rank is", prog=f"{program} stacks")
    amount = profile.add_mutually_exclusive_group(required=True)
    amount.add_argument("--steps", type=_steps, metavar="N", help=f"record N steps, up to {attach.MOST_STEPS}")
    amount.add_argument(
        "--seconds", type=_seconds, metavar="S", help=f"record for S seconds, up to {attach.MOST_SECONDS}"
    )
    for each in (profile, stacks):
        each.add_argument("--ranks", type=_ranks, metavar="N,...", help="these ranks only (default: all)")
    profile.add_argument(
        "--output", type=Path, metavar="DIR", help="the new folder for the files (default: profile-DATE-TIME)"
    )
    return parser.parse_args(words)


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= attach.MOST_STEPS):
        raise argparse.ArgumentTypeError(f"{text}: give a number of steps, from 1 to {attach.MOST_STEPS}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= attach.MOST_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(f"{text}: give a number of seconds, up to {attach.MOST_SECONDS}")


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: give numbers of ranks, such as 0,3")
    return [int(part) for part in parts]


def _connect(text: str) -> socket.socket:
    """Connect to the monitor of a job.

    Raises:
        UsageError: There is none, or it belongs to another user.
    """
    named = f"--attach {text}"
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
        raise UsageError(f"{named}: give the process id of the hvdrun that runs the job: pgrep -a hvdrun")
    folder = Path("/proc") / text
    try:
        owner, command = (
            folder.stat().st_uid,
            (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"),
        )
    except OSError:
        raise UsageError(f"{named}: there is no such process on this host: pgrep -a hvdrun lists its jobs") from None
    if owner != os.geteuid():
        raise UsageError(f"{named}: the process belongs to user {owner}: only that user can attach to it")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(attach.address_of(int(text)))
        if attach.user_of(connected) != os.geteuid():
            raise UsageError(f"{named}: a process of another user answers in its place")
    except OSError:
        connected.close()
        if any(name in command for name in _NAMES_OF_LAUNCHER):
            raise UsageError(f"{named}: this job has no monitor on this host, which --attach needs: {_HOW}") from None
        raise UsageError(f"{named}: this is no hvdrun, but {command.strip()[:80]!r}: pgrep -a hvdrun") from None
    except BaseException:
        connected.close()
        raise
    return connected


def _send(connected: socket.socket, request: dict[str, Any]) -> None:
    connected.sendall(json.dumps(request).encode() + b"\n")


def _read(answers: BinaryIO) -> Iterator[dict[str, Any]]:
    """Read answers; print what is being done.

    Raises:
        AttachError: There is no result.
    """
    while line := answers.readline():
        message = json.loads(line)
        if "error" in message:
            raise AttachError(message["error"])
        if "say" in message:
            print(message["say"], file=sys.stderr)
        else:
            yield message
    raise AttachError("the job has ended, or its hvdrun was killed")


def _profile(options: argparse.Namespace, connected: socket.socket, answers: BinaryIO) -> None:
    output: Path = options.output or Path(time.strftime("profile-%Y%m%d-%H%M%S"))
    path = output.absolute()  # --output . replaces the current folder, if that is empty
    with _folder(output) as folder:
        amount = {"steps": options.steps} if options.steps else {"seconds": options.seconds}
        _send(connected, {"do": "profile", "ranks": options.ranks, **amount})
        for message in _read(answers):
            if "done" in message:
                break
            if "file" in message:
                _copy(answers, folder / Path(message["file"]).name, message["bytes"])
            else:
                about = message["rank"]
                (folder / f"rank{about['rank']}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
                if about["note"]:
                    print(f"rank {about['rank']}: {about['note']}", file=sys.stderr)
    from horovodlike.timeline import merge_profile, summarize

    try:
        print(f"{merge_profile(path)}: open it at https://ui.perfetto.dev")
        print(summarize(path))
    except ValueError as error:
        raise AttachError(f"the profile is in {output}, but cannot be summarized: {error}") from None


@contextlib.contextmanager
def _folder(output: Path) -> Iterator[Path]:
    """Make a folder beside the one that is wanted, which gets its name if nothing fails.

    Raises:
        UsageError: There is something already, or nothing can be written there.
    """
    path = output.absolute()
    folder = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"--output {output} exists already: name a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}; name another folder") from None
    try:
        yield folder
        os.replace(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy(answers: BinaryIO, path: Path, size: int) -> None:
    """Append a part to a file."""
    part = answers.read(size)
    if len(part) < size:
        raise AttachError("the job has ended while its profile was read, or its hvdrun was killed")
    with path.open("ab") as file:
        file.write(part)


def _describe_stacks(stacks: Sequence[Sequence[Any]]) -> str:
    """Return the stacks as text, equal ones once."""
    groups: dict[str, list[int]] = {}
    for rank, text in stacks:
        groups.setdefault(text, []).append(rank)
    return "\n".join(f"{name_ranks(ranks)}:\n{text}" for text, ranks in groups.items())


def _leave(signum: int, _: object) -> NoReturn:
    sys.exit(128 + signum)
