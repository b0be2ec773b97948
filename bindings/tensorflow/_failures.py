"""What the engine says when the job has ended, which TensorFlow makes errors of its own of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from horovodlike import ops


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
