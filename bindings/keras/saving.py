"""Loading saved models so that all ranks can train them further."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from horovodlike.keras._backend import keras
from horovodlike.keras.functions import objects
from horovodlike.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: str | PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model as `keras.saving.load_model` does, and wrap its optimizer. The optimizer keeps its state.

    Args:
        filepath: A file that a rank or a program without horovodlike has saved. Every rank that calls this reads it.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Other classes and functions that Keras does not know, by name.
        compression: As for `DistributedOptimizer`.
        legacy_opts: Not needed; accepted for scripts that pass it.
        **options: More arguments for `DistributedOptimizer`.

    Returns:
        The model, compiled with a distributed optimizer if it was saved with an optimizer.

    Raises:
        ValueError: Keras cannot load the file.
    """
    del legacy_opts
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and objects.gradients_of(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, compression=compression, **options)
    return model
