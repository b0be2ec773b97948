"""Launch a job: make its JobSpec, start it, wait, and return its exit code."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from horovodlike import config
from horovodlike.config import SETTINGS, Config
from horovodlike.launcher.elastic import HostDiscovery
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import ElasticSpec, JobSpec
from horovodlike.launcher.schedulers.registry import HostResolution

if TYPE_CHECKING:  # they take time to import, and a command line with an error does not need them
    from horovodlike.launcher.supervisor.job import Outcome
    from horovodlike.launcher.supervisor.static_job import Launch


def make_spec(
    asked: JobSpec,
    values: Config,
    where: HostResolution,
    elastic: ElasticSpec | None,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    files: Mapping[str, str] | None,
) -> JobSpec:
    """Complete the specification of a job, and check the files that ranks on this machine will write.

    Args:
        asked: The specification with the command, the number of ranks, and all that neither settings nor hosts decide.
        values: All settings.
        where: The hosts of the job.
        elastic: The elastic part of the job, or None.
        settings: The settings that were asked for, as environment variables.
        environ: The environment, from which the other settings come.
        files: The option with which the user gave a setting, by setting; other settings come from variables. None if
            the hosts are not known yet, so that no file is checked.

    Raises:
        UsageError: A file cannot be written.
    """
    names = files or {}
    has_rank_0 = asked.nodes.number == 0 if asked.nodes else not where.hosts or where.hosts[0].host == where.here
    written = () if values.timeline.upper() in ("", "DYNAMIC") else (values.timeline,)
    found = [("timeline", path) for path in written]
    if values.autotune_log and has_rank_0 and (values.autotune or "autotune_log" in names):
        found.append(("autotune_log", values.autotune_log))
    for setting, path in found if files is not None and where.here is not None else ():
        from horovodlike.launcher.agent.host_probe import why_unwritable

        trouble = why_unwritable(path)
        if trouble:
            called = names.get(setting) or str(config.variable_of(setting, {**environ, **settings}))
            shown = f"{called} {path}" if called.startswith("-") else f"{called}={path}"
            raise UsageError(f"{shown} cannot be written: {trouble}; name a file in a folder that exists")
    if elastic is not None:
        settings = {**settings, SETTINGS["network_timeout"].variable: f"{values.heartbeat_timeout:g}"}
    monitor = asked.monitor
    if monitor is not None:
        accepted = tuple(name for name in map(str.strip, values.monitor_names.split(",")) if name)
        monitor = replace(monitor, host=values.monitor_host, names=accepted, token_file=values.monitor_token_file)
    return replace(
        asked,
        monitor=monitor,
        settings=settings,
        hosts=where.hosts,
        here=where.here,
        elastic=elastic,
        start_timeout=values.start_timeout,
        network_timeout=values.network_timeout,
        network_interface=values.network_interface,
        gpus_per_rank=values.gpus_per_rank,
        grace_period=values.grace_period,
        files=written,
    )


def launch(
    spec: JobSpec,
    command: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    discovery: HostDiscovery | None = None,
    task: bytes | None = None,
    take_signals: bool = False,
    reasons: Sequence[str] = (),
) -> "Outcome":
    """Run a job, and return when all its processes have ended.

    The rendezvous server is started before the ranks are planned, since their variables carry its port.

    Args:
        spec: The job.
        command: The words that each rank executes.
        environ: The environment that the ranks inherit.
        discovery: Finds the hosts of an elastic job; None for the hosts in ``spec``. It is closed at the end.
        task: The content of a file that every rank can read, or None.
        take_signals: Pass this process's signals on to the ranks; only in the main thread.
        reasons: Further lines for ``verbose``.

    Raises:
        UsageError: The job does not fit its hosts; nothing has been started.
        HostsError: Some hosts cannot take part, or could not be found; all started processes have been ended.
        BaseException: An interrupt (KeyboardInterrupt); the ranks have been ended.
    """
    with ExitStack() as stack:
        job = _variant(spec, discovery)(
            spec, command, environ, stack, discovery=discovery, task=task, take_signals=take_signals, reasons=reasons
        )
        job.resolve()
        job.probe()
        job.serve()
        job.plan()
        job.prepare_environment()
        job.start()
        job.supervise()
        return job.attribute()


def _variant(spec: JobSpec, discovery: HostDiscovery | None) -> "type[Launch]":
    """Return the class that runs this kind of job; only the module of that class is imported."""
    if spec.elastic is not None and spec.nodes is not None and spec.nodes.number != 0:
        from horovodlike.launcher.elastic.call_in import CallInLaunch

        return CallInLaunch
    if spec.elastic is not None:
        from horovodlike.launcher.elastic.called_hosts import CalledHosts
        from horovodlike.launcher.elastic.elastic_job import CalledLaunch, ElasticLaunch

        return CalledLaunch if spec.nodes is not None or isinstance(discovery, CalledHosts) else ElasticLaunch
    if spec.nodes is not None:
        from horovodlike.launcher.supervisor.node_job import FollowerLaunch, LeaderLaunch

        return LeaderLaunch if spec.nodes.number == 0 else FollowerLaunch
    if spec.mpi:
        from horovodlike.launcher.supervisor.mpirun_job import MpirunLaunch

        return MpirunLaunch
    from horovodlike.launcher.supervisor.static_job import StaticLaunch

    return StaticLaunch
