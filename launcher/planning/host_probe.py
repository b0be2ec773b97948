"""What the agent of another host says about it before the job starts, and what is wrong there for this job."""

import dataclasses
import importlib.metadata
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovodlike.launcher.agent.protocol import from_native, to_native
from horovodlike.launcher.planning.gpus import Gpus, find_gpus
from horovodlike.launcher.planning.topology import Host, detect_host
from horovodlike.launcher.planning.written_files import why_unwritable

__all__ = ["Description", "decode_description", "describe", "encode_needs", "installed_version"]


@dataclass(frozen=True)
class Description:
    """A host, as its agent sees it.

    Attributes:
        version: The version of horovodlike there.
        host: Its processors, and its GPUs if they were asked for.
        seen_from: The launcher's address as ssh's server there sees it, and its own; None without ssh.
        problems: Why the job cannot run there.
    """

    version: str
    host: Host
    seen_from: tuple[str, str] | None
    problems: tuple[str, ...]


def installed_version() -> str:
    """The version of the package of which this file is a part, whether or not it is on the search path."""
    packages = str(Path(__file__).resolve().parents[3])
    found = importlib.metadata.Distribution.discover(name="horovodlike", path=[packages])
    return next((distribution.version for distribution in found), "of unknown version")


def encode_needs(cwd: str, program: str, gpus: bool = False, files: Sequence[str] = ()) -> dict[str, Any]:
    """What :func:`describe` looks for: where ranks start, what they execute, whether GPUs, and files they write."""
    text = [from_native(os.fsencode(each)) for each in (cwd, program, *files)]
    return {"cwd": text[0], "program": text[1], "gpus": gpus, "files": text[2:]}


def describe(needs: Mapping[str, Any]) -> dict[str, Any]:
    """Describes this host, as :func:`decode_description` reads it."""
    cwd, program = (os.fsdecode(to_native(needs[name])) for name in ("cwd", "program"))
    words = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "version": installed_version(),
        "host": dataclasses.asdict(detect_host(gpus=find_gpus(os.environ) if needs["gpus"] else None)),
        "seen_from": [words[0], words[2]] if len(words) == 4 else None,
        "problems": _problems(cwd, program, [os.fsdecode(to_native(each)) for each in needs["files"]]),
    }


def _problems(cwd: str, program: str, files: Sequence[str]) -> list[str]:
    if not os.path.isdir(cwd):
        return [f"there is no folder {cwd}, in which hvdrun was started; start it in one that all hosts have"]
    path = os.path.join(cwd, program)
    if shutil.which(path) is None:
        return [f"there is no program {path}, which the ranks are to execute; install it there too"]
    paths = [os.path.join(cwd, file) for file in files]
    return [f"{path} cannot be written: {trouble}" for path in paths if (trouble := why_unwritable(path))]


def _decode_gpus(value: Any) -> Gpus | None:
    return None if value is None else Gpus(tuple(map(str, value["names"])), str(value["source"]))


def decode_description(value: Any) -> Description:
    """The inverse of :func:`describe`.

    Raises:
        ValueError: Another version's agent says something else.
    """
    try:
        fields = dict(value["host"])
        host = Host(
            cpus=tuple(fields["cpus"]),
            cores=tuple(map(tuple, fields["cores"])),
            numa_nodes=tuple(map(tuple, fields["numa_nodes"])),
            quota=fields["quota"],
            gpus=_decode_gpus(fields.get("gpus")),
        )
        client, server = value["seen_from"] or (None, None)
        seen_from = None if client is None else (str(client), str(server))
        return Description(str(value["version"]), host, seen_from, tuple(map(str, value["problems"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its description makes no sense ({type(error).__name__})") from None
