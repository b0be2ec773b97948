"""Hosts that DNS names, and discoveries that are late or not to be had."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import pytest

import horovodlike
from horovodlike.launcher.elastic import DiscoveryError, HostDiscovery
from horovodlike.launcher.elastic.cluster_discovery import DnsDiscovery, find_discovery
from horovodlike.launcher.errors import HostsError, UsageError


def test_a_pod_with_addresses_of_both_families_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET6, 0, 0, "", ("fd00::7", 0, 0, 0)), (socket.AF_INET, 0, 0, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert DnsDiscovery("train", slots=2).find() == {"10.0.0.7": 2}
    both.pop()
    assert DnsDiscovery("train").find() == {"fd00::7": 1}


class _Late(HostDiscovery):
    """Finds hosts when it has failed a number of times."""

    def __init__(self, *errors: DiscoveryError) -> None:
        self._errors = list(errors)

    def find(self) -> dict[str, int]:
        if self._errors:
            raise self._errors.pop()
        return {"localhost": 1}


def test_a_job_waits_for_a_discovery_that_is_late() -> None:
    late = _Late(*[DiscoveryError("there is no answer", may_pass=True)] * 2)
    assert horovodlike.run(int, num_proc=1, host_discovery=late) == [0]


@pytest.mark.parametrize(("may_pass", "seconds"), [(True, 1), (False, 60)])
def test_a_job_does_not_wait_for_ever_or_in_vain(may_pass: bool, seconds: float) -> None:
    never = _Late(*[DiscoveryError("there is no answer", may_pass=may_pass)] * 1000)
    began = time.monotonic()
    with pytest.raises(HostsError, match="the hosts cannot be found out: there is no answer"):
        horovodlike.run(int, num_proc=1, host_discovery=never, start_timeout=seconds)
    assert time.monotonic() - began < 30


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UsageError, match=r"pip install 'horovodlike\[kubernetes\]'"):
        find_discovery("kubernetes:a=b")


@pytest.mark.parametrize("where", ["kubernetes:", "dns:", "pods:a", "dns", ""])
def test_what_cannot_be_used(where: str) -> None:
    with pytest.raises(UsageError, match="cannot be used; write kubernetes:SELECTOR or dns:SERVICE"):
        find_discovery(where)


def test_the_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ["10.0.0.3", "10.0.0.1"],
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ]

    def resolve(name: str, port: object, **_: Any) -> Any:
        assert name == "train.ml.svc"
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in answer]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    discovery = DnsDiscovery("train.ml.svc", slots=2)
    assert discovery.find() == {}  # it has no pod yet
    assert list(discovery.find().items()) == [("10.0.0.1", 2), ("10.0.0.3", 2)]
    with pytest.raises(DiscoveryError, match=r"train\.ml\.svc cannot be resolved: Temporary failure"):
        discovery.find()


def test_what_is_no_name() -> None:
    with pytest.raises(DiscoveryError, match="cannot be the name of a service"):
        DnsDiscovery("a" * 100).find()
