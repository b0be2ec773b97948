"""The connection of a worker to the driver in hvdrun.

The driver decides which processes are members of the job, and when. The messages are JSON objects:
docs/developers/protocols.md lists them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

from horovodlike._bootstrap.environment import DRIVER_ADDRESS, DRIVER_PORT, JOB_ID, SECRET_KEY, WORKER
from horovodlike._bootstrap.job_key import take_key
from horovodlike._bootstrap.preemption import Preemption
from horovodlike._net.connect import dial
from horovodlike._net.secure_channel import (
    HANDSHAKE_TIMEOUT,
    AuthenticationError,
    ClientChannel,
    Identity,
    JobKey,
    job_digest,
)
from horovodlike._net.socket_options import set_keepalive
from horovodlike.errors import ConfigError, RendezvousError

__all__ = ["Worker", "current", "find"]

_SEND_TIMEOUT = 10.0
_LISTEN_SECONDS = 3600.0  # the driver may be silent for any time; `receive()` only needs some deadline
_KEEPALIVE_SECONDS, _KEEPALIVE_PROBES = 5, 4

_current: Worker | None = None
_forked_from: int | None = None  # the number of the worker that this process was forked from


def current() -> Worker | None:
    """Return the connection that :func:`find` has made; None before, and in a job that has no driver."""
    return _current


def find(environ: MutableMapping[str, str], start_timeout: float) -> Worker | None:
    """Return the connection to the driver, made at the first call; None in a job that has no driver.

    Raises:
        ConfigError: Environment variables contradict each other or are malformed.
        RendezvousError: The driver cannot be reached, or does not trust this process.
    """
    global _current
    if _current is None and environ.get(DRIVER_PORT):
        if _forked_from is not None:
            raise RendezvousError(
                f"this process was forked from worker {_forked_from}, and only that one can have a place in the job. "
                f"Unset {DRIVER_PORT} in its environment to make it a job of its own"
            )
        _current = Worker(environ, start_timeout)
    return _current


def _forget_in_child() -> None:
    global _current, _forked_from
    if _current is not None:
        _forked_from = _current.number
        _current.preemption.forget_in_child()
        _current = None


os.register_at_fork(after_in_child=_forget_in_child)


class Worker:
    """This process as a worker of the driver. One thread trains and calls these methods; another one listens.

    Attributes:
        number: The driver's number for this process, which never changes.
        generation: The last generation of which this process was a member; 0 before the first.
        commits: The number of commits of this process so far; it never decreases.
        preemption: The state of the request to this process, by SIGTERM, to leave the job.
    """

    def __init__(self, environ: MutableMapping[str, str], start_timeout: float) -> None:
        """Connect to the driver.

        Raises:
            ConfigError: Environment variables contradict each other or are malformed.
            RendezvousError: The driver cannot be reached, or does not trust this process.
        """
        self.number = _integer(environ, WORKER)
        self.generation = 0
        self.commits = 0
        self._has_finished = False
        self.preemption = Preemption(self._wake)
        self._why, self._reason = "start", ""
        self._lock = threading.Lock()  # guards _changed and _added, which the listening thread sets
        self._changed = self._added = False
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        key = take_key(environ)
        if key is None:
            raise RendezvousError(
                f"{SECRET_KEY} is not set although {DRIVER_PORT} is: only the processes that hvdrun starts itself can "
                f"be workers, and this one seems to have been started by a worker. Unset {DRIVER_PORT} in its "
                "environment to make it a job of its own"
            )
        self._key = key
        job = job_digest(f"elastic/{environ.get(JOB_ID, '')}")
        host, port = environ.get(DRIVER_ADDRESS) or "127.0.0.1", _integer(environ, DRIVER_PORT)
        self._where = f"the driver in hvdrun at {host}:{port}"
        self._channel = self._connect(host, port, Identity(self.number, 0, job), start_timeout)
        threading.Thread(target=self._listen, name="horovodlike-elastic", daemon=True).start()

    def _connect(self, host: str, port: int, identity: Identity, start_timeout: float) -> ClientChannel:
        problem: Exception | None = None
        patience = min(start_timeout, HANDSHAKE_TIMEOUT)
        try:
            with contextlib.closing(dial(host, port, patience)) as answers:
                for connected in answers:
                    try:
                        set_keepalive(connected, _KEEPALIVE_SECONDS, _KEEPALIVE_SECONDS, _KEEPALIVE_PROBES)
                        return ClientChannel(connected, self._key, identity, time.monotonic() + patience)
                    except (RendezvousError, OSError) as error:
                        problem = error  # the next address may lead to the driver
        except OSError as error:
            problem = problem or error
        raise RendezvousError(
            f"worker {self.number} cannot reach {self._where}: {problem}. Does hvdrun still run?"
        ) from problem

    def explain(self, why: str, reason: str) -> None:
        """Set why this worker will ask for a rank (``broken``, ``changed`` or ``failed``), and the reason in words."""
        self._why, self._reason = why, reason[:2000]

    def take_place(self, environ: MutableMapping[str, str]) -> JobKey:
        """Ask for a rank and wait until the driver gives one, for however long that takes.

        Args:
            environ: The variables that describe the rank are written into it.

        Returns:
            The key of the generation of which this process is now a member.

        Raises:
            RendezvousError: The driver is lost.
            SystemExit: This process is no member any more, or has been asked to leave (status 0); or the job has ended.
        """
        if not self.preemption.noted:
            # A failure to send is ignored: a driver that has exited may have sent a reason before, which is read below.
            with contextlib.suppress(OSError):
                self._say("ready", commits=self.commits, why=self._why, reason=self._reason)
        answer: dict[str, Any] = {"preempted": True} if self.preemption.noted else self._answers.get()
        if "place" not in answer:
            self._end(answer)
        place = answer["place"]
        self.generation = int(place["generation"])
        environ.update(place["variables"])
        self._why, self._reason = "changed", "init() was called again"
        return self._key.derive(b"horovodlike generation", str(self.generation).encode())

    def _end(self, answer: Mapping[str, Any]) -> None:
        if "preempted" in answer:
            self.leave()
        if "removed" in answer:
            print(f"worker {self.number} is not needed any more: {answer['removed']}", file=sys.stderr)
            raise SystemExit(0)
        if "stop" in answer:
            raise SystemExit(f"worker {self.number} ends with the job: {answer['stop']}")
        raise RendezvousError(f"worker {self.number} has lost {self._where}: {answer['lost']}")

    def changes(self) -> tuple[bool, bool]:
        """Return whether a change of members was announced since this rank was given, and whether workers will join."""
        with self._lock:
            return self._changed, self._added

    def begin(self) -> None:
        """Tell the driver that this process trains again; needed only after :meth:`finish`."""
        if self._has_finished:
            self._has_finished = False
            self.tell("training")

    def finish(self) -> None:
        """Tell the driver that the training has ended."""
        self._has_finished = True
        self.tell("finished")

    def leave(self, words: str = "", status: int = 0) -> NoReturn:
        """Tell the driver that this process leaves, say so in a line that ends with the words, and exit.

        Raises:
            SystemExit: Always, with the status.
        """
        self.tell("leaving")
        print(f"worker {self.number} leaves, as SIGTERM has asked it to{words}", file=sys.stderr)
        raise SystemExit(status)

    def log(self, data: bytes) -> None:
        """Send a pickled value to the process that has started the job.

        Raises:
            OSError: The driver is lost.
            FrameError: The value is too large.
        """
        self._say("log", value=base64.b64encode(data).decode())

    def tell(self, verb: str) -> None:
        """Send the driver a message that has nothing but a verb."""
        with contextlib.suppress(OSError):  # the loss of the driver is noticed when the driver is needed
            self._say(verb)

    def _say(self, verb: str, **more: object) -> None:
        with self._sending:
            self._channel.send(json.dumps({"do": verb, **more}).encode(), time.monotonic() + _SEND_TIMEOUT)

    def _wake(self) -> None:
        """End a wait for a rank; called by a signal handler."""
        self._answers.put({"preempted": True})

    def _listen(self) -> None:
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    self._hear(json.loads(self._channel.receive(time.monotonic() + _LISTEN_SECONDS)))
        except AuthenticationError as error:
            self._answers.put({"lost": f"it refused this process, or does not hold the job's key ({error})"})
        except Exception as error:  # any error must reach the thread that trains
            self._answers.put({"lost": f"{type(error).__name__}: {error}"})

    def _hear(self, message: dict[str, Any]) -> None:
        if "changed" in message:
            with self._lock:
                self._changed = True
                self._added |= bool(message["changed"]["added"])
            return
        if "place" in message:
            with self._lock:  # the new rank accounts for all changes so far
                self._changed = self._added = False
        elif "stop" in message:
            self.preemption.cancel()
        elif "removed" not in message:
            raise ValueError(f"it said something that this release does not know: {sorted(message)}")
        self._answers.put(message)


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"{name}={text!r} is not an integer of at least 0; hvdrun sets it for its workers")
    return int(text)
