"""The cffi extension made from hvl.h by bindings/ffi/build.py; hvl.h is its documentation."""

from typing import Any

from cffi import FFI

ffi: FFI
lib: Any
