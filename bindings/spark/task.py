"""Questions of a function on Spark's executors about its task."""

from __future__ import annotations

import os

from horovodlike.launcher.agent.host_probe import VISIBLE

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the GPUs of this rank, as ``CUDA_VISIBLE_DEVICES`` names them: those that Spark has given to its task."""
    return [word.strip() for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
