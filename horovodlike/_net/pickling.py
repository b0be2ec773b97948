"""Pickles of what pickle alone cannot send: functions and classes of scripts and notebooks, by cloudpickle."""

from __future__ import annotations

import io
from types import CodeType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

_NO_FILE = "<dynamic-code>"  # from cloudpickle 3.1.3 on, in place of the name of a function's file


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that keeps the names of files: tracebacks show lines of them, and TensorFlow's AutoGraph reads them."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not CodeType:
            return super().reducer_override(obj)
        make, arguments = self.dispatch_table[CodeType](obj)
        return make, tuple(obj.co_filename if argument == _NO_FILE else argument for argument in arguments)


def dumps(obj: object) -> bytes:
    """Pickle an object; `pickle.loads` reads it where cloudpickle is installed.

    Raises:
        Exception: Whatever the object's own `__reduce__` or `__getstate__` raises.
        pickle.PicklingError: A part of it cannot be sent.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(obj)
        return file.getvalue()
