"""Signals that go to a function."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from horovodlike.launcher import supervisor
from horovodlike.launcher.supervisor import SignalHandler, Wakeup


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals to this process that were handled, until the test's end."""
    signals: list[int] = []
    waker = Wakeup()
    with SignalHandler(signals.append, waker):
        yield signals
    waker.close()


def test_two_of_sigterm_at_once_are_one(heard: list[int]) -> None:
    for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        signal.raise_signal(signum)
    assert heard == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]


def test_two_of_sigterm_with_time_between_are_two(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_DEAF_S", 0.0)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2


def test_what_there_was_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    waker = Wakeup()
    with SignalHandler([].append, waker):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    waker.close()
