"""Starts the agents of all hosts at the same time, and finds out which of them cannot take part, and why."""

import functools
import os
import selectors
import time
from collections.abc import Callable, Sequence

from horovodlike.launcher.description import Description, decode_description, encode_needs, installed_version
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.frames import Frame, FrameError, Kind, decode_text, encode_seconds, encode_text
from horovodlike.launcher.hosts import Placement
from horovodlike.launcher.link import AgentLink, start_local_agent, start_remote_agent
from horovodlike.launcher.remote import explain_failure, remote_command
from horovodlike.launcher.spec import JobSpec

__all__ = ["describe_hosts", "start_agents"]


def start_agents(
    spec: JobSpec, placements: Sequence[Placement], on_exit: Callable[[Callable[[], object]], object]
) -> list[AgentLink]:
    """Starts an agent on each host; does not wait for any.

    Args:
        spec: The job.
        placements: The hosts.
        on_exit: Takes what is to be called in the end: it ends all agents at the same time.

    Raises:
        HostsError: There is no ssh.
    """
    links: list[AgentLink] = []
    on_exit(functools.partial(_close, links))
    for placement in placements:
        if placement.name == spec.here:
            link = start_local_agent()
        else:
            command = remote_command(placement.name, spec.remote, spec.start_timeout)
            try:
                link = start_remote_agent(command, placement.name)
            except FileNotFoundError:
                raise HostsError(f"{command[0]} is not installed here: it starts what runs on other hosts") from None
        links.append(link)
    return links


def _close(links: Sequence[AgentLink]) -> None:
    for link in links:
        link.cut()
    for link in links:
        link.close()


def describe_hosts(spec: JobSpec, links: Sequence[AgentLink], program: str) -> dict[str, Description]:
    """Asks the agents of other hosts what there is, all at the same time.

    Args:
        spec: The job.
        links: The agents; those of this host are not asked.
        program: What the ranks are to execute.

    Returns:
        The description of each host.

    Raises:
        HostsError: Some hosts cannot take part; the message lists all of them, and why.
    """
    waiting = {link.host: link for link in links if link.host is not None}
    for link in waiting.values():
        link.send(Kind.DESCRIBE, 0, encode_text(encode_needs(os.getcwd(), program)))
        link.send(Kind.ALIVE, 0, encode_seconds(spec.start_timeout + spec.network_timeout))
    found: dict[str, Description] = {}
    failed: dict[str, str] = {}
    readable: set[str] = set()
    deadline = time.monotonic() + spec.start_timeout
    with selectors.DefaultSelector() as selector:
        while waiting and (left := deadline - time.monotonic()) > 0:
            for host, link in waiting.items():
                link.watch(selector, True, functools.partial(readable.add, host))
            for key, _ in selector.select(left):
                key.data()
            while readable:
                host = readable.pop()
                answer = _receive(waiting[host])
                if answer is None:
                    continue
                waiting[host].unwatch(selector)
                try:
                    found[host] = _read(answer, waiting.pop(host), spec)
                except HostsError as error:
                    failed[host] = str(error)
    for host, link in waiting.items():
        link.kill()
        said = f" ({'; '.join(link.last_words)})" if link.last_words else ""
        failed[host] = f"it has not answered within {spec.start_timeout:g} s{said}; raise --start-timeout if need be"
    if failed:
        lines = [f"  {host}: {failed[host]}" for host in (link.host for link in links) if host in failed]
        raise HostsError("\n".join([f"{len(failed)} of {len(links)} hosts cannot take part:", *lines]))
    return found


def _receive(link: AgentLink) -> list[Frame] | Exception | None:
    """What a host has answered, no frames if it has hung up, an exception if it is not understood, None if not yet."""
    try:
        frames = link.receive()
    except (FrameError, OSError) as error:
        return error
    return [] if frames is None else frames or None


def _read(answer: list[Frame] | Exception, link: AgentLink, spec: JobSpec) -> Description:
    if answer == []:
        raise HostsError(explain_failure(spec.remote, link.close(), link.last_words))
    try:
        if isinstance(answer, Exception):
            raise answer
        description = decode_description(decode_text(answer[0].payload))
    except (FrameError, OSError, ValueError) as error:
        raise HostsError(f"its agent is not understood ({error}); install the same horovodlike there") from None
    if description.version != installed_version():
        raise HostsError(
            f"horovodlike {description.version} is installed there, but {installed_version()} here; install the same"
        )
    if description.problems:
        raise HostsError("; ".join(description.problems))
    return description
