"""Collectives as operations of TensorFlow, compiled on first use."""
