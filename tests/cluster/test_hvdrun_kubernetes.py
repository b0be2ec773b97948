"""The jobs in packaging/kubernetes, played on hosts that stand for pods.

A test takes command and variables from the manifests, adds what the controller of that kind of job would add, and runs
the command in each pod, under the host name and with the names that DNS would have.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import kustomization

from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import command, wait_until
from cluster.sshd import PRIVILEGE_SEPARATION

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MANIFESTS = Path(__file__).parents[2] / "packaging" / "kubernetes"
DOMAIN = "default.svc.cluster.local"
SLACK_S = 20.0
SUM = """
    import horovodlike as hvd

    hvd.init()
    print(f"rank {hvd.rank()} of {hvd.size()} on {hvd.cross_rank()}:", int(hvd.allreduce(1.0, op=hvd.Sum)), flush=True)
"""
FOREVER = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"
# In a container, the command is process 1.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# All ranks commit each step, and say when their number has changed; a file ends them.
ELASTIC = """
    import time
    from pathlib import Path

    import numpy as np

    import horovodlike as hvd
    from horovodlike import elastic

    @elastic.run
    def train(state):
        print(f"size {hvd.size()} at step {state.step}", flush=True)
        while not hvd.allreduce(np.array([Path("finish").exists()], np.int32), op=hvd.Sum)[0]:
            state.step += 1
            time.sleep(0.005)
            state.commit()

    hvd.init()
    train(elastic.ObjectState(step=0))
"""


def objects(kind: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in kustomization.render(MANIFESTS / kind)}


class Pods:
    """The processes that were started in pods, with what they print in a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = secrets.token_hex(32)
        self.logs: dict[subprocess.Popen[bytes], Path] = {}
        (folder / "train.py").write_text(textwrap.dedent(SUM))

    def start(
        self, host: Host, container: dict[str, Any], name: str, *wrapper: str, **added: str
    ) -> subprocess.Popen[bytes]:
        """Run a container's command in a pod; `wrapper` runs it, `added` are the controller's variables."""
        programs = {"hvdrun": [sys.executable, "-P", "-m", "horovodlike.launcher"], "python": [sys.executable]}
        words = [word for each in container["command"] for word in programs.get(each, [each])]
        variables = {each["name"]: each.get("value", self.key) for each in container["env"]}
        pod = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', name)
        log = self.folder / f"log.{len(self.logs)}"
        with log.open("wb") as file:
            job = host.popen(
                [*pod, "setpriv", "--pdeathsig", "KILL", *wrapper, *words],
                cwd=self.folder,
                env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **variables, **added),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.logs[job] = log
        return job

    def text(self, job: subprocess.Popen[bytes]) -> str:
        return self.logs[job].read_text()

    def wait(self, job: subprocess.Popen[bytes], pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.text(job)), f"{pattern!r} in {self.logs[job]}", SLACK_S)

    def end(self, *jobs: subprocess.Popen[bytes]) -> None:
        for job in jobs:
            assert job.wait(SLACK_S) == 0, self.text(job)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    for job in made.logs:
        job.kill()
        job.wait()


def resolve(cluster: Cluster, names: dict[str, str]) -> None:
    """Let all hosts resolve these pods, by all that a pod's search list lets one write."""
    for host in cluster.hosts:
        resolve_in(cluster, host, names)


def resolve_in(cluster: Cluster, host: Host, names: dict[str, str]) -> None:
    lines = ["127.0.0.1 localhost"]
    for name, address in names.items():
        lines.append(f"{address} {name}.{DOMAIN} {name} {name}.default {name}.default.svc {name.partition('.')[0]}")
    cluster.write_etc(host, "hosts", "\n".join([*lines, ""]))


def check_sum(pods: Pods, jobs: list[subprocess.Popen[bytes]]) -> None:
    pods.end(*jobs)
    for number, job in enumerate(jobs):
        assert pods.text(job) == f"[{number}]<stdout>: rank {number} of {len(jobs)} on {number}: {len(jobs)}\n"


@pytest.mark.parametrize("kind", ["indexed-job", "jobset"])
def test_completion_indexes(fresh_cluster: Callable[..., Cluster], pods: Pods, kind: str) -> None:
    found = objects(kind)
    if kind == "jobset":
        jobset = found["JobSet"]
        [replicated] = jobset["spec"]["replicatedJobs"]
        job, prefix = replicated["template"], f"{jobset['metadata']['name']}-{replicated['name']}-0"
        subdomain = jobset["metadata"]["name"]
    else:
        job = found["Job"]
        prefix, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    cluster = fresh_cluster(job["spec"]["completions"], ipv6=False)
    names = [f"{prefix}-{host.number}" for host in cluster.hosts]
    resolve(cluster, {f"{name}.{subdomain}": host.ipv4 for name, host in zip(names, cluster.hosts, strict=True)})

    def start(*wrapper: str) -> list[subprocess.Popen[bytes]]:
        return [
            pods.start(host, container, name, *wrapper, JOB_COMPLETION_INDEX=str(host.number))
            for name, host in zip(names, cluster.hosts, strict=True)
        ]

    check_sum(pods, start(*CONTAINER))
    assert cluster.processes() == {}
    (pods.folder / "train.py").write_text(FOREVER)
    jobs = start(*CONTAINER)
    for each in jobs:
        pods.wait(each, "ready")
    jobs[-1].kill()  # a pod is lost: all fail, so that the controller starts them anew
    for each in jobs[:-1]:
        assert each.wait(SLACK_S) == 1, pods.text(each)
    wait_until(lambda: cluster.processes() == {}, "the end of everything")
    jobs = start()
    for each in jobs:
        pods.wait(each, "ready")
    jobs[-1].send_signal(signal.SIGTERM)  # a pod is evicted: all end with a code that is not counted
    uncounted = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    for each in jobs:
        assert each.wait(SLACK_S) in uncounted, pods.text(each)


def test_a_trainjob(fresh_cluster: Callable[..., Cluster], pods: Pods) -> None:
    job, runtime = objects("trainjob")["TrainJob"], objects("trainer")["ClusterTrainingRuntime"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node")
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    container = {**container, "command": trainer["command"]}
    cluster = fresh_cluster(trainer["numNodes"], ipv6=False)
    names = [f"{name}-node-0-{host.number}" for host in cluster.hosts]
    resolve(cluster, {f"{each}.{name}": host.ipv4 for each, host in zip(names, cluster.hosts, strict=True)})
    added = {"PET_NNODES": str(len(names)), "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29500"}
    added["PET_MASTER_ADDR"] = f"{names[0]}.{name}"
    jobs = [
        pods.start(
            host, container, each, **added, PET_NODE_RANK=str(host.number), JOB_COMPLETION_INDEX=str(host.number)
        )
        for each, host in zip(names, cluster.hosts, strict=True)
    ]
    check_sum(pods, jobs)
    assert cluster.processes() == {}


@pytest.mark.cluster("ssh", "sshd")
def test_an_mpijob(fresh_cluster: Callable[..., Cluster], pods: Pods) -> None:
    job = objects("mpijob")["MPIJob"]
    roles = job["spec"]["mpiReplicaSpecs"]
    launcher, worker = (roles[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker"))
    folder, name = Path(job["spec"]["sshAuthMountPath"]), job["metadata"]["name"]
    cluster = fresh_cluster(roles["Worker"]["replicas"] + 1, ipv6=False)
    *workers, first = cluster.hosts
    names = [f"{name}-worker-{host.number}" for host in workers]
    resolve(cluster, {f"{each}.{name}": host.ipv4 for each, host in zip(names, workers, strict=True)})

    # The Secret with a key pair; and the files of the image, for root, since ordinary users cannot run tests.
    keys = pods.folder / "ssh"
    keys.mkdir()
    command("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", keys / "id_rsa")
    (keys / "authorized_keys").write_text((keys / "id_rsa.pub").read_text())
    for file in ("sshd_config", "ssh_config"):
        text = (MANIFESTS / file).read_text().replace("PermitRootLogin no", "PermitRootLogin prohibit-password")
        assert str(folder) in text
        (keys / file).write_text(text.replace(str(folder), str(keys)))
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)

    # The ConfigMap of the launcher, and its variables.
    hosts = "".join(f"{each}.{name}.default.svc slots={job['spec']['slotsPerWorker']}\n" for each in names)
    (pods.folder / "hostfile").write_text(hosts)
    added = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": str(pods.folder / "hostfile")}
    added |= {"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}

    words = [str(keys / "sshd_config") if word.endswith("/sshd_config") else word for word in worker["command"]]
    for each, host in zip(names, workers, strict=True):
        server = pods.start(host, {**worker, "command": words}, each, K_MPI_JOB_ROLE="worker")
        port = worker["readinessProbe"]["tcpSocket"]["port"]
        pods.wait(server, rf"Server listening on \S+ port {port}")
    program, *rest = launcher["command"]
    words = [program, "--ssh-options", f"-F {keys / 'ssh_config'}", *rest]  # what Debian's ssh reads in the image
    started = pods.start(first, {**launcher, "command": words}, f"{name}-launcher", **added)
    pods.end(started)
    lines = sorted(pods.text(started).splitlines())
    assert lines == [f"[{number}]<stdout>: rank {number} of 2 on {number}: 2" for number in (0, 1)]


# Answers as the API server does, about the pods in a file.
API = """
    import json, sys
    from pathlib import Path

    sys.path.append(sys.argv[1])
    from kubernetes_api import KubernetesApi

    class Api(KubernetesApi):
        def answer(self, path, authorization):
            self.pods = json.loads(Path("pods.json").read_text())
            return super().answer(path, authorization)

    Api().write_config(Path("config"))
"""


def test_elastic_pods(fresh_cluster: Callable[..., Cluster], pods: Pods) -> None:
    pytest.importorskip("kubernetes")
    found = objects("elastic")
    template = found["Job"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    name, service = found["Job"]["metadata"]["name"], template["spec"]["subdomain"]
    cluster = fresh_cluster(5, ipv6=False)
    leader_host = cluster.hosts[0]
    (pods.folder / "train.py").write_text(textwrap.dedent(ELASTIC))
    (pods.folder / "api.py").write_text(textwrap.dedent(API))
    listed: dict[str, dict[str, Any]] = {}

    def tell() -> None:
        (pods.folder / "new.json").write_text(json.dumps(list(listed.values())))
        (pods.folder / "new.json").replace(pods.folder / "pods.json")

    def add(host: Host, index: int) -> subprocess.Popen[bytes]:
        listed[host.name] = {
            "metadata": {
                "name": f"{name}-{index}-{host.name}",
                "labels": template["metadata"]["labels"],
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"containers": []},
            "status": {"phase": "Running", "podIP": host.ipv4},
        }
        tell()
        resolve_in(cluster, host, {f"{name}-0.{service}": leader_host.ipv4, f"{name}-{index}.{service}": host.ipv4})
        added = {"JOB_COMPLETION_INDEX": str(index), "KUBECONFIG": str(pods.folder / "config")}
        return pods.start(host, container, f"{name}-{index}", **added)

    tell()
    api = Path(__file__).parents[1] / "launcher" / "elastic"
    leader_host.popen([sys.executable, "api.py", api], cwd=pods.folder)
    wait_until((pods.folder / "config").exists, "the API server")
    leader, evicted, lost = [add(host, host.number) for host in cluster.hosts[:3]]
    pods.wait(leader, r"size 3 at step \d")
    lost.kill()
    pods.wait(leader, "cannot be used")
    del listed[cluster.hosts[2].name]
    again = add(cluster.hosts[3], 2)  # with another address
    pods.wait(again, r"size 3 at step \d")
    scaled = add(cluster.hosts[4], 3)
    pods.wait(scaled, r"size 4 at step \d")
    listed[cluster.hosts[1].name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    tell()
    evicted.send_signal(signal.SIGTERM)
    assert evicted.wait(SLACK_S) == 143, pods.text(evicted)
    wait_until(
        lambda: len(re.findall(r"size 3 at step [1-9]", pods.text(leader))) == 2, "a job of three again", SLACK_S
    )
    (pods.folder / "finish").touch()
    pods.end(leader, again, scaled)
    assert pods.text(leader).count("cannot be used") == 1  # the pod that was lost, not the one that was evicted
