"""``init``, ``shutdown``, and this process's rank in the job. Every framework's module has the same functions."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horovodlike import config as config_module
from horovodlike._bootstrap.environment import (
    DRIVER_PORT,
    FAULT_PLAN,
    MONITOR_PORT,
    RankInfo,
    file_of_generation,
    misspelt,
    path_of_rank,
)
from horovodlike._bootstrap.environment import generation as generation_of_job
from horovodlike._engine import gpu_libraries, ops, options, stack_dump, steps
from horovodlike._engine.native import ffi, lib
from horovodlike._engine.ops import ReduceOp
from horovodlike.errors import ConfigError, HorovodInternalError, NotInitializedError, RendezvousError

if TYPE_CHECKING:
    from horovodlike._bootstrap.bootstrap import JobContext
    from horovodlike._bootstrap.discovery import Meeting
    from horovodlike._bootstrap.driver_client import Worker
    from horovodlike._engine.mpi_provider import Library
    from horovodlike._net.secure_channel import JobKey
    from horovodlike.config import Config

Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]

_MOST_CHARACTERS = 1000  # of the text of an exception that is sent to the other ranks
_lock = threading.RLock()  # serialises init() and shutdown(); reentrant for a signal handler that calls shutdown()
_place: RankInfo | None = None
_settings: Config | None = None  # of the job
_engine_overlaps = False
_average_counts_joined = False
_mpi_library: Library | None = None  # set if MPI moves the data
_object_key: JobKey | None = None  # authenticates the objects of this generation
_address = ""  # at which ranks of other hosts reach this one
_pid = 0  # the process that called init()
_at_init: list[Callable[[RankInfo], None]] = []
_at_shutdown: list[Callable[[], None]] = []
_register_process_sets: list[Callable[[Sequence[Any]], None]] = []
_given_process_sets: Sequence[Any] = ()  # of the last init()
_generation = 0


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Join the job that this process was started for, or become a job of one rank. Blocks until all ranks have joined.

    A second call does nothing. After :func:`shutdown`, a further call joins again; this may be repeated. May be called
    from any thread. In an elastic job, the call waits until the driver gives this process a rank, and tries again if
    another rank is lost meanwhile.

    Args:
        comm: All ranks of the job: None or an empty list, a list of all ranks in ascending order, or an mpi4py
            communicator of all ranks, such as ``MPI.COMM_WORLD`` under mpirun. For some of the ranks, use process sets.
        process_sets: Process sets to register now, in the same order on all ranks;
            `add_process_set` adds others later. Where each rank gives a set of another communicator, of its own part of
            ``MPI.COMM_WORLD.Split(...)``, every part becomes a set. ``"dynamic"``, with which Horovod's
            scripts allow that, has no effect: sets can always be added. In an elastic job, a set is left out if it has
            a rank that the job does not have.

    Raises:
        NotImplementedError: ``comm`` lacks ranks of the job, or has them in another order.
        ValueError: An argument is none of these; or a process set cannot be registered; then the job was shut down.
        ConfigError: A setting or an environment variable has a bad value.
        RendezvousError: The ranks could not find or trust each other in time; or the driver is lost.
        SystemExit: The driver does not need this worker, or SIGTERM has asked it to leave (status 0); or the job has
            ended.
    """
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets must be a sequence of process sets or "dynamic", got {process_sets!r}')
    global _given_process_sets
    chosen: Sequence[Any] = [] if process_sets is None or isinstance(process_sets, str) else process_sets
    while _start(comm):
        _given_process_sets = chosen
        try:
            for register in _register_process_sets if chosen else ():
                register(chosen)
            return
        except HorovodInternalError as error:
            _shut_down()
            worker = _worker()
            if worker is None:
                raise
            worker.explain("failed", str(error))
        except BaseException:
            _shut_down()
            raise


def restart() -> None:
    """Call :func:`shutdown`, and then :func:`init` with the process sets of the last call; for elastic training.

    Raises:
        RendezvousError: The ranks could not find or trust each other in time, or the driver is lost.
        SystemExit: The driver does not need this worker any more, SIGTERM has asked it to leave, or the job has ended.
    """
    _shut_down()
    init(process_sets=_given_process_sets)


def join(meeting: Meeting | None, stall_shutdown: float) -> None:
    """Join a job that is not elastic, as :func:`init` does; for bindings of libraries that number the ranks.

    Args:
        meeting: This process's rank and the discovery of the other ranks; None to read them from the environment.
        stall_shutdown: The default of HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS for this job.

    Raises:
        ConfigError: A setting or an environment variable has a bad value, or the job is elastic.
        RendezvousError: The ranks could not find or trust each other in time.
    """
    with _lock:
        settings = config_module.load(os.environ)
        options.check(settings)
        if os.environ.get(DRIVER_PORT):
            raise ConfigError("in an elastic job the driver numbers the ranks: call hvd.init() first")
        if config_module.variable_of("stall_shutdown_time_seconds", os.environ) is None:
            settings = replace(settings, stall_shutdown_time_seconds=stall_shutdown)
        _join(None, settings, meeting=meeting)


def _start(comm: Any) -> bool:
    """Join the job; return False if this process had joined it before."""
    with _lock:
        if is_initialized():
            return False
        settings = config_module.load(os.environ)
        options.check(settings)
        worker = _find_worker(settings)
        if worker is None:
            _join(comm, settings)
            return True
        while True:
            key = worker.take_place(os.environ)
            try:
                _join(comm, settings, key)
                return True
            except RendezvousError as error:  # for example another rank was lost: the driver decides how to continue
                worker.explain("failed", str(error))


def _worker() -> Worker | None:
    """Return this process's connection to the driver; None if it has none."""
    module = sys.modules.get("horovodlike._bootstrap.driver_client")
    return None if module is None else module.current()


def _find_worker(settings: Config) -> Worker | None:
    """Connect to the driver if the job has one. In other jobs, return None and do not import the driver's client."""
    if not os.environ.get(DRIVER_PORT):
        return None
    if options.uses_mpi(settings):
        raise ConfigError(
            f"HOROVODLIKE_CPU_OPERATIONS={settings.cpu_operations} cannot be used in an elastic job: the ranks of MPI "
            "are fixed"
        )
    from horovodlike._bootstrap import driver_client

    return driver_client.find(os.environ, settings.start_timeout)


def _join(comm: Any, settings: Config, key: JobKey | None = None, meeting: Meeting | None = None) -> None:
    """Join the job, with the rank in ``meeting`` or else in the environment."""
    global _place, _settings, _address, _pid, _mpi_library
    global _engine_overlaps, _average_counts_joined, _generation, _object_key
    from horovodlike._bootstrap import bootstrap
    from horovodlike._engine.mpi_communicators import check_comm

    check_comm(comm)
    library = _load_mpi(settings)
    reach_fault_point("rendezvous")
    segment_bytes = functools.partial(options.segment_bytes, settings)
    with bootstrap.establish(settings, segment_bytes, key=key, meeting=meeting) as joined:
        native = options.describe(settings, joined.place, joined.processors)
        native.external = _connect_mpi(library, settings, joined)
        options.start(settings, native, joined)
        try:
            joined.confirm()
        except BaseException:
            lib.hvl_shutdown(b"")
            raise
    if _pid != os.getpid():
        atexit.register(lambda: _shut_down(getattr(sys, "last_value", None)))  # which has ended the script
    _place, _settings, _pid, _engine_overlaps = joined.place, settings, os.getpid(), bool(native.overlap)
    _mpi_library, _object_key, _address = library, joined.object_key, joined.address
    _average_counts_joined = bool(native.average_counts_joined)
    _generation += 1
    steps.reset()
    if joined.place.size > 1:
        stack_dump.start()
    _start_timeline(settings)
    _log_what_is_ignored(settings, joined.place)
    for notify in _at_init:  # before the first report: these reset what it counts
        notify(joined.place)
    if os.environ.get(MONITOR_PORT):
        _start_reporter(joined.place)


def _load_mpi(settings: Config) -> Library | None:
    """Load the MPI library if the settings choose MPI for the data; return None otherwise."""
    if not options.uses_mpi(settings):
        return None
    from horovodlike._engine import mpi_provider

    return mpi_provider.load(settings.mpi_threads_disable)


def _connect_mpi(library: Library | None, settings: Config, joined: JobContext) -> Any:
    """Connect the ranks by MPI; return an ``hvl_external *``, or NULL if no data goes through MPI."""
    if library is None:
        return ffi.NULL
    library.check(joined.place, settings.mpi_threads_disable)
    if joined.rendezvous is None:
        return ffi.NULL
    joined.rendezvous.barrier("mpi")  # connect() waits for all ranks, so all must have passed the check
    return library.connect()


def _start_timeline(settings: Config) -> None:
    if not settings.timeline or settings.timeline.upper() == "DYNAMIC":
        return
    path = path_of_rank(file_of_generation(settings.timeline), rank())
    try:
        ops.check(lib.hvl_start_timeline(os.fsencode(path), settings.timeline_mark_cycles))
    except ValueError as problem:  # training works without a timeline
        print(f"horovodlike warning: {problem}", file=sys.stderr)


def _start_reporter(place: RankInfo) -> None:
    try:
        from horovodlike._engine import reporter

        reporter.start_if_asked(place)
    except Exception as error:  # no thread, no psutil: the rank goes on without
        print(f"horovodlike warning: rank {place.rank} does not report to the monitor: {error!r}", file=sys.stderr)


def _log_what_is_ignored(settings: Config, place: RankInfo) -> None:
    if place.rank == 0 and _generation == generation_of_job() == 1:
        for line in misspelt(os.environ):
            print(f"horovodlike warning: {line}", file=sys.stderr)
    if place.rank == 0 and settings.log_level in ("trace", "debug"):
        for line in config_module.without_effect(os.environ):
            print(f"horovodlike debug: {line}", file=sys.stderr)


def shutdown(error: BaseException | None = None) -> None:
    """End the job on all ranks: pending operations fail with :class:`ShutDownError`. Also called when Python exits.

    Does nothing if not initialised, and in a process that was forked after ``init()``.

    Args:
        error: The exception because of which this rank ends the job: the error of the others has its class and the
            first 1000 characters of its text. None: the one that is being handled, or that has ended the script.
    """
    if error is None and is_initialized() and (worker := _worker()) is not None:
        worker.tell("shutdown")  # so that it may exit with code 0
    _shut_down(error)


def _shut_down(error: BaseException | None = None) -> None:
    global _place, _object_key
    if _pid != os.getpid():
        return
    with _lock:
        reporter = sys.modules.get("horovodlike._engine.reporter")
        if reporter is not None:
            reporter.stop()
        handled = sys.exc_info()[1]
        ops.check(lib.hvl_shutdown(_described(error or (handled if isinstance(handled, Exception) else None))))
        stack_dump.stop()
        _place = _object_key = None
        for notify in _at_shutdown:
            notify()


def _described(error: BaseException | None) -> bytes:
    if error is None:
        return b""
    words = "".join(traceback.format_exception_only(error)).replace("\0", " ").split()  # in one line
    return " ".join(words)[:_MOST_CHARACTERS].encode(errors="replace")


def is_initialized() -> bool:
    """Return True between :func:`init` and :func:`shutdown`."""
    return bool(lib.hvl_is_initialized())


def overlaps() -> bool:
    """Return whether the engine works while the framework computes (``HOROVODLIKE_OVERLAP``); for bindings."""
    return _engine_overlaps


def generation() -> int:
    """Return how many times this process has joined a job; for bindings.

    The engine's handles and the ids of process sets are valid in one generation only.
    """
    return _generation


def object_key() -> JobKey | None:
    """Return the key that authenticates objects between the ranks of this generation; None in a job of one rank."""
    return _object_key


def place_and_settings() -> tuple[RankInfo, Config] | None:
    """Return this process's rank info and the settings of the job; None if it is not initialised; for reports."""
    with _lock:
        if _place is None or _settings is None or _pid != os.getpid():
            return None
        return _place, _settings


def address() -> str:
    """Return the address at which ranks of other hosts reach this one; a loopback address in a job on one host."""
    return _address


def place() -> RankInfo:
    """Return the rank info of this process.

    Raises:
        NotInitializedError: Not initialised.
    """
    return _current()


def is_elastic() -> bool:
    """Return whether this process is a worker of a driver, which may change the ranks of the job; for bindings."""
    return _worker() is not None


def average_counts_joined() -> bool:
    """Return whether Average also counts ranks that have joined (``HOROVODLIKE_JOIN_AVERAGE``); for bindings."""
    return _average_counts_joined


def reach_fault_point(point: str, step: int | None = None) -> None:
    """Call :func:`horovodlike.testing.reach` if there is a fault plan; that module is imported only then."""
    if os.environ.get(FAULT_PLAN):
        from horovodlike import testing

        testing.reach(point, step)


def on_init(notify: Callable[[RankInfo], None]) -> None:
    """Have ``notify`` called with this process's rank info at the end of every :func:`init`; for bindings."""
    _at_init.append(notify)


def on_shutdown(notify: Callable[[], None]) -> None:
    """Have ``notify`` called at the end of every :func:`shutdown`; for bindings."""
    _at_shutdown.append(notify)


def on_process_sets(register: Callable[[Sequence[Any]], None]) -> None:
    """Have ``register`` called with the process sets that :func:`init` receives; for :mod:`horovodlike.process_set`."""
    _register_process_sets.append(register)


def _current() -> RankInfo:
    if _place is None or _pid != os.getpid():
        raise NotInitializedError("horovodlike has not been initialized; use hvd.init().")
    return _place


def rank() -> int:
    """Return this process's rank, 0 to ``size() - 1``.

    Raises:
        ValueError: Not initialised. The following functions raise it as well.
    """
    return _current().rank


def size() -> int:
    """Return how many processes the job has."""
    return _current().size


def local_rank() -> int:
    """Return this process's number among the ranks of its host, 0 to ``local_size() - 1``."""
    return _current().local_rank


def local_size() -> int:
    """Return how many processes of the job this host has."""
    return _current().local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a process with this process's local rank."""
    return _current().cross_rank


def cross_size() -> int:
    """Return how many hosts have a process with this process's local rank."""
    return _current().cross_size


def is_homogeneous() -> bool:
    """Return True if every host has the same number of processes."""
    return _current().is_homogeneous


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI, so that the script may call it while operations are in flight.

    Raises:
        ValueError: The data of this job does not go through MPI.
    """
    if _place is None or _mpi_library is None:
        raise ValueError("MPI is not enabled: no data goes through it. HOROVODLIKE_CPU_OPERATIONS=mpi enables it")
    return _mpi_library.supports_threads


def mpi_built() -> bool:
    """Return whether data can go through MPI: True if mpi4py is installed."""
    from horovodlike._engine import mpi_provider

    return mpi_provider.is_installed()


def mpi_enabled() -> bool:
    """Return whether this job sends data, all or some, through MPI (``HOROVODLIKE_CPU_OPERATIONS``).

    False before :func:`init`.
    """
    return _place is not None and _mpi_library is not None


def gloo_built() -> bool:
    """Return True: for Horovod's scripts, this means that jobs work without MPI. The Gloo library is not used."""
    return True


def gloo_enabled() -> bool:
    """Return whether this job works without MPI."""
    return not mpi_enabled()


def nccl_built() -> int:
    """Return NCCL's version (22703 for 2.27.3). 0: not found, so tensors on GPUs go through the host's memory."""
    return gpu_libraries.find(counts_gpus=False).nccl_version


def cuda_built() -> bool:
    """Return whether there is a CUDA driver, so that tensors on GPUs can be used. This does not initialise it."""
    return gpu_libraries.find(counts_gpus=False).cuda_version > 0


def rocm_built() -> bool:
    """Return False: collectives do not run on ROCm devices."""
    return False


def ddl_built() -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not supported."""
    return False
