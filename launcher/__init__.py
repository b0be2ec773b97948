"""``hvdrun``: starts the ranks of a job, watches over them, and leaves nothing behind.

The way of a job, one module each:

==================== ===================================================================================================
``cli``              arguments and environment to a :class:`~horovodlike.launcher.planning.job_spec.JobSpec`
``elastic_options``  the flags of elastic jobs
``options``          the flags and configuration-file keys that stand for settings of ``horovodlike.config``
``horovod_options``  what of ``horovodrun``'s options has no effect
``where``            on which hosts the job runs; ``schedulers`` knows those of Slurm, LSF and PBS
``hosts``            pure: lists of hosts, and which ranks each host gets
``command``          what the user typed to what is executed; ``interpreter`` takes a command line of Python apart
``topology``         what a host has: cores, NUMA nodes, quota
``plan``             pure: spec and hosts to one plan per rank
``environment``      what of the launcher's environment ranks and other hosts get
``run_job``          puts the parts of a job together
``gather``           starts the agents of all hosts, and finds out which of them cannot take part
``remote``           pure: how the agent of another host is started, and what it means when that fails
``addresses``        by which addresses hosts reach each other
``nodes``            reads ``--nnodes`` and what belongs to it
``run_nodes``        puts the parts together where each node has a launcher of its own, started without ssh
``node_link``        the connections between these launchers
``relay``            what those of other nodes than the first do
``job``              watches over a job through one agent per host; ``wakeup`` brings it signals
``links``            the connections to all agents: whom to listen to, and who is silent; ``link`` is one of them
``elastic``          jobs whose workers come and go, with parts of its own
``verdict``          pure: which rank is to blame, and the exit code
``output``           prefixes, files and last lines; ``printer`` keeps ranks' lines apart, ``writer`` never blocks
``agent``            runs on each host: starts its ranks, forwards what they write, and ends them with the connection
``description``      what the agent of another host says about it
``process``          fork, process tree and exit order, as the agent needs them
``external``         programs that are asked something: each within a time limit
``frames``           what launcher and agent say to each other
``check_build``      ``hvdrun --check-build``
``selftest``         what the ranks of ``hvdrun --selftest`` execute; ``selftest_report`` is what they say
``run_function``     ``horovodlike.run``; ``run_arguments`` checks its arguments, ``run_task`` is what its ranks execute
==================== ===================================================================================================

``frames``, ``process`` and ``agent`` import nothing but a few modules of the standard library, so that an agent is up
in some 30 ms.
"""
