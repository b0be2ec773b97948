"""How variables, models and optimizers are dealt with, which differs between Keras 3 and tf_keras.

`objects` is one of two modules with the same functions. An optimizer is any that `compile()` takes, loss scaling
included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from horovodlike.keras._backend import is_tf_keras

if TYPE_CHECKING or not is_tf_keras:
    from horovodlike.keras import _keras_3 as objects
else:
    objects = import_module("horovodlike.tensorflow._tf_keras")

__all__ = ["objects"]
