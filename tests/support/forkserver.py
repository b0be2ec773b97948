"""Processes that start with their modules imported, which takes seconds for a framework: a fork server forks them.

`ForkServer` is the test's side. This file is also the program of the fork server, which imports the modules and forks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import psutil

# With these variables modules start no threads when they are imported; a process with threads cannot be forked.
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Keras imports these if they are installed, which takes as long as TensorFlow and the rest of Keras; by way of pandas
# also Arrow, which starts a thread. So Keras does not know DataFrames here.
LEFT_OUT = ("matplotlib", "pandas", "scipy", "sklearn")

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Child:
    """A process of a fork server, with the methods of `subprocess.Popen` that tests use. For any thread."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end  # a pipe, to which the exit status is written
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has exited; return its exit status."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    # If the pipe closes without a status, the fork server was killed, and all its children with it.
                    self.returncode = int(os.read(self._end, 16) or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has exited, and is about to be reported
                os.kill(self.pid, number)

    def wait_until_stopped(self, timeout: float) -> None:
        """Wait until a signal has stopped the process; the kernel reports that to its parent only."""
        deadline = time.monotonic() + timeout
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, f"process {self.pid} has not been stopped"
            time.sleep(0.01)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._end)


class ForkServer:
    """A process that has imported some modules and forks others. All of them exit when this process does."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the object
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno()), *modules],
            env={**os.environ, **environ, **SINGLE},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def start(self, program: str, descriptor: int, environ: Mapping[str, str], output: int) -> Child:
        """Run a Python program in a new process. Its argument is the number of the descriptor that it receives.

        Args:
            program: The program's file.
            descriptor: The descriptor that it receives.
            environ: Its whole environment, except for variables that modules read when they are imported.
            output: The descriptor for its standard output and error.
        """
        end, write = os.pipe2(os.O_CLOEXEC)
        order = json.dumps([program, dict(environ)]).encode()
        with self._lock:
            try:
                socket.send_fds(self._socket, [b"%16d" % len(order)], [descriptor, output, write])
                self._socket.sendall(order)
                pid = int(self._socket.recv(16, socket.MSG_WAITALL) or 0)
            except OSError:
                pid = 0
        os.close(write)
        if not pid:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the fork server has ended:\n{self._log.read().decode(errors='replace')}")
        return Child(pid, end)


@functools.cache
def fork_server(modules: tuple[str, ...], environ: tuple[tuple[str, str], ...] = ()) -> ForkServer:
    """Return the fork server of this process for these modules; it is started at the first call."""
    return ForkServer(modules, dict(environ))


# The program of a fork server.


def _serve(orders: socket.socket) -> list[Any] | None:
    """Fork a child for each order, until there are no more; in a child, return the order."""
    ends: dict[int, tuple[int, int]] = {}  # by pidfd, the process id and the pipe for its exit status
    with select.epoll() as epoll:
        epoll.register(orders, select.EPOLLIN)
        while True:
            for ready, _ in epoll.poll():
                if ready in ends:
                    epoll.unregister(ready)
                    _report(ready, *ends.pop(ready))
                    continue
                head, descriptors, _, _ = socket.recv_fds(orders, 16, 3)
                if not head:
                    return None
                order = json.loads(orders.recv(int(head), socket.MSG_WAITALL))
                pid = os.fork()
                if pid == 0:
                    epoll.close()
                    for kept in [orders.fileno(), *ends, *(end for _, end in ends.values())]:
                        os.close(kept)
                    orders.detach()
                    return [*order, *descriptors]
                os.close(descriptors[0])
                os.close(descriptors[1])
                pidfd = os.pidfd_open(pid)
                ends[pidfd] = pid, descriptors[2]
                epoll.register(pidfd, select.EPOLLIN)
                orders.sendall(b"%16d" % pid)


def _report(pidfd: int, pid: int, end: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
    os.close(end)


def _main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    sys.modules.update(dict.fromkeys(LEFT_OUT))  # type: ignore[arg-type]  # to import None is an ImportError
    for module in sys.argv[2:]:
        import_module(module)
    for module in LEFT_OUT:
        del sys.modules[module]  # the children may import them
    assert len(os.listdir("/proc/self/task")) == 1, f"{sys.argv[2:]}: a module has started a thread"
    gc.freeze()  # the children's garbage collectors skip imported objects, and so do not copy their memory
    todo = _serve(orders)
    if todo is None:
        return
    program, environ, descriptor, output, end = todo
    os.close(end)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [program, str(descriptor)]
    sys.path[:1] = [os.path.dirname(program), TESTS]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _main()
