"""How ratios of training steps are made of what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.targets import step_ratio


def test_a_ratio_is_the_median_of_those_of_single_turns() -> None:
    ours = {"seconds": 4.0, "samples": [2.0, 4.0, 9.0]}
    limit = {"seconds": 2.0, "samples": [1.0, 4.0, 2.0]}
    assert step_ratio(ours, limit) == 2.0  # of 2, 1 and 4.5
    assert step_ratio({"seconds": 3.0}, {"seconds": 2.0}) == 1.5


def test_what_was_not_measured_has_no_ratio() -> None:
    assert step_ratio(None, {"seconds": 1.0}) is None
    assert step_ratio({"seconds": 1.0}, None) is None


def test_turns_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        step_ratio({"seconds": 1.0, "samples": [1.0, 2.0]}, {"seconds": 1.0, "samples": [1.0]})
