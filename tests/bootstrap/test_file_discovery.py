"""The file through which ranks find rank 0 where no launcher tells them."""

import os
import stat
from pathlib import Path

import pytest

from horovodlike._bootstrap.file_discovery import Endpoint, FileDiscovery
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import RendezvousError


def test_publish_read_withdraw(runtime: dict[str, str]) -> None:
    here, there = FileDiscovery("job", runtime), FileDiscovery("job", runtime)
    assert here.directory == os.path.join(runtime["XDG_RUNTIME_DIR"], "horovodlike")
    assert there.read() is None
    key = JobKey.random()
    here.publish(Endpoint(4711, key))
    found = there.read()
    assert found is not None
    assert (found.port, found.key.hex()) == (4711, key.hex())
    assert key.hex() not in repr(found)
    assert FileDiscovery("another job", runtime).read() is None
    there.unpublish()  # it published nothing
    assert there.read() is not None
    here.unpublish()
    here.unpublish()
    assert there.read() is None
    assert os.listdir(here.directory) == []


def test_modes(runtime: dict[str, str]) -> None:
    before = os.umask(0)
    try:
        point = FileDiscovery("job", runtime)
        point.publish(Endpoint(1, JobKey.random()))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.lstat(point.directory).st_mode) == 0o700
    assert stat.S_IMODE(os.lstat(point.path).st_mode) == 0o600


def test_a_file_of_a_crashed_job_is_replaced_and_a_newer_one_is_left(runtime: dict[str, str]) -> None:
    crashed, current = FileDiscovery("job", runtime), FileDiscovery("job", runtime)
    crashed.publish(Endpoint(1, JobKey.random()))
    current.publish(Endpoint(2, JobKey.random()))
    crashed.unpublish()
    found = current.read()
    assert found is not None
    assert found.port == 2


def test_old_files_are_swept(runtime: dict[str, str]) -> None:
    old, young = FileDiscovery("old", runtime), FileDiscovery("young", runtime)
    old.publish(Endpoint(1, JobKey.random()))
    young.publish(Endpoint(1, JobKey.random()))
    os.utime(old.path, (0, 0))
    FileDiscovery("new", runtime).publish(Endpoint(1, JobKey.random()))
    assert old.read() is None
    assert young.read() is not None


def test_a_directory_that_is_a_link(runtime: dict[str, str], tmp_path: Path) -> None:
    point = FileDiscovery("job", runtime)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    os.symlink(tmp_path / "elsewhere", point.directory)
    with pytest.raises(RendezvousError, match="no symbolic link"):
        point.publish(Endpoint(1, JobKey.random()))
    with pytest.raises(RendezvousError, match="no symbolic link"):
        point.read()
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_directory_that_others_may_enter(runtime: dict[str, str]) -> None:
    point = FileDiscovery("job", runtime)
    os.mkdir(point.directory)
    os.chmod(point.directory, 0o755)
    for use in (lambda: point.publish(Endpoint(1, JobKey.random())), point.read):
        with pytest.raises(RendezvousError, match="mode 0755.*chmod 700"):
            use()


def test_a_directory_that_is_a_file(runtime: dict[str, str]) -> None:
    point = FileDiscovery("job", runtime)
    Path(point.directory).touch(mode=0o600)
    with pytest.raises(RendezvousError, match="must be a directory of your own"):
        point.publish(Endpoint(1, JobKey.random()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses(runtime: dict[str, str]) -> None:
    point = FileDiscovery("job", runtime)
    point.publish(Endpoint(1, JobKey.random()))
    os.chown(point.path, 12345, -1)
    with pytest.raises(RendezvousError, match="belongs to user 12345"):
        point.read()
    os.chown(point.directory, 12345, -1)
    with pytest.raises(RendezvousError, match="belongs to user 12345"):
        point.publish(Endpoint(1, JobKey.random()))


def test_a_file_that_is_not_what_it_should_be(runtime: dict[str, str], tmp_path: Path) -> None:
    point = FileDiscovery("job", runtime)
    point.publish(Endpoint(1, JobKey.random()))
    os.chmod(point.path, 0o644)
    with pytest.raises(RendezvousError, match="mode 0644"):
        point.read()
    os.rename(point.path, tmp_path / "target")
    os.chmod(tmp_path / "target", 0o600)
    os.symlink(tmp_path / "target", point.path)
    with pytest.raises(RendezvousError, match="cannot be read"):
        point.read()
    os.unlink(point.path)
    os.mkfifo(point.path, 0o600)
    with pytest.raises(RendezvousError, match="not of the kind"):
        point.read()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"port": 1, "key": "00"}', b'{"port": "x", "key": 1}'])
def test_a_file_that_makes_no_sense(content: bytes, runtime: dict[str, str]) -> None:
    point = FileDiscovery("job", runtime)
    point.publish(Endpoint(1, JobKey.random()))
    Path(point.path).write_bytes(content)
    with pytest.raises(RendezvousError, match="does not hold what rank 0 writes"):
        point.read()


@pytest.mark.parametrize("runtime_directory", ["", "relative", "/nonexistent"])
def test_without_a_runtime_directory(runtime_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    point = FileDiscovery("job", {"XDG_RUNTIME_DIR": runtime_directory})
    assert point.directory == str(tmp_path / f"horovodlike-{os.geteuid()}")
    point.publish(Endpoint(1, JobKey.random()))
    assert point.read() is not None


def test_a_runtime_directory_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    assert FileDiscovery("job", {"XDG_RUNTIME_DIR": str(tmp_path)}).directory.endswith(f"horovodlike-{os.geteuid()}")


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(RendezvousError, match="cannot be used"):
        FileDiscovery("job", {}).publish(Endpoint(1, JobKey.random()))
