"""Functions of scripts on their way to other processes."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from horovodlike._net.object_seal import dumps


def _make(factor: int) -> Callable[[int], int]:
    def multiply(value: int) -> int:
        return max(factor * each for each in (value, 0))

    return multiply


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    """As functions of a script are pickled, which other processes cannot import."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("function", [_make, _make(3)], ids=["plain", "closure"])
def test_a_function_keeps_its_file_and_can_be_read_there(function: Callable[[int], object]) -> None:
    copy = pickle.loads(dumps(function))
    assert copy is not function
    assert copy.__code__ == function.__code__
    assert inspect.getsource(copy) == inspect.getsource(function)
    inner = [code for code in copy.__code__.co_consts if inspect.iscode(code)]
    assert {code.co_filename for code in inner} == {__file__}


def test_a_function_does_there_what_it_does_here() -> None:
    assert pickle.loads(dumps(_make(3)))(5) == 15
    assert pickle.loads(dumps(_make))(2)(7) == 14


def test_what_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps([sys._getframe()])
