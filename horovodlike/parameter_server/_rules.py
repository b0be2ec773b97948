"""The update rules: the core's rules, whose arguments are checked here, and the rules that the user adds.

A rule of the user has a name and arguments with names. Both go to the server as one text, ``name:argument,argument``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from horovodlike._engine import parameters
from horovodlike._engine.arguments import factor
from horovodlike._engine.parameters import MOST_ARGUMENTS, NAME_BYTES
from horovodlike._engine.types import DType

Rule = Callable[..., object]

# Each argument of the core's rules, with its default; NaN: it must be given.
_CORE: Mapping[str, Mapping[str, float]] = {
    "zero": {},
    "copy": {},
    "add": {},
    "scale_add": {"scale": math.nan},
    "max": {},
    "min": {},
    "sgd": {"lr": math.nan},
    "momentum": {"lr": math.nan, "momentum": math.nan},
    "adam": {"lr": math.nan, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
}
_ADDS = ("add", "scale_add", "sgd", "momentum", "adam")
_registered: dict[str, Rule] = {}


def register_rule(name: str, function: Rule) -> None:
    """Add an update rule, or replace one that was added under the same name. Any thread.

    The rule is applied by servers, so every process that serves must have added it: all ranks, or with
    ``hvdrun --servers`` the modules that ``--server-module`` names.

    Args:
        name: An identifier.
        function: ``function(values, pushed, **arguments)`` updates `values`, a NumPy array of consecutive elements of
            the parameters, in place. `pushed` has as many elements, and must not be changed. Both are valid during the
            call only. A large array is updated in pieces, one at a time. An exception of the function is
            raised by the client's `wait`; elements that it has changed by then stay changed. It runs in the thread that
            moves the bytes of all parameter servers of the process: a slow function delays all clients, and one that
            waits for a call of a `ParameterServer` never ends.

    Raises:
        TypeError: `function` cannot be called.
        ValueError: The name is not an identifier, is too long, or names a rule of the core.
    """
    if not isinstance(name, str) or not name.isidentifier() or len(name.encode()) > NAME_BYTES:
        raise ValueError(f"register_rule: the name must be an identifier of at most {NAME_BYTES} bytes, got {name!r}")
    if name in _CORE:
        raise ValueError(f"register_rule: {name!r} is a rule of the core; choose another name")
    if not callable(function):
        raise TypeError(f"register_rule: {name!r} needs a function, got {type(function).__name__}")
    _registered[name] = function


def registered() -> Mapping[str, Rule]:
    """Return the rules that were added in this process, by name."""
    return MappingProxyType(_registered)


def described(rule: Any, arguments: Mapping[str, Any], dtypes: Iterable[DType], at_servers: Iterable[str]) -> Described:
    """Check a rule and its arguments.

    Args:
        rule: The name.
        arguments: The arguments by name.
        dtypes: The element types of the arrays.
        at_servers: The names of further rules, which were added at the servers.

    Returns:
        The name and arguments for the core.

    Raises:
        ValueError: There is no such rule, or an argument is missing, unknown or not a finite number.
    """
    known = {*_CORE, *_registered, *at_servers}
    if rule not in known:
        raise ValueError(
            f"there is no update rule {rule!r}; there are {', '.join(sorted(known))}. register_rule() adds others"
        )
    label = f"rule {rule!r}"
    numbers = {name: factor(value, name, label) for name, value in arguments.items()}
    if rule not in _CORE:
        return _of_user(rule, numbers, dtypes)
    defaults = _CORE[rule]
    unknown = [name for name in numbers if name not in defaults]
    missing = [name for name, default in defaults.items() if math.isnan(default) and name not in numbers]
    if unknown or missing:
        takes = ", ".join(name if math.isnan(default) else f"{name}={default:g}" for name, default in defaults.items())
        wrong = f"does not take {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise ValueError(f"{label} {wrong}: its arguments are {takes or 'none'}")
    other = [dtype.name for dtype in dtypes if defaults and dtype.name not in ("float32", "float64")]
    if other:
        raise ValueError(f"{label} is for float32 and float64, and these parameters are {other[0]}")
    return Described(rule, tuple({**defaults, **numbers}.values()), rule in _ADDS, rule != "zero")


class Described:
    """A rule with its arguments, as the core takes it.

    Attributes:
        name: The name.
        arguments: The arguments.
        adds: Whether it adds the sent elements, so that the next call can make up for errors of a conversion.
        has_payload: Whether elements are sent with it.
    """

    def __init__(self, name: str, arguments: tuple[float, ...], adds: bool = False, has_payload: bool = True) -> None:
        self.name, self.arguments, self.adds, self.has_payload = name, arguments, adds, has_payload


def _of_user(rule: str, numbers: Mapping[str, float], dtypes: Iterable[DType]) -> Described:
    if len(numbers) > MOST_ARGUMENTS:
        raise ValueError(f"rule {rule!r}: it has {len(numbers)} arguments, and can have {MOST_ARGUMENTS} at most")
    name = f"{rule}:{','.join(numbers)}" if numbers else rule
    if len(name.encode()) > NAME_BYTES:
        raise ValueError(f"rule {rule!r}: its name and those of its arguments have more than {NAME_BYTES} bytes")
    for dtype in dtypes:
        _numpy_dtype(dtype)
    return Described(name, tuple(numbers.values()))


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    try:
        return np.dtype(dtype.name)
    except TypeError:
        raise ValueError(f"rules of the user are functions of NumPy arrays, and NumPy has no {dtype.name}") from None


def serve() -> None:
    """Have the core apply the rules of the user in this process."""
    parameters.set_rules(_apply)


def _apply(
    name: str,
    arguments: tuple[float, ...],
    dtype: DType,
    values: Callable[[int], Any],
    pushed: Callable[[int], Any],
    count: int,
) -> None:
    rule, _, names = name.partition(":")
    function = _registered.get(rule)
    if function is None:
        known = ", ".join(sorted({*_CORE, *_registered}))
        raise LookupError(f"the server has no rule {rule!r}; it has {known}")
    element = _numpy_dtype(dtype)
    arrays = [np.frombuffer(memory(count * element.itemsize), element) for memory in (values, pushed)]
    arrays[1].flags.writeable = False
    function(*arrays, **dict(zip(filter(None, names.split(",")), arguments, strict=True)))
