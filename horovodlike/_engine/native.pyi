"""The cffi extension made from hvl.h by bindings/ffi/build.py; hvl.h is its documentation."""

from typing import Any

ffi: Any
lib: Any
