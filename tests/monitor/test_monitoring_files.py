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


@pytest.mark.slow
def test_alerts_at_their_conditions(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("prometheus is not installed: `make tools` does")
    series = {
        'horovodlike_idle_seconds{job="bad",rank="0"}': "0+60x20",
        'horovodlike_idle_seconds{job="bad",rank="1"}': "0+60x20",
        'horovodlike_idle_seconds{job="good",rank="0"}': "0+60x20",
        'horovodlike_idle_seconds{job="good",rank="1"}': "0x20",
        'horovodlike_idle_seconds{job="idle",rank="0"}': "0+60x20",
        'horovodlike_requests_in_flight{job="bad",rank="0"}': "1x20",
        'horovodlike_requests_in_flight{job="bad",rank="1"}': "0x20",
        'horovodlike_requests_in_flight{job="good",rank="0"}': "1x20",
        'horovodlike_requests_in_flight{job="idle",rank="0"}': "0x20",
        'horovodlike_ranks_in_state{job="bad",state="silent"}': "1x20",
        'horovodlike_ranks_in_state{job="good",state="silent"}': "0x20",
        'horovodlike_straggler_seconds_total{job="bad",rank="1"}': "0+30x20",
        'horovodlike_straggler_seconds_total{job="good",rank="1"}': "0+3x20",
        'horovodlike_waiting_seconds_total{job="bad",rank="0"}': "0+50x20",
        'horovodlike_waiting_seconds_total{job="good",rank="0"}': "0+10x20",
        'horovodlike_generation{job="bad"}': "0+1x20",
        'horovodlike_generation{job="good"}': "1x20",
        'horovodlike_events_total{job="bad",kind="warning"}': "0+1x20",
        'horovodlike_events_total{job="good",kind="launcher"}': "0+1x20",
    }
    names = ["RankIsSilent", "TrainingIsStalled", "RankHoldsUpOthers", "RanksWait", "MembersChange", "EngineWarns"]
    expressions = [f'count by (job) (ALERTS{{alertname="{name}",alertstate="firing"}}) > 0' for name in names]
    tests = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": each, "eval_time": "18m", "exp_samples": [{"labels": '{job="bad"}', "value": 1}]}
            for each in expressions
        ],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [tests]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
