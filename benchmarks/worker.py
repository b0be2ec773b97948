"""One rank of one peer: `worker.py PEER`, started by the driver. Runs the driver's commands; sleeps in between."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import cast

# Run as a file: the checkout goes last, so that `horovodlike` is the installed package and not the source folder.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import protocol  # noqa: E402
from benchmarks.buffers import Buffer, allocate, fill, first_value  # noqa: E402
from benchmarks.peers import EagerPeer, FitPeer, MessagePeer, ParameterPeer, Peer, create  # noqa: E402


def timed(peer: Peer, step: Callable[[], None], command: protocol.Message) -> float:
    """Return the mean seconds of a step, over a loop that all ranks enter together."""
    iterations = int(command["iterations"])
    for _ in range(max(2, iterations // 5)):
        step()
    peer.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    return (time.perf_counter() - start) / iterations


def measure_allreduce(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time an in-place sum of one buffer, after checking its result."""
    dtype = command["dtype"]
    buffer = allocate(command["nbytes"], dtype)
    step = peer.allreduce(buffer, dtype)
    _check(peer, step, [buffer], dtype)
    return {"seconds": timed(peer, step, command)}


def measure_many(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time the sum of many small buffers, all in flight together where the peer can."""
    buffers = [allocate(command["nbytes"], "float32") for _ in range(command["count"])]
    step = peer.many(buffers)
    _check(peer, step, buffers, "float32")
    return {"seconds": timed(peer, step, command)}


def measure_training(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time whole training steps."""
    return {"seconds": timed(peer, peer.training_step(command["model"]), command)}


def measure_step_ends(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Train until a file exists; note when each step ends, by the monotonic clock."""
    step, ends, until = peer.training_step(command["model"]), [], Path(command["until"])
    over = allocate(4, "float32")
    agree = peer.allreduce(over, "float32")
    while not first_value(over, "float32"):
        step()
        ends.append(time.perf_counter())
        fill(over, int(until.exists()), "float32")
        agree()
    return {"ends": ends}


def measure_small(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time the sum of one element, each time into a new tensor."""
    return {"seconds": timed(peer, cast(EagerPeer, peer).small(), command)}


def measure_round_trip(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time a message there and back, after checking that both ranks receive rank 0's buffer."""
    buffer = allocate(command["nbytes"], "float32")
    fill(buffer, peer.rank + 1, "float32")
    step = cast(MessagePeer, peer).round_trip(buffer)
    step()
    if first_value(buffer, "float32") != 1:
        raise RuntimeError(f"rank {peer.rank} has got {first_value(buffer, 'float32')} instead of 1")
    return {"seconds": timed(peer, step, command)}


def measure_parameters(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time an operation of a parameter server that begins with zeros, after checking that it has the sent values."""
    buffer = allocate(command["nbytes"], "float32")
    with cast(ParameterPeer, peer).parameters(buffer) as operation:
        fill(buffer, peer.rank + 1, "float32")
        operation("send")()
        peer.barrier()
        operation("receive")()
        wanted = peer.size * (peer.size + 1) // 2
        if first_value(buffer, "float32") != wanted or float(buffer[-1]) != wanted:
            raise RuntimeError(f"rank {peer.rank} has got {first_value(buffer, 'float32')} instead of {wanted}")
        peer.barrier()
        fill(buffer, 0, "float32")
        return {"seconds": timed(peer, operation(command["operation"]), command)}


def measure_fit(peer: Peer, command: protocol.Message) -> protocol.Message:
    """Time steps within the framework's training loop."""
    return {"seconds": cast(FitPeer, peer).fit(command["iterations"])}


def _check(peer: Peer, step: Callable[[], None], buffers: list[Buffer], dtype: str) -> None:
    for buffer in buffers:
        fill(buffer, peer.rank + 1, dtype)
    step()
    wanted = peer.expected(peer.size * (peer.size + 1) // 2)
    for buffer in buffers:
        if first_value(buffer, dtype) != wanted:
            raise RuntimeError(f"wrong result: {first_value(buffer, dtype)} instead of {wanted}")
        fill(buffer, 0, dtype)


MEASUREMENTS: dict[str, Callable[[Peer, protocol.Message], protocol.Message]] = {
    "allreduce": measure_allreduce,
    "many": measure_many,
    "training": measure_training,
    "step_ends": measure_step_ends,
    "small": measure_small,
    "round_trip": measure_round_trip,
    "parameters": measure_parameters,
    "fit": measure_fit,
}


def main() -> None:
    """Answers until the driver says quit or goes away."""
    peer = create(sys.argv[1])
    channel = protocol.connect()
    channel.send({"rank": peer.rank})
    try:
        while (command := channel.receive())["do"] != "quit":
            try:
                answer = MEASUREMENTS[command["do"]](peer, command)
            except Exception:
                answer = {"error": traceback.format_exc()}
            channel.send(answer)
    except protocol.ConnectionLost:
        sys.exit("the driver is gone")
    peer.close()


if __name__ == "__main__":
    main()
