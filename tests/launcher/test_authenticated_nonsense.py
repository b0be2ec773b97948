"""Launchers that get nonsense from another one, which holds the key."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest

from horovodlike._net.secure_channel import (
    Identity,
    JobKey,
    accept_hello,
    answer_challenge,
    make_challenge,
)
from horovodlike.launcher.agent.protocol import (
    Frame,
    FrameKind,
    decode_seconds,
    encode_exit,
    encode_seconds,
    encode_text,
)
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.supervisor import Wakeup, node_job
from horovodlike.launcher.supervisor.job import AGENT_FAILED, Job
from horovodlike.launcher.supervisor.node_connection import NodeConnection
from horovodlike.launcher.supervisor.node_relay import Relay
from horovodlike.launcher.supervisor.output import RankOutput, Screen
from horovodlike.launcher.supervisor.writer import Writer

SLACK_S = 15.0  # what a busy machine may add
KEY = JobKey(bytes(32))
CHALLENGE = make_challenge()
Connect = Callable[[int], tuple[NodeConnection, NodeConnection]]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.fixture
def connect(stack: contextlib.ExitStack) -> Connect:
    """`connect(1)` makes a connection between nodes 0 and 1, and returns node 0's end and node 1's."""

    def make(node: int) -> tuple[NodeConnection, NodeConnection]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
        hello, sealer, opener = answer_challenge(KEY, Identity(node, 3, bytes(32)), CHALLENGE)
        _, our_sealer, our_opener = accept_hello(KEY, CHALLENGE, hello)
        links = NodeConnection(ours, our_sealer, our_opener, node), NodeConnection(theirs, sealer, opener, 0)
        for link in links:
            stack.callback(link.hang_up)
        return links

    return make


@pytest.fixture
def wakeup(stack: contextlib.ExitStack) -> Wakeup:
    made = Wakeup()
    stack.callback(made.close)
    return made


@pytest.fixture
def output(stack: contextlib.ExitStack, wakeup: Wakeup) -> Iterator[RankOutput]:
    """Writes to nowhere."""
    writer = Writer(wakeup.set)
    stack.callback(writer.close, lambda: False)
    with Path(os.devnull).open("w") as nowhere:
        yield RankOutput(Screen.pair(nowhere, nowhere, {}), writer, None, False)
        stack.close()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(FrameKind.EXITED, 7, encode_exit(1, 1)), "it speaks of rank 7, which it does not have"),
        (Frame(FrameKind.EXITED, 0, encode_exit(1, 1)), "it speaks of rank 0, which it does not have"),
        (Frame(FrameKind.EXITED, -1, encode_exit(1, 0)), "it speaks of rank -1"),
        (Frame(FrameKind.STDOUT, 0, b"I am rank 0"), "it speaks of rank 0"),
        (Frame(FrameKind.RESULT, 0, b"x"), "it speaks of rank 0"),
        (Frame(FrameKind.EXITED, 1, b"x"), "a payload has 1 bytes instead of 12"),
        (Frame(FrameKind.STARTED, 1, b"x"), "invalid literal for int"),
        (Frame(FrameKind.SIGNAL, 9999, b""), "9999 is not a valid Signals"),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Frame) else "",
)
def test_node_0_blames_who_talks_nonsense(
    output: RankOutput, wakeup: Wakeup, connect: Connect, frame: Frame, message: str
) -> None:
    (honest, its_end), (liar, other_end) = connect(1), connect(2)
    honest.host, liar.host = "honest", "liar"
    job = Job({honest: [0], liar: [1]}, output, wakeup)
    other_end.send(*frame)
    its_end.send(FrameKind.EXITED, 0, encode_exit(1, 0))
    its_end.send(FrameKind.CLEAN)
    outcome = job.run()
    assert outcome.exit_code == AGENT_FAILED
    assert outcome.trouble is not None
    assert outcome.trouble.startswith("hvdrun on liar cannot be understood: ")
    assert message in outcome.trouble
    assert outcome.results == {}


@pytest.mark.parametrize("rank_runs", [True, False])
def test_a_server_is_blamed_while_a_rank_runs(
    output: RankOutput, wakeup: Wakeup, connect: Connect, rank_runs: bool
) -> None:
    agent, its_end = connect(1)
    job = Job({agent: [0, 1]}, output, wakeup, num_ranks=1)
    exits = [(0, encode_exit(1, 0)), (1, encode_exit(2, -11))]
    for number, status in reversed(exits) if rank_runs else exits:
        its_end.send(FrameKind.EXITED, number, status)
    its_end.send(FrameKind.CLEAN)
    outcome = job.run()
    assert outcome.exit_code == (AGENT_FAILED if rank_runs else 0)
    assert (outcome.trouble is not None) == rank_runs


def test_a_node_ends_its_ranks_when_node_0_is_done_with_it(
    output: RankOutput, wakeup: Wakeup, connect: Connect
) -> None:
    (agent, agents_end), (_, uplink) = connect(1), connect(2)
    relay = Relay(agent, uplink, output, wakeup, SLACK_S)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(relay.run, [Frame(FrameKind.OUTCOME, 3, b"node 0 could not start its ranks")])
        try:
            [end] = agents_end.await_frame(monotonic() + SLACK_S, FrameKind.END)
        finally:
            agents_end.kill()
        assert decode_seconds(end.payload) > 0
        assert running.result(SLACK_S) == 3


@pytest.mark.parametrize("payload", [b"", b"x", encode_seconds(float("nan")), encode_seconds(-1.0)])
def test_node_0_has_gone_if_it_talks_nonsense(
    output: RankOutput, wakeup: Wakeup, connect: Connect, payload: bytes
) -> None:
    (agent, agents_end), (node_0, uplink) = connect(1), connect(2)
    relay = Relay(agent, uplink, output, wakeup, SLACK_S)
    node_0.send(FrameKind.ALIVE, 0, payload)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(relay.run, [])
        try:
            agents_end.await_frame(monotonic() + SLACK_S, FrameKind.END)
        finally:
            agents_end.kill()
        assert running.result(SLACK_S) == AGENT_FAILED


GOOD = {"version": node_job.installed_version(), "host": "b", "num_proc": 2}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "cannot be understood"),
        (b"[]", "cannot be understood"),
        (b"{}", "cannot be understood .*version"),
        (encode_text({**GOOD, "num_proc": -1}), "cannot be understood .*it has -1 ranks"),
        (encode_text({**GOOD, "num_proc": None}), "cannot be understood"),
        (encode_text({"version": "0.0.1", "host": "b"}), r"horovodlike 0\.0\.1 is installed on node 1 \(b\), but"),
    ],
)
def test_what_a_node_says_of_itself_is_checked(connect: Connect, payload: bytes, message: str) -> None:
    link, _ = connect(1)
    node_job.read_join(link, Frame(FrameKind.JOIN, 0, encode_text(GOOD)))
    assert (link.host, link.num_proc) == ("b", 2)
    with pytest.raises(HostsError, match=message):
        node_job.read_join(link, Frame(FrameKind.JOIN, 0, payload))
