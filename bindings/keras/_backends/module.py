"""The Keras that this process uses: Keras 3, or tf_keras, which is Keras 2, where TF_USE_LEGACY_KERAS asks for it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

__all__ = ["OfSameKeras", "check", "is_tf_keras", "keras"]

# What TensorFlow takes for a yes, for `tf.keras`. It says nothing of Keras 3 on another backend.
is_tf_keras = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True") and os.environ.get(
    "KERAS_BACKEND", "tensorflow"
) in ("", "tensorflow")


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != "tf_keras":
            raise
        raise ImportError(
            "TF_USE_LEGACY_KERAS is set, and tf_keras (Keras 2) is not installed: pip install tf_keras, of the version "
            "of TensorFlow, or unset TF_USE_LEGACY_KERAS to use Keras 3"
        ) from error


keras = _imported("tf_keras" if is_tf_keras else "keras")

_OTHER = {
    False: ("tf_keras", "tf_keras (Keras 2)", "Keras 3", "set TF_USE_LEGACY_KERAS=1 in the environment of all ranks"),
    True: ("keras", "Keras 3", "tf_keras (Keras 2)", "unset TF_USE_LEGACY_KERAS, or make it with tf_keras"),
}


def check(given: Any, what: str) -> None:
    """Check that an object is not of the other Keras, nor of a class that was made of one.

    Args:
        given: The object.
        what: Takes it; for the message.

    Raises:
        TypeError: It is.
    """
    package, other, this, remedy = _OTHER[is_tf_keras]
    if any(cls.__module__.partition(".")[0] == package for cls in type(given).__mro__):
        raise TypeError(f"{what} is for {this} here, and this {type(given).__name__} is of {other}: {remedy}")


class OfSameKeras:
    """Precedes the class of Keras from which a callback derives, and checks that the model is of the same Keras."""

    def set_model(self, model: Any) -> None:
        """Take the model that is trained.

        Raises:
            TypeError: It is of the other Keras.
        """
        check(model, f"horovodlike.keras's {type(self).__name__}")
        super().set_model(model)  # type: ignore[misc]  # Keras's class comes next
