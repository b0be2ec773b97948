"""The module ``horovod.runner`` as scripts see it: runs a function in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import horovodlike
from horovodlike.compat import NeedsNames

if TYPE_CHECKING:
    from horovodlike.launcher.errors import RankFailedError

__all__ = ["run"]

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[T]:
    """Run a function as :func:`horovodlike.run` does; the ranks, too, can import ``horovod``.

    Raises:
        RankFailedError: A rank failed; it is a RuntimeError whose text begins as Horovod's. If the function raised an
            exception there, this is its cause.
        Exception: As :func:`horovodlike.run` raises it, if no rank was started.
    """
    from horovodlike.launcher.errors import RankFailedError  # the ranks do not need the launcher
    from horovodlike.launcher.run import RemoteTraceback

    try:
        return horovodlike.run(NeedsNames(func), args, kwargs, num_proc, **options)
    except RankFailedError as error:
        raise _failure(error.rank, error.exit_code, str(error)) from (error.__cause__ or error)
    except Exception as error:
        remote = error.__cause__
        if not isinstance(remote, RemoteTraceback):
            raise  # this process raised it
        raise _failure(remote.rank, 1, f"rank {remote.rank} raised {error!r}") from error


def _failure(rank: int, exit_code: int, text: str) -> RankFailedError:
    from horovodlike.launcher.errors import RankFailedError

    first = "" if rank < 0 else f" The first process to do so was:\nProcess name: {rank}\nExit code: {exit_code}"
    return RankFailedError(
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated.{first}\n{text}",
        rank,
        exit_code,
    )
