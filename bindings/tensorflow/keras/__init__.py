"""`horovodlike.keras` under the name that it has in Horovod for Keras on TensorFlow.

    import horovodlike.tensorflow.keras as hvd

Keras must use its TensorFlow backend, which is the default.
"""

from horovodlike.keras import *  # noqa: F403  # all of it, under another name
from horovodlike.keras import __all__ as __all__
from horovodlike.keras import __getattr__ as __getattr__
from horovodlike.keras import callbacks as callbacks
from horovodlike.keras import elastic as elastic
from horovodlike.keras._backend import keras as _keras

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        "horovodlike.tensorflow.keras is for Keras on TensorFlow, and Keras uses "
        f"{_keras.backend.backend()!r}: import horovodlike.keras, or set KERAS_BACKEND=tensorflow"
    )
