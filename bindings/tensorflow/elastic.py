"""Elastic training with TensorFlow: ranks come and go, the training continues.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, batches):
            step(...)
            state.commit()

    train(state)

A `tf.function` that was traced in one job is right in the next, of whatever size: what it does with the ranks is
found out when it runs. Only process sets are part of what has been traced; trace again where one is used. And so are
`hvd.rank()` and `hvd.size()`: use `hvd.rank_op()` and `hvd.size_op()` inside.
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
    """Do what :func:`horovodlike.elastic.run` does, for functions of TensorFlow.

    A broken job shows as an error of TensorFlow's there, in a graph and in `model.fit()`. It becomes a
    `HorovodInternalError`; other errors of TensorFlow pass unchanged.
    """
    return run_translated(func, translated)


class TensorFlowState(ObjectState):
    """Variables and other values that change during a training.

    Variables are saved as copies, restored and synchronized in place. Other values are attributes, saved as deep
    copies.

    Args:
        variables: What to keep, the same on all ranks. In a graph of TensorFlow 1 its global variables if None.
        session: The session of a graph of TensorFlow 1. Its variables have to be initialized.
        **kwargs: Other values, by the names of the attributes.

    Raises:
        ValueError: There are no variables and nothing to find them by; or a name is one of the state's own.
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
        self._assignments: list[tuple[Any, Any]] = []  # in a graph: what is fed, and the operation
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
        """Keep a copy of everything in memory.

        Raises:
            HorovodInternalError: The job has ended; what was saved before is kept.
        """
        values = self._read_variables()
        check_results()
        self._saved_values = values
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        super().restore()
        self._write_variables(self._saved_values)

    def sync(self) -> None:
        """Take everything from the rank that has committed most, and save it. Collective.

        Raises:
            HorovodInternalError: The job is broken.
            tf.errors.OpError: The ranks have variables that do not fit together.
        """
        root = self.elect_root()
        if self.session is None:
            with translated():
                broadcast_variables(self.variables, root)
        else:
            self._write_variables(
                self._bcast_object(self._read_variables(), root_rank=root, name="tensorflow.elastic.variables")
            )
        super().sync()

    def saved_to_bytes(self) -> bytes:
        """Return a pickle of everything as it was saved."""
        return dumps((super().saved_to_bytes(), self._saved_values))

    def saved_from_bytes(self, saved: bytes) -> None:
        """Read the pickle."""
        objects, self._saved_values = pickle.loads(saved)
        super().saved_from_bytes(objects)


def __getattr__(name: str) -> Any:
    if name != "TensorFlowKerasState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovodlike.keras.elastic import TensorFlowKerasState  # imports Keras

    globals()[name] = TensorFlowKerasState
    return TensorFlowKerasState
