"""Elastic training with Keras, which continues when ranks are added or lost.

Example::

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        state.model.fit(
            dataset,
            steps_per_epoch=steps // hvd.size(),
            initial_epoch=state.epoch,
            epochs=epochs,
            callbacks=[
                hvd.elastic.CommitStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
            ],
        )

    train(state)

A commit takes place when all callbacks have seen the end of a batch or an epoch, so their order does not matter.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from horovodlike._net.object_seal import dumps
from horovodlike.elastic import ObjectState, State
from horovodlike.elastic._loop import run_translated
from horovodlike.elastic._state import check_results
from horovodlike.keras import _backend
from horovodlike.keras._backend import OfSameKeras, check, keras
from horovodlike.keras.functions import broadcast_variables, objects
from horovodlike.process_set import global_process_set

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

Result = TypeVar("Result")
Array = np.ndarray[Any, Any]


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a function that trains with Keras, as :func:`horovodlike.elastic.run` wraps other functions.

    On the TensorFlow backend, a broken job raises an error of TensorFlow, which becomes a `HorovodInternalError` here.
    Other errors are not changed.
    """
    return run_translated(func, _backend.current().translated)


class KerasState(ObjectState):
    """The weights of a model, the state of its optimizer, and other values that change during the training.

    Variables are saved as copies and restored in place. So are the states of random number generators, such as
    dropout's, but these are not synchronized, because they differ between the ranks. Other values become attributes of
    the state, saved as deep copies.

    Gradients that have been accumulated for an incomplete step are dropped when the job restarts.

    Args:
        model: A model that is built, the same on all ranks.
        optimizer: The optimizer that trains the model; None: the one with which the model was compiled. If it is not
            built, it is built here, so that all ranks have all of its state from the beginning.
        **kwargs: Other values, by the names of the attributes.

    Raises:
        ValueError: The model is not built, or the name of another value is already an attribute of the state.
        TypeError: The model or the optimizer is of tf_keras, and this process uses Keras 3; or the other way round.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for given in (model, optimizer):
            check(given, type(self).__name__)
        if not model.built:
            raise ValueError(
                f"{model.name} has no variables yet: build it, or call it once, before KerasState({model.name})"
            )
        super().__init__(**kwargs)
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if self.optimizer is not None:
            objects.build(self.optimizer, model.trainable_variables)
        self._saved_values: list[Array] = []
        self._keep(self._read_variables())

    def _shared_variables(self) -> list[Any]:
        return [*self.model.weights, *([] if self.optimizer is None else objects.variables_of(self.optimizer))]

    def _all_variables(self) -> list[Any]:
        shared = self._shared_variables()
        known = {id(variable) for variable in shared}
        return [*shared, *(variable for variable in self.model.variables if id(variable) not in known)]

    def _read_variables(self) -> list[Array]:
        return objects.read(self._all_variables())

    def _keep(self, values: list[Array]) -> None:
        before = self._saved_values
        if [(value.shape, value.dtype) for value in values] == [(value.shape, value.dtype) for value in before]:
            for kept, value in zip(before, values, strict=True):
                np.copyto(kept, value)
        else:
            self._saved_values = [np.array(value) for value in values]

    def save(self) -> None:
        """Save copies of the variables and the other values in memory.

        Raises:
            HorovodInternalError: The job has ended; the state that was saved before is kept.
        """
        values = self._read_variables()
        check_results()
        self._keep(values)
        super().save()

    def restore(self) -> None:
        """Go back to the state that was saved last.

        Raises:
            ValueError: The model or the optimizer has other variables than when the state was saved.
        """
        variables = self._all_variables()
        if len(variables) != len(self._saved_values):
            raise ValueError(
                f"{self.model.name} and its optimizer have {len(variables)} variables, and had "
                f"{len(self._saved_values)} when they were saved: make another KerasState when a model is changed"
            )
        super().restore()
        objects.write(variables, self._saved_values)

    def sync(self) -> None:
        """Take the whole state of the rank with the most commits, and save it. Collective.

        Raises:
            HorovodInternalError: The job is broken, or the variables of the ranks' models do not match.
        """
        broadcast_variables(self._shared_variables(), self._elect_root())
        super().sync()

    def reset(self) -> None:
        """Prepare for a job with other ranks: drop accumulated gradients and the remains of an interrupted `fit()`."""
        super().reset()
        objects.forget_fit(self.model)
        gradients = objects.gradients_of(self.optimizer)
        if gradients is None:
            return
        gradients.forget()
        if gradients.options.process_set is not global_process_set:  # its id and members are part of compiled functions
            self.model.train_function = self.model.test_function = self.model.predict_function = None

    def _saved_to_bytes(self) -> bytes:
        """Return a pickle of the state that was saved last."""
        return dumps((super()._saved_to_bytes(), self._saved_values))

    def _saved_from_bytes(self, saved: bytes) -> None:
        """Replace the saved state by one that `_saved_to_bytes` returned."""
        objects, self._saved_values = pickle.loads(saved)
        super()._saved_from_bytes(objects)


class CommitStateCallback(OfSameKeras, keras.callbacks.Callback):
    """Commits the state every `batches_per_commit` batches, and after each epoch.

    The commit takes place before the next batch or epoch begins, or when the training ends: then all callbacks have
    seen the end of the batch or epoch. All ranks need the same number of batches between commits.

    Args:
        state: The state to commit.
        batches_per_commit: The number of batches between commits.

    Raises:
        ValueError: `batches_per_commit` is less than 1.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be 1 at least, got {batches_per_commit}")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0  # since the last commit
        self._is_due = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start counting batches."""
        self._batches, self._is_due = 0, False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit the state after the previous epoch."""
        self._commit_if_due()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit the state if there have been `batches_per_commit` batches since the last commit."""
        self._commit_if_due()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count a batch."""
        self._batches += 1
        self._is_due = self._is_due or self._batches >= self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Request a commit before the next epoch begins."""
        self._is_due = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Commit the state after the last epoch."""
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        if self._is_due:
            self._batches, self._is_due = 0, False
            self.state.commit()


class UpdateBatchStateCallback(OfSameKeras, keras.callbacks.Callback):
    """Sets `state.batch` to the number of batches of the epoch that have been trained.

    If `fit()` continues in the middle of an epoch, this callback ends the epoch after the remaining batches, at least
    one. It does so only if `fit()` knows how many batches an epoch has. Callbacks that stop the training at the
    end of an epoch, such as `EarlyStopping`, have to come after this one.

    Args:
        state: A state with an attribute `batch`, 0 at first.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0  # batches of this epoch that an earlier fit() has trained
        self._ends_early = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Continue at the batch that the state has stored."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count a batch, and end the epoch if it is complete."""
        self.state.batch = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._before and steps and self.state.batch >= steps and not self.model.stop_training:
            self._ends_early = self.model.stop_training = True  # ends Keras's loop over batches

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin the next epoch with batch 0; if this callback has ended the epoch early, let `fit()` continue."""
        self.state.batch = self._before = 0
        if self._ends_early:
            self._ends_early = self.model.stop_training = False


class UpdateEpochStateCallback(OfSameKeras, keras.callbacks.Callback):
    """Sets `state.epoch` to the number of complete epochs, with or without an `initial_epoch` for `fit()`.

    Args:
        state: A state with an attribute `epoch`, 0 at first.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count an epoch."""
        self.state.epoch += 1


class TensorFlowKerasState(KerasState):
    """The `KerasState` of `horovodlike.tensorflow.elastic`, for any training loop.

    Args:
        model: A model that is built, the same on all ranks.
        optimizer: The optimizer that trains the model; None: the one with which the model was compiled.
        backend: Not needed; accepted for scripts that pass it.
        **kwargs: Other values, by the names of the attributes.

    Raises:
        ValueError: The model is not built, or the name of another value is already an attribute of the state.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)
