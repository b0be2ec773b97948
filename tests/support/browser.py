"""Debian's Chromium without a screen, over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

LIMIT_S = 30.0
AUDIT_S = 120.0  # for a long page on a busy machine
_AUDIT = """axe.run(OPTIONS).then(found => found.violations.flatMap(each => each.nodes.map(
  node => `${each.id}: ${node.target.join(" ")}: ${node.html.slice(0, 200)}: ${node.failureSummary}`)))"""


class Page:
    """One page of a browser.

    Attributes:
        requests: The addresses that it has loaded, or tried to.
        problems: The messages on its console, and its exceptions.
    """

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=LIMIT_S, suppress_origin=True)
        self._number = 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message["method"], message["params"])

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.problems.append(values["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.problems.append(json.dumps(values["args"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = LIMIT_S) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, (expression, self.value("document.body.innerText"), self.problems)
            time.sleep(0.05)
        return found

    def audit(self, *rules: str) -> list[str]:
        """Return what axe finds: how a part of the page fails people who cannot see, hear, or use a pointer.

        Args:
            rules: The rules of axe to check; none for all.
        """
        found = importlib.util.find_spec("axe_playwright_python")
        assert found is not None and found.origin is not None
        self.value(Path(found.origin).with_name("axe.min.js").read_text() + "; 0")
        options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
        expression = _AUDIT.replace("OPTIONS", json.dumps(options))
        self._socket.settimeout(AUDIT_S)
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        self._socket.settimeout(LIMIT_S)
        assert "exceptionDetails" not in answer, answer
        violations: list[str] = answer["result"]["value"]
        return violations

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def save(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with one page; end it."""
    words = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"]
    words += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        note, deadline = folder / "DevToolsActivePort", time.monotonic() + LIMIT_S
        while not note.exists() or note.read_text().count("\n") < 1:
            assert process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.05)
        port = int(note.read_text().split()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT_S) as answer:
            found = next(each for each in json.load(answer) if each["type"] == "page")
        page = Page(found["webSocketDebuggerUrl"])
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        process.wait(LIMIT_S)
