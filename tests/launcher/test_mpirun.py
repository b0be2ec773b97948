"""The command and the variables of `hvdrun --mpi`."""

from __future__ import annotations

import pytest

from horovodlike.launcher.agent.host_probe import Host
from horovodlike.launcher.cli import parse
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import Binding, JobSpec, RemoteStart
from horovodlike.launcher.planning.hosts import HostSlots
from horovodlike.launcher.planning.plan import JobIdentity
from horovodlike.launcher.schedulers.mpirun import (
    Flavor,
    Mpirun,
    find_mpirun,
    make_command,
    make_environ,
    make_ssh_variables,
    parse_version,
)

OPEN_MPI = Mpirun("/opt/bin/mpirun", Flavor.OPEN_MPI)
MPICH = Mpirun("/opt/bin/mpirun", Flavor.HYDRA)
COMMAND = ("python", "train.py")
TWO_HOSTS = (HostSlots("node-1", 2), HostSlots("node-2", 2))
KEY = "5e" * 32


def _spec(**more):
    return JobSpec(num_proc=4, command=COMMAND, mpi=True, **more)


@pytest.mark.parametrize(
    ("mpirun", "spec", "names", "is_root", "words"),
    [
        (OPEN_MPI, _spec(), [], False, "--tag-output --bind-to none --oversubscribe"),
        (
            OPEN_MPI,
            _spec(hosts=TWO_HOSTS, timestamps=True, bind_to=Binding.CORE, mpi_args=("--mca", "btl", "self,tcp")),
            ["PATH", "HOROVODLIKE_SECRET_KEY"],
            True,
            "--allow-run-as-root --tag-output --timestamp-output --bind-to core --host node-1:2,node-2:2 "
            "-x PATH -x HOROVODLIKE_SECRET_KEY --mca btl self,tcp",
        ),
        (MPICH, _spec(), [], True, "-prepend-rank -bind-to none"),
        (
            MPICH,
            _spec(hosts=TWO_HOSTS, bind_to=Binding.NUMA, mpi_args=("-iface", "eth1")),
            ["PATH"],
            False,
            "-prepend-rank -bind-to numa -hosts node-1:2,node-2:2 -iface eth1",
        ),
    ],
)
def test_command(mpirun, spec, names, is_root, words):
    command = make_command(mpirun, spec, COMMAND, names, is_root=is_root)
    assert command == ["/opt/bin/mpirun", "-np", "4", *words.split(), *COMMAND]


@pytest.mark.parametrize(
    ("mpirun", "spec", "told"),
    [
        (OPEN_MPI, _spec(output_directory="logs"), "--output-filename cannot be used with --mpi; give mpirun's own"),
        (MPICH, _spec(timestamps=True), "--prefix-output-with-timestamp cannot be used with MPICH's mpirun"),
    ],
)
def test_what_mpirun_cannot_do(mpirun, spec, told):
    with pytest.raises(UsageError, match=told):
        make_command(mpirun, spec, COMMAND, [], is_root=False)


def test_options_for_ssh():
    remote = RemoteStart(2222, "/keys/id", ("-o", "Compression=yes"))
    words = "-o Compression=yes -p 2222 -i /keys/id"
    assert make_ssh_variables(OPEN_MPI, remote) == {"OMPI_MCA_plm_rsh_args": words, "PRTE_MCA_plm_ssh_args": words}
    assert make_ssh_variables(MPICH, remote)["HYDRA_LAUNCHER_EXTRA_ARGS"] == words
    assert make_ssh_variables(OPEN_MPI, RemoteStart()) == {}
    with pytest.raises(UsageError, match=r"mpirun parts ssh's options at spaces, so it cannot pass '/my keys/id' on"):
        make_ssh_variables(MPICH, RemoteStart(ssh_identity_file="/my keys/id"))


def _host(cpus: int) -> Host:
    each = tuple((cpu,) for cpu in range(cpus))
    return Host(cpus=tuple(range(cpus)), cores=each, numa_nodes=(tuple(range(cpus)),))


def test_variables():
    identity = JobIdentity("job", KEY, "10.0.0.1,fe80::1", 4711)
    before = {"PATH": "/bin", "HOROVODLIKE_RANK": "3", "HOROVOD_SIZE": "9", "HOROVODLIKE_NODE_ID": "old"}
    spec = _spec(hosts=TWO_HOSTS, settings={"HOROVODLIKE_CPU_OPERATIONS": "mpi"}, bind_to=Binding.CORE)
    environ, said = make_environ(spec, COMMAND, _host(1), identity, before)
    assert environ == {
        "PATH": "/bin",
        "HOROVODLIKE_CPU_OPERATIONS": "mpi",
        "HOROVODLIKE_START_TIMEOUT": "30",
        "HOROVODLIKE_RENDEZVOUS_ADDR": "10.0.0.1,fe80::1",
        "HOROVODLIKE_RENDEZVOUS_PORT": "4711",
        "HOROVODLIKE_RENDEZVOUS_OWNER": "hvdrun",
        "HOROVODLIKE_SECRET_KEY": KEY,
        "HOROVODLIKE_JOB_ID": "job",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=33554432"
        ":glibc.malloc.hugetlb=1",
    }
    assert said == ["OMP_NUM_THREADS=1 for each of 2 ranks (1 core); set it yourself to change that"]


def test_a_job_that_does_not_fit_this_machine():
    identity = JobIdentity("job", KEY, "127.0.0.1", 4711)
    with pytest.raises(UsageError, match="--bind-to core: 4 ranks, but this process may use only 2 cores"):
        make_environ(_spec(bind_to=Binding.CORE), COMMAND, _host(2), identity, {})


@pytest.mark.parametrize(
    ("text", "flavor"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", Flavor.OPEN_MPI),
        ("mpirun (Open MPI) 5.0.11\n", Flavor.OPEN_MPI),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", Flavor.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\n", Flavor.HYDRA),
        ("mpiexec: error: unknown option --version\n", None),
    ],
)
def test_versions(text, flavor):
    assert parse_version(text) == flavor


def _program(folder, text: str) -> dict[str, str]:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_programs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "elsewhere" / "python"))
    with pytest.raises(UsageError, match="there is no mpirun beside this Python or on PATH; install an MPI library"):
        find_mpirun({"PATH": str(tmp_path)})
    environ = _program(tmp_path, "mpirun (Open MPI) 4.1.4")
    assert find_mpirun(environ) == Mpirun(str(tmp_path / "mpirun"), Flavor.OPEN_MPI)
    with pytest.raises(UsageError, match=r"neither Open MPI's nor MPICH's mpirun \(it says 'toy 1\.0'\)"):
        find_mpirun(_program(tmp_path, "toy 1.0"))


def test_options():
    spec = parse(["--mpi", "-np", "2", "--mpi-args", "--mca btl 'self,tcp'", "--mpi-threads-disable", "true"], {})
    assert spec.mpi and spec.mpi_args == ("--mca", "btl", "self,tcp")
    assert spec.settings == {"HOROVODLIKE_CPU_OPERATIONS": "mpi", "HOROVODLIKE_MPI_THREADS_DISABLE": "1"}
    assert parse(["--compat", "--mpi", "-np", "2", "true"], {}).ignored == ()
    assert not parse(["-np", "2", "true"], {}).mpi
    with pytest.raises(UsageError, match="--mpi-args is for mpirun, which only --mpi starts; add --mpi"):
        parse(["-np", "2", "--mpi-args", "-x A", "true"], {})
    job = parse(["-np", "2", "--mpi-args=-x A", "true"], {}, "horovodrun")  # which chooses by itself
    assert (job.mpi, job.mpi_args, job.ignored) == (False, (), ("--mpi-args",))
    with pytest.raises(UsageError, match=r"--mpi-args 'open cannot be used: No closing quotation"):
        parse(["-np", "2", "--mpi", "--mpi-args", "'open", "true"], {})
