"""The transports that can be used for each operation, device and mode: :func:`collective_availability`."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovodlike import basics, config, routes
from horovodlike._engine import gpu_libraries
from horovodlike._engine.native import lib

if TYPE_CHECKING:
    from horovodlike._bootstrap.environment import RankInfo
    from horovodlike.config import Config

__all__ = ["Availability", "Cell", "collective_availability"]

_TRANSPORTS = {
    "shared memory": lib.HVL_SHARED_MEMORY,
    "TCP": lib.HVL_TCP,
    "MPI": lib.HVL_EXTERNAL,
    "NCCL": lib.HVL_NCCL,
    "staging": lib.HVL_STAGING,
}
_DEVICES = {"cpu": lib.HVL_CPU, "gpu": lib.HVL_CUDA}
_KINDS = {
    **{name: getattr(lib, f"HVL_{name.upper()}") for name in (*routes.OPERATIONS, "barrier")},
    "send": lib.HVL_MESSAGE,
    "recv": lib.HVL_MESSAGE,
}
_MODES = ("sync", "async")


@dataclass(frozen=True)
class Cell:
    """One entry of the table.

    Attributes:
        transport: ``shared memory``, ``TCP``, ``MPI``, ``NCCL`` or ``staging`` (through the host's memory, for GPUs).
        operation: The name of the function, such as ``allreduce`` or ``send``.
        device: ``cpu`` or ``gpu``: where the tensors are.
        mode: ``sync`` or ``async`` (the function that returns a handle).
        state: ``available``; ``unavailable``: not here, or not in this job; or ``unimplemented``.
        reason: Why it is unavailable; or the sizes and conditions for which it is available; empty: all.
    """

    transport: str
    operation: str
    device: str
    mode: str
    state: str
    reason: str


@dataclass(frozen=True)
class Availability:
    """The answer of :func:`collective_availability`; its text is a table.

    Attributes:
        of_job: True if it is about the job of this process, False if it is about the installation.
        cells: An entry for each transport, operation, device and mode.
    """

    of_job: bool
    cells: tuple[Cell, ...]

    def find(self, transport: str, operation: str, device: str = "cpu", mode: str = "sync") -> Cell:
        """Return one entry.

        Raises:
            KeyError: There is no such entry.
        """
        wanted = (transport, operation, device, mode)
        for cell in self.cells:
            if (cell.transport, cell.operation, cell.device, cell.mode) == wanted:
                return cell
        raise KeyError(wanted)

    def __str__(self) -> str:
        """Return a table with a column for each transport, and below it the reasons by number."""
        reasons: list[str] = []
        rows: dict[tuple[str, str, str], list[str]] = {}
        for cell in self.cells:
            row = rows.setdefault((cell.device, cell.operation, cell.mode), [])
            row.append(_shown(cell, reasons))
        for device, operation in itertools.product(_DEVICES, _KINDS):
            modes = [(device, operation, mode) for mode in _MODES]
            if rows[modes[0]] == rows[modes[1]]:
                rows = {(*key[:2], ", ".join(_MODES)) if key == modes[0] else key: row for key, row in rows.items()}
                del rows[modes[1]]
        lines = [("device", "operation", "mode", *_TRANSPORTS), *((*key, *row) for key, row in rows.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*table, *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))])


def _shown(cell: Cell, reasons: list[str]) -> str:
    if not cell.reason:
        return cell.state
    if cell.reason not in reasons:
        reasons.append(cell.reason)
    return f"{cell.state} ({reasons.index(cell.reason) + 1})"


def collective_availability(counts_gpus: bool = False) -> Availability:
    """Return which transports can be used for each operation, device and mode.

    Before :func:`init`, the answer is about the installation: how the engine was built, and which libraries are found.
    After it, it is about this job: its hosts and the settings ``CPU_OPERATIONS`` and ``GPU_OPERATIONS``; whether the
    ranks of a process set can use NCCL together is found out at their first operation on GPUs. May be called from any
    thread.

    Args:
        counts_gpus: Also find out whether there is a GPU, which initialises CUDA: processes that are forked later
            cannot use it. False: only look for the libraries.

    Returns:
        The entries; ``print`` shows a table of them.

    Raises:
        ConfigError: A setting has a value that cannot be used.
    """
    gpu = _why_no_gpu(counts_gpus)
    joined = basics.place_and_settings()
    cells = []
    for transport, native_transport in _TRANSPORTS.items():
        missing = gpu.get(transport, "")
        if transport == "MPI" and not basics.mpi_built():
            missing = "mpi4py is not installed"
        for device, native_device in _DEVICES.items():
            for operation, kind in _KINDS.items():
                implemented = bool(lib.hvl_implements(native_transport, kind, native_device))
                why, when = missing, ""
                if not why and joined is not None:
                    why, when = _in_job(transport, operation, *joined)
                for mode in _MODES:
                    state = "unavailable" if why else "available"
                    if not implemented or not _has_function(operation, mode):
                        state, reason = "unimplemented", ""
                    else:
                        reason = why or when
                    cells.append(Cell(transport, operation, device, mode, state, reason))
    return Availability(joined is not None, tuple(cells))


def _has_function(operation: str, mode: str) -> bool:
    functions = importlib.import_module("horovodlike").__all__
    names = (operation,) if mode == "sync" else (f"{operation}_async", f"i{operation}")
    return any(name in functions for name in names)


def _why_no_gpu(counts_gpus: bool) -> dict[str, str]:
    """Return why transports for GPUs cannot be used here, by their names."""
    found = gpu_libraries.find(counts_gpus)
    why = found.why_no_cuda
    if not why and counts_gpus and found.num_gpus == 0:
        why = "there is no GPU"
    return {"staging": why, "NCCL": why or found.why_no_nccl}


def _in_job(transport: str, operation: str, place: RankInfo, settings: Config) -> tuple[str, str]:
    """Return why the job does not use the transport for the operation, and otherwise when it does."""
    if transport in ("NCCL", "staging"):
        return _on_gpu(transport, operation, place, settings)
    if place.size == 1:
        return "the job has one rank", ""
    if transport == "shared memory" and place.local_size == 1:
        return "no other rank is on this host", ""
    if transport == "TCP" and place.local_size == place.size:
        return "all ranks are on one host", ""
    if operation not in routes.OPERATIONS:
        return "", ""
    names = {"mpi"} if transport == "MPI" else {*config.SETTINGS["cpu_operations"].choices} - {"mpi"}
    when = _sizes(settings.cpu_operations, operation, names)
    return _elsewhere("cpu_operations", settings) if when is None else "", when or ""


def _on_gpu(transport: str, operation: str, place: RankInfo, settings: Config) -> tuple[str, str]:
    is_sealed = settings.seal_data and place.local_size < place.size
    if transport == "NCCL":
        when = _sizes(settings.gpu_operations, operation, {"auto", "nccl"})
        if is_sealed:
            return "NCCL cannot seal data (HOROVODLIKE_SEAL_DATA=1)", ""
        return _elsewhere("gpu_operations", settings) if when is None else "", when or ""
    when = _sizes(settings.gpu_operations, operation, {"staging"})
    if is_sealed or when == "":
        return "", ""
    return "", "where NCCL cannot be used" if when is None else f"{when}; others where NCCL cannot be used"


def _elsewhere(name: str, settings: Config) -> str:
    return f"{config.SETTINGS[name].variable}={getattr(settings, name)} chooses another transport"


def _sizes(text: str, operation: str, names: set[str]) -> str | None:
    """Return the sizes of the operation for which a setting chooses one of these names; empty: all; None: none."""
    least, sizes, choices = 0, [], routes.of_operation(text, operation)
    for below, name in choices:
        if name in names:
            sizes.append(f"{least} bytes and more" if below is None else f"{least} to {below - 1} bytes")
        least = below or 0
    if len(sizes) == len(choices):
        return ""
    return ", ".join(sizes) or None
