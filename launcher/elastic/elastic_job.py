"""Puts the parts of an elastic job together: discovery, driver, output."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from horovodlike.launcher.elastic.discovery import (
    DiscoveryError,
    DiscoveryThread,
    FixedHosts,
    HostDiscovery,
    HostDiscoveryScript,
)
from horovodlike.launcher.elastic.driver import Driver
from horovodlike.launcher.elastic.host_health import Backoff
from horovodlike.launcher.elastic.state import Policy
from horovodlike.launcher.errors import HostsError, UsageError, counted, given
from horovodlike.launcher.planning.gpus import gpu_variables
from horovodlike.launcher.planning.job_spec import THIS_MACHINE, ElasticSpec, JobSpec
from horovodlike.launcher.planning.plan import JobIdentity, bind
from horovodlike.launcher.supervisor.agent_startup import describe_this_host
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.launcher.supervisor.output import OutputFiles, RankOutput, Screen
from horovodlike.launcher.supervisor.signals import SignalHandler, Wakeup
from horovodlike.launcher.supervisor.writer import Writer

__all__ = ["ElasticOutcome", "run_elastic"]

_LOOK_S = 0.5
_LOOPBACK = "127.0.0.1"


@dataclass
class ElasticOutcome(Outcome):
    """How an elastic job has ended; ``results`` are by number of worker.

    Attributes:
        members: The workers of the last generation, by rank.
    """

    members: tuple[int, ...] = ()


def run_elastic(
    spec: JobSpec,
    elastic: ElasticSpec,
    command: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    discovery: HostDiscovery | None = None,
    task: bytes | None = None,
    take_signals: bool = False,
    reasons: Sequence[str] = (),
) -> ElasticOutcome:
    """Runs an elastic job and returns when nothing is left of it.

    Args:
        spec: The job.
        elastic: What of it is elastic.
        command: What each worker executes.
        environ: The environment that the workers inherit.
        discovery: Finds the hosts; None for what the job says about them. It is closed in the end.
        task: The file that every worker can read.
        take_signals: Passes this process's signals on to the workers; only in the main thread.
        reasons: What ``verbose`` has to say besides.

    Raises:
        UsageError: The job does not fit its hosts; nothing has been started.
        HostsError: The hosts could not be found out; nothing has been started.
        BaseException: Whatever interrupted it (KeyboardInterrupt); the workers have been ended.
    """
    policy = make_policy(spec, elastic)
    discovery = _choose_discovery(spec, elastic, policy) if discovery is None else discovery
    with ExitStack() as stack:
        lookout = DiscoveryThread(discovery, environ, spec.here)
        stack.callback(lookout.close)
        try:
            found = lookout.look()
        except DiscoveryError as error:
            raise HostsError(f"the hosts cannot be found out: {error}") from error
        spec = replace(spec, here=lookout.here, network_timeout=elastic.heartbeat_timeout)
        if spec.here in found:  # what does not fit is to be said before anything starts
            most = found[spec.here]
            host = describe_this_host(spec, environ)
            bind(spec.bind_to, host, most if policy.max_np is None else min(most, policy.max_np))
            gpu_variables(spec.gpus_per_rank, host.gpus, most, spec.called("--gpus-per-rank"))
        files = None
        if spec.output_directory is not None:
            files = OutputFiles(spec.output_directory, 1, (), called=spec.called("--output-filename"))
            stack.callback(files.close)
        wakeup = Wakeup()
        stack.callback(wakeup.close)
        writer = Writer(wakeup.set)
        output = RankOutput(Screen.pair(sys.stdout, sys.stderr, environ), writer, files, spec.timestamps)
        driver = Driver(
            spec,
            policy,
            command,
            environ,
            JobIdentity(secrets.token_hex(8), secrets.token_hex(32), _LOOPBACK, 0),
            output,
            wakeup,
            grace_period=elastic.grace_period,
            task=task,
            look_every=None if take_signals else _LOOK_S,
        )
        stack.callback(writer.close, lambda: driver.abandoned)
        stack.callback(driver.close)
        stack.callback(lookout.close)  # nothing is told to a driver that has been closed
        if take_signals:
            stack.enter_context(SignalHandler(driver.interrupt, wakeup))
        output.say(*(f"hvdrun: {line}" for line in (reasons if spec.verbose else ())))
        driver.tell(found)
        if not isinstance(discovery, FixedHosts):
            lookout.start(found, driver.tell)
        outcome = driver.run()
        return ElasticOutcome(
            outcome.exit_code, outcome.failure, outcome.trouble, outcome.results, members=driver.members
        )


def make_policy(spec: JobSpec, elastic: ElasticSpec) -> Policy:
    """What the user has asked for, as far as membership goes.

    Raises:
        UsageError: The numbers contradict each other.
    """
    number, least, most = spec.num_proc, elastic.min_np, elastic.max_np
    least = number if least is None else least
    start = f"{given(spec.called('-np'), number)}, for which the job waits before it starts"
    if least > number:
        raise UsageError(f"{given(spec.called('--min-np'), least)} is more than {start}")
    if most is not None and most < number:
        raise UsageError(f"{given(spec.called('--max-np'), most)} is less than {start}")
    cooldown = Backoff() if elastic.cooldown_range is None else Backoff(*elastic.cooldown_range, patient=False)
    return Policy(
        num_proc=number,
        min_np=least,
        max_np=most,
        reset_limit=elastic.reset_limit,
        cooldown=cooldown,
        elastic_timeout=elastic.elastic_timeout,
        heartbeat_timeout=elastic.heartbeat_timeout,
    )


def _choose_discovery(spec: JobSpec, elastic: ElasticSpec, policy: Policy) -> HostDiscovery:
    if elastic.discovery_script is not None:
        return HostDiscoveryScript(elastic.discovery_script, elastic.slots, elastic.discovery_timeout)
    hosts = {entry.host: entry.slots for entry in spec.hosts}
    if not hosts:
        hosts = {THIS_MACHINE: policy.max_np or elastic.slots or spec.num_proc}
    slots = sum(hosts.values())
    if slots < policy.min_np:
        shown = ", ".join(f"{host}:{number}" for host, number in hosts.items())
        called = spec.called("--min-np")
        raise UsageError(
            f"{given(called, policy.min_np)}: the hosts have {counted(slots, 'slot')} only, and do not change: {shown}"
            f"; give them more slots, or use a smaller {called}"
        )
    return FixedHosts(hosts)
