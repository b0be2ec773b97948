"""`--gpus-per-rank`: which GPUs a host has, and which of them each rank sees."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import Launch

import horovodlike
from horovodlike.launcher.agent import host_probe as gpus
from horovodlike.launcher.agent.host_probe import VISIBLE, Gpus, decode_description, describe, encode_needs, find_gpus
from horovodlike.launcher.cli import main, parse
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.launch import launch
from horovodlike.launcher.planning.plan import gpu_variables

UUIDS = [f"GPU-{number:08x}-d33d-2b2c-524d-9e3d8d2b8a77" for number in range(4)]
PARTS = [f"MIG-{number:08x}-42e4-5de3-91c7-45d71c87eb3f" for number in range(3)]
SHOW = ("sh", "-c", f"echo gpus=${{{VISIBLE}-all}}")
NO_LIBRARY = {"HOROVODLIKE_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}


@pytest.fixture
def nvidia_smi(tmp_path: Path) -> Callable[..., dict[str, str | None]]:
    """`nvidia_smi(node1=2, other=4)`: an environment in which hosts, told apart by HOME, have so many GPUs."""
    folder = tmp_path / "nvidia"
    folder.mkdir()

    def write(text: str = "", path: str = os.environ["PATH"], **hosts: int) -> dict[str, str | None]:
        for host, number in hosts.items():
            lines = [f"GPU {index}: NVIDIA A100 (UUID: {uuid})\n" for index, uuid in enumerate(UUIDS[:number])]
            (folder / host).write_text("".join(lines))
        program = folder / "nvidia-smi"
        program.write_text(f'#!/bin/sh\ntest "$*" = -L || exit 2\n{text or "cat " + str(folder) + "/${HOME##*/}"}\n')
        program.chmod(0o755)
        return {"PATH": f"{folder}:{path}", VISIBLE: None, "HOME": "/home/here"}

    return write


def environ(variables: dict[str, str | None]) -> dict[str, str]:
    merged = {**os.environ, **variables}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1,3", ("0", "1", "3")),
        (" 2 , 0", ("2", "0")),
        (f"{UUIDS[1]},{PARTS[0]},MIG-GPU-8932f937/1/0", (UUIDS[1], PARTS[0], "MIG-GPU-8932f937/1/0")),
        ("1,-1,2", ("1",)),
        ("-1", ()),
        ("", ()),
        ("NoDevFiles", ()),
    ],
)
def test_what_cuda_visible_devices_lists(visible: str, names: tuple[str, ...]) -> None:
    assert find_gpus({VISIBLE: visible}) == Gpus(names, f"{VISIBLE}={visible}")


def test_a_gpu_that_is_listed_twice() -> None:
    found = find_gpus({VISIBLE: "0,1,0"})
    assert found == Gpus((), f"{VISIBLE}=0,1,0 names 0 twice, which CUDA refuses")


def test_what_nvidia_smi_lists(nvidia_smi: Callable[..., dict[str, str | None]]) -> None:
    found = find_gpus(environ(nvidia_smi(here=3)))
    assert found.names == tuple(UUIDS[:3])
    assert re.fullmatch(r"/\S+/nvidia-smi -L lists 3", found.source)


def test_gpus_that_are_split(nvidia_smi: Callable[..., dict[str, str | None]], tmp_path: Path) -> None:
    (tmp_path / "listed").write_text(
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[0]})\n"
        f"  MIG 3g.40gb     Device  0: (UUID: {PARTS[0]})\n"
        f"  MIG 3g.40gb     Device  1: (UUID: {PARTS[1]})\n"
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[1]})\n"
        f"GPU 2: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[2]})\n"
        f"  MIG 7g.80gb     Device  0: (UUID: {PARTS[2]})\n"
    )
    found = find_gpus(environ(nvidia_smi(f"cat {tmp_path}/listed")))
    assert found.names == (PARTS[0], PARTS[1], UUIDS[1], PARTS[2])


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", r"\S+/nvidia-smi ended with 9: NVIDIA-SMI has failed"),
        ("exit 12", r"\S+/nvidia-smi ended with 12: it said nothing"),
        ("true", r"\S+/nvidia-smi -L lists none"),
        ("exec sleep 1000", r"\S+/nvidia-smi has not answered: it has not ended within 0.2 s"),
    ],
)
def test_an_nvidia_smi_that_lists_none(
    nvidia_smi: Callable[..., dict[str, str | None]], monkeypatch: pytest.MonkeyPatch, does: str, why: str
) -> None:
    if "sleep" in does:
        monkeypatch.setattr(gpus, "_PATIENCE_S", 0.2)
    found = find_gpus(environ(nvidia_smi(does)))
    assert found.names == ()
    assert re.fullmatch(why, found.source)


def test_the_driver_counts_where_there_is_no_nvidia_smi(fake_gpu: Path) -> None:
    without = {"PATH": "/nowhere", "HOROVODLIKE_CUDA_LIBRARY": str(fake_gpu)}
    assert find_gpus({**without, "FAKE_GPU_COUNT": "3"}) == Gpus(("0", "1", "2"), "the CUDA driver counts 3")
    assert find_gpus({**without, "FAKE_GPU_COUNT": "0"}) == Gpus((), "the CUDA driver counts 0")


def test_there_is_nothing_to_ask() -> None:
    found = find_gpus({"PATH": "/nowhere", **NO_LIBRARY})
    assert found.names == ()
    assert found.source.startswith("there is no nvidia-smi, and /nowhere/libcuda.so.1 cannot be opened: ")


def test_a_setting_that_the_count_does_not_accept() -> None:
    found = find_gpus({"PATH": "/nowhere", "HOROVODLIKE_FAN_OUT": "many"})
    assert found.names == ()
    assert "the GPUs cannot be counted: " in found.source
    assert "HOROVODLIKE_FAN_OUT='many'" in found.source


def test_each_rank_gets_its_own() -> None:
    have = Gpus(tuple("abcde"), "somebody")
    assert gpu_variables(1, have, 3) == [{VISIBLE: "a"}, {VISIBLE: "b"}, {VISIBLE: "c"}]
    assert gpu_variables(2, have, 2) == [{VISIBLE: "a,b"}, {VISIBLE: "c,d"}]
    assert gpu_variables(0, None, 2) == [{}, {}]


@pytest.mark.parametrize(
    ("per_rank", "ranks", "have", "message"),
    [
        (2, 3, 5, "2: 3 ranks need 6 GPUs, but this host has 5 (X); use at most 2 ranks on this host, or "),
        (1, 2, 1, "1: 2 ranks need 2 GPUs, but this host has 1 (X); use at most 1 rank on this host, or "),
        (1, 1, 0, "1: 1 rank needs 1 GPU, but this host has none (X); "),
        (4, 1, 3, "4: 1 rank needs 4 GPUs, but this host has 3 (X); "),
    ],
)  # fmt: skip
def test_too_few(per_rank: int, ranks: int, have: int, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        gpu_variables(per_rank, Gpus(tuple("abcde"[:have]), "X"), ranks)
    assert str(raised.value) == f"--gpus-per-rank {message}leave --gpus-per-rank out: then all ranks see all GPUs"


def test_agents_look_only_if_they_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "5")
    assert decode_description(describe(encode_needs("/", "sh", gpus=False))).host.gpus is None
    assert decode_description(describe(encode_needs("/", "sh", gpus=True))).host.gpus == Gpus(("5",), f"{VISIBLE}=5")


def test_where_it_is_said(tmp_path: Path) -> None:
    def asked(*words: str, environ: dict[str, str] | None = None) -> int:
        return parse([*words, "-np", "2", "true"], environ or {}).gpus_per_rank

    (tmp_path / "hvdrun.yaml").write_text("library_options:\n  gpus_per_rank: 2\n")
    assert asked() == 0
    assert asked("--gpus-per-rank", "1") == 1
    assert asked("--config-file", str(tmp_path / "hvdrun.yaml")) == 2
    assert asked("--config-file", str(tmp_path / "hvdrun.yaml"), "--gpus-per-rank", "3") == 3
    assert asked(environ={"HOROVODLIKE_GPUS_PER_RANK": "4"}) == 4
    with pytest.raises(UsageError, match="--gpus-per-rank='some' cannot be used: it must be an integer"):
        asked("--gpus-per-rank", "some")


def test_not_with_mpirun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mpi", "-np", "2", "--gpus-per-rank", "1", "true"]) == 2
    assert capsys.readouterr().err.startswith("hvdrun: --gpus-per-rank 1 cannot be used with --mpi: mpirun starts the")


@pytest.mark.parametrize(
    ("words", "environ", "name"),
    [
        (["--gpus-per-rank", "1"], {"HOROVODLIKE_GPUS_PER_RANK": "1"}, "--gpus-per-rank 1"),
        (["--config-file", "job.yaml"], {}, "library_options.gpus_per_rank=1"),
        ([], {"HOROVODLIKE_GPUS_PER_RANK": "1"}, "HOROVODLIKE_GPUS_PER_RANK=1"),
    ],
)
def test_errors_name_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], environ: dict[str, str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("library_options: {gpus_per_rank: 1}\n")
    with pytest.raises(UsageError, match=f"^{name} cannot be used with --mpi"):
        parse(["--mpi", "-np", "2", *words, "true"], environ)
    monkeypatch.setenv(VISIBLE, "")
    with pytest.raises(UsageError, match=f"^{name}: 2 ranks need 2 GPUs"):
        launch(parse(["-np", "2", *words, "true"], environ), ("true",), os.environ)


def shown(job: Any, ranks: int) -> list[str]:
    assert job.code == 0, job.err
    return [job.lines_of(rank)[0].decode().removeprefix("gpus=") for rank in range(ranks)]


def test_the_ranks_of_this_host(
    hvdrun: Callable[..., object], nvidia_smi: Callable[..., dict[str, str | None]]
) -> None:
    variables = nvidia_smi(here=4)
    job = hvdrun("-np", 2, "--gpus-per-rank", 2, *SHOW, env=variables)
    assert shown(job, 2) == [",".join(UUIDS[:2]), ",".join(UUIDS[2:])]
    job = hvdrun("-np", 2, "--gpus-per-rank", 1, "--verbose", *SHOW, env={**variables, VISIBLE: "7,3,5"})
    assert shown(job, 2) == ["7", "3"]
    assert f"hvdrun: each rank sees 1 of 3 GPUs ({VISIBLE}=7,3,5)\n" in job.err


def test_without_the_option_nothing_changes(
    hvdrun: Callable[..., object], nvidia_smi: Callable[..., dict[str, str | None]]
) -> None:
    variables = nvidia_smi("exit 1")
    assert shown(hvdrun("-np", 2, *SHOW, env=variables), 2) == ["all", "all"]
    assert shown(hvdrun("-np", 2, *SHOW, env={**variables, VISIBLE: "0"}), 2) == ["0", "0"]


def test_too_few_here(hvdrun: Callable[..., object], nvidia_smi: Callable[..., dict[str, str | None]]) -> None:
    job = hvdrun("-np", 2, "--gpus-per-rank", 1, *SHOW, env=nvidia_smi(here=1))
    assert (job.code, job.out) == (2, b"")
    assert re.fullmatch(
        r"hvdrun: --gpus-per-rank 1: 2 ranks need 2 GPUs, but this host has 1 \(/\S+ -L lists 1\); .+\n", job.err
    )


def test_the_ranks_of_other_hosts(
    hvdrun: Callable[..., object], nvidia_smi: Callable[..., dict[str, str | None]], ssh: Path
) -> None:
    variables = nvidia_smi(path=f"{ssh}:{os.environ['PATH']}", node1=2, here=1, node2=3)
    job = hvdrun("-H", "node1:2,localhost:1,node2:2", "--gpus-per-rank", 1, *SHOW, env=variables)
    assert shown(job, 5) == [*UUIDS[:2], UUIDS[0], *UUIDS[:2]]


@pytest.mark.parametrize("poor", ["node2", "localhost"])
def test_too_few_on_one_of_several_hosts(
    hvdrun: Callable[..., object], nvidia_smi: Callable[..., dict[str, str | None]], ssh: Path, poor: str
) -> None:
    variables = nvidia_smi(path=f"{ssh}:{os.environ['PATH']}", **{"node1": 2, "node2": 2, "here": 2} | {
        {"localhost": "here"}.get(poor, poor): 1})  # fmt: skip
    job = hvdrun("-H", "node1:2,node2:2,localhost:2", "--gpus-per-rank", 1, *SHOW, env=variables)
    assert (job.code, job.out) == (2, b"")
    assert job.err.startswith(f"hvdrun: {poor}: --gpus-per-rank 1: 2 ranks need 2 GPUs, but this host has 1 (")


def test_nodes_that_are_started_by_themselves(
    launch: Callable[..., Launch], nvidia_smi: Callable[..., dict[str, str | None]]
) -> None:
    where = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
    variables = {**nvidia_smi(here=1), "HOROVODLIKE_SECRET_KEY": secrets.token_hex(32)}

    def node(number: int, ranks: int) -> Launch:
        flags = ("--nnodes", 2, "--node-rank", number, "--rendezvous", f"{where}:29400")
        return launch(*flags, "-np", ranks, "--gpus-per-rank", 1, *SHOW, env=variables)

    ended = [each.finish() for each in [node(1, 1), node(0, 1)]]
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    assert ended[0].lines_of(1) == ended[1].lines_of(0) == [f"gpus={UUIDS[0]}".encode()]

    ended = [each.finish() for each in [node(1, 2), node(0, 1)]]
    assert [each.code for each in ended] == [2, 1], [each.err for each in ended]
    assert all("--gpus-per-rank 1: 2 ranks need 2 GPUs, but this host has 1 (" in each.err for each in ended)


def visible() -> str:
    return os.environ[VISIBLE]


def test_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,6")
    assert horovodlike.run(visible, np=2) == ["4,6", "4,6"]
    assert horovodlike.run(visible, np=2, gpus_per_rank=1) == ["4", "6"]
    with pytest.raises(UsageError, match="^gpus_per_rank=1: 3 ranks need 3 GPUs, but this host has 2"):
        horovodlike.run(visible, np=3, gpus_per_rank=1)
    with pytest.raises(UsageError, match="gpus_per_rank='-1' cannot be used"):
        horovodlike.run(visible, np=3, gpus_per_rank=-1)
    monkeypatch.setenv("HOROVODLIKE_GPUS_PER_RANK", "1")
    with pytest.raises(
        UsageError, match="^HOROVODLIKE_GPUS_PER_RANK=1: 3 ranks .* leave HOROVODLIKE_GPUS_PER_RANK out"
    ):
        horovodlike.run(visible, np=3)


def test_too_few_for_workers(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 2, "--min-np", 1, "--gpus-per-rank", 1, sys.executable, "-c", "", env={VISIBLE: "0"})
    assert (job.code, job.out) == (2, b"")
    assert "--gpus-per-rank 1: 2 ranks need 2 GPUs, but this host has 1 (" in job.err
