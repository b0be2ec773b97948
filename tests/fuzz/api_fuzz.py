"""A fuzz of the Python API with the core under AddressSanitizer: `python tests/fuzz/api_fuzz.py --seconds 1800`.

Ranks run one sequence of actions after the other, each from `init()` to `shutdown()`, and each follows from its seed. A
stream of random numbers that all ranks share chooses what is called, so the ranks always make matching calls; a stream
of each rank's own chooses what is done to tensors in flight, in what order handles are waited for, and when. A rank
that cannot make a call shuts the job down, so no sequence waits for ever by itself; one that takes longer than a limit
is a finding. So are a report of a sanitizer, another end of a rank, a wrong result, and an exception that is none of
those that the API documents. Each is printed with the command that repeats it:

    python tests/fuzz/api_fuzz.py --seed S --sequences 1

AddressSanitizer is preloaded, so it allocates all memory: that of torch, NumPy, TensorFlow and Python as well.
`rank.py` is the program of the ranks.
"""

from __future__ import annotations

import argparse
import collections
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import core_builds
from support.ranks import environment_of

from horovodlike._bootstrap.bootstrap import RendezvousServer

RANK = Path(__file__).with_name("rank.py")
SEQUENCE_SECONDS = 60.0
START_SECONDS = 120.0
REPORT_SECONDS = 30.0
SHOWN_CHARACTERS = 6000
SANITIZED = 99  # the exit status after a report
OPTIONS = {
    # Blocks stay in quarantine for long, also large ones; a rank may use less memory than a test machine has.
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={SANITIZED}:quarantine_size_mb=256:alloc_dealloc_mismatch=0:"
    "detect_odr_violation=0:allocator_may_return_null=1:hard_rss_limit_mb=6000:use_sigaltstack=0",
    "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={SANITIZED}",
    "PYTHONMALLOC": "malloc",  # Python's allocator would hide the life of its objects
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HOROVODLIKE_LOG_LEVEL": "error",
}


def _runtimes() -> str:
    """Return the libraries to preload: the sanitizer's, and that of C++, whose exceptions it intercepts."""
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        found.append(str(Path(done.stdout.strip()).resolve()))
    return ":".join(found)


class Job:
    """Ranks that run sequences when told to."""

    def __init__(self, size: int, frameworks: str, without: str) -> None:
        key = secrets.token_bytes(32)
        self._server = RendezvousServer(key, size)
        self._server.start()
        self.logs: list[IO[bytes]] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        package = core_builds.sanitized_package()
        for rank in range(size):
            environment = environment_of(rank, size, key, self._server.port) | OPTIONS
            environment |= {"LD_PRELOAD": _runtimes(), "PYTHONPATH": str(package)}
            environment |= {"HOROVODLIKE_OVERLAP": os.environ.get("HOROVODLIKE_OVERLAP", "auto")}
            self.logs.append(tempfile.TemporaryFile())  # noqa: SIM115  # closed with the object
            command = [sys.executable, str(RANK), frameworks, without]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.logs[rank]}
            self.ranks.append(subprocess.Popen(command, env=environment, **pipes))
            os.set_blocking(self._answers(rank).fileno(), False)

    def _answers(self, rank: int) -> IO[bytes]:
        answers = self.ranks[rank].stdout
        assert answers is not None
        return answers

    def run(self, seed: int, limit: float) -> str:
        """Run a sequence on all ranks and return what is wrong: nothing, most often."""
        for process in self.ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{seed}\n".encode())
                process.stdin.flush()
            except OSError:  # it has exited, which is seen below
                continue
        answers = dict.fromkeys(range(len(self.ranks)), b"")
        deadline = time.monotonic() + limit
        while not all(answer.endswith(b"\n") for answer in answers.values()):
            for rank, process in enumerate(self.ranks):
                answers[rank] += self._answers(rank).read() or b""
                if not answers[rank].endswith(b"\n") and process.poll() is not None:
                    return self._explain(f"rank {rank} exited with status {process.returncode}")
            if time.monotonic() > deadline:
                return self._explain(f"no end within {limit:.0f} s", stacks=True)
            time.sleep(0.005)  # pipes of several processes, and their ends
        wrong = [f"rank {rank}: {answer.decode()}" for rank, answer in answers.items() if answer != b"well\n"]
        return self._explain("".join(wrong)) if wrong else ""

    def _explain(self, what: str, *, stacks: bool = False) -> str:
        lines = [what]
        if stacks:
            for process in self.ranks:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)  # others die of the same, or write their stacks
        for rank, log in enumerate(self.logs):
            text = os.pread(log.fileno(), 1 << 22, 0).decode(errors="replace")
            begin = text.find("ERROR: AddressSanitizer")
            shown = text[begin:][:SHOWN_CHARACTERS] if begin >= 0 else text[-SHOWN_CHARACTERS:]
            lines.append(f"--- rank {rank}\n{shown}")
        return "\n".join(lines)

    def close(self) -> None:
        """End the ranks."""
        for process in self.ranks:
            process.kill()
        for process, log in zip(self.ranks, self.logs, strict=True):
            process.communicate()
            log.close()
        self._server.close()


def main() -> int:
    """Run the fuzz; 0 without a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first sequence; the next one has the next number"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sequences", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--frameworks", default="torch", help="torch, or torch,tensorflow,numpy")
    parser.add_argument("--without", default="", help="actions and mutations to leave out, with commas between them")
    parser.add_argument("--findings", type=int, default=1, help="end after so many")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    options = f"--np {arguments.np} --frameworks {arguments.frameworks}"
    options += f" --without {arguments.without}" if arguments.without else ""
    print(f"seed {seed}", flush=True)
    job: Job | None = None
    begin = next_report = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    try:
        while counts["sequences"] < arguments.sequences and time.monotonic() - begin < arguments.seconds:
            is_new = job is None
            job = job or Job(arguments.np, arguments.frameworks, arguments.without)
            wrong = job.run(seed, SEQUENCE_SECONDS + START_SECONDS * is_new)
            counts["sequences"] += 1
            if is_new:
                begin += time.monotonic() - begin if counts["sequences"] == 1 else 0.0
            if wrong:
                counts["findings"] += 1
                overlap = os.environ.get("HOROVODLIKE_OVERLAP")
                setting = f"HOROVODLIKE_OVERLAP={overlap} " if overlap else ""
                command = f"{setting}python tests/fuzz/api_fuzz.py --seed {seed} --sequences 1 {options}"
                print(f"FINDING in the sequence of seed {seed}: {command}\n{wrong}", flush=True)
                job.close()
                job = None
                if counts["findings"] >= arguments.findings:
                    break
            if time.monotonic() > next_report:
                next_report = time.monotonic() + REPORT_SECONDS
                print(f"seed {seed}: {dict(counts)}", flush=True)
            seed += 1
    finally:
        if job is not None:
            job.close()
    print(f"{counts['sequences']} sequences, {counts['findings']} findings", flush=True)
    return 1 if counts["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
