"""Several hosts on one machine, for tests: network namespaces behind a switch, with real servers in them.

================ =======================================================================================================
``hosts``        the hosts and their network: :class:`~cluster.hosts.Cluster`, :class:`~cluster.hosts.Host`
``links``        what a link can be made to have: rate, delay (``delay_line``), loss
``namespaces``   the commands behind them, and the removal of what a dead process has left
``tools``        what this machine lacks for it
``sshd``         an OpenSSH server in each host
``slurm``        Slurm's daemons over the hosts
``mpirun``       Open MPI over the hosts
``iperf``        the rate that iperf3 measures between two hosts
``jobs``         jobs over the hosts that tests disturb; their ranks run ``fault_job``
``pods``         programs that stand for pods, with their output in files
``port_scanner`` connects to every port of its host
``conftest``     the fixtures ``cluster`` and ``fresh_cluster``, and the mark ``cluster``
``grid``         the program that the tests start over the hosts: all collectives, checked against NumPy
================ =======================================================================================================
"""
