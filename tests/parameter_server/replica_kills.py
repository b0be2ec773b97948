"""Kills clients and servers of an array with copies at random, and compares the elements with what clients have seen.

    python tests/parameter_server/replica_kills.py --seconds 600

Each client adds 1 to the elements that are its own, again and again, and writes down what it sends and what was
acknowledged. So each of these elements must be at least the number of its acknowledged updates, and at most that of its
sent ones, over all lives of the client. Within one life it must be exactly what was acknowledged, but for the updates
of the life before that were under way when it ended. One server at a time is killed, or stopped for longer than the
others wait for it, and the next one only when all copies are complete. Now and then all servers are stopped together.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from horovodlike import config
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._engine import parameters
from horovodlike._engine.parameters import Array, Update
from horovodlike._engine.types import DType
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import RendezvousError
from horovodlike.parameter_server import _rules
from horovodlike.parameter_server._connections import Address, Client, Listener, ServerRing, facts_of
from horovodlike.parameter_server._copies import CopyKeeper, Reconnections
from horovodlike.parameter_server._handles import Handle
from horovodlike.parameter_server._template import address

SERVERS, CLIENTS = 3, 4
EACH = 50_000  # elements of a client; those of two clients are on two servers
WINDOW = 8  # updates of a client that are under way at most
PATIENCE = 2.0
KEY = JobKey(bytes(32))
ARRAY, RING = 7, 8


def serve(port: int) -> None:
    """Serve until it is killed."""
    _rules.serve()
    facts = facts_of(RankInfo(0, 1, node_id="host"), settings())
    listener = Listener(KEY, "127.0.0.1", f"server at {port}", facts, settings(), _rules.registered, CopyKeeper, port)
    print(listener.address.port, flush=True)
    signal.pause()


def settings() -> config.Config:
    """Return the settings."""
    return config.load({"HOROVODLIKE_SEAL_DATA": os.environ.get("SEAL", "0")})


class Connection:
    """A client's view of the array."""

    def __init__(self, ports: list[int], name: str) -> None:
        """Connect to all servers, as soon as they are there."""
        facts = facts_of(RankInfo(1, 2, node_id="host"), settings())
        client = Client(name, facts, settings())
        servers = [Address("127.0.0.1", port, f"server {index}") for index, port in enumerate(ports)]
        rings = [ServerRing(RING, servers, index) for index in range(SERVERS)]
        connected = [self._connect(client, ring) for ring in rings]
        numbers = [each.number for each in connected]
        total = EACH * CLIENTS
        sizes = [total // SERVERS + (index < total % SERVERS) for index in range(SERVERS)]
        ring = parameters.Ring(RING, numbers, PATIENCE)
        self.array = Array(ARRAY, DType.int64, list(zip(numbers, sizes, strict=True)), 0, ring)
        self.reconnections = Reconnections(rings, connected, client, KEY)

    @staticmethod
    def _connect(client: Client, ring: ServerRing):
        deadline = time.monotonic() + 30
        while True:
            try:
                return client.connect(ring.servers[ring.own], KEY, ring, patience=3.0)
            except RendezvousError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def read(self, slot: int) -> np.ndarray:
        """Return the elements of a client."""
        values = np.empty(EACH, np.int64)
        Handle([self.array.receive(slot * EACH, EACH, address(values), values)]).wait(30)
        return values


def push(ports: list[int], slot: int, folder: Path) -> None:
    """Add until it is killed."""
    connection = Connection(ports, f"client {slot}")
    ones, add = np.ones(EACH, np.int64), Update("add")
    sent = os.open(folder / f"sent.{slot}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    acknowledged = os.open(folder / f"acknowledged.{slot}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    base, handles, done = connection.read(slot), [], 0
    while True:
        os.write(sent, b"x")
        handles.append(Handle([connection.array.send(add, slot * EACH, EACH, address(ones), ones)]))
        if len(handles) == WINDOW:
            handles.pop(0).wait(30)
            os.write(acknowledged, b"x")
            done += 1
        if done % 50 == 0:
            while handles:
                handles.pop(0).wait(30)
                os.write(acknowledged, b"x")
                done += 1
            more = connection.read(slot) - base - done
            if more.min() < 0 or more.max() > WINDOW:
                (folder / "wrong").write_text(f"client {slot}: {done} acknowledged, {more.min()} to {more.max()} more")
                os._exit(3)


class Game:
    """The processes, and what was done to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Start all processes, and make the array."""
        self.folder, self.random = folder, random.Random(seed)
        self.servers, self.clients, self.ports = [], [], []
        self.killed = {"servers killed": 0, "servers stopped": 0, "pauses of all servers": 0, "clients killed": 0}
        for _ in range(SERVERS):
            self.servers.append(self._start("server", "0"))
            self.ports.append(int(self.servers[-1].stdout.readline()))
        self.connection = Connection(self.ports, "the game")
        Handle([self.connection.array.create()]).wait(30)
        self.await_copies()
        self.clients = [self._start("client", str(slot)) for slot in range(CLIENTS)]

    def _start(self, role: str, argument: str) -> subprocess.Popen:
        words = [sys.executable, "-P", __file__, "--role", role, "--argument", argument, "--folder", self.folder]
        words += ["--ports", *map(str, self.ports)] if role == "client" else []
        log = (self.folder / f"{role}.{argument}.log").open("ab")
        return subprocess.Popen(words, stdout=subprocess.PIPE if role == "server" else log, stderr=log)

    def await_copies(self) -> None:
        """Wait until all shards have copies."""
        Handle([self.connection.array.await_copies()]).wait(60)

    def play(self, seconds: float) -> None:
        """Kill until the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self.random.uniform(0.0, 0.5))
            if self.random.random() < 0.5:
                self._kill_client()
            else:
                self._lose_server()
                if self.random.random() < 0.3:
                    self._kill_client()
                self.await_copies()
            self.check_alive()

    def _kill_client(self) -> None:
        slot = self.random.randrange(CLIENTS)
        self.check_alive()
        self.clients[slot].kill()
        self.clients[slot].wait()
        self.clients[slot] = self._start("client", str(slot))
        self.killed["clients killed"] += 1

    def _lose_server(self) -> None:
        index = self.random.randrange(SERVERS)
        kind = self.random.random()
        if kind < 0.25:
            stopped = [self.servers[index]] if kind < 0.2 else self.servers
            for server in stopped:
                server.send_signal(signal.SIGSTOP)
            time.sleep(PATIENCE + self.random.uniform(-1.0, 1.5))
            for server in stopped:
                server.send_signal(signal.SIGCONT)
            self.killed["servers stopped" if kind < 0.2 else "pauses of all servers"] += 1
            time.sleep(PATIENCE)  # the copies of a server that was paused are removed
            return
        self.servers[index].kill()
        self.servers[index].wait()
        self.killed["servers killed"] += 1
        time.sleep(self.random.uniform(0.0, 0.5))
        self.servers[index] = self._start("server", str(self.ports[index]))

    def check_alive(self) -> None:
        """Raise an error if a client has ended by itself."""
        wrong = self.folder / "wrong"
        assert not wrong.exists(), wrong.read_text()
        for slot, client in enumerate(self.clients):
            assert client.poll() is None, (self.folder / f"client.{slot}.log").read_text()[-3000:]

    def check(self) -> str:
        """Compare the elements with what the clients have written down; return figures."""
        for client in self.clients:
            client.kill()
            client.wait()
        total, uncertain = 0, 0
        for slot in range(CLIENTS):
            sent = (self.folder / f"sent.{slot}").stat().st_size
            acknowledged = (self.folder / f"acknowledged.{slot}").stat().st_size
            values = self.connection.read(slot)
            assert acknowledged <= values.min() and values.max() <= sent, (slot, acknowledged, values, sent)
            total += acknowledged
            uncertain += sent - acknowledged
        done = ", ".join(f"{number} {what}" for what, number in self.killed.items())
        return f"{done}; {total} updates of {EACH} elements acknowledged, none lost; {uncertain} under way at a kill"

    def close(self) -> None:
        """End all processes."""
        self.connection.reconnections.close()
        for process in [*self.clients, *self.servers]:
            process.kill()
            process.wait()
        parameters.stop()


def main() -> None:
    """Play, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--role", choices=["server", "client"])
    parser.add_argument("--argument", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ports", type=int, nargs="*")
    given = parser.parse_args()
    if given.role == "server":
        serve(given.argument)
    elif given.role == "client":
        push(given.ports, given.argument, given.folder)
    else:
        seed = random.randrange(1 << 30) if given.seed is None else given.seed
        print(f"seed {seed}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            game = Game(Path(folder), seed)
            try:
                game.play(given.seconds)
                print(game.check())
            except BaseException:
                for log in sorted(Path(folder).glob("*.log")):
                    print(f"--- {log.name}", log.read_text()[-3000:], sep="\n")
                raise
            finally:
                game.close()


if __name__ == "__main__":
    main()
