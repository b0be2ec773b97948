"""``hvdrun``: starts the ranks of a job, watches over them, and leaves nothing behind.

The way of a job, one module each:

==================== ===================================================================================================
``cli``              arguments and environment to a :class:`~horovodlike.launcher.spec.JobSpec`
``options``          the flags and configuration-file keys that stand for settings of ``horovodlike.config``
``horovod_options``  what of ``horovodrun``'s options has no effect, or is refused
``command``          what the user typed to what is executed; ``interpreter`` takes a command line of Python apart
``topology``         what this host has: cores, NUMA nodes, quota
``plan``             pure: spec and host to one plan per rank
``job``              runs a plan through one agent per host
``link``             the connection to an agent
``verdict``          pure: which rank is to blame, and the exit code
``output``           prefixes, files and last lines; ``printer`` keeps ranks' lines apart, ``writer`` never blocks
``agent``            runs on each host: starts its ranks, forwards what they write, and ends them with the connection
``process``          fork, process tree and exit order, as the agent needs them
``frames``           what launcher and agent say to each other
``check_build``      ``hvdrun --check-build``
``run_function``     ``horovodlike.run``; ``run_task`` is what its ranks execute
==================== ===================================================================================================

``frames``, ``process`` and ``agent`` import nothing but a few modules of the standard library, so that an agent is up
in some 30 ms.
"""
