"""The operations on torch tensors, as `mpi_ops` and the optimizer use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def disable_compile(*functions: Callable[..., Any]) -> None:
    """Mark functions (or the like of them: all closures of one definition) as not to be compiled.

    `torch.compiler.disable` would do, but it imports the compiler (seconds, and 100 MB) into programs that do not
    compile anything, and adds a microsecond to each call. Its two effects are had without it: a mark on the function,
    by which a traced caller breaks its graph at the call, and one on its code, by which the call runs as it is with all
    it calls.
    """
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark
        function._torchdynamo_disable_msg = "a collective"  # type: ignore[attr-defined]  # a mark
        # Not in every release of torch. Without it the call works as well, but parts of it get compiled.
        with contextlib.suppress(ImportError):
            from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
