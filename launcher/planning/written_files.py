"""Files that ranks will write: looked at before anything starts."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from horovodlike.launcher.errors import UsageError

if TYPE_CHECKING:  # agents have no such module
    from horovodlike.config import Config

__all__ = ["check_files", "files_of_all_hosts", "why_unwritable"]


def why_unwritable(path: str) -> str:
    """Why a file cannot be written on this host, or an empty string; nothing is made."""
    if os.path.islink(path):
        path = os.path.realpath(path)
    folder = os.path.dirname(path) or os.curdir
    try:
        if not os.path.isdir(folder):
            return f"there is no folder {folder}"
        os.lstat(path)
    except FileNotFoundError:
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write to the folder {folder}"
    except OSError as error:
        return error.strerror or str(error)
    if os.path.isdir(path):
        return "it is a folder"
    return "" if os.access(path, os.W_OK) else "no permission to write it"


def files_of_all_hosts(values: "Config") -> tuple[str, ...]:
    """The files that every host of a job writes, or others beside them."""
    return () if values.timeline.upper() in ("", "DYNAMIC") else (values.timeline,)


def check_files(
    values: "Config",
    names: Mapping[str, str],
    here: str | None,
    rank_0_is_here: bool,
    environ: Mapping[str, str],
) -> None:
    """Looks at the files that ranks of this machine will write.

    Args:
        values: The settings.
        names: By setting, the option that asks for it; others were asked for by variables.
        here: The name of this machine among the hosts, or None.
        rank_0_is_here: Rank 0 will run on this machine.
        environ: The variables that the settings were read from.

    Raises:
        UsageError: One cannot be written.
    """
    from horovodlike import config

    if here is None:
        return
    found = [("timeline", path) for path in files_of_all_hosts(values)]
    if values.autotune_log and rank_0_is_here and (values.autotune or "autotune_log" in names):
        found.append(("autotune_log", values.autotune_log))
    for setting, path in found:
        trouble = why_unwritable(path)
        if trouble:
            called = names.get(setting) or str(config.variable_of(setting, environ))
            shown = f"{called} {path}" if called.startswith("-") else f"{called}={path}"
            raise UsageError(f"{shown} cannot be written: {trouble}; name a file in a folder that exists")
