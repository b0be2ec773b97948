"""Ray Train with horovodlike as its backend, and the examples, run the way their users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray.train
from ray import cloudpickle
from ray.train.torch import TorchConfig, TorchTrainer

from horovodlike.ray import HorovodlikeConfig

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "ray"


@pytest.mark.timeout(600)  # Ray starts a process for each worker, which imports PyTorch
def test_the_page_about_ray_runs(cluster, tmp_path):
    page = (ROOT / "docs" / "users" / "ray.md").read_text()
    script = tmp_path / "train.py"
    watchdog = "import faulthandler\nfaulthandler.dump_traceback_later(500, exit=True)\n"  # if it hangs, it says where
    script.write_text(watchdog + "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)))
    done = subprocess.run(
        [sys.executable, "-P", script],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address},  # else it would find this cluster, and wait for its nodes
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fit(function, config, storage, failures=0, **arguments):
    return TorchTrainer(
        function,
        train_loop_config=arguments,
        torch_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=3),
        run_config=ray.train.RunConfig(
            storage_path=str(storage), failure_config=ray.train.FailureConfig(max_failures=failures)
        ),
    ).fit()


def report(metrics, folder, rank):
    (Path(folder) / "step").write_text(str(metrics["step"]))
    kept = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
    ray.train.report(metrics, checkpoint=kept)


def count_steps(config):
    import tempfile

    import torch

    import horovodlike.torch as hvd

    hvd.init()
    context = ray.train.get_context()
    assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    # Ray Train counts local ranks by IP address, which the nodes of a cluster on one machine have in common.
    assert hvd.local_size() <= context.get_local_world_size()
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int((Path(folder) / "step").read_text()) + 1
    for step in range(first, 3):
        if step == 2 and first == 0 and hvd.rank() == 1:
            os._exit(1)
        total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
        with tempfile.TemporaryDirectory() as folder:
            report({"step": step, "total": total, "first": first}, folder, hvd.rank())


@pytest.mark.thorough
def test_a_worker_that_dies_costs_a_restart_from_the_last_checkpoint(cluster, tmp_path):
    result = fit(count_steps, HorovodlikeConfig(timeout_s=60), tmp_path, failures=1)
    assert result.metrics["step"] == 2 and result.metrics["total"] == 3.0
    assert 1 <= result.metrics["first"] <= 2


def reduce_by_torch(config):
    import tempfile

    import torch
    import torch.distributed as dist

    values = torch.ones(3)
    dist.all_reduce(values)
    with tempfile.TemporaryDirectory() as folder:
        report({"step": 0, "backend": dist.get_backend(), "total": values[0].item()}, folder, dist.get_rank())


@pytest.mark.thorough
def test_rays_own_torch_backend_takes_the_name_of_ours(cluster, tmp_path):
    result = fit(reduce_by_torch, TorchConfig(backend="hvd"), tmp_path)
    assert (result.metrics["backend"], result.metrics["total"]) == ("hvd", 3.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "accuracy", "options"),
    [
        ("digits_executor.py", r"test accuracy: (\S+)%", ()),
        ("digits_train.py", r"'accuracy': (\S+),", ("--storage",)),
        ("digits_keras.py", r"'accuracy': (\S+),", ("--storage",)),
    ],
)
def test_example(cluster, tmp_path, name, accuracy, options):
    command = [sys.executable, "-P", str(EXAMPLES / name), "--address", cluster.address]
    command += ["--epochs", "6"] if name == "digits_train.py" else []  # each takes Ray Data a second and more
    command += [word for option in options for word in (option, str(tmp_path / "results"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(rf"2 ranks: .*{accuracy}", done.stdout)
    assert float(found) / (100 if options == () else 1) > 0.93, done.stdout
    if name == "digits_train.py":
        assert "'images': 1796" in done.stdout, "each image is seen once in an epoch"
