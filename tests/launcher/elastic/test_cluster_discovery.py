"""Hosts that Kubernetes or DNS names."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_api import KubernetesApi, pod
from test_elastic_nodes import HOST, Nodes, at_size, nodes

import horovodlike
from horovodlike.launcher.elastic import DiscoveryError, HostDiscovery, cluster_discovery
from horovodlike.launcher.elastic.cluster_discovery import DnsDiscovery, KubernetesDiscovery, find_discovery
from horovodlike.launcher.errors import HostsError, UsageError

__all__ = ["nodes"]  # a fixture


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    made = KubernetesApi()
    made.write_config(tmp_path / "config")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    yield made
    made.close()


@pytest.fixture
def discovery(api: KubernetesApi) -> Iterator[KubernetesDiscovery]:
    made = KubernetesDiscovery("job-name=train", slots=4)
    yield made
    made.close()


def test_pods_that_run(api: KubernetesApi, discovery: KubernetesDiscovery) -> None:
    api.pods = [
        pod("train-1-b", "10.0.0.2", created=5),
        pod("train-0-a", "10.0.0.7", created=1),
        pod("train-2-c", None, phase="Pending"),
        pod("train-3-d", "10.0.0.4", phase="Failed"),
        pod("train-4-e", "10.0.0.5", deletionTimestamp="2026-01-01T00:00:09Z"),
        pod("other", "10.0.0.6", labels={"job-name": "other"}),
    ]
    assert list(discovery.find().items()) == [("10.0.0.7", 4), ("10.0.0.2", 4)]
    assert api.asked[-1].startswith("/api/v1/namespaces/ml/pods?")
    assert "resourceVersion=0" in api.asked[-1]


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


def test_a_service_account_without_the_right(api: KubernetesApi, discovery: KubernetesDiscovery) -> None:
    api.denied = True
    with pytest.raises(DiscoveryError) as error:
        discovery.find()
    assert str(error.value) == (
        'Kubernetes says: pods is forbidden: User "system:serviceaccount:ml:default" cannot list resource "pods" in '
        'API group "" in the namespace "ml". The service account needs a Role in the namespace ml with the rule '
        '{apiGroups: [""], resources: [pods], verbs: [list]}, and a RoleBinding to it'
    )


def test_a_token_that_is_not_valid(api: KubernetesApi, tmp_path: Path) -> None:
    api.write_config(tmp_path / "config", "stale")
    discovery = KubernetesDiscovery("job-name=train")
    with pytest.raises(DiscoveryError, match="does not accept the token of the service account .Unauthorized.; is it"):
        discovery.find()
    discovery.close()


def test_an_api_server_that_is_not_there(api: KubernetesApi) -> None:
    from kubernetes import client

    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = False
    discovery = KubernetesDiscovery("a=b", api_client=client.ApiClient(configuration))
    with pytest.raises(DiscoveryError, match="the Kubernetes API cannot be reached: .*Connection refused"):
        discovery.find()
    discovery.close()


def test_the_service_account_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    (tmp_path / "token").write_text("t0")
    (tmp_path / "ca.crt").write_text("certificates")
    (tmp_path / "namespace").write_text("ml\n")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(cluster_discovery, "_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    from kubernetes import client, config

    made: list[Any] = []
    monkeypatch.setattr(client, "ApiClient", made.append)
    _, namespace = cluster_discovery._configure(client, config)
    assert namespace == "ml"
    assert made[0].host == "https://10.96.0.1:443"
    assert made[0].ssl_ca_cert == str(tmp_path / "ca.crt")
    assert made[0].auth_settings()["BearerToken"]["value"].lower() == "bearer t0"


def test_neither_a_service_account_nor_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="neither a service account of Kubernetes nor a configuration is here"):
        KubernetesDiscovery("a=b")


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


def test_only_nodes_that_are_discovered_take_part(nodes: Callable[..., Nodes], api: KubernetesApi) -> None:
    job = nodes()
    env = {"KUBECONFIG": str(job.folder / "config")}
    first = job.start(0, "--discover", "kubernetes:job-name=train", env=env)
    second = job.start(1, env=env)
    first.expect(b"has called in with 1 slot")
    at_size(first, 1)
    api.pods = [pod("train-1", "127.0.0.1")]  # all nodes of this test have this address
    generation = at_size(second, 2)
    api.pods = [pod("train-1", "127.0.0.1", deletionTimestamp="2026-01-01T00:00:09Z")]
    first.expect(f"hvdrun: {HOST}#1 is not among the hosts that are discovered any more: its workers leave".encode())
    at_size(first, 1, after=generation)
    ended = second.finish()
    assert ended.code == 143
    assert b"hvdrun: this node has left the job, which goes on without it" in ended.out
    assert job.finish(first)[0][0] == 0


@pytest.mark.slow
def test_the_job_ends_at_once_if_it_may_not_ask(nodes: Callable[..., Nodes], api: KubernetesApi) -> None:
    api.denied = True
    job = nodes()
    env = {"KUBECONFIG": str(job.folder / "config")}
    ended = job.start(0, "--discover", "kubernetes:job-name=train", env=env).finish()
    assert ended.code == 1
    assert b"hvdrun: the hosts cannot be found out: Kubernetes says: pods is forbidden" in ended.out
