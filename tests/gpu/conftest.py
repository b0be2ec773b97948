"""The mark that says that a test needs a GPU."""

from __future__ import annotations

import functools
import os

import pytest


@functools.cache
def _missing() -> str:
    from horovodlike.launcher.agent.host_probe import find_gpus
    from horovodlike.launcher.tools.check_build import framework_build

    gpus = find_gpus(os.environ)
    build = framework_build("torch")
    if not gpus.names:
        return gpus.source
    return "" if build.startswith("built") else f"PyTorch is {build or 'not installed'}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none, and say why there is none; with NEEDS_GPU set they fail."""
    if item.get_closest_marker("gpu") is not None and (reason := _missing()):
        (pytest.fail if os.environ.get("NEEDS_GPU") else pytest.skip)(f"no GPU: {reason}")
