"""A real GPU: collectives through NCCL and through staging, and training; without a GPU they are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from gpu_checks import CHECKS
from gpu_training_checks import TRAINING_CHECKS
from support.ranks import RankPool

from horovodlike.launcher.agent.host_probe import find_gpus

ALL = {**CHECKS, **TRAINING_CHECKS}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("check", ALL)
def test_one_rank(ranks: Callable[[int], RankPool], check: str) -> None:
    ranks(1).run(ALL[check], True, timeout=300)


@pytest.mark.parametrize("check", ALL)
def test_two_ranks_on_one_gpu(ranks: Callable[[int], RankPool], check: str) -> None:
    ranks(2).run(ALL[check], True, timeout=300)


@pytest.mark.parametrize("check", ALL)
def test_a_rank_on_each_gpu(ranks: Callable[[int], RankPool], check: str) -> None:
    number = len(find_gpus(os.environ).names)
    if number < 2:
        pytest.skip("no second GPU")
    ranks(min(number, 4)).run(ALL[check], False, timeout=300)
