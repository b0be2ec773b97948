"""``horovodlike.run``: a function on several processes, from Python."""

import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from horovodlike import config
from horovodlike.errors import ConfigError
from horovodlike.launcher.agent.run_task import LENGTH, unpack_answer
from horovodlike.launcher.elastic import HostDiscovery
from horovodlike.launcher.errors import RankFailedError, UsageError
from horovodlike.launcher.launch import launch, make_spec
from horovodlike.launcher.options import (
    ELASTIC_ARGUMENTS,
    check_arguments,
    setting_variables,
    take_elastic,
    take_integer,
    take_number_of_ranks,
)
from horovodlike.launcher.planning import JobSpec, MonitorSpec, RemoteStart
from horovodlike.launcher.planning.command import working_folder
from horovodlike.launcher.schedulers.registry import find_hosts
from horovodlike.launcher.supervisor import failure_attribution
from horovodlike.launcher.supervisor.job import Outcome

__all__ = ["RemoteTraceback", "run"]

T = TypeVar("T")

RUN_TASK = Path(__file__).with_name("agent") / "run_task.py"
"""The program that each rank executes."""

_DURATIONS = ("discovery_timeout", "elastic_timeout", "heartbeat_timeout", "grace_period")
_NO_EFFECT = frozenset({"disable_cache", "mpi_args", "use_gloo", "use_mpi"})
"""Arguments of Horovod's ``run`` that choose among alternatives which do not exist here."""


class RemoteTraceback(Exception):
    """The cause of an exception that comes from a rank: its message is the traceback there."""

    def __init__(self, rank: int, text: str) -> None:
        """Keep the rank and the text."""
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"\n[rank {self.rank}]\n{self.text}"


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    env: Mapping[str, str] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    executable: str | None = None,
    gpus_per_rank: int | None = None,
    host_discovery: HostDiscovery | None = None,
    live: bool = False,
    **horovod: Any,
) -> list[T]:
    """Run a function in several new processes, which form a job, on this machine or on several.

    The function, its arguments and its result are sent by cloudpickle, so a lambda or a function from a notebook works,
    too. The output of the ranks appears in the output of this process, with a prefix. The call blocks until all
    processes of the job have ended. It may be made from any thread; an interrupt (KeyboardInterrupt) ends the job.

    Args:
        func: The function that each rank calls; it calls ``init()`` if it wants to communicate.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks. If neither it nor ``np`` is given: all slots of the hosts that are named, or 1.
        np: Horovod's other name for ``num_proc``.
        env: The environment of the ranks; if None, the environment of this process. On other hosts, variables such as
            HOME keep the values that they have there.
        hosts: The hosts and their slots, as in ``"node-1:4,node-2:4"``.
        hostfile: A file with hosts, in lines such as ``node-1 slots=4``.
        start_timeout: How long ``init()`` waits for all ranks, and this call for the hosts, in seconds.
        ssh_port: The port of the ssh server on each of the other hosts.
        ssh_identity_file: The private key for ssh.
        network_interfaces: The network between the hosts: names of interfaces, or networks such as ``10.0.0.0/8``.
        output_filename: A folder; the output of each rank is written to files there as well.
        verbose: Whether to explain the decisions of the launcher on standard error.
        executable: The Python interpreter of the ranks; this one if None.
        gpus_per_rank: How many GPUs each rank has for itself, in ``CUDA_VISIBLE_DEVICES``, in the order of local
            ranks. 0: each rank sees all GPUs that the job has on its host. None: the value of
            ``HOROVODLIKE_GPUS_PER_RANK``, or 0 if that is not set.
        host_discovery: Finds the hosts of an elastic job, which may come and go.
        live: Whether to show the state of the job while it runs, each second: how much is done, by
            ``report_progress()``, which rank holds up the others, where the time goes, and stalls with their stacks. In
            a notebook above the output of the ranks, on a terminal in the lowest line, elsewhere in a line each ten
            seconds.
        **horovod: Horovod's other arguments. The job is elastic if ``min_np`` (or ``min_num_proc``), ``max_np``
            (``max_num_proc``), ``host_discovery_script`` or ``host_discovery`` is given; ``slots``, ``reset_limit``,
            ``cooldown_range``, ``discovery_timeout``, ``elastic_timeout``, ``heartbeat_timeout`` and ``grace_period``
            mean the same as the options of hvdrun with these names. ``disable_cache``, ``mpi_args``,
            ``use_gloo`` and ``use_mpi`` have no effect, and give a DeprecationWarning.

    Returns:
        The return values of the function, by rank. For an elastic job: its last members' values, in the order of their
        ranks; members without one are left out.

    Raises:
        RankFailedError: A rank ended without a result, such as by a signal.
        HostsError: Some hosts cannot take part; the message says why. It is a RuntimeError.
        UsageError: An argument cannot be used; it is a ValueError.
        Exception: The function raised it on the rank that failed first; its cause is a :class:`RemoteTraceback`.
    """
    check_arguments(
        {
            **{"func": func, "args": args, "kwargs": kwargs, "env": env, "hosts": hosts, "hostfile": hostfile},
            **{"ssh_identity_file": ssh_identity_file, "network_interfaces": network_interfaces},
            **{"output_filename": output_filename, "executable": executable, "host_discovery": host_discovery},
            **horovod,
        }
    )
    working_folder()
    port = take_integer("ssh_port", ssh_port)
    wanted = {name: horovod.pop(name) for name in (ELASTIC_ARGUMENTS | {"grace_period"}) & horovod.keys()}
    interfaces = _check_horovod_arguments(horovod, network_interfaces)
    if hosts is not None and hostfile is not None:
        raise UsageError("Argument hosts and hostfile only allow one provided.")
    environ = dict(os.environ if env is None else env)
    given = {"start_timeout": start_timeout, "network_interface": interfaces, "gpus_per_rank": gpus_per_rank}
    given |= {name: wanted.get(name) for name in _DURATIONS}
    settings = setting_variables(given)
    try:
        values = config.load({**environ, **settings})
    except ConfigError as error:
        raise UsageError(str(error)) from None
    elastic = take_elastic(wanted, host_discovery is not None, values)
    where = find_hosts(hosts, hostfile, take_number_of_ranks(num_proc, np), environ, elastic, host_discovery)
    asked = JobSpec(
        where.num_proc or 1,
        (executable or sys.executable, str(RUN_TASK)),
        remote=RemoteStart(port, ssh_identity_file, scheduler=where.scheduler, cpus=where.cpus),
        output_directory=output_filename,
        fold=False,
        verbose=bool(verbose),
        names=_names(num_proc, gpus_per_rank),
        monitor=MonitorSpec() if live else None,
        live=bool(live),
    )
    is_discovered = host_discovery is not None or (elastic is not None and elastic.discovery_script is not None)
    spec = make_spec(asked, values, where, elastic, settings, environ, files=None if is_discovered else {})
    task = _pack(func, tuple(args), dict(kwargs or {}))
    outcome = launch(spec, spec.command, environ, discovery=host_discovery, task=task)
    if elastic is not None:
        return unpack_results(outcome, [worker for worker in outcome.members if outcome.results.get(worker)] or [0])
    return unpack_results(outcome, range(spec.num_proc))


def _names(num_proc: int | None, gpus_per_rank: int | None) -> dict[str, str]:
    """Return the names in messages for the flags of hvdrun."""
    names = {"--min-np": "min_np", "--max-np": "max_np", "--output-filename": "output_filename"}
    names["-np"] = "np" if num_proc is None else "num_proc"
    names["--gpus-per-rank"] = config.SETTINGS["gpus_per_rank"].variable if gpus_per_rank is None else "gpus_per_rank"
    return names


def _check_horovod_arguments(given: dict[str, Any], network_interfaces: str | Sequence[str] | None) -> str | None:
    """Look at Horovod's other arguments. Returns the network to use, for which it has two names."""
    old_name = given.pop("network_interface", None)
    interfaces = network_interfaces if old_name is None else old_name
    unknown = sorted(given.keys() - _NO_EFFECT)
    if unknown:
        raise TypeError(f"run() got an unexpected keyword argument {unknown[0]!r}")
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("use_gloo") and given.get("use_mpi"):
        raise UsageError("Argument use_gloo and use_mpi only allow one set True.")
    for name in given:
        warnings.warn(f"run(): {name} has no effect", DeprecationWarning, stacklevel=3)
    return interfaces if interfaces is None or isinstance(interfaces, str) else ",".join(interfaces)


def _pack(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    from horovodlike._net.object_seal import dumps

    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path]).encode()
    try:
        pickled = dumps((func, args, kwargs))
    except Exception as error:
        raise TypeError(f"run(): func, or something in args or kwargs, cannot be pickled: {error}") from error
    return LENGTH.pack(len(search_path)) + search_path + pickled


def unpack_results(outcome: Outcome, ranks: Iterable[int]) -> list[Any]:
    """Return the function's results on these ranks, or raise the exception that it has raised; see :func:`run`."""
    if outcome.failure is not None:
        _raise_failure(outcome)
    if outcome.exit_code != 0:
        raise RankFailedError(outcome.trouble or "the job was ended from outside", -1, outcome.exit_code)
    results = []
    for rank in ranks:
        answer = outcome.results.get(rank)
        if not answer:  # os._exit(0)
            raise RankFailedError(f"rank {rank} exited with code 0 before the function returned", rank, 0)
        results.append(pickle.loads(unpack_answer(answer)[1]))
    return results


def _raise_failure(outcome: Outcome) -> None:
    failure = outcome.failure
    assert failure is not None
    raised, content = unpack_answer(outcome.results.get(failure.rank, b""))
    if raised and content:
        sent, text, shown = pickle.loads(content)
        cause = RemoteTraceback(failure.rank, text)
        if sent is not None:
            raise pickle.loads(sent) from cause
        raise RankFailedError(f"rank {failure.rank} raised {shown}", failure.rank, 1) from cause
    lines = b"\n".join(failure_attribution.describe(failure)).decode(errors="replace").removeprefix("hvdrun: ")
    raise RankFailedError(lines, failure.rank, failure_attribution.exit_code(failure.status))
