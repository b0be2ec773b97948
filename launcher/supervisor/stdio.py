"""Standard input, output and error, which daemons and cron may have closed."""

import os
import sys

__all__ = ["open_standard_streams"]


def open_standard_streams() -> None:
    """Have those that are closed lead to ``/dev/null``: what is opened next would get their numbers, and their output.

    To be called while there is one thread, before anything is opened.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free, which is this one
            os.set_inheritable(opened, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # print() would take standard output for standard error
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(null, "w", closefd=False))  # noqa: SIM115 - stays open
