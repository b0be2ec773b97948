"""The text for Prometheus, read by its own client."""

from __future__ import annotations

from typing import Any

import pytest
from monitors import about, report
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from horovodlike.monitor.board import Board
from horovodlike.monitor.collector import read_report
from horovodlike.monitor.prometheus import FAMILIES, accepts_openmetrics, render


def state_of_job(size: int = 2, host: str = "node-1") -> dict[str, Any]:
    board = Board("job", "1.0", clock=lambda: 100.0, monotonic=lambda: 100.0)
    for rank in range(size):
        place = about(rank, size, host=host)
        board.take_hello(place)
        board.take_report(rank, place, read_report(report(rank, size, 98.0, process={"resident_bytes": 4096})))
        more = {"bytes": 3000, "waiting_seconds": 1.0, "communicating_seconds": 0.3, "in_flight": 4, "bytes_by_tcp": 9}
        late = [[1, 7, 2.5]] if rank == 0 and size > 1 else []
        board.take_report(rank, place, read_report({"sent": 100.0, "idle": 0.5, "counters": more, "late": late}))
    board.tick()
    return board.snapshot()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_values(openmetrics: bool) -> None:
    text = render(state_of_job(), openmetrics)
    parse = parse_openmetrics if openmetrics else parse_text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }
    assert samples["horovodlike_reduced_bytes_total", (("rank", "1"),)] == 3000
    assert samples["horovodlike_transport_bytes_total", (("rank", "1"), ("transport", "tcp"))] == 9
    assert samples["horovodlike_requests_in_flight", (("rank", "1"),)] == 4
    assert samples["horovodlike_straggler_waits_total", (("rank", "1"),)] == 7
    assert samples["horovodlike_straggler_seconds_total", (("rank", "1"),)] == 2.5
    assert samples["horovodlike_process_resident_memory_bytes", (("rank", "0"),)] == 4096
    assert samples["horovodlike_time_ratio", (("part", "waiting"), ("rank", "0"))] == 0.25
    assert samples["horovodlike_time_ratio", (("part", "communicating"), ("rank", "0"))] == 0.1
    assert samples["horovodlike_ranks", ()] == 2
    assert samples["horovodlike_job_info", (("job_id", "job"), ("version", "1.0"))] == 1
    assert samples["horovodlike_ranks_in_state", (("state", "running"),)] == 2
    assert text.endswith("# EOF\n") == openmetrics


@pytest.mark.parametrize("openmetrics", [False, True])
def test_names_follow_the_conventions(openmetrics: bool) -> None:
    parse = parse_openmetrics if openmetrics else parse_text
    found = {family.name: family for family in parse(render(state_of_job(), openmetrics))}
    assert len(found) == len(FAMILIES)
    for family in FAMILIES:
        full = f"horovodlike_{family.name}"
        described = found.get(full) or found[f"{full}_info"]
        assert described.documentation.endswith(".")
        assert not family.name.endswith(("_total", "_info"))
        assert not family.unit or family.name.endswith(f"_{family.unit}")


def test_labels_are_escaped() -> None:
    host = 'a"b\\c\nd'
    for parse, openmetrics in ((parse_text, False), (parse_openmetrics, True)):
        hosts = {
            sample.labels["host"]
            for family in parse(render(state_of_job(host=host), openmetrics))
            for sample in family.samples
            if "host" in sample.labels
        }
        assert hosts == {host}


def test_a_job_without_reports() -> None:
    for openmetrics in (False, True):
        text = render(Board().snapshot(), openmetrics)
        assert list((parse_openmetrics if openmetrics else parse_text)(text))


def test_the_series_of_many_ranks_are_bounded() -> None:
    few, many = (render(state_of_job(size)).count("\n") for size in (2, 1024))
    assert many - few == 1022 * (few - render(state_of_job(1)).count("\n"))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3", True),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.4", False),
        ("application/openmetrics-text; q=none", False),
    ],
)
def test_the_format_that_is_asked_for(accept: str, expected: bool) -> None:
    assert accepts_openmetrics(accept) is expected


@pytest.mark.parametrize("openmetrics", [False, True])
def test_series_can_name_their_job(openmetrics: bool) -> None:
    parse = parse_openmetrics if openmetrics else parse_text
    text = render(state_of_job(), openmetrics, names_job=True)
    assert {sample.labels["job_id"] for family in parse(text) for sample in family.samples} == {"job"}
    assert text.count('job_id="job"') == sum(len(family.samples) for family in parse(text))
