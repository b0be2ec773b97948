"""The shared memory of a host's ranks: an anonymous file, a file in /dev/shm, or an error that says why not."""

import contextlib
import errno
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodlike import host_memory
from horovodlike.errors import RendezvousError
from horovodlike.host_memory import open_segment
from horovodlike.place import Place
from horovodlike.rendezvous import Rendezvous, RendezvousServer

Serve = Callable[..., RendezvousServer]
Connect = Callable[..., Rendezvous]
RunRanks = Callable[..., list[Any]]
PlaceOf = Callable[..., Place]
OpenAll = Callable[..., list[Any]]
StartPython = Callable[..., "subprocess.Popen[str]"]

NUM_BYTES = 3 * mmap.PAGESIZE + 100


@pytest.fixture
def open_all(serve: Serve, connect: Connect, run_ranks: RunRanks, place_of: PlaceOf) -> OpenAll:
    """Opens the segment of a few ranks; gives the descriptor or the error of each rank."""

    def run(size: int, num_bytes: int | list[int] = NUM_BYTES, nodes: list[str] | None = None) -> list[Any]:
        server = serve(size)

        def body(rank: int) -> int:
            place = place_of(rank, size, node_id=nodes[rank] if nodes else None)
            with connect(server, rank, size) as rendezvous:
                rendezvous.begin()
                return open_segment(rendezvous, place, num_bytes[rank] if isinstance(num_bytes, list) else num_bytes)

        return run_ranks(size, body)

    return run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm."""
    found = tmp_path / "shm"
    found.mkdir()
    monkeypatch.setattr(host_memory, "_DIRECTORY", str(found))
    return found


def no_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, "no anonymous files here")


def open_files() -> str:
    """What this process has open, except for what another thread closes in this moment."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return " ".join(names)


def check_shared(descriptors: list[int], num_bytes: int) -> None:
    """All descriptors are one memory of the right size that holds zeros, on pages that are already there."""
    for descriptor in descriptors:
        assert isinstance(descriptor, int), descriptor
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
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_anonymous_file(size: int, open_all: OpenAll, directory: Path) -> None:
    descriptors = open_all(size)
    assert os.readlink(f"/proc/self/fd/{descriptors[0]}").startswith("/memfd:")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors[0], 1)
    check_shared(descriptors, NUM_BYTES)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("size", [2, 3])
def test_a_file_where_there_are_no_anonymous_ones(
    size: int, open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    descriptors = open_all(size)
    name = os.readlink(f"/proc/self/fd/{descriptors[0]}")
    assert name.startswith(f"{directory}/horovodlike-")
    assert name.endswith(" (deleted)")
    check_shared(descriptors, NUM_BYTES)
    assert os.listdir(directory) == []


def test_a_file_where_proc_is_closed(open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def closed(path: Any, **options: Any) -> os.stat_result:  # noqa: ANN401
        if isinstance(path, str) and "/fd/" in path:
            raise PermissionError(errno.EACCES, "closed", path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    descriptors = open_all(2)
    assert os.readlink(f"/proc/self/fd/{descriptors[1]}").startswith(str(directory))
    check_shared(descriptors, NUM_BYTES)


def test_nothing_works_and_everybody_learns_why(
    open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    directory.rmdir()
    errors = open_all(3)
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert f"cannot share {NUM_BYTES} bytes of memory" in str(error)
        assert "rank 0: [Errno 38] no anonymous files here" in str(error)
        assert "No such file or directory" in str(error)
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
    for error in open_all(2):
        assert isinstance(error, RendezvousError)
        assert f"rank 0: {NUM_BYTES} bytes could not be allocated (No space left on device)" in str(error)
        assert "Enlarge it (docker run --shm-size" in str(error)
        assert ("too little memory" in str(error)) == memfd
    assert os.listdir(directory) == []


def test_a_file_system_that_cannot_allocate_is_written(open_all: OpenAll, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    num_bytes = (1 << 20) + 100
    check_shared(open_all(2, num_bytes), num_bytes)


def test_memory_that_does_not_hold_the_token(
    open_all: OpenAll, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that leads to somebody else's memory is noticed."""
    monkeypatch.setattr(host_memory, "_write_token", lambda fd: b"x" * host_memory.TOKEN_BYTES)
    for error in open_all(2):
        assert isinstance(error, RendezvousError)
        assert "rank 1:" in str(error)
        assert "does not hold what local rank 0 wrote" in str(error)
    assert os.listdir(directory) == []


def test_memory_of_another_size_or_kind(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(10))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "small", tmp_path / "pipe", tmp_path):
        with pytest.raises(RendezvousError, match="is not the memory of local rank 0"):
            host_memory._open_and_verify(str(path), 4096, bytes(32), 0)


def test_different_nodes(open_all: OpenAll) -> None:
    for error in open_all(3, nodes=["a", "b", "a"]):
        assert isinstance(error, RendezvousError)
        assert "different nodes of the launcher (ranks 0, 2: 'a', rank 1: 'b')" in str(error)
        assert "HOROVODLIKE_HOSTID" in str(error)


@pytest.mark.parametrize("fact", ["boot", "pid_namespace"])
def test_different_machines(
    fact: str, serve: Serve, connect: Connect, run_ranks: RunRanks, place_of: PlaceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = host_memory._host_facts
    monkeypatch.setattr(
        host_memory, "_host_facts", lambda place: real(place) | ({fact: "elsewhere"} if place.rank == 1 else {})
    )
    server = serve(2)

    def body(rank: int) -> None:
        rendezvous = connect(server, rank, 2)
        rendezvous.begin()
        open_segment(rendezvous, place_of(rank, 2), NUM_BYTES)

    for error in run_ranks(2, body):
        assert isinstance(error, RendezvousError)
        assert "rank 1: 'elsewhere'" in str(error)
        assert "not supported yet" in str(error)


def test_different_sizes(open_all: OpenAll) -> None:
    for error in open_all(2, [4096, 8192]):
        assert "different amounts of shared memory (rank 0: '4096', rank 1: '8192')" in str(error)


def test_one_rank_needs_none(place_of: PlaceOf) -> None:
    class Nobody:
        def exchange(self, topic: str, payload: Any) -> list[Any]:  # noqa: ANN401
            raise AssertionError

        def barrier(self, topic: str) -> None:
            raise AssertionError

    assert open_segment(Nobody(), place_of(0, 1), NUM_BYTES) == -1


SMALL_SHM = """
    import errno, os, sys, threading
    from horovodlike.host_memory import open_segment
    from horovodlike.place import Place
    from horovodlike.rendezvous import Rendezvous, RendezvousServer
    key = bytes(32)
    server = RendezvousServer(key, 2)
    server.start()
    if sys.stdin.readline() == "file\\n":
        def no_memfd(*_):
            raise OSError(errno.ENOSYS, "none")
        os.memfd_create = no_memfd
    results = [None, None]
    def body(rank):
        place = Place(rank, 2, rank, 2, job="j")
        with Rendezvous("127.0.0.1", server.port, key, place) as rendezvous:
            rendezvous.begin()
            try:
                results[rank] = open_segment(rendezvous, place, 8 << 20) >= 0
            except Exception as error:
                results[rank] = str(error)
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
