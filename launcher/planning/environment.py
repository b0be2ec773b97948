"""What of the launcher's environment ranks get, and the folder in which they start."""

import os
from collections.abc import Mapping

from horovodlike.launcher.errors import UsageError

__all__ = ["OWN_NAMES", "OWN_PREFIXES", "forwarded", "inherited", "working_folder"]

OWN_NAMES = (
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "SHELL", "USER"),
    *("TEMP", "TMP", "TMPDIR"),
    *("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "XAUTHORITY"),
    "CUDA_VISIBLE_DEVICES",
)
"""Variables that each host has for itself: its own values count there, and the launcher's do not."""
OWN_PREFIXES = ("SSH_", "XDG_")
_OF_A_WORKER = frozenset(
    {
        *("HOROVODLIKE_ELASTIC", "HOROVOD_ELASTIC", "HOROVODLIKE_WORKER", "HOROVODLIKE_GENERATION"),
        *("HOROVODLIKE_DRIVER_ADDR", "HOROVODLIKE_DRIVER_PORT"),
    }
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """All variables but those of the worker of an elastic job that the launcher may have been started by."""
    return {name: value for name, value in environ.items() if name not in _OF_A_WORKER}


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are sent to other hosts: all but those that each host has for itself."""
    return {
        name: value for name, value in environ.items() if name not in OWN_NAMES and not name.startswith(OWN_PREFIXES)
    }


def working_folder() -> str:
    """The folder in which the launcher was started, where ranks start too.

    Raises:
        UsageError: There is none any more.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current folder, in which the ranks would start, cannot be used ({error.strerror}): it has been "
            "deleted or replaced; change to a folder that exists (cd), and start again"
        ) from None
