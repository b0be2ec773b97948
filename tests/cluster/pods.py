"""Programs on hosts that stand for pods: what each prints is in a file, and none outlives its test."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path

from cluster.hosts import Host, environment
from cluster.namespaces import wait_until

SLACK_S = 20.0
# All ranks commit each step, and say when their number has changed; a file ends them.
ELASTIC = """
    import os, time
    from pathlib import Path

    import numpy as np

    import horovodlike as hvd
    from horovodlike import elastic

    @elastic.run
    def train(state):
        print(f"size {hvd.size()} at step {state.step} on {os.environ['HOROVODLIKE_NODE_ID']}", flush=True)
        while not hvd.allreduce(np.array([Path("finish").exists()], np.int32), op=hvd.Sum)[0]:
            state.step += 1
            time.sleep(0.005)
            state.commit()

    hvd.init()
    train(elastic.ObjectState(step=0))
"""


class Pods:
    """The programs that a test has started, in a folder that has the training script as ``train.py``."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self._logs: dict[subprocess.Popen[bytes], Path] = {}
        self.write_script(script)

    def write_script(self, script: str) -> None:
        (self.folder / "train.py").write_text(textwrap.dedent(script))

    def popen(self, host: Host, words: Sequence[str | Path], **variables: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log.{len(self._logs)}"
        with log.open("wb") as file:
            program = host.popen(
                words,
                cwd=self.folder,
                env=environment(OMP_NUM_THREADS="1", **variables),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._logs[program] = log
        return program

    def text(self, program: subprocess.Popen[bytes]) -> str:
        return self._logs[program].read_text()

    def wait(self, program: subprocess.Popen[bytes], pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.text(program)), f"{pattern!r} in {self._logs[program]}", SLACK_S)

    def end(self, *programs: subprocess.Popen[bytes]) -> None:
        """Wait until all have exited with 0."""
        for program in programs:
            assert program.wait(SLACK_S) == 0, self.text(program)

    def finish(self, *programs: subprocess.Popen[bytes]) -> None:
        """End an elastic training."""
        (self.folder / "finish").touch()
        self.end(*programs)

    def close(self) -> None:
        for program in self._logs:
            program.kill()
            program.wait()
