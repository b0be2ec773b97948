"""Where a fault plan may have something happen (`horovodlike.testing`), if there is one."""

from __future__ import annotations

import os

__all__ = ["reach"]


def reach(point: str, step: int | None = None) -> None:
    """As `testing.reach`, which is imported only if there is a plan."""
    if os.environ.get("HOROVODLIKE_FAULT_PLAN"):
        from horovodlike import testing

        testing.reach(point, step)
