"""``hvdrun --attach PID``: profiles of a running job, and the stacks of its ranks.

The monitor of the job (:mod:`horovodlike.monitor.attach`, which describes the protocol) does the work and sends the
files, so this writes them. Its end, also by Ctrl-C, ends the session.
"""

import argparse
import base64
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
    amount.add_argument("--steps", type=int, metavar="N", help=f"record N steps, up to {attach.MOST_STEPS}")
    amount.add_argument("--seconds", type=float, metavar="S", help=f"record for S seconds, up to {attach.MOST_SECONDS}")
    for each in (profile, stacks):
        each.add_argument("--ranks", type=_ranks, metavar="N,...", help="these ranks only (default: all)")
    profile.add_argument(
        "--output", type=Path, metavar="DIR", help="the new folder for the files (default: profile-DATE-TIME)"
    )
    return parser.parse_args(words)


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give numbers of ranks, such as 0,3") from None


def _connect(text: str) -> socket.socket:
    """Connect to the monitor of a job.

    Raises:
        UsageError: There is none, or it belongs to another user.
    """
    named = f"--attach {text}"
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{named}: give the process id of the hvdrun that runs the job: pgrep -a hvdrun")
    try:
        command = (Path("/proc") / text / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        raise UsageError(f"{named}: there is no such process on this host: pgrep -a hvdrun lists its jobs") from None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(attach.address_of(int(text)))
        if attach.user_of(connected) != os.geteuid():
            raise PermissionError
    except PermissionError:
        connected.close()
        raise UsageError(f"{named}: the process belongs to another user: only that user can attach to it") from None
    except OSError:
        connected.close()
        raise UsageError(
            f"{named}: no monitor of a job answers in {command.strip()[:80]!r}: give the process id of an hvdrun that "
            "was started with --monitor or --metrics-file"
        ) from None
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
        amount = {"steps": options.steps} if options.seconds is None else {"seconds": options.seconds}
        _send(connected, {"do": "profile", "ranks": options.ranks, **amount})
        for message in _read(answers):
            if "done" in message:
                break
            if "file" in message:
                with (folder / Path(message["file"]).name).open("ab") as file:
                    file.write(base64.b64decode(message["part"]))
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
    """Make a folder beside the one that is wanted, which receives its name if nothing fails.

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


def _describe_stacks(stacks: Sequence[Sequence[Any]]) -> str:
    """Return the stacks as text, equal ones once."""
    groups: dict[str, list[int]] = {}
    for rank, text in stacks:
        groups.setdefault(text, []).append(rank)
    return "\n".join(f"{name_ranks(ranks)}:\n{text}" for text, ranks in groups.items())


def _leave(signum: int, _: object) -> NoReturn:
    sys.exit(128 + signum)
