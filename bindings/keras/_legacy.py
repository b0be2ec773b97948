"""Objects of tf_keras, which is Keras 2 and what `tf.keras` is where TF_USE_LEGACY_KERAS is set: they are refused."""

from __future__ import annotations

import os
import sys
from typing import Any

_REMEDY = (
    "unset TF_USE_LEGACY_KERAS and use Keras 3, or train with horovodlike.tensorflow.DistributedGradientTape in a loop "
    "of your own, which works with tf_keras"
)


def check_keras_3(given: Any, what: str) -> None:
    """Check that an object is not of tf_keras, nor of a class that was made of one.

    Args:
        given: The object.
        what: Is for Keras 3; for the message.

    Raises:
        TypeError: It is.
    """
    if any(cls.__module__.partition(".")[0] == "tf_keras" for cls in type(given).__mro__):
        raise TypeError(f"{what} is for Keras 3, and this {type(given).__name__} is of tf_keras (Keras 2): {_REMEDY}")


def check_keras_3_is_used(what: str) -> None:
    """Check that `tf.keras` is not in use as tf_keras, for what is not given an object to tell by.

    Raises:
        TypeError: It is.
    """
    is_asked_for = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # what TensorFlow takes for a yes
    if is_asked_for and "tf_keras" in sys.modules:
        raise TypeError(f"{what} is for Keras 3, and tf.keras is tf_keras (Keras 2) here: {_REMEDY}")


class OfKeras3:
    """What our callbacks have in front of their class of Keras's."""

    def set_model(self, model: Any) -> None:
        """Take the model that is trained.

        Raises:
            TypeError: It is of tf_keras.
        """
        check_keras_3(model, f"horovodlike.keras's {type(self).__name__}")
        super().set_model(model)  # type: ignore[misc]
