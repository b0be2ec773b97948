"""Elastic training with TensorFlow, which continues when ranks are added or lost.

Example::

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, batches):
            step(...)
            state.commit()

    train(state)

A `tf.function` that was traced in one job can be used in the next, which may have another number of ranks: its
collectives look up the ranks when they run. But process sets are constants of the traced graph: trace a function that
uses one again. `hvd.rank()` and `hvd.size()` are constants as well: use `hvd.rank_op()` and `hvd.size_op()` inside.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from horovodlike._net.object_seal import dumps
from horovodlike.elastic import ObjectState
from horovodlike.elastic._loop import run_translated
from horovodlike.elastic._state import check_results
from horovodlike.tensorflow._ops.calls import translated
from horovodlike.tensorflow.functions import broadcast_variables

if TYPE_CHECKING:
    from horovodlike.keras.elastic import TensorFlowKerasState

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

Result = TypeVar("Result")
Array = np.ndarray[Any, Any]


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a function that uses TensorFlow, as :func:`horovodlike.elastic.run` wraps other functions.

    In such functions, also in a graph and in `model.fit()`, a broken job raises an error of TensorFlow. It becomes a
    `HorovodInternalError`; other errors of TensorFlow are not changed.
    """
    return run_translated(func, translated)


class TensorFlowState(ObjectState):
    """Variables and other values that change during a training.

    Variables are saved as copies, restored and synchronized in place. Other values become attributes of the state,
    saved as deep copies.

    Args:
        variables: The variables to save, the same on all ranks. None: all global variables of a graph of TensorFlow 1.
        session: The session of a graph of TensorFlow 1. Its variables have to be initialized.
        **kwargs: Other values, by the names of the attributes.

    Raises:
        ValueError: `variables` is None in TensorFlow 2, or the name of another value is already an attribute of the
            state.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None and tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 2 keeps no list of all variables: TensorFlowState(variables=[...]), or "
                "TensorFlowKerasState(model, optimizer) for a model of Keras"
            )
        super().__init__(**kwargs)
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        self._assignments: list[tuple[Any, Any]] = []  # in a graph: placeholder and assignment of each variable
        if session is not None:
            with session.graph.as_default():
                for variable in self.variables:
                    fed = tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
                    self._assignments.append((fed, variable.assign(fed).op))
        self._saved_values: list[Array] = self._read_variables()

    def _read_variables(self) -> list[Array]:
        if self.session is not None:
            return list(self.session.run(self.variables))
        return [variable.numpy().copy() for variable in self.variables]

    def _write_variables(self, values: Sequence[Array]) -> None:
        if self.session is None:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value)
            return
        fed = {placeholder: value for (placeholder, _), value in zip(self._assignments, values, strict=True)}
        self.session.run([operation for _, operation in self._assignments], fed)

    def save(self) -> None:
        """Save copies of the variables and the other values in memory.

        Raises:
            HorovodInternalError: The job has ended; the state that was saved before is kept.
        """
        values = self._read_variables()
        check_results()
        self._saved_values = values
        super().save()

    def restore(self) -> None:
        """Go back to the state that was saved last."""
        super().restore()
        self._write_variables(self._saved_values)

    def sync(self) -> None:
        """Take the variables and other values of the rank with the most commits, and save them. Collective.

        Raises:
            HorovodInternalError: The job is broken.
            tf.errors.OpError: The ranks' variables do not match, for instance in shape.
        """
        root = self._elect_root()
        if self.session is None:
            with translated():
                broadcast_variables(self.variables, root)
        else:
            self._write_variables(
                self._bcast_object(self._read_variables(), root_rank=root, name="tensorflow.elastic.variables")
            )
        super().sync()

    def _saved_to_bytes(self) -> bytes:
        """Return a pickle of the state that was saved last."""
        return dumps((super()._saved_to_bytes(), self._saved_values))

    def _saved_from_bytes(self, saved: bytes) -> None:
        """Replace the saved state by one that `_saved_to_bytes` returned."""
        objects, self._saved_values = pickle.loads(saved)
        super()._saved_from_bytes(objects)


def __getattr__(name: str) -> Any:
    if name != "TensorFlowKerasState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovodlike.keras.elastic import TensorFlowKerasState  # imports Keras

    globals()[name] = TensorFlowKerasState
    return TensorFlowKerasState
