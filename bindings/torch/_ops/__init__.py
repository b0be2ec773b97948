"""Collectives on torch tensors: from tensors to requests and back."""
