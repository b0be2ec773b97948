"""Callbacks that change the learning rate during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovodlike import basics
from horovodlike.keras._backend import OfSameKeras, keras
from horovodlike.keras._objects import objects

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(OfSameKeras, keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    Writes the learning rate into the logs of each epoch, as "lr". Several may be given to `fit()`, for different
    epochs.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch, or a number `m`, which stands for `m ** (epoch - start_epoch)`.
        start_epoch: The first epoch in which it does anything.
        end_epoch: The first epoch in which it does nothing any more; None: there is none.
        staircase: Whether the learning rate changes with each epoch only. Else it does with each batch, and the
            multiplier is given fractions of epochs.
        momentum_correction: Whether momenta, which hold multiples of the old learning rate, change in proportion, as
            proposed by Goyal et al. 2017 (https://arxiv.org/abs/1706.02677). For optimizers that have `momentum`.
        steps_per_epoch: How many batches an epoch has. Needed without `staircase` where `fit()` does not know.

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
        """Find out how many batches an epoch has.

        Raises:
            ValueError: `fit()` does not know, or the optimizer has a schedule of its own.
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
            # As good as another factor in front of them in this batch, and not compiled into the train step as that is.
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
    """Lets the learning rate grow from `initial_lr / size()` to `initial_lr` over the first epochs.

    As proposed by Goyal et al. 2017 (https://arxiv.org/abs/1706.02677) for learning rates that are multiplied by the
    number of ranks. It grows with each batch, and has arrived in the last batch of the last of these epochs.

    Args:
        initial_lr: The learning rate of all ranks together.
        warmup_epochs: How many epochs it takes.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: How many batches an epoch has. Needed where `fit()` does not know.
        verbose: 1: rank 0 prints a line at the end.

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
        """Write the learning rate into the logs, and say so when it has arrived."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and basics.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._get():g}.")
