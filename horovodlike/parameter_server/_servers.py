"""The servers of a job: the ranks of a process set, or processes of their own that ``hvdrun --servers`` has started."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from horovodlike import basics
from horovodlike._bootstrap.environment import (
    JOB_ID,
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_PORT,
    SERVERS,
    RankInfo,
    find_rank_info,
)
from horovodlike._bootstrap.job_key import take_key
from horovodlike._bootstrap.rendezvous_client import Rendezvous
from horovodlike._engine import parameters
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import Config
from horovodlike.errors import RendezvousError
from horovodlike.parameter_server import _rules
from horovodlike.parameter_server._connections import Address, Listener, facts_of

_lock = threading.RLock()
_listener: Listener | None = None  # the listener of this rank, if it serves
_own_key: JobKey | None = None  # the key of a job of one rank
_dedicated: list[Address] | None = None


class _Closable(Protocol):
    def end(self) -> None: ...


_users: weakref.WeakSet[_Closable] = weakref.WeakSet()


def number_of_dedicated() -> int:
    """Return how many processes of their own serve parameters in this job."""
    return int(os.environ.get(SERVERS) or 0)


def key_of_ranks() -> JobKey:
    """Return the key with which clients authenticate themselves at ranks that serve."""
    global _own_key
    with _lock:
        if _own_key is None:
            _own_key = JobKey.random()
        return (basics.object_key() or _own_key).derive(b"parameter servers")


def key_of_dedicated(environ: Any = os.environ) -> JobKey:
    """Return the key with which clients authenticate themselves at processes that only serve.

    Raises:
        RendezvousError: The environment has no key.
    """
    key = take_key(environ)
    if key is None:
        raise RendezvousError("there is no key for the servers of parameters: hvdrun --servers makes it")
    return key.derive(b"parameter servers")


def serve(settings: Config) -> Address:
    """Have this rank serve parameters until the job ends; return where it listens.

    Raises:
        RendezvousError: It cannot listen.
    """
    global _listener
    with _lock:
        if _listener is None:
            _rules.serve()
            name = f"the parameter server of rank {basics.rank()}"
            facts = facts_of(basics.place(), settings)
            _listener = Listener(key_of_ranks(), basics.address(), name, facts, settings, _rules.registered)
        return _listener.address


def find_dedicated(settings: Config) -> Sequence[Address]:
    """Return where the servers of this job listen that are processes of their own; wait until all of them do.

    Raises:
        RendezvousError: They do not listen in time.
    """
    global _dedicated
    with _lock:
        if _dedicated is None:
            rank_info = replace(find_rank_info(os.environ), job=os.environ.get(JOB_ID, ""))  # also in a job of one rank
            with rendezvous(rank_info, settings) as joined:
                _dedicated = [Address(str(each[0]), int(each[1]), str(each[2])) for each in joined.find_servers()]
        return _dedicated


def rendezvous(rank_info: RankInfo, settings: Config) -> Rendezvous:
    """Connect to the rendezvous server of hvdrun."""
    key = take_key(os.environ)
    if key is None or RENDEZVOUS_PORT not in os.environ:
        raise RendezvousError("hvdrun --servers starts servers of parameters, and it has not started this process")
    host, port = os.environ[RENDEZVOUS_ADDRESS], int(os.environ[RENDEZVOUS_PORT])
    return Rendezvous(host, port, key, rank_info, settings.start_timeout, "hvdrun")


def add_user(user: _Closable) -> None:
    """Have a client of the servers ended when the job ends."""
    _users.add(user)


def _end() -> None:
    """End all connections of this process, at the end of the job."""
    global _listener, _own_key
    with _lock:
        for user in list(_users):
            user.end()
        if _listener is not None:
            _listener.close()
        _listener = _own_key = None
        parameters.stop()


basics.on_shutdown(_end)
