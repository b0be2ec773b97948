"""The creation of process groups, and the ownership of the engine.

A process has one engine. If `hvd.init()` has started it before `init_process_group` is called, the default group uses
it and does not end it. Else `init_process_group` starts it, and it ends with the default group; until then `hvd.init()`
does nothing.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from horovodlike import basics, config
from horovodlike._bootstrap.environment import HOST_ID, RankInfo, find_rank_info
from horovodlike.process_set import add_by_members
from horovodlike.torch.distributed import _meeting
from horovodlike.torch.distributed._team import Team
from horovodlike.torch.distributed.process_group import HvdProcessGroup

_stall_limit = 0.0  # the engine's stall limit in seconds, if a group has set it on starting the engine; else 0
_sets: dict[tuple[int, ...], int] = {}  # by ranks, the ids of the process sets of groups


def _forget() -> None:
    global _stall_limit
    _stall_limit = 0.0
    _sets.clear()


basics.on_shutdown(_forget)
basics.on_init(lambda _: _forget())  # a forked child begins without a shutdown


def create(options: Any, backend_options: object) -> HvdProcessGroup:
    """Make a process group; called by torch on each of its ranks.

    Args:
        options: torch's `_DistributedBackendOptions`.
        backend_options: The caller's `pg_options`; must be None, since the backend has no options.

    Raises:
        TypeError: There are backend options.
        ValueError: The ranks are not in ascending order, or the engine does not run on all ranks of the job.
        RendezvousError: The ranks could not find or trust each other, or do not agree about the job.
        ConfigError: A setting or an environment variable has a bad value.
    """
    if backend_options is not None:
        raise TypeError(
            f"the backend hvd has no options, got pg_options={backend_options!r}; its settings are variables of the "
            "environment, see docs/users/settings.md"
        )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if ranks != sorted(ranks):
        raise ValueError(f"the backend hvd needs the ranks of a group in ascending order, got {ranks}")
    is_default = not options.global_ranks_in_group
    # A store may outlive a group, as torchrun's does, and then has the keys of earlier groups of the same name.
    life = options.store.add(f"lives/{options.group_rank}", 1)
    store = PrefixStore(f"life/{life}", options.store)
    on_close = functools.partial(_end_engine, -1)
    if is_default or not basics.is_initialized():
        if not is_default and dist.is_initialized() and len(ranks) < dist.get_world_size():
            raise ValueError(
                f"a group of the backend hvd of the ranks {ranks} needs the engine on all ranks: use "
                'init_process_group("hvd"), or call hvd.init() on all ranks first'
            )
        if _join(store, options.group_rank, options.group_size, options.timeout):
            on_close = functools.partial(_end_engine, basics.generation())
    team = Team(
        str(options.group_id),
        options.group_rank,
        ranks,
        _set_of(tuple(ranks)),
        options.timeout.total_seconds(),
        store,
        engine_ends_stalls=0 < _stall_limit <= options.timeout.total_seconds(),
    )
    return HvdProcessGroup(team, on_close)


def _join(store: Store, rank: int, size: int, timeout: timedelta) -> bool:
    """Make sure that the engine runs, as a job of these ranks; return whether this call has started it."""
    global _stall_limit
    settings = config.load(os.environ)
    node = os.environ.get(HOST_ID, "").strip() or None
    engine = RankInfo(basics.rank(), basics.size()) if basics.is_initialized() else None
    facts = _meeting.facts_of_this_process(settings, node, engine, find_rank_info(os.environ))
    plan = _meeting.agree(store, rank, size, facts, timeout)
    if plan.how == "running":
        return False
    meeting = None if plan.how == "launcher" else _meeting.meeting(store, rank, size, plan, settings, node)
    basics.join(meeting, timeout.total_seconds())
    if config.variable_of("stall_shutdown_time_seconds", os.environ) is None:
        _stall_limit = timeout.total_seconds()
    return True


def _set_of(ranks: tuple[int, ...]) -> int:
    """Return the id of these ranks' process set. The first group that needs it registers it, and it stays."""
    if len(ranks) == basics.size():
        return 0
    if ranks not in _sets:
        _sets[ranks] = add_by_members(ranks)
    return _sets[ranks]


def _end_engine(generation: int) -> None:
    """End the engine of this generation, also in a broken job; -1: the group that is closed has not started one."""
    if generation == basics.generation():
        basics.shutdown()
