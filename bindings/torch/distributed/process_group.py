"""The process group of the backend `hvd`, which carries out the operations of torch.distributed by the engine.

PyTorch calls the methods by their old and by their new names, from Python and some also from C++. C++ passes lists and
options; Python code may leave the options out. All operations return a `Work`. If the option `asyncOp` is false, the
call carries the operation out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from horovodlike._engine.ops import Kind
from horovodlike.torch.distributed._messages import Messages
from horovodlike.torch.distributed._movements import Movements
from horovodlike.torch.distributed._operations import Operations
from horovodlike.torch.distributed._reductions import Reductions
from horovodlike.torch.distributed._team import Team
from horovodlike.torch.distributed._tensors import seconds_of
from horovodlike.torch.distributed._work import HvdWork

_MONITORED_ANSWER_SECONDS = 5.0


class HvdProcessGroup(Reductions, Movements, Messages, dist.ProcessGroup):  # type: ignore[misc]  # torch has overloads
    """A group of ranks; made by `init_process_group("hvd")` and `new_group()`.

    Threads may use different groups at the same time. The operations of one group must come in the same order on all
    of its ranks; if they do not agree about an operation, it raises `MismatchError` on all of them.

    Args:
        team: The ranks of the group.
        on_close: Called when the group is destroyed or aborted.
    """

    def __init__(self, team: Team, on_close: Callable[[], None]) -> None:
        """Begin without operations."""
        dist.ProcessGroup.__init__(self, team.rank, team.size)  # type: ignore[call-arg]  # not annotated
        Operations.__init__(self, team)
        self._on_close = on_close
        self._group_desc = "undefined"
        self._barriers = itertools.count()

    # The group.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return "hvd"

    name = getBackendName
    _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the group."""
        return self._team.name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Do nothing: the group was made with its name, by which the ranks match its operations."""

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description of the group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Keep a description."""
        self._group_desc = desc

    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        """Return the store through which the ranks have met."""
        return self._team.store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are counted from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations the group has started."""
        return self._team.count

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of waits for operations that are started from now on."""
        self._team.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Destroy the group. The default group also ends the engine, if `init_process_group` has started it."""
        self._close("has been destroyed")

    def abort(self) -> None:
        """Do the same as `shutdown`: operations in flight fail on all ranks when the engine ends."""
        self._close("has been aborted")

    def _close(self, why: str) -> None:
        if not self._team.closed:
            self._team.closed = why
            self._on_close()

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the operations that are started until `_end_coalescing`."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> HvdWork:
        """Return the work of all operations since `_start_coalescing`."""
        operations, self._coalesced = self._coalesced or [], None
        return HvdWork(operations, [one for operation in operations for one in operation.outputs])

    def barrier(  # type: ignore[override]  # torch has overloads
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> HvdWork:
        """Return a work that is complete when all ranks have called this."""
        given = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timeout)
        return self.start(Kind.BARRIER, "", (), (), (), opts, given)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called this. It uses only the store, so that it works where other operations hang.

        Raises:
            DistBackendError: Some ranks did not call this in time. The message names them; without `wait_all_ranks`
                only the first of them.
        """
        self._team.check_open()
        seconds = seconds_of(timeout) or self._team.timeout
        key = f"monitored/{next(self._barriers)}"
        missing = self._team.missing(key, seconds if self._team.rank == 0 else seconds + _MONITORED_ANSWER_SECONDS)
        if missing:
            shown = missing if wait_all_ranks else missing[:1]
            raise dist.DistBackendError(
                f"monitored_barrier of process group {self._team.name!r}: "
                f"{', '.join(f'rank {rank}' for rank in shown)} had not come to it after {seconds:g} s"
            )
