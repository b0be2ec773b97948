from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path

import pytest

from horovodlike.launcher.agent.host_probe import (
    Host,
    HostDescription,
    decode_description,
    describe,
    detect_host,
    encode_needs,
    installed_version,
)
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.planning.addresses import addresses_towards, find_this_machine, reachable_addresses
from horovodlike.launcher.planning.hosts import HostSlots
from horovodlike.launcher.planning.plan import forwarded
from horovodlike.launcher.schedulers.registry import scheduler_of
from horovodlike.launcher.schedulers.ssh import explain_failure

HOST = Host((0,), ((0,),), ((0,),))


def remote_command(host: str, remote: RemoteStart, timeout: float) -> list[str]:
    return scheduler_of(remote).start_command(host, remote, timeout)


def test_the_command_of_ssh() -> None:
    words = remote_command("node1", RemoteStart(), 29.5)
    assert words[0] == "ssh"
    assert words[-3:-1] == ["--", "node1"]
    assert words[-1].startswith(f"exec {sys.executable} ")
    assert "ConnectTimeout=30" in words
    assert not {"-p", "-i"} & set(words)
    words = remote_command("node1", RemoteStart(2222, "key", ("-l", "me")), 30)
    assert words[1:7] == [
        "-l",
        "me",
        "-p",
        "2222",
        "-i",
        "key",
    ]  # before our own: of several values ssh takes the first
    assert words[-3:-1] == ["--", "node1"]


def test_the_command_of_srun() -> None:
    words = remote_command("n1", RemoteStart(scheduler="Slurm", cpus={"n1": 8}), 30)
    assert words[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n1", "--overlap", "--cpus-per-task=8"} <= set(words)
    assert words[-1].endswith("/start_agent.py")
    assert sys.executable in words
    assert not any("cpus-per-task" in word for word in remote_command("n2", RemoteStart(scheduler="Slurm"), 30))


@pytest.mark.parametrize(
    ("status", "words", "expected"),
    [
        (
            255,
            ["ssh: Could not resolve hostname x: Name or service not known"],
            "ssh says: ssh: Could.*check its spell",
        ),
        (255, ["me@x: Permission denied (publickey)."], "ssh-copy-id"),
        (255, ["ssh: connect to host x port 22: Connection refused"], "is ssh's server running there"),
        (255, ["ssh: connect to host x port 22: Connection timed out"], "is the host up"),
        (255, ["Host key verification failed."], "accept it once by hand"),
        (255, ["kex_exchange_identification: read: Connection reset"], "ssh says: kex_exchange_identification"),
        (127, ["sh: 1: exec: /x/python: not found"], "cannot be executed there .*same path"),
        (2, ["python: can't open file '/x/start_agent.py'"], "horovodlike is not installed there: python: can't open"),
        (-9, [], "ssh ended with -9 before the agent answered: nothing was said about it"),
    ],
)
def test_why_an_agent_does_not_answer(status: int, words: list[str], expected: str) -> None:

    assert re.search(expected, explain_failure("ssh", status, words))


def test_the_description_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5000 10.0.0.2 22")
    found = decode_description(describe(encode_needs(str(tmp_path), sys.executable)))
    assert found.free_port > 0
    assert found == HostDescription(installed_version(), detect_host(), ("10.0.0.1", "10.0.0.2"), (), found.free_port)
    monkeypatch.delenv("SSH_CONNECTION")
    found = decode_description(describe(encode_needs(str(tmp_path / "none"), sys.executable)))
    assert found.seen_from is None
    assert found.problems == (f"there is no folder {tmp_path}/none, in which hvdrun was started; start it in one that "
                              "all hosts have",)  # fmt: skip
    [problem] = decode_description(describe(encode_needs(str(tmp_path), "./program"))).problems
    assert problem.startswith(f"there is no program {tmp_path}/./program, ")
    (tmp_path / "program").touch(0o755)
    files = encode_needs(str(tmp_path), "./program", files=("none/timeline.json", "timeline.json"))
    trouble = f"{tmp_path}/none/timeline.json cannot be written: there is no folder {tmp_path}/none"
    assert decode_description(describe(files)).problems == (trouble,)
    assert decode_description(describe(encode_needs(str(tmp_path), "./program"))).problems == ()


@pytest.mark.parametrize("value", [None, [], {}, {"host": 3}, {"version": "1", "host": {"cpus": 1}}])
def test_a_description_that_makes_no_sense(value: object) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        decode_description(value)


def test_each_host_keeps_what_is_its_own() -> None:
    environ = {"HOME": "/h", "PATH": "/bin", "SSH_CONNECTION": "x", "XDG_RUNTIME_DIR": "x", "TMPDIR": "x", "MINE": "1"}
    assert forwarded({**environ, "CUDA_VISIBLE_DEVICES": "0", "HOROVODLIKE_FAN_OUT": "2"}) == {
        "PATH": "/bin",
        "MINE": "1",
        "HOROVODLIKE_FAN_OUT": "2",
    }


def test_this_machine_among_hosts() -> None:
    hosts = (HostSlots("node1.invalid", 1), HostSlots("127.0.0.1", 2), HostSlots("me", 1))
    assert find_this_machine(hosts, {"me"}) == ((HostSlots("node1.invalid", 1), HostSlots("127.0.0.1", 3)), "127.0.0.1")
    assert find_this_machine(hosts[:1], {"me"}) == (hosts[:1], None)


def test_addresses() -> None:
    assert addresses_towards("node1.invalid", ("127.0.0.1", "127.0.0.1")) == ["127.0.0.1"]
    assert addresses_towards("127.0.0.1", None) == ["127.0.0.1"]
    assert addresses_towards("node1.invalid", None) == []
    # A jump host's address, which is not ours, is of no use; the route to the host's own is.
    assert addresses_towards("node1.invalid", ("192.0.2.1", "127.0.0.1")) == ["127.0.0.1"]
    described = {"node1.invalid": HostDescription("1", HOST, ("127.0.0.1", "127.0.0.1"), ())}
    assert reachable_addresses(described) == ["127.0.0.1"]
    assert ipaddress.ip_address(reachable_addresses(described, "lo")[0]).is_loopback
    assert reachable_addresses(described, "127.0.0.0/8") == ["127.0.0.1"]
    with pytest.raises(UsageError, match="HOROVODLIKE_NETWORK_INTERFACE='none0'"):
        reachable_addresses(described, "none0")
    with pytest.raises(HostsError, match="at which address node2.invalid can reach this machine.*--network-interface"):
        reachable_addresses({"node2.invalid": HostDescription("1", HOST, None, ())})
