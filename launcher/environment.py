"""What of the launcher's environment the ranks of another host get. Pure."""

from collections.abc import Mapping

__all__ = ["OWN_NAMES", "OWN_PREFIXES", "forwarded"]

OWN_NAMES = (
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "SHELL", "USER"),
    *("TEMP", "TMP", "TMPDIR"),
    *("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "XAUTHORITY"),
    "CUDA_VISIBLE_DEVICES",
)
"""Variables that each host has for itself: its own values count there, and the launcher's do not."""
OWN_PREFIXES = ("SSH_", "XDG_")


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are sent to other hosts: all but those that each host has for itself."""
    return {
        name: value for name, value in environ.items() if name not in OWN_NAMES and not name.startswith(OWN_PREFIXES)
    }
