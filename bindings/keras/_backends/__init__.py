"""The differences between the backends and versions of Keras."""
