from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horovodlike.launcher.tools import check_build


def test_the_block() -> None:
    lines = check_build.check_build().splitlines()
    assert lines[0].startswith("horovodlike v")
    assert lines[0].endswith(":")
    assert [line for line in lines if line and not line.startswith(" ")][1:] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    assert "    [X] horovodlike (one ordered log, in shared memory and over TCP)" in lines
    assert lines[-2:] == ["    [X] Shared memory (within a host)", "    [X] TCP (between hosts)"]
    assert all(line[:8] in ("    [X] ", "    [ ] ") for line in lines if line.startswith(" "))


def test_a_framework_without_its_binding_is_not_available() -> None:
    works, name, remark = check_build._framework("Email", "email", "email", ("no-such-distribution",))
    assert (works, name) == (False, "Email")
    assert "no binding" in remark
    assert check_build._framework("None", "no_such_module", "torch", ()) == (False, "None", "not installed")
    assert check_build._framework("Email", "email", "launcher", ("no-such-distribution",))[0]


def test_no_framework_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from horovodlike.launcher.cli import main\n"
        "try: main(['--check-build'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'tensorflow', 'keras', 'mpi4py', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"horovodlike v")


@pytest.fixture
def operations(fake_gpu: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`operations(variables)`: what is said of NCCL and CUDA, with a stand-in for the driver that has 2 GPUs."""

    def ask(**variables: str) -> list[str]:
        environ = {**os.environ, "HOROVODLIKE_CUDA_LIBRARY": str(fake_gpu), "FAKE_GPU_COUNT": "2", **variables}
        words = [sys.executable, "-m", "horovodlike.launcher", "--check-build"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
        return [line.strip() for line in done.stdout.splitlines() if re.search(r"\] (NCCL|CUDA) \(", line)]

    return ask


def test_nccl_of_the_settings(operations: Callable[..., list[str]], fake_gpu: Path) -> None:
    assert operations(HOROVODLIKE_NCCL_LIBRARY=str(fake_gpu)) == [
        f"[X] NCCL (2.27.3, {fake_gpu}, from HOROVODLIKE_NCCL_LIBRARY)",
        "[X] CUDA (driver of CUDA 12.8, GPUs: 2)",
    ]


def test_nccl_without_a_gpu(operations: Callable[..., list[str]], fake_gpu: Path) -> None:
    assert operations(HOROVODLIKE_NCCL_LIBRARY=str(fake_gpu), FAKE_GPU_COUNT="0") == [
        f"[ ] NCCL (2.27.3, {fake_gpu}, from HOROVODLIKE_NCCL_LIBRARY; there is no GPU to use it for)",
        "[ ] CUDA (driver of CUDA 12.8, GPUs: 0)",
    ]


def test_nccl_of_a_package(operations: Callable[..., list[str]], fake_gpu: Path, tmp_path: Path) -> None:
    file = tmp_path / "packages" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    file.parent.mkdir(parents=True)
    shutil.copy(fake_gpu, file)
    about = tmp_path / "packages" / "nvidia_nccl_cu12-2.27.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.27.3\n")
    nccl, _ = operations(PYTHONPATH=str(tmp_path / "packages"))
    assert nccl == f"[X] NCCL (2.27.3, {file}, from nvidia-nccl-cu12 2.27.3)"


def test_nccl_of_the_system(operations: Callable[..., list[str]], fake_gpu: Path, tmp_path: Path) -> None:
    file = tmp_path / "system" / "libnccl.so.2"
    file.parent.mkdir()
    shutil.copy(fake_gpu, file)
    empty = tmp_path / "empty" / "nvidia" / "__init__.py"  # hides NVIDIA's packages, where there are any
    empty.parent.mkdir(parents=True)
    empty.touch()
    nccl, _ = operations(LD_LIBRARY_PATH=str(file.parent), PYTHONPATH=str(tmp_path / "empty"))
    assert nccl == f"[X] NCCL (2.27.3, {file}, from the loader)"


def test_what_is_missing_is_said(operations: Callable[..., list[str]]) -> None:
    nccl, cuda = operations(HOROVODLIKE_NCCL_LIBRARY="/no/libnccl.so.2", HOROVODLIKE_CUDA_LIBRARY="/no/libcuda.so.1")
    assert nccl.startswith("[ ] NCCL (/no/libnccl.so.2 cannot be opened: ")
    assert cuda.startswith("[ ] CUDA (/no/libcuda.so.1 cannot be opened: ")


@pytest.mark.parametrize(
    ("module", "name", "text", "said"),
    [
        ("torch", "version.py", "cuda: Optional[str] = None\n", "not built for CUDA"),
        ("torch", "version.py", "debug = False\ncuda: Optional[str] = '12.6'\n", "built for CUDA 12.6"),
        ("torch", "version.py", "cuda = '11.8'\n", "built for CUDA 11.8"),
        ("torch", "other.py", "", ""),
        ("tensorflow", "python/platform/build_info.py", "([('is_cuda_build', False), ", "not built for CUDA"),
        ("tensorflow", "python/platform/build_info.py", "('cpu', 'x'), ('is_cuda_build', True)", "built for CUDA"),
        ("keras", "version.py", "cuda = '12'", ""),
    ],
)
def test_what_frameworks_were_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, text: str, said: str
) -> None:
    package = tmp_path / module
    (package / name).parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert check_build.framework_build(module) == said


def test_settings_that_are_not_accepted(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "horovodlike.launcher", "--check-build"]
    environ = {**os.environ, "HOROVODLIKE_FAN_OUT": "many"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hvdrun: HOROVODLIKE_FAN_OUT='many' cannot be used: ")
