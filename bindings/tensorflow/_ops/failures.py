"""What TensorFlow's errors have to do with the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from horovodlike._engine import ops


class NotAMemberError(tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]
    """This rank is not in the process set of a collective: what TensorFlow says of a bad argument, and Python."""


class UnsupportedReductionError(tf.errors.AbortedError, ValueError):  # type: ignore[misc]
    """This operation does not know the reduction that it was asked for. Nothing was sent."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise the engine's error in place of TensorFlow's, if the job is broken or shut down.

    TensorFlow puts what the engine has said into its own message. Other errors pass as they are: also those of
    collectives after which the job goes on.

    Raises:
        HorovodInternalError: The job has ended; the cause is what TensorFlow has raised.
    """
    try:
        yield
    except tf.errors.OpError as error:
        ended = ops.has_ended()
        if ended is None or str(ended) not in error.message:
            raise
        raise ended from error
