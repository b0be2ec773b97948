"""A worker of an elastic job that trains nothing: it speaks with the driver and with its peers, and does as it is told.

Its peers' rendezvous stands in for collectives: each step is an all-gather, in which they agree on what comes next.
It prints `at <generation>: rank <rank> of <size>` when it is a member, and ends well when there is a file `finish`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from horovodlike._bootstrap.environment import find_rank_info
from horovodlike._bootstrap.rendezvous_client import Rendezvous
from horovodlike._net.secure_channel import ClientChannel, Identity, JobKey, job_digest
from horovodlike.errors import RendezvousError

LIMIT_S = 60.0


class Driver:
    """The connection to the driver."""

    def __init__(self) -> None:
        self.number = int(os.environ["HOROVODLIKE_WORKER"])
        self.key = JobKey(bytes.fromhex(os.environ.pop("HOROVODLIKE_SECRET_KEY")))
        self.change = 0
        assert "HOROVODLIKE_RANK" not in os.environ
        assert "HOROVOD_SIZE" not in os.environ
        job = job_digest("elastic/" + os.environ["HOROVODLIKE_JOB_ID"])
        address = os.environ["HOROVODLIKE_DRIVER_ADDR"].split(",")[0], int(os.environ["HOROVODLIKE_DRIVER_PORT"])
        connected = socket.create_connection(address, LIMIT_S)
        self.link = ClientChannel(connected, self.key, Identity(self.number, 0, job), time.monotonic() + LIMIT_S)

    def say(self, **message: object) -> None:
        self.link.send(json.dumps(message).encode(), time.monotonic() + LIMIT_S)

    def hear(self) -> dict[str, object]:
        message: dict[str, object] = json.loads(self.link.receive(time.monotonic() + LIMIT_S))
        print(f"heard {next(iter(message))}")
        if "stop" in message or "removed" in message:
            sys.exit(0 if "removed" in message else 4)
        if "changed" in message:
            change = message["changed"]
            assert isinstance(change, dict)
            assert change["number"] > self.change
            self.change = change["number"]
        return message

    def listen(self) -> None:
        """Takes what there is, without waiting."""
        while select.select([self.link.socket], [], [], 0)[0]:
            self.hear()

    def get_place(self, after: int, why: str, text: str = "") -> int:
        """Asks for a place and takes it; returns the generation."""
        self.say(do="ready", commits=after, why=why, reason=text)
        while "place" not in (message := self.hear()):
            pass
        place = message["place"]
        assert isinstance(place, dict)
        os.environ.update(place["variables"])
        assert os.environ["HOROVODLIKE_GENERATION"] == str(place["generation"])
        assert place["generation"] > after
        return int(place["generation"])


def init(driver: Driver, generation: int) -> Rendezvous:
    # A job of one needs no rendezvous, and no name: here it has both.
    place = replace(find_rank_info(os.environ), job=os.environ["HOROVODLIKE_JOB_ID"])
    key = driver.key.derive(b"horovodlike generation", str(generation).encode())
    address, port = os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"], int(os.environ["HOROVODLIKE_RENDEZVOUS_PORT"])
    peers = Rendezvous(address, port, key, place, LIMIT_S, owner="hvdrun")
    peers.begin()
    return peers


def hold_back(first: int) -> None:
    """Keep workers from this number on from the driver until there is a file `admitted`."""
    while int(os.environ["HOROVODLIKE_WORKER"]) >= first and not Path("admitted").exists():
        time.sleep(0.005)


Hook = Callable[[int, int, int], object]


def nothing(worker: int, generation: int, step: int) -> None:
    """The usual hook."""


def work(before_init: Hook = nothing, at_step: Hook = nothing) -> None:
    """Run a worker from its start to its end; the hooks get its number, the generation, and the step."""
    notice: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: notice.append(signum))
    driver = Driver()
    generation, why, text, step = 0, "start", "", 0
    while True:
        generation = driver.get_place(generation, why, text)
        before_init(driver.number, generation, step)
        try:
            peers = init(driver, generation)
        except RendezvousError as error:
            why, text = "failed", str(error)
            continue
        print(f"at {generation}: rank {peers.rank} of {peers.size}", flush=True)
        try:
            # No message was read since it got its place: whatever was announced before that has been acted upon.
            done = max(peers.exchange("changes", driver.change))
            while True:
                step += 1
                at_step(driver.number, generation, step)
                time.sleep(0.005)
                driver.listen()
                finish = peers.rank == 0 and Path("finish").exists()
                found = peers.exchange("step", [driver.change, finish, bool(notice)])
                if any(each[1] for each in found):
                    driver.say(do="finished")
                    return
                if notice:
                    driver.say(do="leaving")
                    return
                if any(each[2] for each in found) or max(each[0] for each in found) > done:
                    why, text = "changed", ""
                    break
        except RendezvousError as error:
            why, text = "broken", str(error)
        peers.close()
