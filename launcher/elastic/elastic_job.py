"""The steps of an elastic job: discovery, driver, output."""

import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from horovodlike.launcher.elastic import (
    DiscoveryError,
    DiscoveryThread,
    FixedHosts,
    HostDiscovery,
    HostDiscoveryScript,
)
from horovodlike.launcher.elastic.called_hosts import CalledHosts
from horovodlike.launcher.elastic.cluster_discovery import find_discovery
from horovodlike.launcher.elastic.driver import Driver
from horovodlike.launcher.elastic.host_health import Backoff
from horovodlike.launcher.elastic.state import Policy
from horovodlike.launcher.errors import HostsError, UsageError, counted, given
from horovodlike.launcher.planning import THIS_MACHINE, ElasticSpec, JobSpec, Nodes
from horovodlike.launcher.planning.addresses import LOOPBACK
from horovodlike.launcher.planning.plan import bind, gpu_variables
from horovodlike.launcher.supervisor import SignalHandler
from horovodlike.launcher.supervisor.agent_startup import describe_this_host
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.launcher.supervisor.node_job import key_of_ranks, listening_addresses
from horovodlike.launcher.supervisor.static_job import Launch
from horovodlike.launcher.supervisor.waiting import Waiting

_ASK_AGAIN_S = 0.2


class ElasticLaunch(Launch):
    """A job whose workers come and go. The driver plans and starts them when their hosts answer."""

    _called: CalledHosts | None = None
    _hosts: DiscoveryThread | None = None

    def resolve(self) -> None:
        """Find the hosts that can be used now."""
        assert self._spec.elastic is not None
        self._elastic = self._spec.elastic
        self._policy = make_policy(self._spec, self._elastic)
        if self._discovery is None:
            self._discovery = _choose_discovery(self._spec, self._elastic, self._policy)
        self._hosts = DiscoveryThread(self._discovery, self._environ, self._spec.here)
        self._stack.callback(self._hosts.close)
        self._found = self._first_look(self._hosts)
        here, timeout = self._hosts.here, self._elastic.heartbeat_timeout
        self._spec = replace(self._spec, here=here, network_timeout=timeout)

    def probe(self) -> None:
        """Check that the workers of this host fit before anything starts; the other hosts are asked as they come."""
        self._check_this_host(self._found)

    def _first_look(self, hosts: DiscoveryThread) -> dict[str, int]:
        """Find the hosts; retry after a failure that may pass, such as a name server that does not answer yet."""
        deadline, waiting = time.monotonic() + self._spec.start_timeout, Waiting()
        while True:
            try:
                return hosts.look()
            except DiscoveryError as error:
                if not error.may_pass or time.monotonic() >= deadline:
                    raise HostsError(f"the hosts cannot be found out: {error}") from error
                waiting.note(f"waiting: the hosts cannot be found out yet: {error}")
            time.sleep(_ASK_AGAIN_S)

    def _check_this_host(self, found: Mapping[str, int]) -> None:
        spec = self._spec
        if spec.here is not None and spec.here in found:
            most, limit = found[spec.here], self._policy.max_np
            host = describe_this_host(spec, self._environ)
            bind(spec.bind_to, host, most if limit is None else min(most, limit))
            gpu_variables(spec.gpus_per_rank, host.gpus, most, spec.called("--gpus-per-rank"))
        self._open_files(1, ())

    def serve(self) -> None:
        """Listen for the workers."""
        self._open_monitor([LOOPBACK])
        self._open_output()
        self._driver = Driver(
            self._spec,
            self._policy,
            self._command,
            self._environ,
            self._identity,
            self._output,
            self._wakeup,
            grace_period=self._elastic.grace_period,
            task=self._task,
            look_every=self._look_every,
            called=self._called,
            monitor=self._monitor,
        )
        self._stack.callback(self._close_output, lambda: self._driver.abandoned)
        self._stack.callback(self._driver.close)
        if self._hosts is not None:
            self._stack.callback(self._hosts.close)  # runs first, so that a closed driver is told no hosts

    def start(self) -> None:
        """Tell the driver the hosts, now and whenever they change."""
        if self._take_signals:
            self._stack.enter_context(SignalHandler(self._driver.interrupt, self._wakeup))
        self._say()
        if self._called is None:
            self._driver.tell(self._found)
        if self._hosts is not None and not isinstance(self._discovery, FixedHosts):
            self._hosts.start(self._found, self._driver.tell)

    def supervise(self) -> None:
        """See :meth:`Launch.supervise`."""
        self._driver.run()

    def attribute(self) -> Outcome:
        """See :meth:`Launch.attribute`."""
        return replace(self._driver.outcome, members=self._driver.members)


class CalledLaunch(ElasticLaunch):
    """A job whose hosts call in."""

    _called: CalledHosts

    def resolve(self) -> None:
        """Listen for the hosts."""
        assert self._spec.elastic is not None
        spec, self._elastic = self._spec, self._spec.elastic
        timeout, here = self._elastic.heartbeat_timeout, None
        if isinstance(self._discovery, CalledHosts):
            self._called, self._discovery = self._discovery, None
        elif spec.nodes is not None:
            here = socket.gethostname()
            self._called = self._listen(spec.nodes, here)
            least = max((spec.nodes.least or 1) * spec.num_proc, self._elastic.min_np or 1)
            spec = replace(spec, num_proc=least, names={**spec.names, "-np": "--nnodes MIN times -np, which is"})
        self._stack.callback(self._called.close)
        self._policy = make_policy(spec, self._elastic)
        self._spec = replace(spec, here=here, network_timeout=timeout)
        key = key_of_ranks(self._called.key, self._identity.job_id).hex()
        self._identity = replace(self._identity, key=key)
        self._watch_discovery()

    def probe(self) -> None:
        """Check that the workers of this host fit before anything starts; the other hosts are asked as they come."""
        self._check_this_host(self._called.find())

    def _listen(self, nodes: Nodes, here: str) -> CalledHosts:
        deadline = time.monotonic() + self._spec.start_timeout
        addresses = listening_addresses(self._spec, nodes, deadline)
        own = {here: self._spec.num_proc}
        return CalledHosts(addresses, nodes.port, key=nodes.key, nodes=nodes.count, own=own)

    def _watch_discovery(self) -> None:
        """Prepare to ask, again and again, which hosts may take part, if the user wants that."""
        self._discovery = _asked_discovery(self._elastic)
        if self._discovery is not None:
            self._hosts = DiscoveryThread(self._discovery, {}, resolves=False)
            self._stack.callback(self._hosts.close)
            self._found = self._first_look(self._hosts)
            self._called.allow(self._found)


def make_policy(spec: JobSpec, elastic: ElasticSpec) -> Policy:
    """Return the limits and timeouts of the membership, as the user has asked for them.

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
    backoff = Backoff() if elastic.cooldown_range is None else Backoff(*elastic.cooldown_range, patient=False)
    return Policy(
        num_proc=number,
        min_np=least,
        max_np=most,
        reset_limit=elastic.reset_limit,
        resets_like_horovod=spec.compat,
        backoff=backoff,
        elastic_timeout=elastic.elastic_timeout,
        heartbeat_timeout=elastic.heartbeat_timeout,
    )


def _asked_discovery(elastic: ElasticSpec) -> HostDiscovery | None:
    """Return the discovery that the user has asked for by ``--discover`` or ``--host-discovery-script``."""
    if elastic.discover is not None:
        return find_discovery(elastic.discover, elastic.slots)
    if elastic.discovery_script is not None:
        seconds = min(elastic.discovery_timeout, elastic.elastic_timeout)
        return HostDiscoveryScript(elastic.discovery_script, elastic.slots, seconds)
    return None


def _choose_discovery(spec: JobSpec, elastic: ElasticSpec, policy: Policy) -> HostDiscovery:
    if (asked := _asked_discovery(elastic)) is not None:
        return asked
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
