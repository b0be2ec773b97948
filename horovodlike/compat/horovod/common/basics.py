"""The module ``horovod.common.basics`` as a script sees it."""

from __future__ import annotations

from typing import Any

from horovodlike import basics

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions of :mod:`horovodlike.basics` as methods; the arguments, a library to load, are ignored."""

    def __init__(self, *library: Any) -> None:
        """Do nothing: there is nothing to load."""

    def __getattr__(self, name: str) -> Any:
        if name in basics.__all__:
            return getattr(basics, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *basics.__all__})
