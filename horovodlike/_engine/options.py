"""The options with which the engine starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from horovodlike import config as config_module
from horovodlike import routes
from horovodlike._bootstrap.environment import file_of_generation
from horovodlike._engine import ops
from horovodlike._engine.gpu_libraries import nccl_library
from horovodlike._engine.native import ffi, lib
from horovodlike.errors import ConfigError

if TYPE_CHECKING:
    from horovodlike._bootstrap.bootstrap import JobContext
    from horovodlike._bootstrap.environment import RankInfo
    from horovodlike.config import Config

__all__ = ["check", "describe", "segment_bytes", "start", "uses_mpi"]

_GREATEST = 2**63 - 1
_TRANSPORTS = {"mpi": lib.HVL_EXTERNAL, "staging": lib.HVL_STAGING}  # for all other names the engine chooses


def check(settings: Config) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: The settings ask for sealed data, but MPI moves the data.
    """
    if settings.seal_data and uses_mpi(settings):
        raise ConfigError(
            f"HOROVODLIKE_SEAL_DATA=1 cannot be used with HOROVODLIKE_CPU_OPERATIONS={settings.cpu_operations} (hvdrun "
            "--mpi): MPI moves the data, and nothing that MPI moves is sealed. Leave out one of them"
        )


def uses_mpi(settings: Config) -> bool:
    """Return whether MPI moves the data of any operation."""
    return "mpi" in routes.names(settings.cpu_operations)


def segment_bytes(settings: Config, place: RankInfo) -> int:
    """Return the number of bytes of shared memory that the ranks of this host need."""
    return int(lib.hvl_segment_bytes(describe(settings, place, processors=1)))


def start(settings: Config, native: Any, joined: JobContext) -> None:
    """Start the engine with the options of :func:`describe` and the results of the bootstrap."""
    kept = [_describe_hosts(settings, native, joined)]  # memory that must live until hvl_init() has copied it
    pids = ffi.new("int32_t[]", joined.pids)
    native.local_pids = pids if joined.place.local_size > 1 else ffi.NULL
    native.segment_fd = joined.segment_fd
    native.fan_out = settings.fan_out
    folder = ffi.new("char[]", os.fsencode(settings.flight_recorder))
    native.flight_recorder_folder = folder
    autotune_log = ffi.new("char[]", os.fsencode(file_of_generation(settings.autotune_log)))
    native.autotune_log = autotune_log
    native.cuda_library = cuda_file = ffi.new("char[]", os.fsencode(settings.cuda_library))
    native.nccl_library = nccl_file = ffi.new("char[]", os.fsencode(nccl_library(settings.nccl_library)))
    native.routes = rules = ffi.new("hvl_route[]", _rules(settings))
    native.num_routes = len(rules)
    kept += [cuda_file, nccl_file, rules]
    ops.check(lib.hvl_init(native))
    kept.clear()
    joined.close_descriptors()


def _describe_hosts(settings: Config, native: Any, joined: JobContext) -> list[Any]:
    """Set the engine's options for a job of several hosts; return the memory to which they point."""
    if joined.wakeup_pipes is None:  # one host
        return []
    if settings.seal_data:
        native.seal_data, native.gpu_operations = True, _sealed_gpu_operations(settings)
    names = [ffi.new("char[]", os.fsencode(name)) for name in joined.host_names]
    connections = ffi.new("hvl_connection[]", len(joined.connections))
    for entry, connection in zip(connections, joined.connections, strict=True):
        entry.fd, entry.rank, entry.use = connection.socket.fileno(), connection.rank, connection.use
        ffi.memmove(entry.send_key, connection.keys.send.reveal(), lib.HVL_KEY_BYTES)
        ffi.memmove(entry.receive_key, connection.keys.receive.reveal(), lib.HVL_KEY_BYTES)
    native.hosts = hosts = ffi.new("int32_t[]", joined.hosts)
    native.host_names = pointers = ffi.new("char *[]", names)
    native.connections, native.num_connections = connections, len(joined.connections)
    native.wakeup_fd = joined.wakeup_pipes.own
    native.wakeup_fds = wakeup_pipes = ffi.new("int32_t[]", joined.wakeup_pipes.ends)
    return [*names, connections, hosts, pointers, wakeup_pipes]


def _rules(settings: Config) -> list[tuple[int, int, int, int]]:
    """Return the rules of the settings, as ``hvl_route``; none for a setting without rules."""
    rules = []
    for device, text in ((lib.HVL_CPU, settings.cpu_operations), (lib.HVL_CUDA, settings.gpu_operations)):
        for operation in routes.OPERATIONS if routes.has_rules(text) else ():
            kind = getattr(lib, f"HVL_{operation.upper()}")
            for below, name in routes.of_operation(text, operation):
                rules.append((device, kind, below or _GREATEST, _TRANSPORTS.get(name, lib.HVL_BY_ENGINE)))
    return rules


def _gpu_operations(settings: Config) -> int:
    """Return the `hvl_gpu_operations` of operations that no rule sends through the host: the strictest one named."""
    named = routes.names(settings.gpu_operations)
    return config_module.GPU_OPERATIONS.index(next(name for name in ("nccl", "auto", "staging") if name in named))


def _sealed_gpu_operations(settings: Config) -> int:
    """Return the `hvl_gpu_operations` of a job of several hosts whose data is sealed: staging.

    Raises:
        ConfigError: The setting asks for NCCL, whose data between hosts is not sealed.
    """
    if "nccl" in routes.names(settings.gpu_operations):
        raise ConfigError(
            f"HOROVODLIKE_SEAL_DATA=1 cannot be used with HOROVODLIKE_GPU_OPERATIONS={settings.gpu_operations} on "
            "several hosts: nothing that NCCL moves between hosts is sealed. Leave out one of them; staging and auto "
            "copy tensors to the host, from where they go over sealed connections"
        )
    return config_module.GPU_OPERATIONS.index("staging")


def _overlaps(settings: Config, place: RankInfo, processors: int) -> bool:
    if settings.overlap != "auto":
        return settings.overlap == "always"
    # Requests overlap with computation if the framework threads of this host's ranks leave a processor to the engines.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # Without this variable, frameworks start as many threads as the process has processors.
    per_rank = int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))
    return place.local_size * max(per_rank, 1) < processors


def describe(settings: Config, place: RankInfo, processors: int) -> Any:
    """Return an ``hvl_config *`` with all options that do not depend on the other ranks."""
    warning_time = 0.0 if settings.stall_check_disable else settings.stall_check_time_seconds
    return ffi.new(
        "hvl_config *",
        {
            "abi_version": lib.HVL_ABI_VERSION,
            "rank": place.rank,
            "size": place.size,
            "local_rank": place.local_rank,
            "local_size": place.local_size,
            "cross_rank": place.cross_rank,
            "cross_size": place.cross_size,
            "segment_fd": -1,
            "wakeup_fd": -1,
            "processors": processors,
            "slot_bytes": settings.slot_bytes,
            "slot_depth": settings.slot_depth,
            "fusion_threshold": settings.fusion_threshold,
            "cycle_time": settings.cycle_time / 1000.0,
            "overlap": _overlaps(settings, place, processors),
            "cache_capacity": settings.cache_capacity,
            "stall_warning_time": warning_time,
            "stall_shutdown_time": settings.stall_shutdown_time_seconds,
            "flight_recorder_size": settings.flight_recorder_size,
            "autotune": settings.autotune,
            "autotune_fusion_threshold": not config_module.is_set("fusion_threshold", os.environ),
            "autotune_cycle_time": not config_module.is_set("cycle_time", os.environ),
            "autotune_warmup_samples": settings.autotune_warmup_samples,
            "autotune_steps_per_sample": settings.autotune_steps_per_sample,
            "average_counts_joined": settings.join_average == "all",
            "hierarchical_adasum": settings.hierarchical_adasum,
            "gpu_operations": _gpu_operations(settings),
            "gpu_staging_bytes": settings.gpu_staging_bytes,
            "log_level": config_module.LOG_LEVELS.index(settings.log_level),
        },
    )
