"""Elastic jobs: the driver, which starts workers, replaces those that fail, and says who is a member.

==================== ===================================================================================================
``run_elastic``      puts the parts of an elastic job together
``membership``       pure: all decisions; ``events`` are what goes in and comes out, ``state`` what it knows, and
                     ``cooldown`` when a host may have workers again
``driver``           carries the decisions out, and tells the membership what happens
``fleet``            the agents of the hosts, and how workers are started through them
``worker_server``    the driver's end of the connections to its workers
``places``           pure: the ranks of a generation, as its members are told
``discovery``        which hosts there are
==================== ===================================================================================================

To find hosts in a way of your own, derive from :class:`HostDiscovery` and give it to ``horovodlike.run``.
"""

from horovodlike.launcher.elastic.discovery import DiscoveryError, HostDiscovery

__all__ = ["DiscoveryError", "HostDiscovery"]
