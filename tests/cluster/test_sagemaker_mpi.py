"""SageMaker's `distribution={"mpi": ...}`: the runner of its toolkit starts the ranks with Open MPI 4, by ssh.

Played is what the toolkit does in a container for PyTorch, with processes, addresses, a name and /opt/ml of each host's
own. The test shortens only the sleeps of 30 seconds after the end, and moves the file by which the first host announces
that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import namespaces
from cluster.hosts import Cluster, Host
from cluster.namespaces import command
from cluster.pods import Pods
from cluster.sshd import PRIVILEGE_SEPARATION

pytestmark = [pytest.mark.cluster("ssh", "sshd", "mpirun"), pytest.mark.slow]

# As in sagemaker_pytorch_container/training.py.
TOOLKIT = """
    import time, types
    from sagemaker_training import entry_point, environment, logging_config, mpi, runner

    logging_config.configure_logger(20)
    mpi.time = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.2)))
    mpi.MPI_FINISHED_STATUS_FILE = "{folder}/done"
    env = environment.Environment()
    entry_point.run(
        env.module_dir, env.user_entry_point, env.to_cmd_args(), env.to_env_vars(), runner_type=runner.MPIRunnerType
    )
"""
TRAIN = """
    import horovodlike

    horovodlike.init()
    total = int(horovodlike.allreduce(float(horovodlike.rank()), op=horovodlike.Sum))
    print(f"rank {horovodlike.rank()} of {horovodlike.size()}, {horovodlike.local_rank()} on host "
          f"{horovodlike.cross_rank()}: total {total}", flush=True)
"""
# Also where /opt holds what is needed, or /opt/ml does not exist.
CONTAINER = """
    hostname "$0" && mount -t overlay none -o "lowerdir=$1:/opt" /opt && mount --bind "$2" /opt/ml && shift 2 &&
    exec "$@"
"""
SSHD = "HostKey /etc/ssh/key\nAuthorizedKeysFile /etc/ssh/key.pub\nPidFile none\nUsePAM no\nPermitRootLogin yes\n"
SSHD += "SetEnv SHLVL=2\n"  # as in `cluster.sshd`
SSH = "IdentityFile /etc/ssh/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
NAMES = ("algo-1", "algo-2")


def prepare_ssh(cluster: Cluster, folder: Path) -> None:
    """Give the hosts the keys that an image for this has: one pair for all hosts and users."""
    made = folder / "etc-ssh"
    made.mkdir()
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made / "key")
    (made / "sshd_config").write_text(SSHD)
    (made / "ssh_config").write_text(SSH)
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    (folder / ".ssh").mkdir()  # paramiko's
    (folder / ".ssh/id_ed25519").symlink_to(made / "key")
    lines = [f"{host.ipv4} {name}\n" for host, name in zip(cluster.hosts, NAMES, strict=True)]
    for host in cluster.hosts:
        (namespaces.ETC / host.namespace / "ssh").symlink_to(made)
        cluster.write_etc(host, "hosts", "".join(["127.0.0.1 localhost\n", *lines]))
        cluster.write_etc(host, "environment", "")  # to which the toolkit adds its own


def start(pods: Pods, host: Host, name: str) -> subprocess.Popen[bytes]:
    base = pods.folder / name
    for each in ("input/config", "input/data", "output", "code", "model"):
        (base / each).mkdir(parents=True)
    resources = {"current_host": name, "hosts": NAMES, "network_interface_name": "eth0"}
    (base / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    (base / "input/config/inputdataconfig.json").write_text("{}")
    hyperparameters = {
        "sagemaker_program": "train.py",
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
        # mpi4py's wheels do not find Debian's library by themselves.
        "sagemaker_mpi_custom_mpi_options": "--oversubscribe -x MPI4PY_LIBMPI=libmpi.so.40 -x OMP_NUM_THREADS",
    }
    texts = {each: json.dumps(value) for each, value in hyperparameters.items()}
    (base / "input/config/hyperparameters.json").write_text(json.dumps(texts))
    (base / "code/train.py").write_text(textwrap.dedent(TRAIN))
    (pods.folder / "opt/ml").mkdir(parents=True, exist_ok=True)
    own = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    toolkit = textwrap.dedent(TOOLKIT).format(folder=pods.folder)
    words = [*own, "sh", "-c", CONTAINER, name, pods.folder / "opt", base, sys.executable, "-c", toolkit]
    variables = {"HOME": str(pods.folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    return pods.popen(host, words, **variables)


def test_the_toolkits_mpi_runner(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = fresh_cluster(2, ipv6=False)
    prepare_ssh(cluster, tmp_path)
    pods = Pods(tmp_path, TRAIN)
    try:
        jobs = [start(pods, host, name) for host, name in zip(cluster.hosts, NAMES, strict=True)]
        for job in jobs:
            assert job.wait(120) == 0, pods.text(job)  # the toolkit imports TensorFlow if it can
        first, second = map(pods.text, jobs)
    finally:
        pods.close()
    for rank in range(4):
        assert f"rank {rank} of 4, {rank % 2} on host {rank // 2}: total 6" in first
    assert "Orted process exited" in second
    assert "MPI training job status file found. Exit gracefully" in second
    assert cluster.processes() == {}
