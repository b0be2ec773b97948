"""The processor time that this process receives, and the kernel's data on the reasons why it receives no more.

Everything is read from procfs and sysfs, takes well under a millisecond, and is left out where the kernel lacks it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_FREQUENCY_S = 10.0
"""The interval between readings of the frequency, which can wake idle processors."""
_MOST_PROCESSORS = 8
_TICKS = os.sysconf("SC_CLK_TCK")


class Processor:
    """Counts the time of all threads of this process. Belongs to one thread."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._delays: dict[str, int] = {}  # thread id -> nanoseconds
        self._delay = 0
        self._frequency: float | None = None
        self._frequency_at = 0.0

    def measure(self) -> dict[str, float]:
        """Return numbers by name, sums since the process began but for the frequency.

        Returns:
            ``cpu_seconds``: in which its threads ran; ``run_delay_seconds``: in which they could have run, and another
            process had the processor; ``steal_seconds``: in which the hypervisor had a processor of this host;
            ``frequency_hertz``: of the processors it may use, on average.
        """
        values: dict[str, float] = {"cpu_seconds": round(time.process_time(), 4)}
        with contextlib.suppress(OSError, ValueError, IndexError):
            values["run_delay_seconds"] = round(self._measure_delay() / 1e9, 4)
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as file:
            values["steal_seconds"] = int(file.readline().split()[8]) / _TICKS
        if time.monotonic() - self._frequency_at >= _FREQUENCY_S or not self._frequency_at:
            self._frequency, self._frequency_at = _frequency(), time.monotonic()
        if self._frequency is not None:
            values["frequency_hertz"] = self._frequency
        return values

    def _measure_delay(self) -> int:
        """Add up the second number of each thread's schedstat, the time on the run queue of a processor."""
        before, self._delays = self._delays, {}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                    delay = self._delays[thread] = int(file.read().split()[1])
                self._delay += max(0, delay - before.get(thread, 0))
        if not self._delays:
            raise FileNotFoundError
        return self._delay


def _frequency() -> float | None:
    processors = sorted(os.sched_getaffinity(0))[:_MOST_PROCESSORS]
    with contextlib.suppress(OSError, ValueError):
        paths = [Path(f"/sys/devices/system/cpu/cpu{each}/cpufreq/scaling_cur_freq") for each in processors]
        return 1000.0 * sum(int(path.read_text()) for path in paths) / len(paths)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = [float(line.partition(":")[2]) for line in file if line.startswith("cpu MHz")]
        chosen = [found[each] for each in processors if each < len(found)]
        return 1e6 * sum(chosen) / len(chosen)
    return None
