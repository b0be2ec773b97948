"""What differs between the backends and versions of Keras."""
