"""A small server that answers as the API server of Kubernetes does when it is asked for a list of pods."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "the token of the service account"


def pod(name: str, address: str | None, *, phase: str = "Running", created: int = 0, **metadata: Any) -> dict[str, Any]:
    labels = {"job-name": "train", **metadata.pop("labels", {})}
    time = f"2026-01-01T00:00:{created:02}Z"
    return {
        "metadata": {"name": name, "labels": labels, "creationTimestamp": time, **metadata},
        "spec": {"containers": []},
        "status": {"phase": phase, **({} if address is None else {"podIP": address})},
    }


class KubernetesApi:
    """The server; `pods` is what it lists, and `denied` makes it refuse."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.denied = False
        self.asked: list[str] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append(self.path)
                status, body = api.answer(self.path, self.headers.get("authorization") or "")
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, authorization: str) -> tuple[int, dict[str, Any]]:
        asked = urlsplit(path)
        if authorization != f"Bearer {TOKEN}":
            return 401, self._status(401, "Unauthorized")
        namespace = asked.path.removeprefix("/api/v1/namespaces/").removesuffix("/pods")
        if self.denied:
            who = f"system:serviceaccount:{namespace}:default"
            message = f'pods is forbidden: User "{who}" cannot list resource "pods" in API group "" in the namespace'
            return 403, self._status(403, f'{message} "{namespace}"')
        if asked.path != f"/api/v1/namespaces/{namespace}/pods":
            return 404, self._status(404, "the server could not find the requested resource")
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        name, _, value = query.get("labelSelector", "").partition("=")
        chosen = [each for each in self.pods if not name or each["metadata"]["labels"].get(name) == value]
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": chosen}

    def _status(self, code: int, message: str) -> dict[str, Any]:
        return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}

    def write_config(self, path: Any, token: str = TOKEN) -> None:
        """Write a configuration of kubectl that leads here."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "ml"}}],
        }
        path.write_text(json.dumps(content))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
