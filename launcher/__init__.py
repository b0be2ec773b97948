"""``hvdrun``: starts the ranks of a job, watches over them, and leaves nothing behind.

The modules and packages, lowest layer first. Each imports only from itself and from those above it in this table:

================ =======================================================================================================
``errors``       exceptions, and the wording of numbers and values in messages
``agent``        runs on each host: starts its ranks, forwards their output, and ends them when the connection ends.
                 ``start_agent`` runs ``agent``; ``protocol``: the frames between launcher and agent; ``process``:
                 fork, process tree and exit order; ``host_probe``: processors, GPUs and problems of a host;
                 ``external``: asks other programs, within a time limit; ``run_task``: the program of the ranks of
                 ``horovodlike.run``
``planning``     the specification of a job; ``hosts``: host lists, and the ranks of each host; ``addresses``: the
                 addresses by which hosts reach each other; ``command``: the command to execute, from the words that the
                 user has typed; ``plan``: one plan per rank, with its environment
``schedulers``   the interface, and a module for each: hosts, and the command that starts an agent there; ``registry``:
                 chooses among them and the hosts that the user names; ``mpirun``: the command line of MPI's launcher
``supervisor``   ``static_job``: the eight steps of a job, of which ``node_job`` and ``mpirun_job`` are variants;
                 ``agent_startup``: starts and asks the agents; ``job`` and ``node_relay``: derived from the event loop
                 in the package itself; ``connection`` to agents, ``node_connection`` to other launchers;
                 ``output``: prefixes, files and last lines, ``fold``: lines that ranks share, ``printer``: one
                 screen or file, ``writer``: never blocks; ``failure_attribution``: the rank that is the cause, and
                 the exit code
``elastic``      jobs whose workers come and go; its ``__init__`` has the table of its modules
``options``      the table of options, which the command line, the configuration file and ``run`` read;
                 ``horovod_options``: the options of ``horovodrun`` that have no effect
``launch``       runs a job, from its options to its exit code: the specification, and eight steps in order
``tools``        ``--check-build`` and ``--selftest``
``cli``, ``run`` ``hvdrun`` and ``horovodlike.run``
================ =======================================================================================================

``agent`` imports nothing but the standard library, and little of it before it is asked to describe its
host, so that an agent is up in some 30 ms.
"""
