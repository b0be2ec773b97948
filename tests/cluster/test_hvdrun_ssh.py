"""One `hvdrun` on the launcher, which starts ranks on other hosts through real ssh servers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster import sshd
from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import wait_until

pytestmark = pytest.mark.cluster("sshd", "ssh")

HVDRUN = (sys.executable, "-m", "horovodlike.launcher")
GRACE_S = 5.0
SETTLE_S = 2.0
SLACK_S = 20.0
FOREVER = "import signal\nprint('ready', flush=True)\nwhile True:\n    signal.pause()\n"


def hvdrun(host: Host, folder: Path, *words: object, **settings: str) -> subprocess.Popen[str]:
    """Start hvdrun on a host of the cluster; `settings` are further variables of its environment."""
    return host.popen(
        [*HVDRUN, *map(str, words)],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def expect(process: subprocess.Popen[str], text: str, times: int) -> None:
    """Read output until the text has come this number of times."""
    assert process.stdout is not None
    seen = []
    while sum(text in line for line in seen) < times:
        line = process.stdout.readline()
        assert line, f"the output ended: {seen}; {process.communicate()}"
        seen.append(line)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def gone(hosts: Sequence[Host], seconds: float = GRACE_S + SLACK_S) -> None:
    """Wait until nothing is left on hosts but their ssh servers."""

    def left() -> dict[int, str]:
        return {pid: words for host in hosts for pid, words in host.processes().items() if "listener" not in words}

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), "the end of what hvdrun has started", seconds)
    assert left() == {}


SHOW = """
    import os, socket
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "NODE_ID")
    found = {name: os.environ["HOROVODLIKE_" + name] for name in names}
    address = os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"]
    for each in address.split(","):
        socket.create_connection((each, int(os.environ["HOROVODLIKE_RENDEZVOUS_PORT"]))).close()
    print(socket.gethostname(), os.getcwd(), os.environ["OF_THE_TEST"], *found.values())
"""


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_ranks_on_three_hosts(
    cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    hosts = cluster(3, ssh=True)
    names = [host.ipv4 if family == "ipv4" else f"[{host.ipv6}]" for host in hosts.hosts]
    text = ",".join(f"{name}:{slots}" for name, slots in zip(names, (2, 1, 1), strict=True))
    code, out, err = finish(hvdrun(hosts.launcher, tmp_path, "-H", text, program(SHOW), OF_THE_TEST="here"))
    assert code == 0, err
    ids = [name.strip("[]") for name in names]
    assert sorted(out.splitlines()) == [
        f"[{rank}]<stdout>: {host} {tmp_path} here {rank} 4 {local} {local_size} {cross} {cross_size} {ids[number]}"
        for rank, (number, host, local, local_size, cross, cross_size) in enumerate(
            [(0, "h0", 0, 2, 0, 3), (0, "h0", 1, 2, 0, 1), (1, "h1", 0, 1, 1, 3), (2, "h2", 0, 1, 2, 3)]
        )
    ]
    gone(hosts.hosts)


def test_the_first_host_may_be_the_launchers(
    cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = cluster(3, ssh=True)
    words = ("-H", "h0:1,h1:1", "--verbose", program(SHOW))
    code, out, err = finish(hvdrun(hosts.hosts[0], tmp_path, *words, OF_THE_TEST="x"))
    assert code == 0, err
    assert [line.split()[1] for line in sorted(out.splitlines())] == ["h0", "h1"]
    assert re.search(r"^hvdrun: rank 0 is process \d+$", err, re.M)  # without ssh
    assert re.search(r"^hvdrun: rank 1 is process \d+ on h1$", err, re.M)


def test_another_port_and_a_key(
    fresh_cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = fresh_cluster(2)
    key = sshd.start(hosts, port=2222, identity=False)
    words = ("-H", "h0:1,h1:1", program(SHOW))
    code, _, err = finish(hvdrun(hosts.launcher, tmp_path, *words, OF_THE_TEST="x"))
    assert (code, err.count("Connection refused; is ssh's server running there, on this port")) == (1, 2), err
    code, _, err = finish(hvdrun(hosts.launcher, tmp_path, "-p", 2222, *words, OF_THE_TEST="x"))
    assert (code, err.count("Permission denied (publickey).; set up a key")) == (1, 2), err
    code, out, err = finish(hvdrun(hosts.launcher, tmp_path, "-p", 2222, "-i", key, *words, OF_THE_TEST="x"))
    assert code == 0, err
    assert len(out.splitlines()) == 2


def test_hosts_that_cannot_take_part(
    cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = cluster(3, ssh=True)
    text = "h0:1,nowhere:1,10.77.0.99:1"
    code, out, err = finish(
        hvdrun(hosts.launcher, tmp_path, "-H", text, "--start-timeout", 2, program(SHOW), OF_THE_TEST="x")
    )
    first, *lines = err.splitlines()
    assert (code, out, first) == (1, "", "hvdrun: 2 of 3 hosts cannot take part:")
    assert lines[0].startswith("  nowhere: ssh says: ssh: Could not resolve hostname nowhere")
    assert lines[1].startswith("  10.77.0.99: ")
    assert re.search("timed out|No route to host|not answered within 2 s", lines[1])
    gone(hosts.machines)


@pytest.mark.slow
def test_a_chosen_network(
    fresh_cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = fresh_cluster(2, interfaces=2, ssh=True)
    text = program("import os\nprint(os.environ['HOROVODLIKE_RENDEZVOUS_ADDR'])")
    for words, address in (
        ([], hosts.launcher.addresses["eth0"][1]),  # names stand for both addresses, IPv6 first
        (["--network-interface", "eth1"], hosts.launcher.addresses["eth1"][0]),
        (["--network-interface", "fd77:0:0:1::/64"], hosts.launcher.addresses["eth1"][1]),
    ):
        code, out, err = finish(hvdrun(hosts.launcher, tmp_path, "-H", "h0:1,h1:1", *words, text))
        assert code == 0, err
        assert sorted(out.splitlines()) == [f"[{rank}]<stdout>: {address}" for rank in range(2)]


def test_the_key_is_nowhere_to_be_seen(
    cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = cluster(3, ssh=True)
    train = program("import os, signal\nprint('key', os.environ['HOROVODLIKE_SECRET_KEY'], flush=True)\nsignal.pause()")
    job = hvdrun(hosts.launcher, tmp_path, "-H", "h0:1,h1:1", "--verbose", train)
    assert job.stdout is not None
    key = job.stdout.readline().split()[-1]
    assert re.fullmatch("[0-9a-f]{64}", key)
    lines = [words for host in hosts.machines for words in host.processes().values()]
    assert len([words for words in lines if "start_agent.py" in words]) >= 2
    assert not any(key in words for words in lines)
    job.kill()
    _, err = job.communicate()
    assert key not in err
    assert not any(key in sshd.log(host) for host in hosts.machines)
    gone(hosts.machines)


def test_a_killed_client_takes_the_ranks_with_it(
    cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = cluster(3, ssh=True)
    job = hvdrun(hosts.launcher, tmp_path, "-H", "h0:2,h1:1", program(FOREVER))
    expect(job, "ready", 3)
    [client] = [
        pid for pid, words in hosts.launcher.processes().items() if words.startswith("ssh ") and " h0 " in words
    ]
    os.kill(client, signal.SIGKILL)
    code, _, err = finish(job, SETTLE_S + GRACE_S + SLACK_S)
    assert (code, "hvdrun: the agent on h0 ended with SIGKILL; ranks 0, 1 were ended\n" in err) == (1, True), err
    gone(hosts.machines)


def test_a_dropped_session(cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path) -> None:
    hosts = cluster(3, ssh=True)
    job = hvdrun(hosts.launcher, tmp_path, "-H", "h0:1,h1:1", program(FOREVER))
    expect(job, "ready", 2)
    for pid in sshd.sessions(hosts.hosts[1]):
        os.kill(pid, signal.SIGKILL)
    code, _, err = finish(job, SETTLE_S + GRACE_S + SLACK_S)
    assert code == 1
    assert re.search(r"^hvdrun: the agent on h1 ended with code 255 \(.*\); rank 1 was ended$", err, re.M), err
    gone(hosts.machines)


def test_a_killed_launcher(cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path) -> None:
    hosts = cluster(3, ssh=True)
    job = hvdrun(hosts.launcher, tmp_path, "-H", "h0:1,h1:2", program(FOREVER))
    expect(job, "ready", 3)
    job.kill()
    job.communicate()
    gone(hosts.machines)


@pytest.mark.slow
def test_a_pulled_cable(fresh_cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path) -> None:
    hosts = fresh_cluster(2, ssh=True)
    train = program(FOREVER)
    job = hvdrun(hosts.launcher, tmp_path, "-H", "h0:1,h1:1", train, HOROVODLIKE_NETWORK_TIMEOUT="3")
    expect(job, "ready", 2)
    hosts.link_down(hosts.hosts[1])
    code, _, err = finish(job, 3 + SETTLE_S + GRACE_S + SLACK_S)
    assert code == 1
    assert re.search(r"^hvdrun: h1 has been silent for \d+ s; is it up, and reachable\?$", err, re.M), err
    # On the host that was cut off, the agent ends the ranks; ssh's server does not notice for hours.
    wait_until(lambda: not [each for each in hosts.hosts[1].processes().values() if "train.py" in each], "ranks", 30)
    gone([hosts.launcher, hosts.hosts[0]])


def test_ctrl_c(cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path) -> None:
    hosts = cluster(3, ssh=True)
    job = hvdrun(hosts.launcher, tmp_path, "-H", "h0:1,h1:1", program(FOREVER))
    expect(job, "ready", 2)
    job.send_signal(signal.SIGINT)
    code, _, err = finish(job, GRACE_S + SLACK_S)
    assert code == 130
    assert "KeyboardInterrupt" in err
    gone(hosts.machines)


PARAMETERS = """
    import numpy as np
    import horovodlike as hvd
    from horovodlike.parameter_server import ParameterServer

    hvd.init()
    for servers in ("dedicated", "ranks"):
        with ParameterServer(np.zeros(1_000_001), servers=servers) as server:
            for _ in range(3):
                server.send(np.ones(1_000_001)).wait()
            hvd.barrier()
            assert (server.receive().wait() == 3 * hvd.size()).all()
            hvd.barrier()
    print("received", hvd.size())
"""


@pytest.mark.parametrize("seals", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_servers_of_parameters(
    cluster: Callable[..., Cluster], program: Callable[[str], Path], tmp_path: Path, seals: str
) -> None:
    """Two servers and three ranks on two hosts, so that some connections are within a host and some are not."""
    hosts = cluster(2, ssh=True)
    words = ("-H", "h0:2,h1:1", "--servers", 2, "--verbose", program(PARAMETERS))
    code, out, err = finish(hvdrun(hosts.launcher, tmp_path, *words, HOROVODLIKE_SEAL_DATA=seals))
    assert code == 0, err
    assert out.count("received 3\n") == 3
    assert [re.search(rf"^hvdrun: server {n} is process \d+ on h{n}$", err, re.M) for n in range(2)].count(None) == 0
    assert "warning" not in err, err
    gone(hosts.hosts)
