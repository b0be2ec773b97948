"""Makes the source of horovodlike._native (cffi, API mode) from the marked block of hvl.h."""

import re
from pathlib import Path

from cffi import FFI

_HEADER = (Path(__file__).parents[2] / "horovodlike" / "native" / "hvl.h").read_text(encoding="utf-8")
_BLOCK = re.search(r"/\* cffi:begin \*/(.*)/\* cffi:end \*/", _HEADER, re.DOTALL)
if _BLOCK is None:
    raise RuntimeError("hvl.h has lost its cffi:begin and cffi:end marks")

ffibuilder = FFI()
ffibuilder.cdef(_BLOCK.group(1))
ffibuilder.set_source("horovodlike._native", '#include "hvl.h"', py_limited_api=True)
