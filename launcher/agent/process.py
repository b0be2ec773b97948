"""Functions of an agent for processes: start a rank, signal a whole tree, and reap exits in their order.

A process that calls :func:`spawn` must have a single thread, since the forked child runs Python code before exec.
"""

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

CANNOT_EXECUTE = 126
"""The exit status of a rank whose process cannot be made, or whose program may not be executed, as in shells."""
_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent dies, daemons included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int) -> None:
    """Ask the kernel for a signal when the parent dies.

    Args:
        parent: The parent's process id; if the parent has died before this call, the signal is sent at once.
        signum: The signal.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def descendants(root: int) -> list[int]:
    """List the process ids of all processes below ``root``, parents before children."""
    return _below([root], _processes())[1:]


def tree_of(leader: int) -> list[int]:
    """List the process ids of all processes of the session with this leader, and of their descendants."""
    found = _processes()
    return _below([pid for pid, (_, session) in found.items() if session == leader], found)


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of every process."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # it has gone in the meantime
            continue
        # The program's name is in parentheses and may hold any character, parentheses too.
        _, parent, _, session, *_ = stat[stat.rindex(b")") + 2 :].split()
        found[int(entry)] = int(parent), int(session)
    return found


def _below(roots: list[int], processes: Mapping[int, tuple[int, int]]) -> list[int]:
    """List the roots and everything below them, each process once."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found = dict.fromkeys(roots)
    left = list(found)
    for pid in left:
        new = [child for child in children.get(pid, ()) if child not in found]
        found.update(dict.fromkeys(new))
        left += new
    return left


def oom_kills(root: str = "") -> int:
    """Count the processes of this control group that the kernel has killed for lack of memory; 0 if it does not say."""
    counts = [0]
    with contextlib.suppress(OSError, ValueError), open(f"{root}/proc/self/cgroup") as lines:
        for _, controller, path in (line.rstrip("\n").split(":", 2) for line in lines):
            name = "memory.oom_control" if controller else "memory.events"  # in version 1 or 2
            with contextlib.suppress(OSError), open(f"{root}/sys/fs/cgroup/{controller}/{path}/{name}") as events:
                counts += [int(line.split()[1]) for line in events if line.startswith("oom_kill ")]
    return max(counts)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process that may have gone, or to a group if ``pid`` is negative."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def signal_descendants(signum: int) -> None:
    """Send a signal to every process below this one; continue stopped ones, so that they can handle it."""
    for pid in descendants(os.getpid()):
        send_signal(pid, signum)
        if signum != signal.SIGKILL:
            send_signal(pid, signal.SIGCONT)


class ExitQueue:
    """Reaps children, and reports the watched ones in the order in which they exited.

    ``wait`` returns children in the order of their starts. The ready list of an epoll keeps the order of events, so
    each watched child has a pidfd in an epoll. Kernels older than 5.3 have no pidfd: there the order of starts is used.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pid_of: dict[int, int] = {}
        self._watched: set[int] = set()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a watched child has exited."""
        return self._epoll.fileno()

    def watch(self, pid: int) -> None:
        """Report this child when it exits."""
        self._watched.add(pid)
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            self._pid_of[pidfd] = pid
            self._epoll.register(pidfd, select.EPOLLIN)

    def reap(self) -> tuple[list[tuple[int, int]], bool]:
        """Reap every child that has exited.

        Returns:
            Process id and status (exit code, or minus the signal) of the watched ones, first exit first; and whether
            any child is left. A subreaper without children has no descendants.
        """
        exits: list[tuple[int, int]] = []
        while True:
            exits += [(pid, self._take(pid)) for pid in self._ready()]
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return exits, False
            if found is None:
                return exits, True
            if found.si_pid not in self._watched:
                os.waitpid(found.si_pid, 0)
            elif found.si_pid not in self._pid_of.values():
                exits.append((found.si_pid, self._take(found.si_pid)))
            # Else it has exited just now, and the next call of _ready() finds it.

    def _ready(self) -> list[int]:
        pids = []
        for pidfd, _ in self._epoll.poll(0):
            pids.append(self._pid_of.pop(pidfd))
            self._epoll.unregister(pidfd)
            os.close(pidfd)
        return pids

    def _take(self, pid: int) -> int:
        self._watched.discard(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def stops() -> list[tuple[int, bool]]:
    """List the children that have been stopped (True) or continued (False) since the last call."""
    found: list[tuple[int, bool]] = []
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return found
        if child is None:
            return found
        found.append((child.si_pid, child.si_code != os.CLD_CONTINUED))


@dataclass(frozen=True)
class Start:
    """How to start one rank; names, arguments and variables are in the bytes of the operating system."""

    rank: int
    command: Sequence[bytes]
    environ: Mapping[bytes, bytes]
    cwd: bytes
    cpus: Sequence[int] | None = None
    inherit: Sequence[int] = field(default_factory=tuple)
    """File descriptors that the rank inherits under the same numbers."""

    def with_task(self, task: int, result: int) -> "Start":
        """Return a copy whose rank inherits the file of its task and the pipe for its result."""
        given = {b"HOROVODLIKE_TASK_FD": task, b"HOROVODLIKE_RESULT_FD": result}
        environ = {**self.environ, **{name: b"%d" % number for name, number in given.items()}}
        return replace(self, environ=environ, inherit=(task, result))


def spawn(start: Start, stdout: int, stderr: int) -> int:
    """Start a rank as the leader of its own process group; the kernel kills it if this process dies.

    Args:
        start: The rank to start.
        stdout: The descriptor that becomes the rank's standard output.
        stderr: The descriptor that becomes the rank's standard error.

    Returns:
        The process id.
    """
    parent = os.getpid()
    # A signal to the forked child before it executes the rank's program must not run this process's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid != 0:
        with contextlib.suppress(OSError):  # parent and child both do it: either may run first
            os.setpgid(pid, pid)
        return pid
    code = 127
    try:
        _become(start, parent, stdout, stderr)
    except BaseException as error:  # in the forked child no exception may reach the callers
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        code = CANNOT_EXECUTE if isinstance(error, PermissionError) else 127
        os.write(2, b"hvdrun: cannot run " + b" ".join(start.command) + b": " + os.fsencode(reason) + b"\n")
    finally:
        os._exit(code)


def _become(start: Start, parent: int, stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target, inheritable=True)
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    # Signals that are ignored stay so after exec. Python ignores the first two; others may be inherited as ignored.
    for signum in _RESET:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(parent, signal.SIGKILL)
    for descriptor in start.inherit:
        os.set_inheritable(descriptor, True)
    if start.cpus is not None:
        os.sched_setaffinity(0, start.cpus)
    try:
        os.chdir(start.cwd)
    except OSError as error:
        raise OSError(error.errno, f"the folder {os.fsdecode(start.cwd)} cannot be entered: {error.strerror}") from None
    os.execvpe(start.command[0], list(start.command), dict(start.environ))
