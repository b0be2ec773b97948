"""The package ``horovod.common`` as scripts see it; this is also its modules ``util`` and ``basics``."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from horovodlike import basics as _basics  # importing horovod.common.basics sets `basics` here to this module
from horovodlike.process_set import ids_and_ranks
from horovodlike.timeline import start_timeline, stop_timeline

__all__ = [
    "HorovodBasics",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "check_num_rank_power_of_2",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "shared_basics",
    "split_list",
]

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether horovodlike has a module for a framework, and that framework can be imported.

    Args:
        ext_base_name: The framework, for instance ``torch``.
        verbose: If it is not available, print the reason.
    """
    try:
        importlib.import_module(f"horovodlike.{ext_base_name}")
    except ImportError as error:
        if verbose:
            print(f"horovod.{ext_base_name} cannot be imported: {error}")
        return False
    return True


def check_extension(ext_name: str, *_: Any) -> None:
    """Raise ImportError if a framework cannot be used. Horovod's further arguments, about its build, are ignored.

    Args:
        ext_name: The framework's module, for instance ``horovod.torch``.
    """
    importlib.import_module(f"horovodlike.{ext_name.removeprefix('horovod.')}")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Raise the exception if there is one: horovodlike is built against no version of a framework, so any will do.

    Args:
        name: The framework.
        version: Its version.
        exception: The error that the framework's extension raised when it was loaded.
    """
    if exception is not None:
        raise exception


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether this process finds a CUDA driver, so that tensors on GPUs can be used."""
    return _basics.cuda_built()


def mpi_built(verbose: bool = False) -> bool:
    """Return whether data can go through MPI: True if mpi4py is installed."""
    return _basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return True: for Horovod's scripts, this means that jobs work without MPI."""
    return True


def nccl_built(verbose: bool = False) -> bool:
    """Return whether ranks can communicate by NCCL: True if this process finds its library."""
    return bool(_basics.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: oneCCL is not supported."""
    return False


@contextlib.contextmanager
def env(**changes: str | None) -> Iterator[None]:
    """Set environment variables, or remove those that are None, until the end of a ``with`` block."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return a function that decides the operation of an allreduce from its arguments ``op`` and ``average``.

    Args:
        reduce_ops: An object with the attributes ``Average`` and ``Sum``.
    """

    def decide(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op is not None:
            return op
        return int(reduce_ops.Sum if average is False else reduce_ops.Average)

    return decide


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_num_rank_power_of_2(num_rank: int) -> None:
    """Raise ValueError unless a number of ranks is a power of 2."""
    if not num_rank_is_power_2(num_rank):
        raise ValueError(f"the number of ranks must be a power of 2, not {num_rank}")


def split_list(values: Sequence[T], num_chunks: int) -> list[Sequence[T]]:
    """Cut a list into consecutive pieces whose lengths differ by one at most; the longer ones come first."""
    length, longer = divmod(len(values), num_chunks)
    ends = [chunk * length + min(chunk, longer) for chunk in range(num_chunks + 1)]
    return [values[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated over."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Return whether a version such as ``2.1.0+cpu`` is at least ``target``; only its first three numbers count.

    Raises:
        ValueError: ``target`` is not of the form ``1.2.3``.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"a version of the form 1.2.3 is expected, not {target!r}")
    return _numbers(version) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+){0,2}", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    return tuple(numbers + [0] * (3 - len(numbers)))


_OTHERS = {
    "_get_process_set_ids_and_ranks": ids_and_ranks,
    "start_timeline": start_timeline,
    "stop_timeline": stop_timeline,
}


class HorovodBasics:
    """The functions of :mod:`horovodlike.basics` as methods; the arguments, the library to load, are ignored."""

    def __init__(self, *library: Any) -> None:
        """Do nothing: there is nothing to load."""

    def __getattr__(self, name: str) -> Any:
        if name in _basics.__all__:
            return getattr(_basics, name)
        if name in _OTHERS:
            return _OTHERS[name]
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}: it has the functions that horovodlike.basics "
            "lists, and no compiled library to call; process sets are in horovod.common.process_sets",
            name=name,
            obj=self,
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_basics.__all__, *_OTHERS})


shared_basics = HorovodBasics()
"""The object behind ``horovod.torch.mpi_ops._basics`` and the like."""
