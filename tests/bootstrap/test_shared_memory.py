"""The shared memory of a host's ranks: an anonymous file, a file in /dev/shm, or an error that says why not."""

import contextlib
import errno
import fcntl
import mmap
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodlike._bootstrap import shared_memory
from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
from horovodlike._bootstrap.shared_memory import Segment, open_segment
from horovodlike._bootstrap.topology import HostFacts, HostTable
from horovodlike.errors import RendezvousError

Serve = Callable[..., RendezvousServer]
Connect = Callable[..., Rendezvous]
RunRanks = Callable[..., list[Any]]
OpenAll = Callable[..., list[Any]]
StartPython = Callable[..., "subprocess.Popen[str]"]

NUM_BYTES = 3 * mmap.PAGESIZE + 100


def table_of(nodes: str) -> HostTable:
    """The hosts of ranks that run on these nodes, a letter each."""
    facts = [
        HostFacts(node, False, node, "boot", "pid", "net", nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
    ]
    return HostTable.of(facts)


@pytest.fixture
def open_all(serve: Serve, connect: Connect, run_ranks: RunRanks) -> OpenAll:
    """Opens the segments of ranks on nodes; gives the segment or the error of each rank."""

    def run(nodes: str, num_bytes: Callable[[int, HostTable], int] = lambda rank, table: NUM_BYTES) -> list[Any]:
        server = serve(len(nodes))

        def body(rank: int) -> Segment:
            with connect(server, rank, len(nodes)) as rendezvous:
                rendezvous.begin()
                return open_segment(rendezvous, rank, table_of(nodes), lambda table: num_bytes(rank, table))

        return run_ranks(len(nodes), body)

    return run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm."""
    found = tmp_path / "shm"
    found.mkdir()
    monkeypatch.setattr(shared_memory, "DIRECTORY", str(found))
    return found


def no_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, "no anonymous files here")


def open_files() -> str:
    """Return what this process has open, except for what another thread closes in this moment."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return " ".join(names)


def check_shared(segments: list[Any], num_bytes: int = NUM_BYTES) -> list[str]:
    """All have one memory of the right size that holds zeros, on pages that are already there; gives its names."""
    for segment in segments:
        assert isinstance(segment, Segment), segment
    descriptors = [segment.fd for segment in segments]
    found = [os.fstat(descriptor) for descriptor in descriptors]
    assert {(each.st_dev, each.st_ino, each.st_size) for each in found} == {
        (found[0].st_dev, found[0].st_ino, num_bytes)
    }
    assert found[0].st_blocks * 512 >= num_bytes
    assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
    maps = [mmap.mmap(descriptor, num_bytes) for descriptor in descriptors]
    assert maps[0][:] == bytes(num_bytes)
    for rank, mapped in enumerate(maps):
        mapped[rank] = rank + 1
    assert maps[0][: len(maps)] == bytes(range(1, len(maps) + 1))
    for mapped in maps:
        mapped.close()
    names = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return names


def check_alone(segments: list[Any]) -> list[str]:
    """Every rank is a host of its own; gives the reasons, which all of them know."""
    for segment in segments:
        assert isinstance(segment, Segment), segment
        assert segment.fd == -1
        assert segment.table.ranks == tuple((rank,) for rank in range(len(segments)))
        assert segment.problems == segments[0].problems
    problems: list[str] = segments[0].problems
    return problems


@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_anonymous_file(size: int, open_all: OpenAll, directory: Path) -> None:
    segments = open_all("a" * size)
    assert [segment.table.ranks for segment in segments] == [(tuple(range(size)),)] * size
    assert [segment.problems for segment in segments] == [[]] * size
    with pytest.raises(PermissionError):
        os.ftruncate(segments[0].fd, 1)
    assert check_shared(segments)[0].startswith("/memfd:")
    assert os.listdir(directory) == []


@pytest.mark.parametrize("size", [2, 3])
def test_a_file_where_there_are_no_anonymous_ones(
    size: int, open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    name = check_shared(open_all("a" * size))[0]
    assert name.startswith(f"{directory}/horovodlike-")
    assert name.endswith(" (deleted)")
    assert os.listdir(directory) == []


def test_a_file_where_proc_is_closed(open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def closed(path: Any, **options: Any) -> os.stat_result:  # noqa: ANN401
        if isinstance(path, str) and "/fd/" in path:
            raise PermissionError(errno.EACCES, "closed", path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    assert check_shared(open_all("aa"))[1].startswith(str(directory))
    assert os.listdir(directory) == []


def test_several_hosts_at_the_same_time(open_all: OpenAll) -> None:
    segments = open_all("abacbb", lambda rank, table: NUM_BYTES + len(table.ranks_beside(rank)))
    for ranks in ((0, 2), (1, 4, 5)):
        check_shared([segments[rank] for rank in ranks], NUM_BYTES + len(ranks))
    assert segments[3].fd == -1
    assert {segment.table.ranks for segment in segments} == {((0, 2), (1, 4, 5), (3,))}


def test_hosts_that_share_memory_in_different_ways(
    open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host has no anonymous files: the other keeps what it has."""
    real = shared_memory.make_memfd
    monkeypatch.setattr(
        shared_memory, "make_memfd", lambda count: no_memfd() if count == NUM_BYTES + 1 else real(count)
    )
    segments = open_all("aabb", lambda rank, table: NUM_BYTES + rank // 2)
    assert check_shared(segments[:2])[0].startswith("/memfd:")
    assert check_shared(segments[2:], NUM_BYTES + 1)[0].startswith(str(directory))
    assert os.listdir(directory) == []


def test_nothing_works_and_everybody_learns_why(
    open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    directory.rmdir()
    problems = check_alone(open_all("aaa"))
    assert len(problems) == 2  # all three, and then two of them
    assert "ranks 0, 1, 2: with an anonymous memory file, rank 0: [Errno 38] no anonymous files here" in problems[0]
    assert "No such file or directory" in problems[0]
    assert "horovodlike" not in open_files()


@pytest.mark.parametrize("memfd", [True, False])
def test_memory_that_cannot_be_allocated(
    memfd: bool, open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    if not memfd:
        monkeypatch.setattr(os, "memfd_create", no_memfd)
    problems = check_alone(open_all("aa"))
    assert f"rank 0: {NUM_BYTES} bytes could not be allocated (No space left on device)" in problems[0]
    assert "Enlarge it (docker run --shm-size" in problems[0]
    assert ("too little memory" in problems[0]) == memfd
    assert os.listdir(directory) == []


def test_a_file_system_that_cannot_allocate_is_written(open_all: OpenAll, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    num_bytes = (1 << 20) + 100
    check_shared(open_all("aa", lambda rank, table: num_bytes), num_bytes)


def test_memory_that_does_not_hold_the_token(
    open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that leads to another process's memory is noticed."""
    monkeypatch.setattr(shared_memory, "write_token", lambda fd: b"x" * shared_memory.TOKEN_BYTES)
    problems = check_alone(open_all("aa"))
    assert "rank 1:" in problems[0]
    assert "does not hold what local rank 0 wrote" in problems[0]
    assert os.listdir(directory) == []


def test_ranks_that_can_share_memory_stay_together(
    open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two containers on one node: ranks 0 and 2 see one memory, ranks 1, 3 and 4 another."""
    outside = (1, 3, 4)
    here = threading.local()
    real = shared_memory.open_and_verify

    def num_bytes(rank: int, table: HostTable) -> int:
        beside = table.ranks_beside(rank)
        here.reaches = (rank in outside) == (beside[0] in outside)
        return NUM_BYTES + len(beside)

    def open_and_verify(*arguments: Any, **named: Any) -> int:  # noqa: ANN401
        if not here.reaches:
            raise OSError(errno.ENOENT, "another container's")
        return real(*arguments, **named)

    monkeypatch.setattr(shared_memory, "open_and_verify", open_and_verify)
    segments = open_all("aaaaab", num_bytes)
    for ranks in ((0, 2), outside):
        check_shared([segments[rank] for rank in ranks], NUM_BYTES + len(ranks))
    assert {segment.table.ranks for segment in segments} == {((0, 2), outside, (5,))}
    assert "ranks 0, 1, 2, 3, 4: with an anonymous memory file, rank 1:" in segments[5].problems[0]
    assert "another container's" in segments[5].problems[0]
    assert os.listdir(directory) == []
    assert "horovodlike" not in open_files()


def test_memory_of_another_size_or_kind(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(10))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "small", tmp_path / "pipe", tmp_path):
        with pytest.raises(RendezvousError, match="is not the memory of local rank 0"):
            shared_memory.open_and_verify(str(path), 4096, bytes(32), 0)


def test_memory_that_another_process_could_shrink() -> None:
    for seals, error in ((0, "is not sealed"), (fcntl.F_SEAL_SHRINK, None)):
        memory = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, 4096)
            token = shared_memory.write_token(memory)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
            path = f"/proc/self/fd/{memory}"
            if error is not None:
                with pytest.raises(RendezvousError, match=error):
                    shared_memory.open_and_verify(path, 4096, token, 0, is_sealed=True)
            else:
                os.close(shared_memory.open_and_verify(path, 4096, token, 0, is_sealed=True))
        finally:
            os.close(memory)


def test_different_sizes(open_all: OpenAll) -> None:
    for error in open_all("aab", lambda rank, table: 4096 * (rank + 1)):
        assert "different amounts of shared memory (rank 0: 4096, rank 1: 8192)" in str(error)


def test_one_rank_on_each_host_needs_none() -> None:
    class Nobody:
        def exchange(self, topic: str, payload: Any) -> list[Any]:  # noqa: ANN401
            raise AssertionError

        def barrier(self, topic: str) -> None:
            raise AssertionError

    table = table_of("ab")
    assert open_segment(Nobody(), 1, table, lambda table: NUM_BYTES) == Segment(table)


SMALL_SHM = """
    import errno, os, sys, threading
    from horovodlike._bootstrap.topology import HostFacts, HostTable
    from horovodlike._bootstrap.shared_memory import open_segment
    from horovodlike._bootstrap.environment import RankInfo
    from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
    key = bytes(32)
    server = RendezvousServer(key, 2)
    server.start()
    if sys.stdin.readline() == "file\\n":
        def no_memfd(*_):
            raise OSError(errno.ENOSYS, "none")
        os.memfd_create = no_memfd
    results = [None, None]
    def body(rank):
        place = RankInfo(rank, 2, rank, 2, job="j")
        with Rendezvous("127.0.0.1", server.port, key, place) as rendezvous:
            rendezvous.begin()
            facts = [HostFacts("a", False, "a", "", "", "", each, 2) for each in range(2)]
            segment = open_segment(rendezvous, rank, HostTable.of(facts), lambda table: 8 << 20)
            results[rank] = segment.fd >= 0 or segment.problems
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    server.close()
    print(results[0] == results[1], results[0], os.listdir("/dev/shm"))
"""


@pytest.mark.parametrize("way", ["memfd", "file"])
def test_a_dev_shm_of_one_megabyte(way: str, start_python: StartPython) -> None:
    unshare = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")
    prefix = (*unshare, "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot mount in a namespace of its own here")
    output, errors = start_python(SMALL_SHM, prefix=prefix).communicate(f"{way}\n", timeout=30)
    assert output.endswith(" []\n"), errors
    assert output.startswith("True ")
    if way == "memfd":
        assert output.startswith("True True")
    else:
        assert "8388608 bytes could not be allocated" in output
        assert "/dev/shm has 1048576 bytes, " in output
        assert "Enlarge it" in output
