"""The progress of a training, for the job's monitor and the platform that runs the job: :func:`report_progress`.

Kubeflow Trainer shows it in the status of a TrainJob, and asks for it by three variables. Source: kubeflow/trainer,
docs/proposals/2779-trainjob-progress and pkg/statusserver/server.go. Everything that sends is imported by the thread
that does so, only where these variables are set.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from horovodlike import basics

__all__ = ["report_progress"]

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105  # the variable that has the path of the token's file
_EVERY_S = 5.0  # as Kubeflow's own clients do
_TIMEOUT_S = 5.0
_FAREWELL_S = 2.0
_MOST_METRICS = 256
_LARGEST = 2**31 - 1


def report_progress(done: float, total: float, metrics: Mapping[str, float] | None = None) -> None:
    """Tell the platform how much of the training is done; it shows that, the time left, and the metrics.

    Call it on all ranks, as often as you like: only rank 0 reports, and only where the platform asks for it, which is
    Kubeflow Trainer so far. The page of ``hvdrun --monitor`` and ``run(live=True)`` show the share. It does not wait: a
    thread sends the latest report, at most one in five seconds, and `shutdown()` the last one. If that fails, a warning
    is printed once, and the training continues. The time left is estimated from the reports since `init()`. May be
    called from any thread.

    Args:
        done: The number of steps or epochs that are done, fractions included.
        total: The number of all of them, in the same unit; reports of more than that count as all.
        metrics: Numbers by name, such as the loss. Numbers of earlier reports are shown until they change.

    Raises:
        NotInitializedError: Not initialised.
        TypeError: A metric or its name has a wrong type.
        ValueError: `done` is negative, `total` is not positive, either is infinite or NaN, or there are more than 256
            metrics.
    """
    global _reporter, fraction
    rank = basics.rank()
    if not (math.isfinite(done) and math.isfinite(total) and done >= 0 and total > 0):
        raise ValueError(f"report_progress: done must be 0 or more, and total positive, got {done!r} of {total!r}")
    url = os.environ.get(_URL)
    if rank != 0:
        return
    share = fraction = min(done / total, 1.0)
    if not url:
        return
    texts = {} if metrics is None else _texts(metrics)
    with _lock:
        if _reporter is None:
            _reporter = _Reporter(url)
        _reporter.report(share, texts)


def _texts(metrics: Mapping[str, float]) -> dict[str, str]:
    texts = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"report_progress: the name of a metric must be a text, got {name!r}")
        try:
            texts[name] = f"{float(value):.6g}"
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"report_progress: the metric {name!r} must be a number, got {value!r:.80}") from None
    return texts


class _Reporter:
    """The thread that sends, and the report that it sends next."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._metrics: dict[str, str] = {}
        self._begun: tuple[float, float] | None = None  # time and fraction, from which the time left is estimated
        self._fraction = 0.0
        self._changed = threading.Condition()
        self._next: dict[str, Any] | None = None
        self._closing = False
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="horovodlike-progress", daemon=True)
        self._thread.start()

    def report(self, fraction: float, metrics: Mapping[str, str]) -> None:
        """Have the thread send this report instead of an earlier one that it has not sent yet."""
        if len({**self._metrics, **metrics}) > _MOST_METRICS:
            raise ValueError(f"report_progress: there are more than {_MOST_METRICS} metrics")
        self._metrics.update(metrics)
        status: dict[str, Any] = {
            "progressPercentage": int(100 * fraction),
            "metrics": [{"name": name, "value": value} for name, value in self._metrics.items()],
            "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if (seconds := self._seconds_left(fraction)) is not None:
            status["estimatedRemainingSeconds"] = min(math.ceil(seconds), _LARGEST)
        with self._changed:
            self._next = status
            self._changed.notify()

    def _seconds_left(self, fraction: float) -> float | None:
        now = time.monotonic()
        if self._begun is None or fraction < self._fraction:  # an elastic job may fall back to its last commit
            self._begun = now, fraction
        self._fraction = fraction
        since, first = self._begun
        return (1 - fraction) * (now - since) / (fraction - first) if fraction > first else None

    def close(self) -> None:
        """Send the last report, unless sending has failed before; wait two seconds for that at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            waits = not self._fails
        if waits:
            self._thread.join(_FAREWELL_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                status, self._next = self._next, None
                if status is None or (self._closing and self._fails):
                    return
            trouble = _send(self._url, status)
            with self._changed:
                self._fails = bool(trouble)
            if trouble:
                _warn(f"the progress cannot be reported to {self._url}: {trouble}; the training continues without")
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _EVERY_S)


def _send(url: str, status: Mapping[str, Any]) -> str:
    """Send a status; return why that has failed, or an empty text."""
    import http.client
    import json
    import ssl
    from pathlib import Path
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            return f"{_URL} is no address of https"
        # Both files change while a job runs. There are no redirects, which could lead the token elsewhere.
        token = Path(os.environ.get(_TOKEN, "")).read_text().strip()
        context = ssl.create_default_context(cafile=os.environ.get(_CA) or None)
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", parts.path or "/", json.dumps({"trainerStatus": status}), headers)
            answer = connection.getresponse()
            said = answer.read(300).decode(errors="replace")
            return "" if answer.status == http.client.OK else f"it answers {answer.status}, {said!r}"
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def _warn(text: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(f"horovodlike warning: {text}", file=sys.stderr)


def _close() -> None:
    global _reporter, fraction
    fraction = None
    with _lock:
        reporter, _reporter = _reporter, None
    if reporter is not None:
        reporter.close()


_lock = threading.Lock()
_reporter: _Reporter | None = None
_warned = False
fraction: float | None = None
"""The share that is done, on rank 0; None if that has not been reported since ``init()``."""
basics.on_shutdown(_close)
