"""Allreduce and training over several hosts: network namespaces with TCP between them, made by tests/cluster.

The limit is the rate that iperf3 measures on the same link; it takes its turns like the other peers. The rate of an
allreduce is the least that each host has to send, 2(n-1)/n times the tensor for n hosts, divided by the time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import driver, launch
from benchmarks.allreduce import AllreduceCase
from benchmarks.parameters import ParametersCase
from benchmarks.protocol import Message
from benchmarks.training import TrainingCase

TESTS = Path(__file__).resolve().parent.parent / "tests"
# Only while its modules are imported: some folders of the tests have the names of frameworks.
sys.path.append(str(TESTS))
from cluster import iperf  # noqa: E402
from cluster.hosts import Cluster, Host  # noqa: E402
from cluster.tools import missing as missing_tool  # noqa: E402

sys.path.remove(str(TESTS))

KIB, MIB = 1 << 10, 1 << 20
SMALL = (4, 64 * KIB)
RENDEZVOUS_PORT, STORE_PORT = 29400, 29500
ARRAYS = "numpy"
"""The peer without a framework, which has the parameter servers."""


@dataclass(frozen=True)
class Network:
    """Hosts, their links, and the measurements on them.

    Attributes:
        hosts: How many there are.
        rate: Bits per second to which each host's link is shaped; 0 for as fast as it goes.
        direct: A cable between two hosts, instead of a switch.
        per_host: Numbers of ranks on each host that horovodlike is measured with.
        latency: Whether small tensors and training steps are measured too.
        sealed: Whether horovodlike with one rank on each host is measured with HOROVODLIKE_SEAL_DATA, too.
        parameters: Whether parameter servers with one rank on each host are measured, too.
    """

    hosts: int
    rate: float = 0.0
    direct: bool = False
    per_host: tuple[int, ...] = (1,)
    latency: bool = False
    sealed: bool = False
    parameters: bool = False


NETWORKS = {
    "shaped": Network(2, rate=1e9, per_host=(1, 2), sealed=True, parameters=True),
    "cable": Network(2, direct=True, latency=True, sealed=True),
    "four": Network(4, rate=1e9),
}


@dataclass(frozen=True)
class Effort:
    """How much is measured: the large tensor, rounds, seconds of a measurement and of one by iperf3, models."""

    nbytes: int
    rounds: int
    budget: float
    iperf_seconds: int
    models: tuple[str, ...] = ()


class HostsCase(AllreduceCase):
    """The same for a peer of any name."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return True


class Iperf:
    """The link's limit, as a peer: an operation takes as long as its bytes at the rate that iperf3 measures."""

    name = "iperf3"

    def __init__(self, hosts: Sequence[Host], bidirectional: bool, seconds: int, share: float = 1.0) -> None:
        """Measures between the first two hosts; both directions at once, of which the mean counts, or one.

        `share`: how much a host sends for the operation, compared with an allreduce of as many bytes.
        """
        self._hosts = hosts
        self._bidirectional = bidirectional
        self._seconds = seconds
        self._share = share

    def call(self, command: Message) -> list[Message]:
        """See driver.Participant."""
        sender, receiver = self._hosts[:2]
        rates = iperf.measure(sender, receiver, seconds=self._seconds, bidirectional=self._bidirectional)
        rate = (rates.forward + rates.backward) / 2 if self._bidirectional else rates.forward
        return [{"seconds": self._share * bits_to_send(command["nbytes"], len(self._hosts)) / rate}]


def missing() -> str:
    """Why hosts cannot be had here, or the empty string."""
    return missing_tool("namespaces") or missing_tool("iperf3")


def bits_to_send(nbytes: int, hosts: int) -> float:
    """Return the bytes that each host has to send for an allreduce: nccl-tests' bus bandwidth is this per second."""
    return 8 * nbytes * 2 * (hosts - 1) / hosts


def horovodlike(
    hosts: Sequence[Host], per_host: int = 1, sealed: bool = False, framework: str = "horovodlike"
) -> launch.Launcher:
    """One `hvdrun --nnodes` on each host, as without ssh; jobs of different arguments can be there together."""
    hvdrun = launch.beside(sys.executable, "hvdrun")
    port = RENDEZVOUS_PORT + 4 * per_host + 2 * (framework != "horovodlike") + sealed
    rendezvous = f"{hosts[0].name}:{port}"

    def commands(size: int, scratch: Path) -> list[launch.Command]:
        key = scratch / "key"
        key.touch(mode=0o600)
        key.write_text("0123456789abcdef" * 4)  # the network ends at these hosts
        nodes = ["--nnodes", str(len(hosts)), "--rendezvous", rendezvous, "--secret-key-file", str(key)]
        ranks = ["-np", str(per_host), *launch.worker(framework)]
        return [
            launch.Command(host.inside([str(hvdrun), *nodes, "--node-rank", str(number), *ranks]), settings)
            for number, host in enumerate(hosts)
        ]

    settings = {"HOROVODLIKE_SEAL_DATA": "1"} if sealed else {}
    name = framework + (f".{per_host}" if per_host != 1 else "") + (".sealed" if sealed else "")
    return launch.Launcher(name, commands, "" if hvdrun else "hvdrun is not installed")


def gloo(hosts: Sequence[Host]) -> launch.Launcher:
    """One rank of torch.distributed on each host, over the same interface."""
    store = f"tcp://{hosts[0].ipv4}:{STORE_PORT}"

    def commands(size: int, scratch: Path) -> list[launch.Command]:
        return [
            launch.Command(host.inside(launch.worker("gloo")), launch.places(size, rank, store, "eth0"))
            for rank, host in enumerate(hosts)
        ]

    return launch.Launcher("gloo", commands, "" if importlib.util.find_spec("torch") else "PyTorch is not installed")


def measure(
    name: str, effort: Effort, choose: Callable[[Sequence[launch.Launcher]], Sequence[launch.Launcher]]
) -> dict[str, list[dict[str, Any]]]:
    """Measures on one network of NETWORKS.

    Args:
        name: the network's.
        effort: how much is measured.
        choose: from all peers to those that the run measures.

    Returns:
        The rows of the results: "allreduce", "training" and "parameters".

    Raises:
        BenchmarkError: a peer failed, or hosts could not be made.
    """
    network = NETWORKS[name]
    trains = network.latency and effort.models
    with _hosts(network) as hosts, contextlib.ExitStack() as stack:
        peers = [horovodlike(hosts, count) for count in network.per_host]
        sizes = {peer.name: count * len(hosts) for peer, count in zip(peers, network.per_host, strict=True)}
        if network.sealed:
            peers.append(horovodlike(hosts, sealed=True))
        peers.append(gloo(hosts))
        if network.parameters:
            peers.append(horovodlike(hosts, framework=ARRAYS))
        if trains:
            peers.append(launch.independent("alone"))
        groups = [stack.enter_context(driver.Group(peer, sizes.get(peer.name, len(hosts)))) for peer in choose(peers)]
        reducing = [group for group in groups if group.name not in ("alone", ARRAYS)]
        results = {"allreduce": _allreduce(name, hosts, reducing, effort)}
        if servers := [group for group in groups if group.name == ARRAYS]:
            results["parameters"] = _parameters(name, hosts, servers, effort)
        if trains:
            results["training"] = _training(groups, effort)
    return results


@contextlib.contextmanager
def _hosts(network: Network) -> Iterator[Sequence[Host]]:
    """Yield the hosts, with names that resolve to IPv4 addresses: then headers have the same size for all peers."""
    try:
        with Cluster(network.hosts, direct=network.direct, ipv6=False) as cluster:
            for host in cluster.hosts if network.rate else ():
                cluster.shape(host, rate=network.rate)
            yield cluster.hosts
    except AssertionError as error:  # the fixture raises it, also for commands that fail
        raise driver.BenchmarkError(f"hosts: {error}") from error


def _allreduce(
    name: str, hosts: Sequence[Host], groups: Sequence[driver.Group], effort: Effort
) -> list[dict[str, Any]]:
    network = NETWORKS[name]
    limit = Iperf(hosts, bidirectional=not network.rate, seconds=effort.iperf_seconds)
    large = HostsCase("float32", effort.nbytes)
    samples = driver.interleave([*groups, limit], [large], effort.rounds, effort.budget, fewest=2)
    if network.latency:
        cases = [HostsCase("float32", nbytes) for nbytes in SMALL]
        samples |= driver.interleave(groups, cases, effort.rounds, effort.budget / 2, fewest=20)
    sent = {group.name: _sent(group, hosts[0], large) for group in groups}
    rows = []
    for (peer, case), seconds in samples.items():
        assert isinstance(case, HostsCase)
        row: dict[str, Any] = {"network": name, "hosts": len(hosts), "peer": peer, "nbytes": case.nbytes}
        row |= driver.summary(seconds)
        row["rate"] = bits_to_send(case.nbytes, len(hosts)) / row["seconds"]
        if case == large and peer in sent:
            row["sent"] = sent[peer]
        rows.append(row)
    return rows


def _parameters(
    name: str, hosts: Sequence[Host], groups: Sequence[driver.Group], effort: Effort
) -> list[dict[str, Any]]:
    """Measure `send` of all ranks at once: each host sends the parts that it does not serve, half of an allreduce's."""
    limit = Iperf(hosts, bidirectional=False, seconds=effort.iperf_seconds, share=0.5)
    case = ParametersCase("send", effort.nbytes)
    samples = driver.interleave([*groups, limit], [case], effort.rounds, effort.budget, fewest=2)
    bits = bits_to_send(effort.nbytes, len(hosts)) / 2
    rows = [{"network": name, "peer": peer, **driver.summary(seconds)} for (peer, _), seconds in samples.items()]
    return [row | {"rate": bits / row["seconds"]} for row in rows]


def _sent(group: driver.Group, host: Host, case: HostsCase) -> int:
    """Return the bytes that a host sends for one measurement of a few allreduces, the same number for every peer."""
    before = host.counters()
    group.call(case.command(2))
    return (host.counters() - before).sent_bytes


def _training(groups: Sequence[driver.Group], effort: Effort) -> list[dict[str, Any]]:
    cases = [TrainingCase(model) for model in effort.models]
    samples = driver.interleave(groups, cases, effort.rounds, effort.budget, fewest=5)
    return [
        {"peer": peer, "np": groups[0].size, "model": case.model, **driver.summary(seconds)}
        for (peer, case), seconds in samples.items()
        if isinstance(case, TrainingCase)
    ]
