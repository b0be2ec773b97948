"""Hosts that Kubernetes or DNS names: the classes behind ``--discover``."""

import json
import socket
from pathlib import Path
from typing import Any

from horovodlike.launcher.elastic import DiscoveryError, HostDiscovery
from horovodlike.launcher.errors import UsageError

__all__ = ["DnsDiscovery", "KubernetesDiscovery", "find_discovery"]

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TIMEOUT_S = 10.0
_ABSENT = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def find_discovery(where: str, slots: int | None = None) -> HostDiscovery:
    """Return the discovery for a value of ``--discover``.

    Args:
        where: ``kubernetes:SELECTOR`` or ``dns:SERVICE``.
        slots: The slots of each host; 1 if None.

    Raises:
        UsageError: The value is not accepted, or the Kubernetes client is not installed.
    """
    kind, _, name = where.partition(":")
    if kind == "kubernetes" and name:
        return KubernetesDiscovery(name, slots=slots or 1)
    if kind == "dns" and name:
        return DnsDiscovery(name, slots=slots or 1)
    raise UsageError(f"--discover {where} cannot be used; write kubernetes:SELECTOR or dns:SERVICE")


class DnsDiscovery(HostDiscovery):
    """The addresses of a name, such as a headless Service of Kubernetes, whose name has its pods' addresses."""

    def __init__(self, name: str, *, slots: int = 1) -> None:
        """Take the name; nothing is resolved yet.

        Args:
            name: The name, such as ``train.default.svc``.
            slots: The slots of each host.
        """
        self._name = name
        self._slots = slots

    def find(self) -> dict[str, int]:
        """Resolve the name; a name that does not exist (yet) stands for no host. IPv6 counts only without IPv4.

        Raises:
            DiscoveryError: The name servers do not answer, or refuse.
        """
        try:
            found = socket.getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _ABSENT:
                return {}
            raise DiscoveryError(f"{self._name} cannot be resolved: {error.strerror}", may_pass=True) from None
        except UnicodeError:
            raise DiscoveryError(f"{self._name!r} cannot be the name of a service") from None
        # A pod of a Service with both families has an address of each.
        families = {each[0] for each in found}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        return {address: self._slots for address in sorted(str(each[4][0]) for each in found if each[0] == family)}


class KubernetesDiscovery(HostDiscovery):
    """The pods with a label that run and are not being terminated, by their addresses, the oldest first.

    It asks the API server for a list of pods, which is the only right that its service account needs. A pod that is
    being terminated is no host any more, so that its workers commit and leave before it ends.
    """

    def __init__(self, selector: str, *, namespace: str | None = None, slots: int = 1, api_client: Any = None) -> None:
        """Read the pod's service account, or else the configuration of ``kubectl``; nothing is asked yet.

        Args:
            selector: A label selector, such as ``job-name=train``.
            namespace: The namespace; None for this pod's, or the namespace in the configuration of ``kubectl``.
            slots: The slots of each pod.
            api_client: A ``kubernetes.client.ApiClient`` to use in place of these.

        Raises:
            UsageError: The Kubernetes client is not installed, or has no configuration.
        """
        try:
            from kubernetes import client, config
        except ImportError:
            raise UsageError(
                "to find pods, the Kubernetes client is needed: pip install 'horovodlike[kubernetes]'"
            ) from None
        if api_client is None:
            api_client, own_namespace = _configure(client, config)
            namespace = namespace or own_namespace
        self._api: Any = client.CoreV1Api(api_client)  # the client has annotations since version 34 only
        self._client = api_client
        self._error = client.ApiException
        self._selector = selector
        self._namespace = namespace or "default"
        self._slots = slots

    def find(self) -> dict[str, int]:
        """Ask for the pods.

        Raises:
            DiscoveryError: The API server cannot be reached, or refuses; the message names the right that is missing.
        """
        from urllib3.exceptions import HTTPError

        try:
            # From the server's cache (version 0): a list that is asked for every second must not burden its database.
            pods = self._api.list_namespaced_pod(
                self._namespace, label_selector=self._selector, resource_version="0", _request_timeout=_TIMEOUT_S
            )
        except self._error as error:
            raise DiscoveryError(self._explain(error), may_pass=error.status not in (401, 403)) from None
        except (HTTPError, OSError) as error:
            raise DiscoveryError(f"the Kubernetes API cannot be reached: {error}", may_pass=True) from None
        running = [
            pod
            for pod in pods.items
            if pod.metadata.deletion_timestamp is None and pod.status.phase == "Running" and pod.status.pod_ip
        ]
        running.sort(key=lambda pod: (str(pod.metadata.creation_timestamp), pod.metadata.name))
        return {pod.status.pod_ip: self._slots for pod in running}

    def close(self) -> None:
        """Close the connections to the API server."""
        self._client.close()

    def _explain(self, error: Any) -> str:
        try:
            said = str(json.loads(error.body)["message"])
        except (ValueError, TypeError, KeyError):
            said = str(error.reason)
        if error.status == 403:
            return (
                f"Kubernetes says: {said}. The service account needs a Role in the namespace {self._namespace} with "
                'the rule {apiGroups: [""], resources: [pods], verbs: [list]}, and a RoleBinding to it'
            )
        if error.status == 401:
            return f"Kubernetes does not accept the token of the service account ({said}); is it mounted, and valid?"
        return f"Kubernetes answers {error.status}: {said}"


def _configure(client: Any, config: Any) -> tuple[Any, str | None]:
    """Return an API client, and the namespace that goes with it."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
        return client.ApiClient(configuration), _NAMESPACE.read_text().strip()
    except (config.ConfigException, OSError):
        pass
    try:
        config.load_kube_config(client_configuration=configuration)
        context = config.list_kube_config_contexts()[1]["context"]
    except (config.ConfigException, OSError, KeyError, TypeError) as error:
        raise UsageError(f"neither a service account of Kubernetes nor a configuration is here: {error}") from None
    return client.ApiClient(configuration), context.get("namespace")
