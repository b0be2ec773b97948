"""The dashboard and the alerts use metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from horovodlike.monitor.prometheus import FAMILIES

FOLDER = Path(__file__).parents[2] / "packaging" / "monitoring"


def names() -> set[str]:
    suffixes = {"counter": "_total", "info": "_info", "gauge": ""}
    return {f"horovodlike_{family.name}{suffixes[family.kind]}" for family in FAMILIES}


def test_the_dashboard() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for each in found for name in re.findall(r"horovodlike_\w+", each)}
    assert used <= names()
    assert all(each.count("(") == each.count(")") for each in found)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_alerts() -> None:
    rules = [
        rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    used = {name for rule in rules for name in re.findall(r"horovodlike_\w+", rule["expr"])}
    assert len(rules) == 7
    assert used <= names()


@pytest.mark.slow
def test_prometheus_accepts_the_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("prometheus is not installed: `make tools` does")
    done = subprocess.run([promtool, "check", "rules", FOLDER / "alerts.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
