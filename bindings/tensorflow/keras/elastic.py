"""`horovodlike.keras.elastic` under the name that it has in Horovod for Keras on TensorFlow."""

from horovodlike.keras.elastic import *  # noqa: F403  # all of it, under another name
from horovodlike.keras.elastic import __all__ as __all__
