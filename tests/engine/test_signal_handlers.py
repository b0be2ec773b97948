"""Signal handlers of scripts that end the job, whatever the main thread does."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import signal
from horovodlike import basics

signal.signal(signal.SIGUSR1, lambda *_: basics.shutdown())
hooks = {"init": basics.on_init, "shutdown": basics.on_shutdown}
left = [signal.SIGUSR1]
hooks[%r](lambda *_: signal.raise_signal(left.pop()) if left else None)
basics.init()
basics.shutdown()
assert not basics.is_initialized()
basics.init()
print("still", basics.size())
"""


def _run(when: str) -> str:
    command = [sys.executable, "-c", SCRIPT % when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_shutdown_in_the_midst_of_init() -> None:
    assert _run("init") == "still 1\n"


def test_shutdown_in_the_midst_of_shutdown() -> None:
    assert _run("shutdown") == "still 1\n"
