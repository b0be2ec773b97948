"""`TensorFlowKerasState`: the state of a training of a Keras model, by whatever loop."""

from __future__ import annotations

from typing import Any

from horovodlike.keras.elastic import KerasState

__all__ = ["TensorFlowKerasState"]


class TensorFlowKerasState(KerasState):
    """The weights of a Keras model, the state of its optimizer, and other values: a `KerasState`.

    Args:
        model: A model that is built, the same on all ranks.
        optimizer: That trains it; the one that it was compiled with if None.
        backend: Not needed; accepted for scripts that pass it.
        **kwargs: Other values, by the names of the attributes.

    Raises:
        ValueError: The model is not built, or a name is one of the state's own.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)
