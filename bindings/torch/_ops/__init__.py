"""The operations on torch tensors, as `mpi_ops` and the optimizer use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def disable_compile(*functions: Callable[..., Any]) -> None:
    """Mark functions as not to be compiled; the mark on a closure's code is for all closures of the same definition.

    This has the two effects of `torch.compiler.disable`, which imports the compiler (seconds, and 100 MB) into programs
    that do not compile anything, and adds a microsecond to each call. With the mark on the function, a traced caller
    breaks its graph at the call. With the mark on its code, the call runs uncompiled, and so does all that it calls.
    """
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark
        function._torchdynamo_disable_msg = "a collective"  # type: ignore[attr-defined]  # a mark
        # Some releases of torch lack set_code_exec_strategy. The call works without it, but parts of it get compiled.
        with contextlib.suppress(ImportError):
            from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
