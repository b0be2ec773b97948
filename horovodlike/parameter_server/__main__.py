"""A process that serves parameters and does nothing else: ``python -m horovodlike.parameter_server``.

``hvdrun --servers`` starts it, and ends it by SIGTERM when the ranks have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from horovodlike import config
from horovodlike._bootstrap.environment import HOST_ID, JOB_ID, NODE_ID, SERVER, RankInfo
from horovodlike._engine import parameters
from horovodlike._net.interfaces import own_address
from horovodlike._net.socket_options import ensure_descriptors
from horovodlike.errors import ConfigError, RendezvousError
from horovodlike.parameter_server import _rules, _servers
from horovodlike.parameter_server._connections import Listener, facts_of

_SIZE = "HOROVODLIKE_SIZE"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT comes; return the exit code."""
    parser = argparse.ArgumentParser("python -m horovodlike.parameter_server", description=__doc__)
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="NAME",
        action="append",
        default=[],
        help="a module to import, which adds update rules by register_rule(); may be repeated",
    )
    modules: list[str] = parser.parse_args(argv).modules
    number = os.environ.get(SERVER)
    if number is None:
        parser.error("hvdrun starts servers of parameters: hvdrun -np 4 --servers 2 python train.py")
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # all threads inherit this: the main thread takes the signals
    for name in modules:
        importlib.import_module(name)
    try:
        listener = _listen(int(number))
    except (ConfigError, RendezvousError) as error:
        print(f"horovodlike.parameter_server: {error}", file=sys.stderr)
        return 1
    with contextlib.closing(listener):
        signal.sigwait(_SIGNALS)
    parameters.stop()
    return 0


def _listen(number: int) -> Listener:
    environ, settings = os.environ, config.load(os.environ)
    key = _servers.key_of_dedicated()
    size = int(environ[_SIZE])
    rank_info = RankInfo(
        size + number, size, job=environ.get(JOB_ID, ""), node_id=environ.get(HOST_ID) or environ.get(NODE_ID)
    )
    with _servers.rendezvous(rank_info, settings) as joined:
        address = own_address(0, [(joined.local_address, joined.server_address)], settings.network_interface)
        _rules.serve()
        ensure_descriptors(size, "the connections of a server of parameters")
        facts = facts_of(rank_info, settings)
        name = f"parameter server {number} ({facts.name})"
        listener = Listener(key, address, name, facts, settings, _rules.registered)
        try:
            joined.publish(listener.address)
        except BaseException:
            listener.close()
            raise
    return listener


if __name__ == "__main__":
    sys.exit(main())
