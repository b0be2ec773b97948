"""Reports of the training's progress to Kubeflow Trainer, played by a server with a certificate of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.plain_ranks import PlainRanks
from support.ranks import RankPool

LIMIT_S = 10.0
STATUS = '{"kind": "Status", "message": "Forbidden"}'


class Trainer:
    """The server, in the process that reports; what it has got is in `requests`.

    Args:
        folder: Where its certificate is, and the token.
        answer: Its status code.
        answers: Whether it answers at all.
    """

    def __init__(self, folder: Path, *, answer: int = 200, answers: bool = True) -> None:
        import http.server
        import json
        import os
        import queue
        import ssl
        import threading

        requests: queue.Queue[tuple[str, str, Any]] = queue.Queue()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(answer)
                self.end_headers()
                self.wfile.write(STATUS.encode())
                requests.put((self.path, self.headers["Authorization"], body))

            def log_message(self, *_: object) -> None:
                pass

        self.requests = requests
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "ca.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        port = self._server.server_port
        if answers:
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.token = folder / "token"
        self.token.write_text("first\n")
        os.environ["KUBEFLOW_TRAINER_SERVER_URL"] = f"https://127.0.0.1:{port}/namespaces/a/trainjobs/b/status"
        os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(folder / "ca.crt")
        os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(self.token)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "ca.key", "-out", "ca.crt"]
    words += ["-subj", "/CN=trainer", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *words], cwd=folder, check=True, capture_output=True)
    return folder


def run(fn: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns in a process of its own, and its output."""
    ranks = PlainRanks(fn, [arguments])
    (value,) = ranks.values()
    return value, ranks.outputs[0]


def _threads() -> list[str]:
    import threading

    return [each.name for each in threading.enumerate() if each.name.startswith("horovodlike-progress")]


def _report(folder: Path) -> Any:
    import horovodlike as hvd

    trainer = Trainer(folder)
    hvd.init()
    hvd.report_progress(1, 4, {"loss": 0.5})
    first = trainer.requests.get(timeout=LIMIT_S)
    trainer.token.write_text("second")
    hvd.report_progress(2, 4, {"loss": 0.25})
    hvd.report_progress(3, 4, {"accuracy": 1})
    hvd.shutdown()
    return [first, trainer.requests.get_nowait()], trainer.requests.empty(), _threads()


def test_the_latest_report_is_sent_at_the_end(certificate: Path) -> None:
    (requests, is_all, left), output = run(_report, certificate)
    assert (is_all, left, output) == (True, [], "")
    (path, first_token, first), (_, last_token, last) = requests
    assert path == "/namespaces/a/trainjobs/b/status"
    assert (first_token, last_token) == ("Bearer first", "Bearer second")
    first, last = first["trainerStatus"], last["trainerStatus"]
    assert (first["progressPercentage"], first["metrics"]) == (25, [{"name": "loss", "value": "0.5"}])
    assert "estimatedRemainingSeconds" not in first
    assert last["progressPercentage"] == 75
    assert last["metrics"] == [{"name": "loss", "value": "0.25"}, {"name": "accuracy", "value": "1"}]
    assert last["estimatedRemainingSeconds"] in range(int(LIMIT_S))
    assert last["lastUpdatedTime"] >= first["lastUpdatedTime"]


def _refuse(folder: Path) -> list[str]:
    import horovodlike as hvd
    from horovodlike import progress

    trainer = Trainer(folder, answer=403)
    progress._EVERY_S = 0.0
    hvd.init()
    for step in range(3):
        hvd.report_progress(step, 3)
        trainer.requests.get(timeout=LIMIT_S)
    thread = progress._reporter._thread
    hvd.shutdown()
    thread.join(LIMIT_S)
    return _threads()


def test_an_error_is_printed_once(certificate: Path) -> None:
    left, output = run(_refuse, certificate)
    assert left == []
    assert output.count("horovodlike warning") == 1
    assert "/status: it answers 403, '" + STATUS + "'; the training continues without" in output


def _hang(folder: Path) -> float:
    import time

    import horovodlike as hvd
    from horovodlike import progress

    progress._FAREWELL_S = 0.1
    trainer = Trainer(folder, answers=False)
    hvd.init()
    slowest = 0.0
    for step in range(1000):
        begun = time.monotonic()
        hvd.report_progress(step, 1000, {"loss": 1.0})
        slowest = max(slowest, time.monotonic() - begun)
    hvd.shutdown()
    assert trainer.requests.empty()
    return slowest


def test_a_server_that_hangs_costs_no_step(certificate: Path) -> None:
    slowest, _ = run(_hang, certificate)
    assert slowest < 1  # of the five seconds after which a connection is given up


def _stay_silent() -> list[str]:
    import os

    import horovodlike as hvd

    if hvd.rank() == 1:
        os.environ["KUBEFLOW_TRAINER_SERVER_URL"] = "https://127.0.0.1:1/"
    hvd.report_progress(1, 2)
    os.environ.pop("KUBEFLOW_TRAINER_SERVER_URL", None)
    return _threads()


def test_only_rank_0_reports_and_only_if_it_is_asked(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_stay_silent) == [[], []]


def _misuse() -> list[str]:
    import os

    import horovodlike as hvd

    os.environ["KUBEFLOW_TRAINER_SERVER_URL"] = "http://127.0.0.1:1/"
    errors = []

    def attempt(*arguments: Any) -> None:
        try:
            hvd.report_progress(*arguments)
        except (TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    attempt(1, 2)
    hvd.init()
    for done, total in ((-1, 2), (1, 0), (float("nan"), 1), (1, float("inf"))):
        attempt(done, total)
    attempt(1, 2, {1: 1.0})
    attempt(1, 2, {"loss": "low"})
    attempt(1, 2, {str(number): 0 for number in range(257)})
    hvd.report_progress(3, 2)
    hvd.shutdown()
    return errors


def test_misuse_is_an_error_and_a_token_is_never_sent_in_the_clear() -> None:
    errors, output = run(_misuse)
    assert "not been initialized" in errors[0]
    assert [each.partition(":")[0] for each in errors] == [
        "NotInitializedError",
        *["ValueError"] * 4,
        *["TypeError"] * 2,
        "ValueError",
    ]
    assert errors[1].endswith("done must be 0 or more, and total positive, got -1 of 2")
    assert errors[6] == "TypeError: report_progress: the metric 'loss' must be a number, got 'low'"
    assert "KUBEFLOW_TRAINER_SERVER_URL is no address of https" in output
