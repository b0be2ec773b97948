"""One way from a job to its exit code, whatever starts the ranks: eight steps, in this order."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from horovodlike.launcher.planning.job_spec import JobSpec
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.launcher.supervisor.static_job import Launch, StaticLaunch

__all__ = ["launch"]


def launch(spec: JobSpec, command: tuple[str, ...], environ: Mapping[str, str], **how: Any) -> Outcome:
    """Run a job, and return when nothing is left of it.

    The rendezvous server is started before the ranks are planned, since their variables carry its port.

    Args:
        spec: The job.
        command: The words that each rank executes.
        environ: The environment that the ranks inherit.
        **how: See :class:`~horovodlike.launcher.supervisor.static_job.Launch`.

    Raises:
        UsageError: The job does not fit its hosts; nothing has been started.
        HostsError: Some hosts cannot take part, or could not be found; nothing is left of what was started.
        BaseException: An interrupt (KeyboardInterrupt); the ranks have been ended.
    """
    with ExitStack() as stack:
        job = _variant(spec)(spec, command, environ, stack, **how)
        job.resolve()
        job.probe()
        job.serve()
        job.plan()
        job.prepare_environment()
        job.start()
        job.supervise()
        return job.attribute()


def _variant(spec: JobSpec) -> type[Launch]:
    """Choose what starts the ranks; a module is imported only if it is needed."""
    if spec.nodes is not None:
        from horovodlike.launcher.supervisor.node_job import FollowerLaunch, LeaderLaunch

        return LeaderLaunch if spec.nodes.number == 0 else FollowerLaunch
    if spec.elastic is not None:
        from horovodlike.launcher.elastic.elastic_job import ElasticLaunch

        return ElasticLaunch
    if spec.mpi:
        from horovodlike.launcher.supervisor.mpirun_job import MpirunLaunch

        return MpirunLaunch
    return StaticLaunch
