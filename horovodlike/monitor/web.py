"""The answers of the monitor to requests over HTTP, and the connections of its readers.

:func:`answer` is pure. Nothing can be changed through it: it only reads, and only with the token. A browser cannot be
made to read it for another site: the Host header must name this server (a name that an attacker has pointed here is not
accepted), and no answer allows another origin. A connection carries one request and has its deadlines, so that readers
that are slow, idle or many delay no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import hashlib
import hmac
import ipaddress
import json
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes

from horovodlike.monitor import prometheus

MOST_HEADER_BYTES = 16384
MOST_CONNECTIONS = 256
REQUEST_S = 5.0
"""How long a reader may take to send its request."""
ANSWER_S = 20.0
"""How long a reader may take to read the answer."""
_JSON = "application/json"
_PLAIN = "text/plain; charset=utf-8"
_COMPRESSED_FROM = 4096
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}


@dataclass(frozen=True)
class HttpRequest:
    """A request; the names of its headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class HttpResponse:
    """An answer, with further headers."""

    status: int
    body: bytes = b""
    kind: str = _PLAIN
    headers: Mapping[str, str] = field(default_factory=dict)


class Snapshot:
    """The state of a job at one time, and the bodies of answers with it. Each is made once, however many read it."""

    def __init__(self, state: dict[str, Any]) -> None:
        """Take the state; see :meth:`horovodlike.monitor.board.Board.snapshot`."""
        self._state = state

    @functools.cached_property
    def json(self) -> bytes:
        """The state as JSON."""
        return json.dumps(self._state, separators=(",", ":")).encode()

    @functools.cached_property
    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return prometheus.render(self._state).encode()

    @functools.cached_property
    def openmetrics(self) -> bytes:
        """The metrics in the format OpenMetrics."""
        return prometheus.render(self._state, openmetrics=True).encode()


@dataclass(frozen=True)
class Access:
    """The conditions of access.

    Attributes:
        token: The text that readers must know.
        names: The names that a Host header may have, besides addresses and ``localhost``.
    """

    token: str = field(repr=False)
    names: Collection[str] = ()

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header is one with which this server may be called."""
        host = header.strip()
        if host.startswith("["):
            host, bracket, rest = host[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")):
                return False
        elif host.count(":") <= 1:
            host = host.partition(":")[0]
        host = host.lower().removesuffix(".")
        if host == "localhost" or host in {name.lower() for name in self.names}:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def allows(self, request: HttpRequest) -> bool:
        """Return whether a request has the token, in its query or in its Authorization header."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else request.query.get("token", [])
        # All are compared, and in constant time.
        return [hmac.compare_digest(each.encode(), self.token.encode()) for each in given[:1]] == [True]


@functools.cache
def read_page() -> tuple[bytes, str]:
    """Return the page, and the policy with which a browser runs its own script and style, and loads nothing else."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    digests = {}
    for tag in ("script", "style"):
        inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digests[tag] = b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def parse(head: bytes) -> HttpRequest | None:
    """Read a request up to the empty line that ends its headers; return None if it is none."""
    try:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, version = first.split(" ")
        if not version.startswith("HTTP/1.") or not target.startswith("/"):
            return None
        headers: dict[str, str] = {}
        for line in filter(None, lines):
            name, colon, value = line.partition(":")
            name = name.lower()
            # Two Host headers, or a folded line, could mean different things to a proxy and to this server.
            if not colon or not name or name != name.strip() or (name == "host" and name in headers):
                return None
            headers[name] = value.strip()
        path, _, query = target.partition("?")
        decoded = unquote_to_bytes(path).decode("utf-8", "replace")
        return HttpRequest(method, decoded, parse_qs(query, max_num_fields=16), headers)
    except ValueError:
        return None


def answer(
    request: HttpRequest | None,
    access: Access,
    snapshot: Callable[[bool], Snapshot],
    output: Callable[[int], bytes],
) -> HttpResponse:
    """Return the answer to a request.

    Args:
        request: The request; None if it could not be read.
        access: The rules that say which readers are allowed.
        snapshot: Returns the state of the job, with the history of ranks if the argument is True.
        output: Returns the end of the output of a rank, or of a worker of an elastic job.
    """
    if request is None:
        return HttpResponse(400, b"this is not a request that this server understands\n")
    if not access.allows_host(request.headers.get("host", "")):
        return HttpResponse(
            403, b"the Host header is neither an address, localhost, nor a name in HOROVODLIKE_MONITOR_NAMES\n"
        )
    if request.method not in ("GET", "HEAD"):
        return HttpResponse(405, b"only GET and HEAD\n", headers={"Allow": "GET, HEAD"})
    if request.path == "/health":
        return HttpResponse(200, b"ok\n")
    if not access.allows(request):
        return HttpResponse(
            401,
            b"the token is missing or wrong: use the whole URL that hvdrun has printed\n",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if request.path == "/":
        page, policy = read_page()
        return HttpResponse(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": policy})
    if request.path == "/metrics":
        wanted = prometheus.accepts_openmetrics(request.headers.get("accept", ""))
        if wanted:
            return HttpResponse(200, snapshot(False).openmetrics, prometheus.OPENMETRICS)
        return HttpResponse(200, snapshot(False).text, prometheus.TEXT)
    if request.path == "/api/state":
        return HttpResponse(200, snapshot(request.query.get("history") == ["1"]).json, _JSON)
    if request.path == "/api/output":
        try:
            return HttpResponse(200, output(int(request.query["of"][0])))
        except (KeyError, ValueError):
            return HttpResponse(400, b"/api/output?of=0 is the end of the output of rank 0\n")
    return HttpResponse(404, b"there are /, /metrics, /api/state, /api/output and /health\n")


@functools.lru_cache(maxsize=4)  # by the identity of the bytes, in effect: a snapshot has them once
def _compress(body: bytes) -> bytes:
    return gzip.compress(body, 1, mtime=0)


def encode(response: HttpResponse, request: HttpRequest | None) -> bytes:
    """Return the bytes of an answer."""
    body, headers = response.body, dict(response.headers)
    if request is not None and len(body) >= _COMPRESSED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body = _compress(body)
        headers["Content-Encoding"] = "gzip"
    headers = {
        "Content-Type": response.kind,
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Content-Security-Policy": "default-src 'none'",
        **headers,
        "Connection": "close",
    }
    head = f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    return head.encode("latin-1") + (b"" if request is not None and request.method == "HEAD" else body)


class Readers:
    """The connections of readers. Belongs to the thread of an event loop."""

    def __init__(self, access: Access, snapshot: Callable[[bool], Snapshot], output: Callable[[int], bytes]) -> None:
        """Take the conditions of access, and the functions that return the state of the job and output of ranks."""
        self._answer = functools.partial(answer, access=access, snapshot=snapshot, output=output)
        self._open: dict[asyncio.StreamWriter, bool] = {}  # the oldest first; True once it has sent its request

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection, and close it."""
        self._open[writer] = False
        self._make_room()
        try:
            request: HttpRequest | None = None
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
                if writer in self._open:
                    self._open[writer] = True
                request = parse(head[:-4])
                response = self._answer(request)
            except asyncio.LimitOverrunError:
                response = HttpResponse(431, b"the headers are too long\n")
            except (asyncio.TimeoutError, TimeoutError):
                response = HttpResponse(408, b"the request took too long\n")
            writer.write(encode(response, request))
            await asyncio.wait_for(writer.drain(), ANSWER_S)
            if response.status == 431:  # unread bytes would reset the connection before the answer is read
                writer.write_eof()
                await asyncio.wait_for(_discard(reader), REQUEST_S)
        except (OSError, EOFError, asyncio.TimeoutError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), ANSWER_S)
            writer.transport.abort()
            self._open.pop(writer, None)

    def _make_room(self) -> None:
        """Close a connection if the newest one is too many: the oldest of those that have not sent a request."""
        while len(self._open) > MOST_CONNECTIONS:
            earlier = list(self._open)[:-1]
            oldest = next((writer for writer in earlier if not self._open[writer]), earlier[0])
            del self._open[oldest]  # the next new connection ends another one
            oldest.transport.abort()

    def close(self) -> None:
        """Close all connections; their tasks end soon after."""
        for writer in self._open:
            writer.transport.abort()


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass
