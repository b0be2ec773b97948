"""The nodes of a job with one ``hvdrun`` on each: from options, or else from the platform on which they run."""

import argparse
import contextlib
import re
from collections.abc import Mapping

from horovodlike._bootstrap.environment import SECRET_KEY, SECRET_KEY_FILE
from horovodlike._bootstrap.job_key import read_key_file, take_key
from horovodlike._bootstrap.place import Facts, Place
from horovodlike._bootstrap.places import detect_place, find_failure_file
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import SETTINGS
from horovodlike.errors import ConfigError
from horovodlike.launcher import options
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import MOST_RANKS, Nodes

_NODES = re.compile(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", re.ASCII)
_RENDEZVOUS = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)


def detect(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Place | None:
    """Find the place of this node on a platform, unless the options leave nothing to find.

    Args:
        arguments: The parsed command line. Flags for hosts and elastic jobs that were not given are set here if the
            platform decides them.
        environ: The environment.

    Raises:
        UsageError: The platform's variables make no sense, or contradict each other.
    """
    named = [arguments.hosts, arguments.hostfile]
    if arguments.nnodes is None:  # else these print names of nodes that have hvdrun
        named += [arguments.host_discovery_script, arguments.discover]
    said = (arguments.nnodes, arguments.node_rank, arguments.rendezvous)
    if arguments.no_detect or arguments.mpi or any(each is not None for each in named) or None not in said:
        return None
    try:
        place = detect_place(Facts(environ))
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if place is not None and place.hostfile is not None and arguments.nnodes is None:
        _take_hosts(arguments, place)
    return place


def _take_hosts(arguments: argparse.Namespace, place: Place) -> None:
    """Use the hosts of a platform that has ssh set up."""
    if options.is_elastic(arguments) and place.discovery is not None:
        found: dict[str, str | int] = {"host_discovery_script": place.discovery}
        if arguments.slots is None and place.slots is not None:
            found["slots"] = place.slots
        vars(arguments).update(found)
        arguments.given = {**arguments.given, **{name: "--" + name.replace("_", "-") for name in found}}
    else:
        arguments.hostfile = place.hostfile
    arguments.ssh_options = arguments.ssh_options or place.ssh_options or ""


def settings_of(place: Place | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that fit the platform as variables, without those that the user has set."""
    found = {} if place is None else {SETTINGS[name].variable: value for name, value in place.settings.items()}
    return {name: value for name, value in found.items() if not environ.get(name)}


def find_nodes(arguments: argparse.Namespace, place: Place | None, environ: Mapping[str, str]) -> Nodes | None:
    """Read ``--nnodes`` and the flags that belong to it, with the place as default; return None if there is one node.

    Raises:
        UsageError: Something is missing or not accepted.
    """
    text: str | None = arguments.nnodes
    if text is None and place is not None and place.is_among_others:
        if place.nnodes is None:
            raise UsageError(
                f"how many nodes are there? {place}; give --nnodes N, or --no-detect for a job of its own on each node"
            )
        text = str(place.nnodes)
    if text is None:
        for flag in ("node_rank", "rendezvous", "secret_key_file"):
            if getattr(arguments, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} needs --nnodes, the number of nodes")
        return None
    if arguments.hosts is not None or arguments.hostfile is not None:
        raise UsageError("--nnodes and -H contradict each other: either hvdrun starts what runs on other hosts, or you")
    if arguments.mpi:
        raise UsageError("--nnodes and --mpi contradict each other: mpirun starts what runs on other hosts by itself")
    least, count = _node_counts(text)
    number = _node_number(arguments.node_rank, place, required=least is None)
    if number is not None and not 0 <= number < count:
        raise UsageError(f"--node-rank {number}: of {count} nodes, the first one is 0 and the last one {count - 1}")
    host, port = _rendezvous(arguments.rendezvous, place)
    return Nodes(count, number, host, port, _key_of_nodes(arguments.secret_key_file, place, environ), least)


def _node_counts(text: str) -> tuple[int | None, int]:
    """Read the value of ``--nnodes``: N, or MIN:MAX for an elastic job."""
    match = _NODES.fullmatch(text)
    if match is None:
        raise UsageError(f"--nnodes {text} cannot be used: write a number, or MIN:MAX for an elastic job")
    least, count = None if match[1] is None else int(match[1]), int(match[2])
    if count < 1 or least == 0:
        raise UsageError(f"--nnodes {text}: there must be at least one node")
    if count > MOST_RANKS:
        raise UsageError(f"--nnodes {text}: a job can have {MOST_RANKS} nodes at most")
    if least is not None and least > count:
        raise UsageError(f"--nnodes {text}: the first number, with which the job begins, must not be the greater one")
    return least, count


def _node_number(node_rank: int | None, place: Place | None, *, required: bool) -> int | None:
    if node_rank is not None:
        return node_rank
    if not required:
        return None if place is None else place.node_rank
    if place is None or place.node_rank is None:
        raise UsageError("--nnodes needs --node-rank N, which of the nodes this is (JOB_COMPLETION_INDEX is not set)")
    return place.node_rank


def _rendezvous(given: str | None, place: Place | None) -> tuple[str, int]:
    if given is None:
        if place is None or place.host is None or place.port is None:
            seen = f"; {place} does not tell it" if place is not None else ""
            raise UsageError(
                f"--nnodes needs --rendezvous HOST:PORT, the same on all nodes: where node 0 is found{seen}"
            )
        return place.host, place.port
    match = _RENDEZVOUS.fullmatch(given)
    if match is None or not 0 < int(match[2]) < 65536:
        raise UsageError(f"--rendezvous {given} cannot be used; write it like: node-0:29400")
    return match[1].strip("[]"), int(match[2])


def _key_of_nodes(path: str | None, place: Place | None, environ: Mapping[str, str]) -> JobKey:
    try:
        key = take_key(dict(environ)) if path is None else read_key_file(path, "--secret-key-file")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if key is None:
        advice = f". On {place.platform}, {place.key_advice}" if place is not None and place.key_advice else ""
        raise UsageError(
            f"--nnodes needs a key that all nodes hold and nobody else: --secret-key-file, {SECRET_KEY_FILE} or "
            f"{SECRET_KEY}, with 64 hexadecimal digits, such as 'openssl rand -hex 32' makes{advice}"
        )
    return key


def number_of_ranks(place: Place | None, environ: Mapping[str, str]) -> int | None:
    """Return how many ranks the platform wants on this node; None if it does not say.

    Raises:
        UsageError: It wants one for each GPU, and there is none.
    """
    wanted = None if place is None else place.ranks
    if wanted is None or isinstance(wanted, int):
        return wanted
    from horovodlike.launcher.agent.host_probe import detect_host, find_gpus

    if wanted == "cpu":
        return detect_host().usable_cpus
    gpus = find_gpus(environ)
    if gpus.names:
        return len(gpus.names)
    if wanted == "gpu":
        raise UsageError(f"{place} needs a GPU for each rank, but {gpus.source}; give -np")
    return detect_host().usable_cpus if wanted == "auto" else 1


def report_failure(reason: str, environ: Mapping[str, str]) -> None:
    """Write the reason of a failure where the platform shows it to the user, unless the script has done so itself."""
    path = find_failure_file(Facts(environ))
    if path is not None:
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(reason)
