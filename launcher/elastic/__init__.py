"""Elastic jobs: the driver, which starts workers, replaces those that fail, and decides which are members.

=================== ====================================================================================================
``elastic_job``     the steps of an elastic job
``membership``      pure: all decisions; ``events`` are its input and output, ``state`` its data, and ``host_health``
                    decides when a host may have workers again
``driver``          carries the decisions out, and tells the membership what happens
``agents``          the agents of the hosts, and how workers are started through them
``worker_server``   the driver's end of the connections to its workers
``rank_assignment`` pure: the ranks of a generation, as its members are told
``discovery``       finds the hosts
=================== ====================================================================================================

To find hosts in a way of your own, derive from :class:`HostDiscovery` and give it to ``horovodlike.run``.
"""

from horovodlike.launcher.elastic.discovery import DiscoveryError, HostDiscovery

__all__ = ["DiscoveryError", "HostDiscovery"]
