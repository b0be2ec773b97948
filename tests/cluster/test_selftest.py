"""`hvdrun --selftest` over hosts, one of whose links is slow."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.hosts import Cluster, environment

pytestmark = pytest.mark.cluster("sshd", "ssh")


@pytest.mark.slow
def test_every_link_is_measured(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    hosts = fresh_cluster(3, ssh=True)
    hosts.shape(hosts.hosts[2], rate=1e8)
    words = [sys.executable, "-m", "horovodlike.launcher", "-H", "h0:2,h1:1,h2:1", "--selftest"]
    job = hosts.launcher.popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    found = {name: float(rate) for name, rate in re.findall(r": (.+?) +\d+ us +([\d.]+) Gbit/s", out)}
    assert found.keys() == {"h0 - h1", "h0 - h2", "h1 - h2", "inside h0"}
    for name in ("h0 - h2", "h1 - h2"):
        assert 0.05 < found[name] < 0.1
    assert found["h0 - h1"] > 0.1
    assert "All hosts have the same versions." in out
