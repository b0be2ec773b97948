"""Starting the backend `hvd`: without an import, by any means of meeting, and everything that can be wrong then."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plain_ranks import PlainRanks
from support.process_groups import own_engine, process_group


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _train(url: str, rank: int, size: int, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    import torch.distributed as dist

    before = [name for name in sys.modules if name.startswith("horovodlike.torch")]
    given = {"rank": rank, "world_size": size} if url else {}
    dist.init_process_group(init_method=url or None, **given, **{"backend": "hvd", **options})
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist(), before


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", ["file", "tcp", "env", "devices"])
def test_any_init_method_without_an_import(tmp_path, how, size):
    port = _free_port()
    url = {"file": f"file://{tmp_path / 'store'}", "tcp": f"tcp://127.0.0.1:{port}"}.get(how, "")
    options = {"backend": "cpu:hvd,cuda:nccl"} if how == "devices" else {}
    environments = [
        {
            **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        for rank in range(size)
    ]
    ranks = PlainRanks(_train, [(url, rank, size, options) for rank in range(size)], environments)
    assert ranks.values() == [([size * (size + 1) / 2] * 3, [])] * size


def _on_hosts(url: str, rank: int, size: int) -> list[int]:
    import torch.distributed as dist

    import horovodlike.torch as hvd

    dist.init_process_group("hvd", init_method=url, rank=rank, world_size=size)
    tensors = []
    for chosen in ([0, 2], [1], [1, 2], [0, 1, 2]):
        group = dist.new_group(chosen)
        if rank in chosen:
            dist.all_reduce(tensor := torch.full((50_000,), rank + 1), group=group)
            tensors.append(int(tensor[-1]))
    dist.barrier()
    place = [hvd.local_rank(), hvd.local_size(), hvd.cross_size()]
    dist.destroy_process_group()
    return [*place, *tensors]


def test_ranks_of_several_hosts(tmp_path):
    environments = [{"HOROVODLIKE_HOSTID": host, "HOROVODLIKE_NETWORK_INTERFACE": "lo"} for host in "aab"]
    ranks = PlainRanks(_on_hosts, [(f"file://{tmp_path / 'store'}", rank, 3) for rank in range(3)], environments)
    assert ranks.values() == [[0, 2, 2, 4, 6], [1, 2, 1, 2, 5, 6], [0, 1, 2, 4, 5, 6]]


TWICE = """
import os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
for meeting in sys.argv[1:]:
    dist.init_process_group("hvd", init_method=meeting, rank=rank, world_size=2)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]
    dist.destroy_process_group()
import horovodlike.torch as hvd
hvd.init()
assert (hvd.rank(), hvd.size()) == (rank, 2)
print("trained")
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
HVDRUN = [str(Path(sys.executable).parent / "hvdrun"), "-np", "2", sys.executable]


# The store of `env://` is torchrun's, but with hvdrun rank 0's: a quick rank would meet the store that ends.
@pytest.mark.parametrize(
    ("launcher", "second"),
    [
        pytest.param(TORCHRUN, "env://", id="torchrun"),
        pytest.param(HVDRUN, "file://{folder}/store", id="hvdrun", marks=pytest.mark.slow),
    ],
)
def test_under_a_launcher(tmp_path, launcher, second):
    script = tmp_path / "script.py"
    script.write_text(TWICE)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    words = [*launcher, str(script), "env://", second.format(folder=tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("trained")) == (0, 2), done.stderr


def _error_of(url: str, rank: int, size: int, init_first: bool, timeout: float) -> str:
    import torch.distributed as dist

    import horovodlike.torch as hvd

    if init_first:
        hvd.init()
    with pytest.raises(RuntimeError) as caught:
        dist.init_process_group(
            "hvd", init_method=url, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
        )
    return str(caught.value)


def test_another_world_size_than_that_of_hvd_init(tmp_path):
    url = f"file://{tmp_path / 'store'}"
    ranks = PlainRanks(_error_of, [(url, rank, 2, True, 30.0) for rank in range(2)])  # jobs of one
    for message in ranks.values():
        assert "says that this is rank 0 of 2, but hvd.init() has made it rank 0 of 1" in message


def test_hvd_init_on_some_ranks_only(tmp_path):
    url = f"file://{tmp_path / 'store'}"
    ranks = PlainRanks(_error_of, [(url, rank, 2, rank == 1, 30.0) for rank in range(2)])
    for message in ranks.values():
        assert "rank 1 of the process group had called hvd.init() before init_process_group, and rank 0 had" in message


def test_a_rank_that_does_not_come(tmp_path):
    url = f"file://{tmp_path / 'store'}"
    ranks = PlainRanks(_error_of, [(url, rank, 3, False, 1.0) for rank in range(2)])
    outcomes = ranks.collect()
    assert all(outcome.ok and outcome.seconds < 20 for outcome in outcomes), outcomes
    assert "after 1 s rank 2 of 3 had not called init_process_group" in outcomes[0].value


def _twice(store: Path) -> None:
    import torch.distributed as dist

    with process_group(store), pytest.raises(ValueError, match="twice"):
        dist.init_process_group("hvd", init_method=f"file://{store}2", rank=0, world_size=1)


def _options(store: Path) -> None:
    import torch.distributed as dist

    with (
        pytest.raises(TypeError, match="backend hvd has no options.*settings"),
        process_group(store, pg_options=object()),
    ):
        pass
    assert not dist.is_initialized()


def _forked(store: Path) -> None:
    import torch.distributed as dist

    with process_group(store):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(ValueError, match="fork") as caught:
                    dist.all_reduce(torch.ones(1))
                os.write(write, f"{caught.value}".encode())
                dist.destroy_process_group()
                dist.init_process_group("hvd", init_method=f"file://{store}{os.getpid()}", rank=0, world_size=1)
                dist.all_reduce(torch.ones(1))
                os.write(write, b"; a group of its own")
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        said = os.read(read, 10_000).decode()
        os.close(read)
        os.close(write)
        assert said.endswith("; a group of its own"), said
        dist.all_reduce(tensor := torch.ones(1))
        assert tensor.item() == dist.get_world_size()


def test_init_process_group_twice(ranks, tmp_path):
    ranks(2).run(_twice, tmp_path / "store")


def test_backend_options(ranks, tmp_path):
    ranks(2).run(_options, tmp_path / "store")


def test_after_fork(ranks, tmp_path):
    ranks(2).run(_forked, tmp_path / "store")


def _after_restart(store: Path) -> None:
    import torch.distributed as dist

    import horovodlike.torch as hvd

    with process_group(store):
        hvd.shutdown()
        with pytest.raises(ValueError, match="not been initialized"):
            dist.all_reduce(torch.ones(1))
        hvd.init()
        with pytest.raises(RuntimeError, match="of the job before the last init"):
            dist.all_reduce(torch.ones(1))
    with process_group(Path(f"{store}2")):
        dist.all_reduce(torch.ones(1))
    with own_engine(Path(f"{store}3")):
        hvd.shutdown()
        hvd.init()  # of the script's own: the group leaves it alone
    assert hvd.is_initialized()


def test_a_group_of_an_engine_that_has_ended(ranks, tmp_path):
    ranks(2).run(_after_restart, tmp_path / "store")


def test_an_older_torch():
    from horovodlike.torch.distributed import check_version

    for version in ("2.1.0", "2.13.0+cpu", "3.0.0a0"):
        check_version(version)
    with pytest.raises(ImportError, match="needs torch 2.1 or newer; installed is 2.0.1"):
        check_version("2.0.1")


def test_the_entry_point_never_raises(monkeypatch):
    import horovodlike_torch_backend
    import torch.distributed as dist

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *_, **__: 1 / 0)
    horovodlike_torch_backend.register()
    program = "import sys, torch; print([name for name in sys.modules if name.startswith('horovodlike')])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['horovodlike_torch_backend']"


@pytest.mark.parametrize("order", (1, pytest.param(-1, marks=pytest.mark.slow)))
def test_the_backend_is_registered_once_where_autoload_is_off(order):
    ways = "import horovodlike.torch.distributed", "import horovodlike_torch_backend as it; it.register()"
    first, second = ways[::order]
    program = f"""
from torch.distributed import Backend
assert "hvd" not in Backend.backend_list
{first}
plugin = Backend._plugins["HVD"]
{second}
assert Backend._plugins["HVD"] is plugin
print(plugin.extended_api, Backend.backend_capability["hvd"])
"""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True ['cpu', 'cuda']\n"
