"""The search for NCCL, and the messages about libraries that are not there."""

import sys

import pytest

from horovodlike import basics
from horovodlike._engine import gpu_libraries
from horovodlike._engine.native import ffi, lib


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A folder of packages with NCCL's."""
    file = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    return file


def test_the_settings_come_first(wheel):
    assert gpu_libraries.nccl_library("/somewhere/libnccl.so") == "/somewhere/libnccl.so"


def test_then_the_package(wheel):
    assert gpu_libraries.nccl_library("") == str(wheel)


def test_then_the_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert gpu_libraries.nccl_library("") == ""


def test_what_is_found_is_said(monkeypatch):
    monkeypatch.setenv("HOROVODLIKE_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    monkeypatch.setenv("HOROVODLIKE_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    found = gpu_libraries.find()
    assert (found.cuda_version, found.nccl_version, found.num_gpus, found.nccl_file) == (0, 0, 0, "")
    assert found.why_no_cuda.startswith("/nowhere/libcuda.so.1 cannot be opened: ")
    assert found.why_no_nccl.startswith("/nowhere/libnccl.so.2 cannot be opened: ")


def test_what_is_missing_is_said():
    found = ffi.new("hvl_gpu_libraries *")
    lib.hvl_find_gpu_libraries(b"/nowhere/libcuda.so.1", b"/nowhere/libnccl.so.2", 1, found)
    assert (found.cuda_version, found.nccl_version, found.num_gpus) == (0, 0, 0)
    assert ffi.string(found.why_no_cuda).startswith(b"/nowhere/libcuda.so.1 cannot be opened: ")
    assert ffi.string(found.why_no_nccl).startswith(b"/nowhere/libnccl.so.2 cannot be opened: ")


def test_what_can_be_used(fake_gpu, monkeypatch):
    for library, cuda, nccl in ((str(fake_gpu), True, 22703), ("/nowhere/lib.so", False, 0)):
        monkeypatch.setenv("HOROVODLIKE_CUDA_LIBRARY", library)
        monkeypatch.setenv("HOROVODLIKE_NCCL_LIBRARY", library)
        assert (basics.cuda_built(), basics.nccl_built()) == (cuda, nccl)
