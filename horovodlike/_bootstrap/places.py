"""The search for the place of this process among the nodes of a platform, by the table of platforms.

:mod:`horovodlike._bootstrap.environment` has the table of launchers, which start each rank by itself.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace

from horovodlike._bootstrap.place import OWN_NAMES, Facts, Place
from horovodlike._bootstrap.platforms import PLATFORMS, sagemaker_folder
from horovodlike.errors import ConfigError

# Any of these variables shows that the process is a rank already: a job's ranks are no place for another job.
_OF_A_RANK = ("HOROVODLIKE_RANK", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID")


def detect_place(facts: Facts) -> Place | None:
    """Find the place of this process by the table.

    Returns:
        The place by the first row that fits, completed by later ones that agree; None if no row fits, and in a process
        that is a rank of a job.

    Raises:
        ConfigError: A variable is malformed, this node cannot have ranks, or two rows contradict each other.
    """
    if any(map(facts.get, _OF_A_RANK)):
        return None
    places = [place for row in PLATFORMS if (place := row.read(facts)) is not None]
    if not places:
        return None
    for index, first in enumerate(places):
        for other in places[index + 1 :]:
            if (name := _contradiction(first, other)) is not None:
                raise ConfigError(
                    f"two descriptions of this node contradict each other in {name}: {first}; and {other}. Unset the "
                    "variables that are left over from something else, or give --no-detect and say it by options"
                )
    return _own_name(facts, _merge(places))


def find_failure_file(facts: Facts) -> str | None:
    """Return the file in which SageMaker expects the reason of a failure, though the place may be the failure.

    Returns:
        The path; its folder exists on SageMaker only. None in a process that is a rank of a job.
    """
    return None if any(map(facts.get, _OF_A_RANK)) else f"{sagemaker_folder(facts)}/output/failure"


def _contradiction(first: Place, other: Place) -> str | None:
    if (first.hostfile is None) != (other.hostfile is None) and (first.nnodes or other.nnodes or 1) > 1:
        return "the hosts"
    for name, called in (("nnodes", "the number of nodes"), ("node_rank", "the number of this node")):
        if None not in (values := {getattr(first, name), getattr(other, name)}) and len(values) > 1:
            return called
    # Only names can be compared: an address, or a name of this host for itself, may stand for any.
    labels = {each.host.partition(".")[0] for each in (first, other) if each.host and _is_name(each.host)}
    return "node 0" if len(labels) > 1 else None


def _is_name(host: str) -> bool:
    return host not in OWN_NAMES and not re.fullmatch(r"[0-9.]+|.*:.*", host)


def _merge(places: list[Place]) -> Place:
    merged = places[0]
    for other in places[1:]:
        missing = {
            each.name: getattr(other, each.name)
            for each in fields(Place)
            if getattr(merged, each.name) in (None, "", {}) and getattr(other, each.name) not in (None, "", {})
        }
        if missing:
            merged = replace(merged, **missing)
    evidence = "; ".join([places[0].evidence, *(f"as {each.platform}: {each.evidence}" for each in places[1:])])
    return replace(merged, evidence=evidence, settings={**_settings(places)})


def _settings(places: list[Place]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for place in reversed(places):
        found |= place.settings
    return found


def _own_name(facts: Facts, place: Place) -> Place:
    """Replace node 0's name for itself, such as localhost, which is of no use to the others."""
    several = place.nnodes is not None and place.nnodes > 1
    if several and place.node_rank == 0 and place.host is not None and place.host in OWN_NAMES:
        return replace(place, host=facts.host_name())
    return place
