"""The jobs in packaging/kubernetes, played on hosts that stand for pods.

A test takes command and variables from the manifests, adds what the controller of that kind of job would add, and runs
the command in each pod, under the host name and with the names that DNS would have.
"""

from __future__ import annotations

import itertools
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

from cluster.hosts import Cluster, Host
from cluster.namespaces import command, wait_until
from cluster.pods import ELASTIC, SLACK_S, Pods
from cluster.sshd import PRIVILEGE_SEPARATION

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MANIFESTS = Path(__file__).parents[2] / "packaging" / "kubernetes"
DOMAIN = "default.svc.cluster.local"
SUM = """
    import horovodlike as hvd

    hvd.init()
    print(f"rank {hvd.rank()} of {hvd.size()} on {hvd.cross_rank()}:", int(hvd.allreduce(1.0, op=hvd.Sum)), flush=True)
"""
FOREVER = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"
# In a container, the command is process 1.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def objects(kind: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in kustomization.render(MANIFESTS / kind)}


class Containers(Pods):
    """The containers of a job's pods."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SUM)
        self.key = secrets.token_hex(32)

    def start(
        self, host: Host, container: dict[str, Any], name: str, *wrapper: str, **added: str
    ) -> subprocess.Popen[bytes]:
        """Run a container's command in a pod; `wrapper` runs it, `added` are the controller's variables."""
        programs = {"hvdrun": [sys.executable, "-P", "-m", "horovodlike.launcher"], "python": [sys.executable]}
        words = [word for each in container["command"] for word in programs.get(each, [each])]
        variables = {each["name"]: each.get("value", self.key) for each in container["env"]}
        pod = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', name)
        argv = [*pod, "setpriv", "--pdeathsig", "KILL", *wrapper, *words]
        return self.popen(host, argv, CUDA_VISIBLE_DEVICES="", **variables, **added)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path)
    yield made
    made.close()


def resolve(cluster: Cluster, names: dict[str, str]) -> None:
    """Let all hosts resolve these pods, by all that a pod's search list lets one write."""
    for host in cluster.hosts:
        resolve_in(cluster, host, names)


def resolve_in(cluster: Cluster, host: Host, names: dict[str, str]) -> None:
    lines = ["127.0.0.1 localhost"]
    for name, address in names.items():
        lines.append(f"{address} {name}.{DOMAIN} {name} {name}.default {name}.default.svc {name.partition('.')[0]}")
    cluster.write_etc(host, "hosts", "\n".join([*lines, ""]))


def check_sum(pods: Containers, jobs: list[subprocess.Popen[bytes]]) -> None:
    pods.end(*jobs)
    for number, job in enumerate(jobs):
        assert pods.text(job) == f"[{number}]<stdout>: rank {number} of {len(jobs)} on {number}: {len(jobs)}\n"


@pytest.mark.parametrize("kind", ["indexed-job", "jobset"])
def test_completion_indexes(fresh_cluster: Callable[..., Cluster], pods: Containers, kind: str) -> None:
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
    pods.write_script(FOREVER)
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


def test_a_trainjob(fresh_cluster: Callable[..., Cluster], pods: Containers) -> None:
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


class MpiJob:
    """An MPIJob, with what the operator adds: a key pair in a Secret, and the files of a ConfigMap."""

    def __init__(self, pods: Containers, cluster: Cluster) -> None:
        self.pods, self.cluster = pods, cluster
        self.spec = objects("mpijob")["MPIJob"]["spec"]
        self.name = objects("mpijob")["MPIJob"]["metadata"]["name"]
        self.keys, self.mount = pods.folder / "ssh", pods.folder / "mpi"
        self.keys.mkdir()
        self.mount.mkdir()
        command("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", self.keys / "id_rsa")
        (self.keys / "authorized_keys").write_text((self.keys / "id_rsa.pub").read_text())
        # The files of the image, for root, since ordinary users cannot run tests.
        for file in ("sshd_config", "ssh_config"):
            text = (MANIFESTS / file).read_text().replace("PermitRootLogin no", "PermitRootLogin prohibit-password")
            assert self.spec["sshAuthMountPath"] in text
            (self.keys / file).write_text(text.replace(self.spec["sshAuthMountPath"], str(self.keys)))
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        self._addresses: dict[str, str] = {}
        self._versions = itertools.count()

    def _container(self, role: str) -> dict[str, Any]:
        container: dict[str, Any] = self.spec["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0]
        return container

    def start_worker(self, host: Host, index: int, *wrapper: str) -> subprocess.Popen[bytes]:
        worker, name = self._container("Worker"), f"{self.name}-worker-{index}"
        self._addresses[f"{name}.{self.name}"] = host.ipv4
        resolve(self.cluster, self._addresses)
        *sshd, config = worker["command"]
        assert config.endswith("/sshd_config")
        argv = [*sshd, str(self.keys / "sshd_config")]
        server = self.pods.start(host, {**worker, "command": argv}, name, *wrapper, K_MPI_JOB_ROLE="worker")
        self.pods.wait(server, rf"Server listening on \S+ port {worker['readinessProbe']['tcpSocket']['port']}")
        return server

    def script(self, *running: int) -> str:
        lines = (f"echo {self.name}-worker-{index}.{self.name}.default.svc\n" for index in running)
        return "#!/bin/sh\n" + "".join(lines)

    def mount_files(self, replicas: int, *running: int) -> None:
        """Write the ConfigMap's files and swap them in, as the kubelet does: `running` are the workers that run."""
        slots = f"slots={self.spec['slotsPerWorker']}"
        hosts = (f"{self.name}-worker-{index}.{self.name}.default.svc {slots}\n" for index in range(replicas))
        version = self.mount / f"..{next(self._versions)}"
        version.mkdir()
        (version / "hostfile").write_text("".join(hosts))
        (version / "discover_hosts.sh").write_text(self.script(*running))
        (version / "discover_hosts.sh").chmod(0o555)
        (self.mount / "..new").symlink_to(version.name)
        (self.mount / "..new").replace(self.mount / "..data")
        for file in ("hostfile", "discover_hosts.sh"):
            if not (self.mount / file).is_symlink():
                (self.mount / file).symlink_to(f"..data/{file}")

    def start_launcher(self, host: Host, *flags: str) -> subprocess.Popen[bytes]:
        launcher = self._container("Launcher")
        added = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": str(self.mount / "hostfile")}
        added |= {"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}
        program, *rest = launcher["command"]
        ssh = ("--ssh-options", f"-F {self.keys / 'ssh_config'}")  # what Debian's ssh reads in the image
        return self.pods.start(
            host, {**launcher, "command": [program, *ssh, *flags, *rest]}, f"{self.name}-launcher", **added
        )


@pytest.mark.cluster("ssh", "sshd")
def test_an_mpijob(fresh_cluster: Callable[..., Cluster], pods: Containers) -> None:
    cluster = fresh_cluster(3, ipv6=False)
    job = MpiJob(pods, cluster)
    assert job.spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    *workers, first = cluster.hosts
    for host in workers:
        job.start_worker(host, host.number)
    job.mount_files(2, 0, 1)
    started = job.start_launcher(first)
    pods.end(started)
    lines = sorted(pods.text(started).splitlines())
    assert lines == [f"[{number}]<stdout>: rank {number} of 2 on {number}: 2" for number in (0, 1)]


@pytest.mark.cluster("ssh", "sshd")
def test_an_elastic_mpijob(fresh_cluster: Callable[..., Cluster], pods: Containers) -> None:
    cluster = fresh_cluster(4, ipv6=False)
    *hosts, first = cluster.hosts
    pods.write_script(ELASTIC)
    job = MpiJob(pods, cluster)
    job.mount_files(2)  # no pod runs yet
    launcher = job.start_launcher(first, "--min-np", "1", "--max-np", "3")
    lost = job.start_worker(hosts[0], 0, *CONTAINER)
    job.start_worker(hosts[1], 1)
    job.mount_files(2, 0, 1)
    pods.wait(launcher, r"size 2 at step \d")
    (job.mount / "discover_hosts.sh").write_text(job.script(0, 1)[:6])  # read before all of it was there
    pods.wait(launcher, "the hosts cannot be found out, and stay as they are")
    lost.kill()
    pods.wait(launcher, rf"hvdrun: {job.name}-worker-0\S* cannot be used")
    pods.wait(launcher, rf"size 1 at step [1-9]\d* on {job.name}-worker-1")
    job.mount_files(3, 1)
    job.start_worker(hosts[2], 2)  # the job is scaled
    job.mount_files(3, 1, 2)
    pods.wait(launcher, r"size 2 at step [1-9]\d*")
    (job.mount / "discover_hosts.sh").write_text(job.script(1, 2)[:-20])  # a name without its end
    pods.wait(launcher, rf"hvdrun: {job.name}-worker- cannot be used: ssh says")
    job.mount_files(3, 1, 2)
    job.start_worker(hosts[0], 0)  # the operator has made it anew
    job.mount_files(3, 0, 1, 2)
    pods.wait(launcher, r"size 3 at step [1-9]\d*")
    pods.finish(launcher)


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


def test_elastic_pods(fresh_cluster: Callable[..., Cluster], pods: Containers) -> None:
    found = objects("elastic")
    template = found["Job"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    name, service = found["Job"]["metadata"]["name"], template["spec"]["subdomain"]
    cluster = fresh_cluster(5, ipv6=False)
    leader_host = cluster.hosts[0]
    pods.write_script(ELASTIC)
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
    pods.finish(leader, again, scaled)
    assert pods.text(leader).count("cannot be used") == 1  # the pod that was lost, not the one that was evicted
