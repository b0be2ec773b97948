"""Callbacks for `fit()` on several ranks. All ranks need the same, in the same order, except `BestModelCheckpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from horovodlike import basics
from horovodlike import objects as objects_module
from horovodlike._engine.steps import BY_CALLBACK, mark
from horovodlike.arrays import functions as arrays
from horovodlike.keras._backend import OfSameKeras, keras
from horovodlike.keras.functions import broadcast_variables, join, objects, variables_of
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.progress import report_progress

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "JoinCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ReportProgressCallback",
]


class BroadcastGlobalVariablesCallback(OfSameKeras, keras.callbacks.Callback):
    """Broadcasts the weights and the optimizer's state of one rank when training begins.

    If the model of any rank is not built by then, the broadcast takes place after the first batch, and the ranks train
    that batch from different weights. The states of random number generators are not broadcast.

    Args:
        root_rank: The rank whose values are taken.
        device: Not needed; accepted for scripts that pass it.
        local_variables: Variables that keep their values on each rank. So do the variables that the optimizer keeps
            for them and names after them.
        process_set: The ranks that take part, one of which is the root.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Iterable[Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        del device
        self.root_rank, self.process_set = root_rank, process_set
        self._local = list(local_variables or [])
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast: it keeps its value on each rank."""
        self._local.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if the models of all ranks are built."""
        if self._is_done:
            return
        built = arrays.allreduce(np.array(self.model.built), "is_built", basics.Min, process_set=self.process_set)
        if not built:
            return
        optimizer = self.model.optimizer
        if optimizer is not None:
            objects.build(optimizer, self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Mark a step for the monitor; broadcast after the first batch, if there has been no broadcast before."""
        mark(BY_CALLBACK)
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = objects.innermost(self.model.optimizer)
        is_wrapped = basics.size() == 1 or hasattr(getattr(optimizer, "optimizer", optimizer), "register_local_var")
        keeps_step = type(self.model).train_step.__module__.startswith(("keras.", "tf_keras."))
        if optimizer is not None and not is_wrapped and keeps_step:
            warnings.warn("each rank trains alone: compile with hvd.DistributedOptimizer(optimizer)", stacklevel=2)
        broadcast_variables(variables_of(self.model, self._local), self.root_rank, self.process_set)
        self._is_done = True


class MetricAverageCallback(OfSameKeras, keras.callbacks.Callback):
    """Replaces the metrics of an epoch of `fit()`, not of `evaluate()`, by their averages over the ranks.

    Callbacks that use metrics (`ReduceLROnPlateau`, `EarlyStopping`, `ModelCheckpoint`) have to come after this one, so
    that all ranks take the same decisions. Each rank's value has the same weight, however many samples the rank had.

    Args:
        device: Not needed; accepted for scripts that pass it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device
        self._trains = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the metrics in `logs`, in place.

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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note that `fit()` has begun, which passes the metrics of a validation on to `on_epoch_end`."""
        self._trains = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Note that `fit()` has ended."""
        self._trains = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Warn in `evaluate()`, which returns its metrics without asking its callbacks."""
        if not self._trains and basics.size() > 1:
            warnings.warn(
                "MetricAverageCallback averages the metrics of fit(), but evaluate() returns those of each rank: give "
                "them to hvd.allreduce, and the callback to fit() only",
                stacklevel=2,
            )


class ReportProgressCallback(OfSameKeras, keras.callbacks.Callback):
    """Calls `horovodlike.report_progress` after each batch, and with the metrics after each epoch.

    Give it to all ranks, or to rank 0, after `MetricAverageCallback`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Report, if `fit()` knows how many batches there are."""
        if steps := self.params.get("steps"):
            report_progress(self._epoch + min((batch + 1) / steps, 1.0), self.params["epochs"])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report, with the metrics."""
        metrics = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        report_progress(epoch + 1, self.params["epochs"], metrics)


class JoinCallback(OfSameKeras, keras.callbacks.Callback):
    """Allows ranks to have different numbers of batches: a rank without further batches waits for the other ranks.

    The other ranks continue without it. They average gradients over the ranks that are left, or divide by the number of
    all ranks with `HOROVODLIKE_JOIN_AVERAGE=all`. At the end of the epoch, before validation, a rank that has made all
    the steps broadcasts its weights and optimizer state, except for `local_variables`. This callback has to come before
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
        """Start counting the batches of the epoch."""
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
        counts = arrays.allgather(np.array([self._batches]), "batches")
        if counts.min() == counts.max():
            return
        gradients = objects.gradients_of(self.model.optimizer)
        if gradients is not None:
            gradients.forget()
        broadcast_variables(variables_of(self.model, self._local), int(counts.argmax()))


class LearningRateScheduleCallback(OfSameKeras, keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    It writes the learning rate into the logs of each epoch, as "lr". `fit()` may get several of these callbacks, for
    different epochs.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch, or a number `m`, which stands for `m ** (epoch - start_epoch)`.
        start_epoch: The first epoch in which the callback sets the learning rate.
        end_epoch: The first epoch in which it does not set the learning rate any more; None: it always does.
        staircase: Change the learning rate with each epoch only. If False, it changes with each batch, and `multiplier`
            receives fractions of epochs.
        momentum_correction: Scale momenta in proportion to the learning rate, because they contain the old rate as a
            factor; proposed by Goyal et al. 2017 (https://arxiv.org/abs/1706.02677). For optimizers with `momentum`.
        steps_per_epoch: The number of batches in an epoch. Needed without `staircase` if `fit()` does not know it.

    Raises:
        ValueError: `initial_lr` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Determine the number of batches in an epoch, if it is needed.

        Raises:
            ValueError: The number is not known, or the optimizer has a learning rate schedule.
        """
        schedule = objects.schedule_of(self.model.optimizer)
        if schedule is not None:
            raise ValueError(
                f"{type(self).__name__} cannot set a learning rate that {schedule!r} sets: use an optimizer of Keras "
                "with a number as its learning_rate"
            )
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if self.steps_per_epoch is None:
                raise ValueError(
                    f"fit() does not know how many batches an epoch has: pass steps_per_epoch to {type(self).__name__}"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate of the epoch."""
        self._epoch = epoch
        if self.staircase and self._is_active():
            self._set(self.multiplier(epoch))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate of the batch."""
        if not self.staircase and self._is_active():
            assert self.steps_per_epoch is not None
            self._set(self.multiplier(self._epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the learning rate into the logs."""
        if logs is not None:
            logs["lr"] = self._get()

    def _is_active(self) -> bool:
        return self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _get(self) -> float:
        return float(objects.to_numpy(self.model.optimizer.learning_rate))

    def _set(self, multiplier: float) -> None:
        before, after = self._get(), self.initial_lr * multiplier
        self.model.optimizer.learning_rate = after
        if self.momentum_correction and before > 0 and before != after:
            # Equivalent to another `momentum` in this batch, which has no effect once the train step is compiled.
            momenta = self._momenta()
            objects.write(momenta, [value * (after / before) for value in objects.read(momenta)])

    def _momenta(self) -> list[Any]:
        """Return the variables that hold momenta, if the optimizer is built and has any."""
        optimizer = objects.innermost(self.model.optimizer)
        momentum = getattr(optimizer, "momentum", None)
        if not objects.is_built(optimizer) or momentum is None or not objects.to_numpy(momentum):
            return []
        momenta = objects.momenta(optimizer, self.model.trainable_variables)
        if momenta is None:
            raise ValueError(
                f"{type(optimizer).__name__} has a momentum, but no variables that hold it, to correct: pass "
                "momentum_correction=False"
            )
        return momenta


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate from `initial_lr / size()` to `initial_lr` over the first epochs.

    As proposed by Goyal et al. 2017 (https://arxiv.org/abs/1706.02677) for learning rates that are multiplied by the
    number of ranks. The rate grows with each batch, and reaches `initial_lr` in the last batch of these epochs.

    Args:
        initial_lr: The learning rate after the warmup, which has been multiplied by the number of ranks.
        warmup_epochs: The number of epochs that the warmup takes.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: The number of batches in an epoch. Needed if `fit()` does not know it.
        verbose: 1: rank 0 prints a line at the end of the warmup.

    Raises:
        ValueError: `initial_lr` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = epoch + 1.0 / self.steps_per_epoch
            return 1.0 / basics.size() * (done * (basics.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the learning rate into the logs, and report the end of the warmup."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and basics.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._get():g}.")


class BestModelCheckpoint(OfSameKeras, keras.callbacks.ModelCheckpoint):
    """A `ModelCheckpoint` that saves the best model only, and whose `filepath` is set later.

    Give it to one rank, after `MetricAverageCallback`.

    Args:
        monitor: The metric that decides which model is the best.
        verbose: 1: print when a model is saved.
        save_weights_only: Save weights instead of whole models. The path then ends in ".weights.h5", else in ".keras".
        mode: "min", "max" or "auto".
        save_freq: "epoch", or the number of batches after which a model may be saved.
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
            filepath="unset.weights.h5" if save_weights_only else "unset.keras",  # Keras checks the ending
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the path has been set.

        Raises:
            ValueError: `filepath` was not set.
        """
        if self.filepath is None:
            raise ValueError("set BestModelCheckpoint.filepath to where the model is to be saved, before fit()")
        super().on_train_begin(logs)
