"""The module ``horovod.tensorflow.util`` as scripts see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["refs_to_vars", "vars_to_refs"]


def _executing_eagerly() -> bool:
    """Return whether TensorFlow executes operations at once."""
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a ``tf.function``."""
    wrapped: Callable[..., Any] = tf.function(function)
    return wrapped


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called once for given positional arguments, and once more outside of eager mode."""

    @functools.cache
    def call(eager: bool, *args: Any) -> Any:
        return function(*args)

    return lambda *args: call(_executing_eagerly(), *args)


def vars_to_refs(variables: Any) -> Any:
    """Return the hashable reference of a variable; of a list, a tuple of references."""
    if isinstance(variables, list):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variable of a reference; of a tuple of references, a list of variables."""
    if isinstance(refs, tuple):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()
