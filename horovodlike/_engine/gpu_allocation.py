"""Memory for the outputs of requests on a GPU, of which the engine has none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.requests import DType, shape_of

# By thread: what the handler of a signal has raised while the thread allocated, to be raised by the wait it is in.
_interruptions: dict[int, BaseException] = {}


def raise_interruption() -> None:
    """Raise what the handler of a signal has raised while this thread allocated outputs."""
    if _interruptions and threading.get_ident() in _interruptions:
        raise _interruptions.pop(threading.get_ident())


class _Source:
    """What the engine's call for memory gets at. Does not know its `Allocation`, which would be a cycle."""

    def __init__(self, allocate: Callable[[int, tuple[int, ...], DType], int]) -> None:
        self.allocate = allocate
        self.failure: Exception | None = None


class Allocation:
    """Memory for the outputs of a request on a GPU, which its caller finds when the engine knows their shapes.

    To be kept alive like the memory of the request.

    Args:
        allocate: Called with the number of an output, its shape and its dtype; returns the address of memory for it.
            Any thread of the process may call it, since it is the engine that does, or a thread that waits for some
            request. It may neither wait nor call ``shutdown()``. If it raises, the job is broken.
    """

    __slots__ = ("_handle", "_source", "callbacks")

    def __init__(self, allocate: Callable[[int, tuple[int, ...], DType], int]) -> None:
        self._source = _Source(allocate)
        self._handle = ffi.new_handle(self._source)
        self.callbacks = ffi.new("hvl_callbacks *", {"allocate": lib.hvl_allocate_output, "context": self._handle})

    @property
    def failure(self) -> Exception | None:
        """What `allocate` has raised."""
        return self._source.failure


@ffi.def_extern()  # type: ignore[untyped-decorator]
def hvl_allocate_output(context: Any, index: int, output: Any) -> Any:
    source: _Source = ffi.from_handle(context)
    try:
        address = source.allocate(index, shape_of(output), DType(output.dtype))
    except Exception as error:
        source.failure = error
        return ffi.NULL
    except BaseException as interruption:
        # The handler of a signal has raised because this thread happens to run Python. It is the wait that is
        # interrupted, not the collective, which the other ranks go on with.
        _interruptions[threading.get_ident()] = interruption
        return hvl_allocate_output(context, index, output)
    return ffi.cast("void *", address) if output.num_bytes else context  # null would mean that there is no memory
