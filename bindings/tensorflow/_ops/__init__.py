"""Collectives as ops of TensorFlow, compiled on first import."""
