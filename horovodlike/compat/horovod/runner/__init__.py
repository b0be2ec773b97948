"""The module ``horovod.runner`` as scripts see it: runs a function in several processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import horovodlike
from horovodlike.compat import install

__all__ = ["run"]

T = TypeVar("T")


class NeedsNames:
    """A function that is pickled in an inner pickle, so that Horovod's names are installed before it is unpickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        from horovodlike._net.object_seal import dumps

        return _restore, (dumps(self._function),)


def _restore(data: bytes) -> Any:
    install(quiet=True)  # the process that pickled `data` has reported a hidden Horovod
    return pickle.loads(data)


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[T]:
    """Run a function as :func:`horovodlike.run` does; the ranks, too, can import ``horovod``."""
    return horovodlike.run(NeedsNames(func), args, kwargs, num_proc, **options)
