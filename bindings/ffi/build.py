"""Generates the source of horovodlike._engine.native (cffi, API mode) from the marked blocks of the C API's headers."""

import re
from pathlib import Path

from cffi import FFI

_NATIVE = Path(__file__).parents[2] / "horovodlike" / "native"


def _declarations(header: str) -> str:
    block = re.search(
        r"/\* cffi:begin \*/(.*)/\* cffi:end \*/", (_NATIVE / header).read_text(encoding="utf-8"), re.DOTALL
    )
    if block is None:
        raise RuntimeError(f"{header} has lost its cffi:begin and cffi:end marks")
    return block.group(1)


_ENGINE = _declarations("hvl.h")

# Declarations, made from the function pointers of hvl_external, of the functions that horovodlike._engine.mpi_provider
# defines: each has the name of its pointer after `hvl_mpi_`.
_EXTERNAL = re.search(r"typedef struct hvl_external \{(.*?)\} hvl_external;", _ENGINE, re.DOTALL)
if _EXTERNAL is None:
    raise RuntimeError("hvl.h has lost its hvl_external")
_FUNCTIONS = re.sub(r"\(\*(\w+)\)", r"hvl_mpi_\1", _EXTERNAL.group(1).replace("void* context;", "", 1))

ffibuilder = FFI()
ffibuilder.cdef(_ENGINE)
ffibuilder.cdef(_declarations("hvl_parameters.h"))
ffibuilder.cdef(f'extern "Python" {{ {_FUNCTIONS} }}')
# The function for hvl_callbacks.allocate, which horovodlike._engine.requests defines.
ffibuilder.cdef('extern "Python" void* hvl_allocate_output(void* context, int32_t index, const hvl_output* output);')
# The function for hvl_parameters_set_rule(), which carries out the rules of the user at a parameter server.
ffibuilder.cdef(
    """extern "Python" int32_t hvl_apply_rule(void* context, const char* name, const double* arguments,
    int32_t num_arguments, int32_t dtype, void* values, const void* pushed, int64_t count, char* error);"""
)
ffibuilder.set_source("horovodlike._engine.native", '#include "hvl_parameters.h"', py_limited_api=True)
