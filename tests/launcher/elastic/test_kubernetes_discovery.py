"""Hosts that Kubernetes names, by its client and a server that plays its API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.config import incluster_config, kube_config
from kubernetes_api import KubernetesApi, pod
from test_elastic_nodes import HOST, Nodes, at_size, nodes

from horovodlike.launcher.elastic import DiscoveryError, cluster_discovery
from horovodlike.launcher.elastic.cluster_discovery import KubernetesDiscovery
from horovodlike.launcher.errors import UsageError

__all__ = ["nodes"]  # a fixture

pytestmark = pytest.mark.slow


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    made = KubernetesApi()
    made.write_config(tmp_path / "config")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
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
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = False
    discovery = KubernetesDiscovery("a=b", api_client=client.ApiClient(configuration))
    with pytest.raises(DiscoveryError, match="the Kubernetes API cannot be reached: .*Connection refused"):
        discovery.find()
    discovery.close()


def test_the_service_account_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t0")
    (tmp_path / "ca.crt").write_text("certificates")
    (tmp_path / "namespace").write_text("ml\n")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(cluster_discovery, "_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    made: list[Any] = []
    monkeypatch.setattr(client, "ApiClient", made.append)
    _, namespace = cluster_discovery._configure(client, config)
    assert namespace == "ml"
    assert made[0].host == "https://10.96.0.1:443"
    assert made[0].ssl_ca_cert == str(tmp_path / "ca.crt")
    assert made[0].auth_settings()["BearerToken"]["value"].lower() == "bearer t0"


def test_neither_a_service_account_nor_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="neither a service account of Kubernetes nor a configuration is here"):
        KubernetesDiscovery("a=b")


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


def test_the_job_ends_at_once_if_it_may_not_ask(nodes: Callable[..., Nodes], api: KubernetesApi) -> None:
    api.denied = True
    job = nodes()
    env = {"KUBECONFIG": str(job.folder / "config")}
    ended = job.start(0, "--discover", "kubernetes:job-name=train", env=env).finish()
    assert ended.code == 1
    assert b"hvdrun: the hosts cannot be found out: Kubernetes says: pods is forbidden" in ended.out
