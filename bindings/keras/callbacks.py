"""Callbacks for `fit()` on several ranks. All ranks need the same ones, in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from horovodlike import basics
from horovodlike import objects as objects_module
from horovodlike.keras import _arrays
from horovodlike.keras._backend import OfSameKeras, keras
from horovodlike.keras._learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from horovodlike.keras._objects import objects
from horovodlike.keras.functions import broadcast_variables, join, variables_of

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "JoinCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(OfSameKeras, keras.callbacks.Callback):
    """Gives all ranks the weights and the optimizer's state of one rank when training begins.

    If the model of any rank is not built by then, it happens after the first batch, which is then trained from
    different weights. States of random number generators stay those of each rank.

    Args:
        root_rank: The rank whose values are taken.
        device: Not needed; accepted for scripts that pass it.
        local_variables: Variables that keep their values on each rank, and with them what the optimizer remembers of
            them, which it names after them.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self._local = list(local_variables or [])
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        self._local.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if the models of all ranks are built."""
        if self._is_done:
            return
        built = _arrays.allreduce(np.array(self.model.built), "is_built", basics.Min)
        if not built:
            return
        optimizer = self.model.optimizer
        if optimizer is not None:
            objects.build(optimizer, self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast after the first batch, if that has not been done."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_variables(variables_of(self.model, self._local), self.root_rank)
        self._is_done = True


class MetricAverageCallback(OfSameKeras, keras.callbacks.Callback):
    """Replaces the metrics of an epoch by their averages over the ranks.

    Callbacks that use metrics (`ReduceLROnPlateau`, `EarlyStopping`, `ModelCheckpoint`) have to come after this one:
    then they decide the same on all ranks. The average is of the ranks' values, however many samples each had.

    Args:
        device: Not needed; accepted for scripts that pass it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average what is in `logs`, in place.

        Raises:
            ValueError: The ranks have different metrics.
        """
        if logs is None or basics.size() == 1:
            return
        mine = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        everyone = objects_module.allgather_object(mine, "keras.metrics")
        for rank, theirs in enumerate(everyone):
            if theirs.keys() != everyone[0].keys():
                raise ValueError(
                    f"the ranks have different metrics to average: {sorted(everyone[0])} on rank 0, "
                    f"{sorted(theirs)} on rank {rank}"
                )
        for name in sorted(mine):
            logs[name] = sum(theirs[name] for theirs in everyone) / len(everyone)


class JoinCallback(OfSameKeras, keras.callbacks.Callback):
    """Lets ranks have different numbers of batches: a rank that has no more in an epoch waits until none has.

    The others continue without it. They average gradients over those that are left, or divide by the number of all
    ranks if `HOROVODLIKE_JOIN_AVERAGE` says so. At the end of the epoch, before validation, a rank that has made all
    the steps gives its weights and optimizer state to the others, except for the given variables. It has to come before
    callbacks that communicate at the end of an epoch, such as `MetricAverageCallback`.

    Args:
        local_variables: As for `BroadcastGlobalVariablesCallback`.
    """

    def __init__(self, local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self._local = list(local_variables or [])
        self._batches = 0
        self._has_joined = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin to count batches."""
        self._batches = 0
        self._has_joined = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count a batch."""
        self._batches = batch + 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Join before validation."""
        self._join()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Join, if there was no validation."""
        self._join()

    def _join(self) -> None:
        if self._has_joined or basics.size() == 1:
            return
        self._has_joined = True
        join()
        counts = _arrays.allgather(np.array([self._batches]), "batches")
        if counts.min() == counts.max():
            return
        gradients = objects.gradients_of(self.model.optimizer)
        if gradients is not None:
            gradients.forget()
        broadcast_variables(variables_of(self.model, self._local), int(counts.argmax()))


class BestModelCheckpoint(OfSameKeras, keras.callbacks.ModelCheckpoint):
    """A `ModelCheckpoint` that saves the best model only, and whose `filepath` is set later.

    Give it to one rank, after `MetricAverageCallback`.

    Args:
        monitor: The metric to go by.
        verbose: 1: say what is saved.
        save_weights_only: Save weights instead of whole models. The path then ends in ".weights.h5", else in ".keras".
        mode: "min", "max" or "auto".
        save_freq: "epoch", or after how many batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath="unset.weights.h5" if save_weights_only else "unset.keras",  # checked by its ending
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there is a path.

        Raises:
            ValueError: `filepath` was not set.
        """
        if self.filepath is None:
            raise ValueError("set BestModelCheckpoint.filepath to where the model is to be saved, before fit()")
        super().on_train_begin(logs)
