"""The ops are compiled once, however many processes ask for them; and it is said what to do where they cannot be."""

from __future__ import annotations

import stat
import threading

import pytest

from horovodlike.tensorflow._ops import build


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that writes a line for each run, and makes its output of what the variable RESULT says."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/runs\n'
        'while [ "$1" != -o ]; do shift; done\n'
        '[ "$RESULT" = fails ] && echo "no such header" >&2 && exit 3\n'
        'echo compiled > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "runs"


def test_those_that_ask_at_once_compile_once(compiler, tmp_path):
    asked = threading.Barrier(4)
    results = []

    def ask():
        asked.wait(30)
        results.append(build.library())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (library,) = set(results)
    assert len(results) == 4
    assert library.parent == tmp_path / "cache" / "horovodlike" and library.read_text() == "compiled\n"
    (run,) = compiler.read_text().splitlines()
    assert "ops.cc" in run and "-std=c++17" in run and "-l:libhorovodlike.so" in run
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".lock"}
    assert build.library() == library and len(compiler.read_text().splitlines()) == 1


def test_a_compiler_that_fails(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("RESULT", "fails")
    with pytest.raises(ImportError, match="(?s)could not compile its ops.*ended with 3.*no such header"):
        build.library()
    monkeypatch.setenv("RESULT", "")
    assert build.library().exists()  # nothing is left that would be in the way
    assert not list(tmp_path.glob("cache/horovodlike/tmp*"))


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ImportError, match=r"no C\+\+ compiler: install g\+\+ .*horovodlike.tensorflow.build"):
        build.library()
    monkeypatch.setenv("CXX", "nonsense++")
    with pytest.raises(ImportError, match=r"CXX names, nonsense\+\+, does not exist: install g\+\+"):
        build.library()


def test_a_folder_that_cannot_be_written_to(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ImportError, match="Set XDG_CACHE_HOME to a folder"):
        build.library()


def test_what_goes_into_it_is_in_the_name(compiler, monkeypatch):
    before = build.library()
    monkeypatch.setattr(build.tf.version, "GIT_VERSION", "another")
    assert build.library() != before
