"""The states of the generators of random numbers that a rank draws from."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["random_state", "set_random_state"]


def random_state(device: torch.device, generators: Sequence[torch.Generator]) -> bytes:
    """Return the states of Python's, NumPy's and PyTorch's generators, of the GPU's, and of the given ones."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    given = [generator.get_state() for generator in generators]
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state(), on_gpu, given))


def set_random_state(state: bytes, device: torch.device, generators: Sequence[torch.Generator]) -> None:
    """Set all generators to a state that `random_state` has returned."""
    of_python, of_numpy, of_torch, on_gpu, given = pickle.loads(state)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)
    for generator, of_generator in zip(generators, given, strict=False):
        generator.set_state(of_generator)
