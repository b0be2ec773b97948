"""The environment variables that give the members of a generation their ranks. Pure."""

from collections.abc import Sequence

from horovodlike.launcher.planning.plan import place_variables

_NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
OF_A_PLACE = frozenset(place_variables(**dict.fromkeys(_NAMES, 0))) | {
    "HOROVODLIKE_GENERATION",
    "HOROVODLIKE_RENDEZVOUS_ADDR",
    "HOROVODLIKE_RENDEZVOUS_PORT",
}
"""The variables that a worker receives from the driver with its rank, and must not inherit."""


def place_members(generation: int, hosts: Sequence[str], address: str, port: int) -> list[dict[str, str]]:
    """Return the variables that each member sets in its environment.

    Args:
        generation: The generation's number.
        hosts: The host of each member, by rank. Hosts are numbered in the order in which they first occur here.
        address: The address of the generation's rendezvous server, as in ``HOROVODLIKE_RENDEZVOUS_ADDR``.
        port: The port that it listens on.

    Returns:
        The variables by rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    common = {
        "HOROVODLIKE_GENERATION": str(generation),
        "HOROVODLIKE_RENDEZVOUS_ADDR": address,
        "HOROVODLIKE_RENDEZVOUS_PORT": str(port),
    }
    places = []
    for rank, host in enumerate(hosts):
        local_rank = groups[host].index(rank)
        across = [name for name, ranks in groups.items() if len(ranks) > local_rank]
        place = place_variables(
            rank=rank,
            size=len(hosts),
            local_rank=local_rank,
            local_size=len(groups[host]),
            cross_rank=across.index(host),
            cross_size=len(across),
        )
        places.append(place | common)
    return places
