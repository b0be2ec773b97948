"""A snapshot of the monitor as text for Prometheus: its format 0.0.4, or OpenMetrics 1.0. Pure.

Names follow Prometheus' conventions: base units, ``_total`` for counters, values that can be added up over the label
``rank``. No label has a value that a script chooses, so the number of series grows with the number of ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from horovodlike.monitor.board import TRANSPORTS
from horovodlike.monitor.slow_ranks import KINDS

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "horovodlike_"

_Labels = tuple[tuple[str, str], ...]
_Samples = Iterator[tuple[_Labels, float]]


@dataclass(frozen=True)
class Family:
    """A metric.

    Attributes:
        name: Its name without the prefix; of a counter, without ``_total``.
        kind: ``counter``, ``gauge`` or ``info``.
        unit: The unit, which the name ends in, or an empty text.
        help: Its meaning.
        samples: Returns the labels and the value of each series in a snapshot.
    """

    name: str
    kind: str
    unit: str
    help: str
    samples: Callable[[Mapping[str, Any]], _Samples]


def _of_ranks(value: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Mapping[str, Any]], _Samples]:
    def samples(state: Mapping[str, Any]) -> _Samples:
        for each in state["ranks"]:
            found = value(each)
            if found is not None:
                yield (("rank", str(each["rank"])),), found

    return samples


def _in(part: str, name: str) -> Callable[[Mapping[str, Any]], _Samples]:
    return _of_ranks(lambda each: each[part].get(name))


def _of_job(value: Callable[[Mapping[str, Any]], float]) -> Callable[[Mapping[str, Any]], _Samples]:
    return lambda state: iter([((), value(state))])


def _rank_info(state: Mapping[str, Any]) -> _Samples:
    for each in state["ranks"]:
        names = ("rank", "host", "local_rank", "worker", "pid")
        yield tuple((name, str(each[name])) for name in names), 1


def _parts(state: Mapping[str, Any]) -> _Samples:
    for each in state["ranks"]:
        for part, value in each["parts"].items():
            yield (("rank", str(each["rank"])), ("part", part)), value


def _transports(state: Mapping[str, Any]) -> _Samples:
    for each in state["ranks"]:
        for name in TRANSPORTS:
            value = each["counters"].get(f"bytes_by_{name}")
            if value is not None:
                yield (("rank", str(each["rank"])), ("transport", name)), value


def _slow_ranks(state: Mapping[str, Any]) -> _Samples:
    found = {(rank, each["kind"]) for each in state["slow"] for rank in each["ranks"]}
    for each in state["ranks"]:
        for kind in KINDS:
            yield (("rank", str(each["rank"])), ("kind", kind)), int((each["rank"], kind) in found)


def _states(state: Mapping[str, Any]) -> _Samples:
    for name in ("starting", "running", "idle", "stalled", "silent", "ended"):
        yield (("state", name),), sum(each["state"] == name for each in state["ranks"])


def _since_start(name: str) -> Callable[[Mapping[str, Any]], _Samples]:
    return _in("counters", name)


FAMILIES = (
    Family(
        "job",
        "info",
        "",
        "The job.",
        lambda state: iter([((("job_id", state["job"]), ("version", state["version"])), 1)]),
    ),
    Family("rank", "info", "", "The place and process of each rank.", _rank_info),
    Family("ranks", "gauge", "", "The number of ranks that the job has now.", _of_job(lambda state: state["size"])),
    Family("ranks_in_state", "gauge", "", "How many ranks are in this state: see monitor.md.", _states),
    Family("generation", "gauge", "", "The generation of an elastic job.", _of_job(lambda state: state["generation"])),
    Family("reduced_bytes", "counter", "bytes", "Tensors of all complete requests.", _since_start("bytes")),
    Family(
        "transport_bytes",
        "counter",
        "bytes",
        "Tensors of all batches by what carried them: shared_memory, tcp, external, nccl, staging.",
        _transports,
    ),
    Family(
        "requests_in_flight", "gauge", "", "Requests that are enqueued and not complete.", _in("counters", "in_flight")
    ),
    Family("requests", "counter", "", "Complete requests, failed ones included.", _since_start("requests")),
    Family("executed_requests", "counter", "", "Requests that were part of a batch.", _since_start("executed")),
    Family("batches", "counter", "", "Batches in which requests were executed.", _since_start("batches")),
    Family(
        "negotiated_in_full",
        "counter",
        "",
        "Requests that were described in full; should stop growing after the first step.",
        _since_start("negotiated_in_full"),
    ),
    Family(
        "negotiation_seconds",
        "counter",
        "seconds",
        "Time of all executed requests from enqueue to the begin of their batch.",
        _since_start("negotiation_seconds"),
    ),
    Family(
        "execution_seconds",
        "counter",
        "seconds",
        "Time of all batches from begin to end.",
        _since_start("execution_seconds"),
    ),
    Family(
        "peer_wait_seconds",
        "counter",
        "seconds",
        "The part of the execution in which the rank waited for other ranks.",
        _since_start("peer_wait_seconds"),
    ),
    Family(
        "waiting_seconds",
        "counter",
        "seconds",
        "Time in which a collective waited for other ranks and none was executed.",
        _since_start("waiting_seconds"),
    ),
    Family(
        "communicating_seconds",
        "counter",
        "seconds",
        "Time in which a collective was executed.",
        _since_start("communicating_seconds"),
    ),
    Family("time_ratio", "gauge", "ratio", "Shares of the last second: waiting, communicating, computing.", _parts),
    Family("steps", "counter", "", "Steps that were marked.", _since_start("steps")),
    Family("step_seconds", "counter", "seconds", "Time from the first step to the last.", _since_start("step_seconds")),
    Family("samples", "counter", "", "Samples of these steps.", _since_start("samples")),
    Family("failed_writes", "counter", "", "Commits that could not be written to disk.", _since_start("failed_writes")),
    Family(
        "blocked_seconds",
        "counter",
        "seconds",
        "Time in which the rank waited for collectives and did nothing else.",
        _since_start("blocked_seconds"),
    ),
    Family("slow_rank", "gauge", "", "1 where the verdict on a rank is this kind of slowness.", _slow_ranks),
    Family(
        "slower_ratio",
        "gauge",
        "ratio",
        "By which part of the others' time outside of collectives the rank is slower.",
        _of_ranks(lambda each: each["slower"]),
    ),
    Family(
        "straggler_waits",
        "counter",
        "",
        "How often the rank was the last one, by a millisecond or more (ranks of the first host).",
        _of_ranks(lambda each: each["times_late"]),
    ),
    Family(
        "straggler_seconds",
        "counter",
        "seconds",
        "For how long others have waited for the rank (ranks of the first host).",
        _of_ranks(lambda each: each["seconds_waited_for"]),
    ),
    Family(
        "delay_seconds",
        "gauge",
        "seconds",
        "By how much the rank was later than the first one, on average over the last collectives.",
        _of_ranks(lambda each: each["late"]),
    ),
    Family(
        "idle_seconds",
        "gauge",
        "seconds",
        "For how long no request of the rank is known to be complete; not of a rank that has ended.",
        _of_ranks(lambda each: None if each["state"] == "ended" else each["idle"] + each["age"]),
    ),
    Family(
        "report_age_seconds",
        "gauge",
        "seconds",
        "The time since the last report of the rank.",
        _of_ranks(lambda each: each["age"]),
    ),
    Family(
        "shared_memory_bytes",
        "gauge",
        "bytes",
        "Shared memory of the host, divided by its ranks.",
        _since_start("shared_memory_bytes"),
    ),
    Family(
        "process_resident_memory_bytes",
        "gauge",
        "bytes",
        "Resident memory of the rank's process.",
        _in("process", "resident_bytes"),
    ),
    Family(
        "process_cpu_seconds",
        "counter",
        "seconds",
        "Processor time of the rank's process.",
        _in("process", "cpu_seconds"),
    ),
    Family(
        "process_run_delay_seconds",
        "counter",
        "seconds",
        "Time in which threads of the rank could have run, and another process had the processor.",
        _in("process", "run_delay_seconds"),
    ),
    Family(
        "processor_frequency_hertz",
        "gauge",
        "hertz",
        "The frequency of the processors that the rank may use.",
        _in("process", "frequency_hertz"),
    ),
    Family(
        "gpu_memory_bytes",
        "gauge",
        "bytes",
        "GPU memory of the rank's tensors, where PyTorch uses a GPU.",
        _in("process", "gpu_bytes"),
    ),
    Family(
        "gpu_reserved_memory_bytes",
        "gauge",
        "bytes",
        "GPU memory that PyTorch has reserved.",
        _in("process", "gpu_reserved_bytes"),
    ),
    Family(
        "events",
        "counter",
        "",
        "Events by kind: launcher, elastic, slow, warning, stall, end.",
        lambda state: (((("kind", kind),), count) for kind, count in state["event_counts"].items()),
    ),
)


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an Accept header asks for OpenMetrics at least as much as for the older format."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0, "*/*": 0.0}
    for choice in accept.split(","):
        name, *parameters = (part.strip() for part in choice.split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            weights[name.lower()] = max(weights.get(name.lower(), 0.0), float(weight))
        except ValueError:
            continue
    return 0.0 < weights["application/openmetrics-text"] >= weights["text/plain"]


def render(state: Mapping[str, Any], openmetrics: bool = False, names_job: bool = False) -> str:
    """Return a snapshot as text for Prometheus; see :data:`TEXT` and :data:`OPENMETRICS` for its type.

    Args:
        state: The snapshot.
        openmetrics: Whether it is for OpenMetrics.
        names_job: Whether all series have the label ``job_id``: where one target has the metrics of several jobs.
    """
    lines: list[str] = []
    of_job: _Labels = (("job_id", state["job"]),) if names_job else ()
    for family in FAMILIES:
        name = PREFIX + family.name
        full = name + {"counter": "_total", "info": "_info"}.get(family.kind, "")
        kind = "gauge" if family.kind == "info" and not openmetrics else family.kind
        head = name if openmetrics else full
        lines += [f"# HELP {head} {_escaped_help(family.help)}", f"# TYPE {head} {kind}"]
        if openmetrics and family.unit:
            lines.append(f"# UNIT {head} {family.unit}")
        for labels, value in family.samples(state):
            labels = labels if family.name == "job" else labels + of_job
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
            lines.append(f"{full}{{{shown}}} {_number(value)}" if shown else f"{full} {_number(value)}")
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped(text: str) -> str:
    return _escaped_help(text).replace('"', '\\"')


def _number(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(value)
