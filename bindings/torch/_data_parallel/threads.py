"""Threads that apply the replicas: the caller's for the first, and one of its own for each other, kept between steps.

A thread of its own for each replica, and not any free one, as autograd orders the nodes of the backward pass by
counters of the threads that made them: so the same program adds gradients in the same order.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import torch

from horovodlike._engine.ops import GpuStream
from horovodlike.torch._ops import gpu

_Context = Callable[[], contextlib.AbstractContextManager[object]]


class Threads:
    """The threads of the replicas with numbers 1, 2, ...; they exit when this object is gone."""

    def __init__(self, count: int) -> None:
        """Make threads for `count` replicas, the module included; each starts when it is first used."""
        self._pools = [ThreadPoolExecutor(1, f"data_parallel_{number}") for number in range(1, count)]

    def apply(
        self,
        replicas: Sequence[Callable[..., Any]],
        inputs: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]],
        devices: Sequence[torch.device],
    ) -> list[Any]:
        """Call each replica with its arguments, in the modes of autograd and autocast of the calling thread.

        Returns:
            The results, when all calls have ended.

        Raises:
            Exception: The error of the first replica that failed, as `DataParallel.forward` describes.
        """
        contexts = _contexts_of_this_thread({device.type for device in devices})
        streams = [gpu.current_stream(device.index) if device.type == "cuda" else None for device in devices]
        calls: list[tuple[Any, ...]] = list(zip(replicas, inputs, kwargs, streams, strict=True))
        futures = [
            pool.submit(contextvars.copy_context().run, functools.partial(_call, contexts, *call))
            for pool, call in zip(self._pools, calls[1:], strict=False)
        ]
        futures.insert(0, _called(_call, [], *calls[0]))
        wait(futures)
        for number, future in enumerate(futures):
            if (error := future.exception()) is not None:
                _reraise(error, number, devices[number])
        return [future.result() for future in futures]


def _called(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function, and return its result or error as a future; an interruption of the thread is raised at once."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def _call(
    contexts: Sequence[_Context],
    replica: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stream: GpuStream | None,
) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        if stream is not None:
            stack.enter_context(gpu.on(stream))
        return replica(*args, **kwargs)


def _contexts_of_this_thread(kinds: set[str]) -> list[_Context]:
    """Return functions that make contexts, in which another thread has this one's modes.

    Args:
        kinds: The types of the devices that are used.
    """
    is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    contexts: list[_Context] = []
    if is_inference:
        contexts.append(torch.inference_mode)
    contexts.append(lambda: torch.set_grad_enabled(has_gradients))
    caches = torch.is_autocast_cache_enabled()
    for kind in kinds:
        # Without a dtype given, `autocast` takes the current one of the thread that makes it.
        if _is_autocast_enabled(kind):
            dtype = torch.autocast(kind).fast_dtype
            contexts.append(lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype, cache_enabled=caches))  # type: ignore[misc]
    return contexts


def _is_autocast_enabled(kind: str) -> bool:
    if hasattr(torch, "get_autocast_dtype"):
        return torch.is_autocast_enabled(kind)
    # Until torch 2.3 there is a function for each type of device.
    return torch.is_autocast_cpu_enabled() if kind == "cpu" else torch.is_autocast_enabled()


def _reraise(error: BaseException, number: int, device: torch.device) -> NoReturn:
    """Raise an error of the same type, if it takes a message, which names the replica."""
    if not isinstance(error, Exception):
        raise error
    message = f"replica {number} on device {device} failed: {type(error).__name__}: {error}"
    try:
        named: Exception = type(error)(message)
    except Exception:  # the type is made of something else than a message
        named = RuntimeError(message)
    raise named from error
