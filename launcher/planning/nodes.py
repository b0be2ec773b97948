"""What the user says about nodes on each of which ``hvdrun`` is started by itself."""

import argparse
import re
from collections.abc import Mapping

from horovodlike._bootstrap.environment import SECRET_KEY, SECRET_KEY_FILE
from horovodlike._bootstrap.job_key import read_key_file, take_key
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import ConfigError
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.job_spec import MOST_RANKS, Nodes

__all__ = ["find_nodes"]

_INDEX = "JOB_COMPLETION_INDEX"
"""Where Kubernetes says which of an Indexed Job's pods this is."""
_WHERE = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)


def find_nodes(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Nodes | None:
    """Reads ``--nnodes`` and what belongs to it; None without it.

    Raises:
        UsageError: Something is missing or not accepted.
    """
    count: int | None = arguments.nnodes
    if count is None:
        for flag in ("node_rank", "rendezvous", "secret_key_file"):
            if getattr(arguments, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} needs --nnodes, the number of nodes")
        return None
    if arguments.hosts is not None or arguments.hostfile is not None:
        raise UsageError("--nnodes and -H contradict each other: either hvdrun starts what runs on other hosts, or you")
    if arguments.mpi:
        raise UsageError("--nnodes and --mpi contradict each other: mpirun starts what runs on other hosts by itself")
    if count < 1:
        raise UsageError(f"--nnodes {count}: there must be at least one node")
    if count > MOST_RANKS:
        raise UsageError(f"--nnodes {count}: a job can have {MOST_RANKS} nodes at most")
    number = _number(arguments.node_rank, environ)
    if not 0 <= number < count:
        raise UsageError(f"--node-rank {number}: of {count} nodes, the first one is 0 and the last one {count - 1}")
    if arguments.rendezvous is None:
        raise UsageError("--nnodes needs --rendezvous HOST:PORT, the same on all nodes: where node 0 is found")
    match = _WHERE.fullmatch(arguments.rendezvous)
    if match is None or not 0 < int(match[2]) < 65536:
        raise UsageError(f"--rendezvous {arguments.rendezvous} cannot be used; write it like: node-0:29400")
    return Nodes(count, number, match[1].strip("[]"), int(match[2]), _key(arguments.secret_key_file, environ))


def _number(node_rank: int | None, environ: Mapping[str, str]) -> int:
    if node_rank is not None:
        return node_rank
    text = environ.get(_INDEX, "")
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--nnodes needs --node-rank N, which of the nodes this is ({_INDEX} is not set either)")
    return int(text)


def _key(path: str | None, environ: Mapping[str, str]) -> JobKey:
    try:
        key = take_key(dict(environ)) if path is None else read_key_file(path, "--secret-key-file")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if key is None:
        raise UsageError(
            f"--nnodes needs a key that all nodes hold and nobody else: --secret-key-file, {SECRET_KEY_FILE} or "
            f"{SECRET_KEY}, with 64 hexadecimal digits, such as 'openssl rand -hex 32' makes"
        )
    return key
