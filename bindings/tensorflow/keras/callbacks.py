"""`horovodlike.keras.callbacks` under the name that it has in Horovod for Keras on TensorFlow."""

from horovodlike.keras.callbacks import *  # noqa: F403  # all of it, under another name
from horovodlike.keras.callbacks import __all__ as __all__
