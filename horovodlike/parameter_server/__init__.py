"""Parameter servers for arrays: elements that are split among servers, and updated by any rank at any time.

Example::

    server = ParameterServer(array)              # collective: each rank serves a part of the array
    server.send(gradient, "sgd", lr=0.1).wait()  # not collective, as all that follows
    array = server.receive().wait()

Nothing imports this package before it is used. The modules behind this façade:

* ``_client``: `ParameterServer`; ``_handles``: `Handle`; ``_rules``: update rules; ``_sharding``: the parts of arrays
* ``_template``: the arrays as callers pass and receive them
* ``_servers``: which processes serve; ``_connections``: how they and their clients find and trust each other
* ``_checkpoint``: `ParameterServer.save` and `load`; ``__main__``: a process that does nothing but serve
* :mod:`horovodlike._engine.parameters`: the core, which moves the bytes and applies the rules
"""

from horovodlike.parameter_server._client import ParameterServer
from horovodlike.parameter_server._handles import Handle
from horovodlike.parameter_server._rules import register_rule

__all__ = ["Handle", "ParameterServer", "register_rule"]
