"""The agent of one host: starts the ranks, forwards their output, and ends them on request or with its connection.

It speaks the protocol of :mod:`horovodlike.launcher.agent.protocol` on standard input and output, over a pipe or an ssh
session alike. A network connection can break without either end noticing, so the launcher sends heartbeats. There are
two processes: the *guard*, and its child, the *agent* proper, which is the parent of the ranks. Each is the subreaper
of its descendants. When the agent exits or is killed, the guard kills the processes that are left. When the guard is
killed, the kernel sends the agent SIGTERM, and the agent ends the job. When the launcher is killed, the agent reads the
end of its input. When the agent dies, the kernel kills the ranks (``PR_SET_PDEATHSIG``). Standard output ends only when
guard and agent have exited: then the launcher knows that the host is clean.
"""

import contextlib
import fcntl
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from horovodlike.launcher.agent.process import (
    CANNOT_EXECUTE,
    ExitQueue,
    Start,
    become_subreaper,
    descendants,
    die_with_parent,
    oom_kills,
    send_signal,
    signal_descendants,
    spawn,
    stops,
)
from horovodlike.launcher.agent.protocol import (
    MAGIC,
    PIECE,
    Frame,
    FrameKind,
    FrameReader,
    InvalidFrameError,
    decode_seconds,
    decode_text,
    encode,
    encode_exit,
    encode_text,
    to_native,
)

GRACE_S = 5.0
"""The time from SIGTERM to SIGKILL, unless the launcher sends another one."""
_GIVE_UP_S = 10.0
"""A process that still exists this long after SIGKILL sleeps in the kernel: it cannot be ended."""
_KILL_AGAIN_S = 0.02
_OUTGOING_LIMIT = 1024 * 1024
"""With more unsent bytes than this, the agent reads no more from the ranks: once a pipe is full, write() waits."""
_READ = 64 * 1024
_OUT_OF_MEMORY = b"hvdrun: killed by the kernel for lack of memory; give this host or container more, or fewer ranks\n"


class Agent:
    """One connection to the launcher and the ranks that were started through it."""

    def __init__(self, receive: int, send: int, launcher: int) -> None:
        """Take over the connection and this process's signals.

        Args:
            receive: The descriptor on which the launcher's frames arrive.
            send: The descriptor for frames to the launcher.
            launcher: The process id of the guard's parent: the launcher or, on another host, a server such as sshd.
        """
        self._receive_fd, self._send_fd = receive, send
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._lost = False
        self._started = False
        self._grace_period = GRACE_S
        self._elastic = False  # an elastic job: ranks come and go, and have the numbers of workers
        self._rank_of: dict[int, int] = {}  # process id -> rank, of the ranks that run
        self._servers: set[int] = set()  # the parameter servers' numbers, among the ranks' numbers
        self._left: dict[int, tuple[int, int]] = {}  # pid of an exited rank -> rank, status; until its group is empty
        self._streams: dict[int, tuple[int, FrameKind]] = {}  # descriptor -> rank, stream
        self._paused = False
        self._task_fd: int | None = None
        self._exits = ExitQueue()
        self._oom_kills = oom_kills()
        self._ending = False
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        self._lost_at: float | None = None  # when the launcher counts as lost unless a heartbeat comes
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        for descriptor in (receive, send):
            os.set_blocking(descriptor, False)
        self._on_readable(receive, self._receive)
        self._on_readable(self._exits.fileno(), lambda: None)
        self._watch_signals()
        # A forked copy of the launcher may keep our input open, so watch the launcher's process as well.
        with contextlib.suppress(OSError):
            self._on_readable(os.pidfd_open(launcher), self._lose)

    def run(self) -> int:
        """Serve until the job is over and none of its processes is left; return the exit code."""
        while True:
            alive = self._reap()
            over = not alive and (self._lost or (self._started and (self._ending or not self._elastic)))
            if over:
                for descriptor in list(self._streams):
                    self._drain(descriptor)
                    self._close_stream(descriptor)
            if not self._advance(alive):
                return 1
            self._flush()
            if over and not self._outgoing:
                return 0
            self._poll(alive)
            if self._lost_at is not None and time.monotonic() >= self._lost_at and not self._lost:
                print("hvdrun agent: the launcher has been silent for too long", file=sys.stderr)
                self._lose()

    # Events.

    def _poll(self, alive: bool) -> None:
        deadlines = [] if self._lost or self._lost_at is None else [self._lost_at]
        if self._kill_at is not None and alive:
            deadlines.append(self._kill_at)
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else -1.0
        for descriptor, _ in self._epoll.poll(timeout):
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler()

    def _on_readable(self, descriptor: int, handler: Callable[[], object], events: int = select.EPOLLIN) -> None:
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, events)

    def _forget(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _watch_signals(self) -> None:
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        guard = os.getppid()
        # SIGTERM comes from the kernel when the guard dies, or from a user or tool.
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda signum, frame: None)

        def on_signal() -> None:
            if not any(number != signal.SIGCHLD for number in os.read(read, 4096)) or self._ending:
                return
            if os.getppid() != guard or not self._started:
                self._send(FrameKind.FAILED, 0, b"the agent or its guard was killed")
                self._end(self._grace_period)
            elif self._kill_at is None:  # a user or a tool ends all processes of the job, or of this host
                self._ending = self._elastic  # or else it ends with its ranks
                self._pass_on(signal.SIGTERM, self._grace_period)

        self._on_readable(read, on_signal)

    def _receive(self) -> None:
        try:
            data = os.read(self._receive_fd, PIECE)
            if not data:
                self._lose()
                return
            for frame in self._reader.feed(data):
                self._obey(frame)
        except BlockingIOError:
            pass
        except (OSError, InvalidFrameError) as error:
            if not self._lost:
                print(f"hvdrun agent: {error}", file=sys.stderr)
                self._lose()

    def _lose(self) -> None:
        """Handle the loss of the launcher: end the job."""
        self._lost = True
        self._outgoing.clear()
        for descriptor in [fd for fd in self._handlers if self._handlers[fd] == self._lose]:
            self._forget(descriptor)
        self._forget(self._receive_fd)
        self._forget(self._send_fd)
        self._resume()
        self._end(GRACE_S)

    def _obey(self, frame: Frame) -> None:
        if frame.kind is FrameKind.TASK:
            self._store_task(frame.payload)
        elif frame.kind is FrameKind.START:
            self._started = True
            try:
                self._start(decode_text(frame.payload))
            except (OSError, ValueError, KeyError) as error:
                self._send(FrameKind.FAILED, 0, f"the ranks cannot be started: {error}".encode())
                self._end(0.0)
        elif frame.kind is FrameKind.SIGNAL:
            self._pass_on(frame.number, decode_seconds(frame.payload))
        elif frame.kind is FrameKind.SIGNAL_RANK:
            self._signal_rank(frame.number, int(frame.payload))
        elif frame.kind is FrameKind.END:
            self._started = True  # no further START will come
            self._end(decode_seconds(frame.payload))
        elif frame.kind is FrameKind.KILL:
            self._kill_at = time.monotonic()
        elif frame.kind is FrameKind.ALIVE:
            self._lost_at = time.monotonic() + decode_seconds(frame.payload)
            self._send(FrameKind.ALIVE, 0, frame.payload)
        elif frame.kind is FrameKind.DESCRIBE:
            # Imported here: the agent of the launcher's own host never receives DESCRIBE, and starts sooner without it.
            from horovodlike.launcher.agent.host_probe import describe

            self._outgoing += MAGIC
            self._send(FrameKind.DESCRIPTION, 0, encode_text(describe(decode_text(frame.payload))))

    # Starting.

    def _store_task(self, piece: bytes) -> None:
        if self._task_fd is None:
            self._task_fd = os.memfd_create("horovodlike-task", os.MFD_CLOEXEC)
        while piece:
            piece = piece[os.write(self._task_fd, piece) :]

    def _start(self, plan: dict[str, Any]) -> None:
        names, prefixes = ([to_native(text) for text in plan[key]] for key in ("own_names", "own_prefixes"))
        own = {name: value for name, value in os.environb.items() if name in names or name.startswith(tuple(prefixes))}
        common = own | {to_native(name): to_native(value) for name, value in plan["environ"].items()}
        self._elastic = plan["elastic"]
        self._grace_period = plan["grace_period"]
        self._servers.update(entry["rank"] for entry in plan["ranks"] if entry["is_server"])
        for entry in plan["ranks"]:
            environ = {**common, **{to_native(name): to_native(value) for name, value in entry["environ"].items()}}
            start = Start(
                rank=entry["rank"],
                command=[to_native(word) for word in entry["command"]],
                environ=environ,
                cwd=to_native(plan["cwd"]),
                cpus=entry["cpus"],
            )
            try:
                pid, readers = self._start_rank(start)
            except OSError as error:  # too many processes or open files: in an elastic job the others continue
                if not self._elastic:
                    raise
                self._send(FrameKind.STDERR, start.rank, f"hvdrun: cannot start another process: {error}\n".encode())
                self._send(FrameKind.EXITED, start.rank, encode_exit(0, CANNOT_EXECUTE))
            else:
                self._follow(start.rank, pid, readers)

    def _start_rank(self, start: Start) -> tuple[int, dict[int, tuple[int, FrameKind]]]:
        """Start one rank.

        Returns:
            The process id, and the rank and stream of each descriptor to read from.

        Raises:
            OSError: The process or its pipes cannot be made.
        """
        streams = (
            (FrameKind.STDOUT, FrameKind.STDERR)
            if self._task_fd is None
            else (FrameKind.STDOUT, FrameKind.STDERR, FrameKind.RESULT)
        )
        readers: dict[int, tuple[int, FrameKind]] = {}
        writers: list[int] = []
        try:
            for stream in streams:
                read, write = os.pipe2(os.O_CLOEXEC)
                readers[read] = (start.rank, stream)
                writers.append(write)
            if self._task_fd is not None:
                start = start.with_task(self._task_fd, result=writers[2])
            pid = spawn(start, *writers[:2])
        except OSError:
            for read in readers:
                os.close(read)
            raise
        finally:
            for write in writers:
                os.close(write)
        return pid, readers

    def _follow(self, rank: int, pid: int, readers: dict[int, tuple[int, FrameKind]]) -> None:
        self._exits.watch(pid)
        self._rank_of[pid] = rank
        self._send(FrameKind.STARTED, rank, b"%d" % pid)
        for read in readers:
            os.set_blocking(read, False)
            if not self._paused:
                self._on_readable(read, functools.partial(self._forward, read))
        self._streams.update(readers)

    # Output of the ranks.

    def _forward(self, descriptor: int) -> bool:
        """Forward the bytes that can be read without waiting; return False if there are none."""
        rank, stream = self._streams[descriptor]
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return False
        if not data:
            self._close_stream(descriptor)
            return False
        self._send(stream, rank, data)
        if len(self._outgoing) > _OUTGOING_LIMIT and not self._lost:
            self._pause()
        return True

    def _drain(self, descriptor: int) -> None:
        """Forward the bytes that an exited rank has left in a pipe, no more: its descendants may write forever."""
        for _ in range(1 + fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // _READ):
            if not self._forward(descriptor):
                return

    def _close_stream(self, descriptor: int) -> None:
        if self._streams.pop(descriptor, None) is not None:
            self._forget(descriptor)
            os.close(descriptor)

    def _pause(self) -> None:
        self._paused = True
        for descriptor in self._streams:
            self._forget(descriptor)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            for descriptor in self._streams:
                self._on_readable(descriptor, functools.partial(self._forward, descriptor))

    def _send(self, kind: FrameKind, number: int, payload: bytes) -> None:
        if not self._lost:
            self._outgoing += encode(kind, number, payload)

    def _flush(self) -> None:
        if self._lost:
            return
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._send_fd, self._outgoing)]
        except BlockingIOError:
            if self._send_fd not in self._handlers:
                self._on_readable(self._send_fd, self._flush, select.EPOLLOUT)
        except OSError:
            self._lose()
            return
        if not self._outgoing:
            self._forget(self._send_fd)
        if len(self._outgoing) < _OUTGOING_LIMIT // 2:
            self._resume()

    # Ending.

    def _reap(self) -> bool:
        exits, alive = self._exits.reap()
        oom_kills_before, self._oom_kills = self._oom_kills, oom_kills() if exits else self._oom_kills
        for pid, status in exits:
            rank = self._rank_of.pop(pid)
            for descriptor in [fd for fd, (owner, _) in self._streams.items() if owner == rank]:
                self._drain(descriptor)
            if status == -signal.SIGKILL and self._oom_kills > oom_kills_before:
                self._send(FrameKind.STDERR, rank, _OUT_OF_MEMORY)
            self._send(FrameKind.EXITED, rank, encode_exit(pid, status))
            if self._elastic:
                send_signal(-pid, signal.SIGTERM)  # ends the helpers of the worker; its replacement starts new ones
            self._left[pid] = rank, status
        self._tell_gone()
        if self._elastic:
            self._tell_stops()
        elif alive and self._started and not self._rank_of:
            self._end(GRACE_S)  # the ranks have left processes running
        return alive

    def _tell_gone(self) -> None:
        for pid, (rank, status) in list(self._left.items()):
            try:
                os.kill(-pid, 0)
            except ProcessLookupError:
                del self._left[pid]
                if not self._elastic:
                    self._send(FrameKind.GONE, rank, encode_exit(pid, status))
            except PermissionError:  # the group has a process of another user
                pass

    def _tell_stops(self) -> None:
        for pid, stopped in stops():
            if pid in self._rank_of:
                self._send(FrameKind.STOPPED if stopped else FrameKind.CONTINUED, self._rank_of[pid], b"")

    def _signal_rank(self, rank: int, signum: int) -> None:
        for pid in [pid for pid, owner in self._rank_of.items() if owner == rank]:
            send_signal(pid, signum)
            send_signal(pid, signal.SIGCONT)

    def _pass_on(self, signum: int, grace: float) -> None:
        # Servers stay: a rank may send or save something before it ends. The launcher ends them after the ranks.
        for pid in [pid for pid, rank in self._rank_of.items() if rank not in self._servers]:
            # SIGINT goes to the whole process group, as from a terminal. Other signals go to the rank alone, so that it
            # can act upon them while its helper processes (such as data loaders) still run.
            send_signal(-pid if signum == signal.SIGINT else pid, signum)
            send_signal(pid, signal.SIGCONT)
        self._kill_within(grace)

    def _end(self, grace: float) -> None:
        if not self._ending:
            self._ending = True
            signal_descendants(signal.SIGTERM)
            self._kill_within(grace)

    def _kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _advance(self, alive: bool) -> bool:
        """Kill the processes whose time is over; return False if SIGKILL does not end them."""
        now = time.monotonic()
        if self._kill_at is None or now < self._kill_at or not alive:
            return True
        self._ending = True
        self._killed_at = self._killed_at or now
        if now > self._killed_at + _GIVE_UP_S:
            left = b" ".join(b"%d" % pid for pid in descendants(os.getpid()))
            self._send(FrameKind.FAILED, 0, b"these processes do not die of SIGKILL: " + left)
            self._flush()
            return False
        signal_descendants(signal.SIGKILL)
        self._kill_at = now + _KILL_AGAIN_S
        return True


def _guard(agent: int) -> int:
    """Wait for the agent, kill the processes that it has left, and return the exit code."""
    # A user may send SIGTERM to all processes of a job: pass it on, so that the agent gives the ranks their time.
    signal.signal(signal.SIGTERM, lambda *_: send_signal(agent, signal.SIGTERM))
    _, status = os.waitpid(agent, 0)
    exits = ExitQueue()
    give_up = time.monotonic() + _GIVE_UP_S
    while exits.reap()[1] and time.monotonic() < give_up:
        signal_descendants(signal.SIGKILL)
        time.sleep(_KILL_AGAIN_S)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> int:
    """Run guard and agent on standard input and output; return the exit code."""
    become_subreaper()
    launcher, guard = os.getppid(), os.getpid()
    agent = os.fork()
    if agent != 0:
        os.close(0)
        return _guard(agent)
    code = 1
    try:
        os.setpgid(0, 0)  # a signal to the guard's process group must not reach the agent too
        become_subreaper()
        serving = Agent(0, 1, launcher)
        die_with_parent(guard, signal.SIGTERM)
        code = serving.run()
    except BaseException:  # in the forked child no exception may reach the callers
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
