"""Jobs that follow each other in the same processes with other ranks, as in elastic training."""

from __future__ import annotations

import os
from dataclasses import dataclass

from horovodlike import basics
from support import ranks


@dataclass(frozen=True)
class Generation:
    """A job whose rendezvous server runs. The ranks of a test get it as an argument."""

    size: int
    port: int
    key: bytes

    def enter(self, rank: int) -> None:
        """Leave the current job, and join this one. Blocks until all its ranks have joined."""
        basics.shutdown()
        environment = ranks.environment_of(rank, self.size, self.key, self.port)
        os.environ.update({name: value for name, value in environment.items() if name.startswith("HOROVODLIKE_")})
        basics.init()
