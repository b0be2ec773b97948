"""A job whose ranks compute the input of another one."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@contextlib.contextmanager
def data_workers(run: Run, number: int, *options: object) -> Iterator[None]:
    """Runs workers during the block, which writes and reads `service.json`; the block has them end."""
    ended: list[subprocess.CompletedProcess[str]] = []
    words = ("-m", "horovod.tensorflow.data.compute_worker", *options, "service.json")
    job = ("-m", "horovodlike.launcher", "--compat", "-np", number, "python", *words)
    thread = threading.Thread(target=lambda: ended.append(run(*job)))
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert ended and ended[0].returncode == 0, ended and ended[0].stderr
