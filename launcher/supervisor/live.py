"""The state of a job in a notebook or on a terminal while it runs, for ``horovodlike.run(..., live=True)``."""

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from html import escape
from typing import Any

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.errors import ranges
from horovodlike.launcher.supervisor.monitoring import WatchedOutput

_PERIOD_S = 1.0
_PLAIN_PERIOD_S = 10.0
"""The time between two lines where a line cannot be overwritten."""
_EVENTS = 3
_LEAST_DONE = 1e-3  # the least share that is done from which the time left is estimated
_PARTS = ("computing", "communicating", "waiting")

View = Callable[[str, str], None]
"""Shows a text, or HTML where that can be shown, in the place of the last one."""


def facts(state: Mapping[str, Any], seconds: float) -> tuple[list[str], list[str]]:
    """Return the state of a job in words: the usual facts, and the faults.

    Args:
        state: The state; see :meth:`horovodlike.monitor.board.Board.snapshot`.
        seconds: How long the job has been running.
    """
    by_state = {
        name: [each["rank"] for each in state["ranks"] if each["state"] == name] for name in ("silent", "ended")
    }
    usual, wrong = [str(timedelta(seconds=int(seconds)))], []
    if done := progress(state):
        usual[0] += f", {percent(done)} done"
        if _LEAST_DONE < done < 1:
            usual[0] += f", about {timedelta(seconds=int(seconds * (1 - done) / done))} left"
    if not state["ranks"]:
        usual.append("no rank has called init() yet")
    elif by_state["ended"]:
        usual.append(f"{len(by_state['ended'])} of {state['size']} ranks have ended")
    else:
        usual.append(f"{len(state['ranks']) - len(by_state['silent'])} of {state['size']} ranks")
        states = {each["state"] for each in state["ranks"]} - {"silent"}
        usual[-1] += f", {states.pop()}" if states in ({"starting"}, {"idle"}) else ""
    if state["generation"] > 1:
        usual.append(f"generation {state['generation']}")
    now = state["history"][-1] if state["history"] and not by_state["ended"] else {}
    if any(now.get(part) for part in _PARTS):
        usual.append(", ".join(f"{part} {percent(now[part])}" for part in _PARTS))
        usual.append(f"{now['bytes'] / 1e6:.3g} MB/s of tensors")
    if (late := state["straggler"]) is not None:
        wrong.append(f"rank {late['rank']} holds up the others: {1000 * late['seconds_each']:.0f} ms late each time")
    if (stall := state["stall"]) is not None:
        wrong.append(f"ranks wait, and nothing has completed for {stall['seconds']:.0f} s")
    if by_state["silent"]:
        wrong.append(f"silent: rank {ranges(by_state['silent'])}")
    return usual, wrong


def percent(share: float) -> str:
    """Return a share as people read it."""
    return f"{100 * share:.0f} %"


def progress(state: Mapping[str, Any]) -> float | None:
    """Return the share of the training that is done, as rank 0 has reported it."""
    shares = (each["counters"].get("progress") for each in state["ranks"] if each["rank"] == 0)
    return next(shares, None)


def as_line(state: Mapping[str, Any], seconds: float) -> str:
    """Return the state of a job as one line, which a terminal may cut: faults come early."""
    usual, wrong = facts(state, seconds)
    return "; ".join([usual[0], *wrong, *usual[1:]])


def as_html(state: Mapping[str, Any], seconds: float) -> str:
    """Return the state of a job as HTML; all text from ranks is escaped."""
    usual, wrong = facts(state, seconds)
    parts = [f"<p>{escape('; '.join(usual))}</p>"]
    if (done := progress(state)) is not None:
        parts.append(f'<progress max="1" value="{done:.4f}" style="width: 100%"></progress>')
    parts += [f"<p><b>▲ {escape(each)}</b></p>" for each in wrong]
    for group in state["stall"]["stacks"] if state["stall"] else ():
        title = f"rank {ranges(group['ranks'])}"
        parts.append(f"<details><summary>{title}</summary><pre>{escape(group['stack'])}</pre></details>")
    warnings = [each["text"] for each in state["events"] if each["kind"] in ("elastic", "warning", "stall")]
    parts += [f"<pre>{escape(text)}</pre>" for text in warnings[-_EVENTS:]]
    return f"<div>{''.join(parts)}</div>"


class LiveOutput(WatchedOutput):
    """Output above which, in a notebook, or else below which the state of the job is shown, each second."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take the arguments of :class:`WatchedOutput`, and begin to show."""
        super().__init__(*given, **named)
        screen = self._screens[FrameKind.STDERR]
        self._is_overwritten = screen.printer.terminal
        notebook = _open_notebook()
        self._view: View | None = notebook or self._write
        self._period = _PERIOD_S if notebook or self._is_overwritten else _PLAIN_PERIOD_S
        self._begun = time.monotonic()
        self._next = self._begun + self._period

    @property
    def deadline(self) -> float | None:
        """See :meth:`RankOutput.deadline`."""
        earlier = super().deadline
        return self._next if earlier is None else min(earlier, self._next)

    def show_due(self) -> None:
        """See :meth:`RankOutput.show_due`; show the state if it is time."""
        super().show_due()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._period
            self._show_state(end="\r" if self._is_overwritten else "\n")

    def end(self) -> None:
        """See :meth:`RankOutput.end`; show the last state."""
        super().end()
        self._show_state(end="\n")

    def _show_state(self, end: str) -> None:
        if self._view is None:
            return
        state, seconds = self._board.snapshot(), time.monotonic() - self._begun
        try:
            self._view(as_line(state, seconds) + end, as_html(state, seconds))
        except Exception as error:  # the notebook has been closed, or its library has changed
            self._view = None
            self.say(f"hvdrun: warning: the state of the job is not shown any more: {error!r}")

    def _write(self, text: str, _: str) -> None:
        screen = self._screens[FrameKind.STDERR]
        self._writer.put(screen.write, screen.printer.add("live", b"hvdrun: ", text.encode(errors="replace")))


def _open_notebook() -> View | None:
    """Return the function that shows the state in the cell of a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):  # IPython on a terminal has none
        return None
    from IPython.display import display

    def content(text: str, html: str) -> dict[str, str]:
        return {"text/plain": text.rstrip(), "text/html": html}

    begun = content("the job starts", "<div>The job starts.</div>")
    handle = display(begun, raw=True, display_id=True)
    return lambda text, html: handle.update(content(text, html), raw=True)
