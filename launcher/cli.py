"""The command line of ``hvdrun``, and of ``horovodrun`` where that second name is installed."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from horovodlike import config
from horovodlike.errors import ConfigError, RendezvousError
from horovodlike.launcher import elastic_options, horovod_options, options
from horovodlike.launcher.errors import HostsError, UsageError, given
from horovodlike.launcher.horovod_options import HOROVODRUN
from horovodlike.launcher.planning.command import check_interpreter, resolve_command, with_horovod_names
from horovodlike.launcher.planning.environment import working_folder
from horovodlike.launcher.planning.job_spec import MOST_RANKS, Binding, JobSpec, RemoteStart
from horovodlike.launcher.planning.nodes import find_nodes
from horovodlike.launcher.planning.written_files import check_files, files_of_all_hosts
from horovodlike.launcher.schedulers.host_resolution import HostResolution
from horovodlike.launcher.supervisor.stdio import open_standard_streams

__all__ = ["horovodrun", "main", "parse"]

USAGE_ERROR = 2
_SELFTEST = Path(__file__).with_name("tools") / "selftest.py"
_SELFTEST_RANKS = 2
_OF_OTHERS = ("--binding-args", "--mpi-args", "--ssh-options")
"""Their values are options of other programs, and begin with a dash."""

_DESCRIPTION = "Runs a command once per rank of a distributed training job, and ends all ranks when one fails."
_EPILOG = """examples:
  hvdrun -np 4 python train.py --epochs 3
  hvdrun -np 4 train.py
  hvdrun -np 2 --output-filename logs --bind-to core python -m package.train
  hvdrun -H node-1:4,node-2:4 python train.py
  hvdrun -np 4 --gpus-per-rank 1 python train.py
  hvdrun --mpi -np 4 python train.py
  hvdrun -H node-1:4,node-2:4 --selftest
  hvdrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py
  hvdrun --compat -np 2 python written_for_horovod.py

Options stand before the command. They win over the configuration file, which wins over the environment.
"""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from horovodlike.launcher.tools.check_build import package_version

        print(package_version())
        parser.exit(0)


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from horovodlike.launcher.tools.check_build import check_build

        try:
            print(check_build())
        except ConfigError as error:
            raise UsageError(str(error)) from None
        parser.exit(0)


def _make_parser(program: str, compat: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        usage=f"{program} -np N [options] command [arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-v", "--version", action=_Version, nargs=0, help="print the version")
    add("-np", "--num-proc", dest="num_proc", metavar="N", help="the number of ranks; all slots if hosts are named")
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="print what this installation can do")
    add("--selftest", action="store_true", help="check the hosts: versions, latency and bandwidth; there is no command")
    add("--verbose", action="store_true", help="explain decisions on standard error")
    add("--config-file", metavar="FILE", help="YAML file with settings")
    add("--output-filename", metavar="DIR", help="write each rank's output to DIR/rank.N/stdout and stderr as well")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="begin each line of output with the time",
    )
    add(
        "--bind-to",
        choices=[binding.value for binding in Binding],
        default=Binding.NONE.value,
        help="core: an equal share of the physical cores for each rank; numa: ranks are spread over the NUMA nodes; "
        "none: the system decides (default)",
    )
    add(
        "--compat",
        action="store_true",
        help="run a Python program that imports horovod, with horovodlike in its place; accept horovodrun's options",
    )
    _add_host_arguments(parser)
    _add_mpi_arguments(parser)
    elastic_options.add_arguments(parser)
    options.add_arguments(parser)
    if compat:
        horovod_options.add_arguments(parser)
    return parser


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "hosts", "Without any, those of a Slurm, LSF or PBS job, or else this machine."
    ).add_argument
    add("-H", "--hosts", metavar="HOST:N,...", help="the hosts, and how many ranks each of them may have")
    add("-hostfile", "--hostfile", metavar="FILE", help="a file with hosts, in lines such as: worker-0 slots=2")
    add("--nnodes", type=int, metavar="N", help="no ssh: hvdrun is started by itself on each of N nodes")
    add("--node-rank", type=int, metavar="N", help="which of them this is (default: JOB_COMPLETION_INDEX)")
    add("--rendezvous", metavar="HOST:PORT", help="where node 0 is found, and listens")
    add("--secret-key-file", metavar="FILE", help="a file of mode 0600 with 64 hexadecimal digits, alike on all nodes")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="the port of ssh's servers")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")
    add("--ssh-options", metavar="WORDS", default="", help="more options for ssh, such as '-l user -o Compression=yes'")
    add(
        "--network-interfaces",
        "--network-interface",
        dest="network_interfaces",
        action="append",
        metavar="NAME,...",
        help="the network between the hosts: names of interfaces, or networks such as 10.0.0.0/8",
    )


def _add_mpi_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("MPI").add_argument
    add("--mpi", action="store_true", help="start the ranks with mpirun, and move their data with MPI, through mpi4py")
    add("--mpi-args", metavar="WORDS", help="more options for mpirun, such as '--mca btl self,tcp'; needs --mpi")


def _mpi_args(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.mpi_args is not None and not arguments.mpi:
        if arguments.compat:
            return ()
        raise UsageError("--mpi-args is for mpirun, which only --mpi starts; add --mpi, or leave --mpi-args out")
    try:
        return tuple(shlex.split(arguments.mpi_args or ""))
    except ValueError as error:
        raise UsageError(f"--mpi-args {arguments.mpi_args}: {error}") from None


def _split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Splits the words into options and the command.

    argparse would take the command's own options for ours, if only to complain that an abbreviation is ambiguous; so
    would it those of other programs, unless an equals sign stands before them.
    """
    values = {
        name: 1 if action.nargs is None else int(action.nargs)
        for action in parser._actions
        for name in action.option_strings
    }
    taken: list[str] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return taken, tuple(argv[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        end = index + 1 + _values_of(word, values)
        own = argv[index + 1 : end]
        if len(own) == 1 and any(name.startswith(word) for name in _OF_OTHERS):
            taken.append(f"{word}={own[0]}")
        else:
            taken += [word, *own]
        index = end
    return taken, tuple(argv[index:])


def _values_of(word: str, values: Mapping[str, int]) -> int:
    """How many words after an option, which may be abbreviated, are its own."""
    name, equals, _ = word.partition("=")
    meant = [name] if name in values else [known for known in values if known.startswith(name)]
    return 0 if equals else max((values[known] for known in meant), default=0)


def _number_of_ranks(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"-np {text}: the number of ranks must be an integer, for instance -np 2") from None
    if number < 1:
        raise UsageError(f"-np {text}: a job needs at least one rank, for instance -np 2")
    if number > MOST_RANKS:
        raise UsageError(f"-np {text}: a job can have {MOST_RANKS} ranks at most")
    return number


def _read(argv: Sequence[str], program: str) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, ``compat`` among them, and the command."""
    parser = _make_parser(program, compat=True)
    words, command = _split(parser, argv)
    if program != HOROVODRUN and "--compat" not in words:
        known = horovod_options.flags()
        foreign = next((word for word in words if word.partition("=")[0] in known), None)
        # Horovod's flags would make abbreviations of ours ambiguous: those who do not want them do not get them.
        parser = _make_parser(program, compat=False)
        if foreign is not None:
            parser.error(f"{foreign} is an option of Horovod's, which only --compat accepts")
        words, command = _split(parser, argv)
    arguments = parser.parse_args(words)
    arguments.compat |= program == HOROVODRUN
    return arguments, command


def _settings(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """The settings that were asked for, and what of Horovod's was given and has no effect.

    Horovod's configuration file may choose MPI, which then is in ``arguments``.
    """
    settings = {}
    keys: list[str] = []
    path = arguments.config_file
    if path is not None:
        content = options.read_file(path)
        if arguments.compat:
            if "--gloo" not in horovod_options.given(arguments) and not elastic_options.is_elastic(arguments):
                arguments.mpi |= horovod_options.chooses_mpi(content)
            content, keys = horovod_options.without_effect(content, arguments.mpi)
        settings = options.from_mapping(content, path)
    if arguments.network_interfaces:
        settings[config.SETTINGS["network_interface"].variable] = ",".join(arguments.network_interfaces)
    if arguments.mpi:
        settings[config.SETTINGS["cpu_operations"].variable] = "mpi"
    return settings | options.from_arguments(arguments), [*_flags_without_effect(arguments), *keys]


def _flags_without_effect(arguments: argparse.Namespace) -> list[str]:
    if not arguments.compat:
        return []
    of_mpi = ["--mpi-args"] if arguments.mpi_args is not None and not arguments.mpi else []
    return [*horovod_options.given(arguments), *elastic_options.without_effect(arguments), *of_mpi]


def _gpus_name(arguments: argparse.Namespace, settings: Mapping[str, str]) -> str:
    """By what the user has asked for GPUs, if he has."""
    if arguments.gpus_per_rank is not None:
        return "--gpus-per-rank"
    variable = config.SETTINGS["gpus_per_rank"].variable
    return "library_options.gpus_per_rank" if variable in settings else variable


def _file_names(arguments: argparse.Namespace, settings: Mapping[str, str]) -> dict[str, str]:
    """By what the user has asked for files to be written, but for variables."""
    by_flag = {option.setting: option for option in options.OPTIONS if option.row.variable in settings}
    return {
        name: option.flag if getattr(arguments, option.destination) is not None else str(option.key)
        for name, option in by_flag.items()
    }


def _remote(arguments: argparse.Namespace, slurm: bool, cpus: Mapping[str, int]) -> RemoteStart:
    try:
        ssh_options = tuple(shlex.split(arguments.ssh_options))
    except ValueError as error:
        raise UsageError(f"--ssh-options {arguments.ssh_options!r} cannot be used: {error}") from None
    port: int | None = arguments.ssh_port
    if port is not None and not 0 < port < 65536:
        raise UsageError(f"--ssh-port {port} cannot be used: it must be a port, from 1 to 65535")
    return RemoteStart(arguments.ssh_port, arguments.ssh_identity_file, ssh_options, slurm, cpus)


def parse(argv: Sequence[str], environ: Mapping[str, str], program: str = "hvdrun") -> JobSpec:
    """Reads the command line.

    Args:
        argv: The words after the program's name.
        environ: The environment; its settings are checked, and used where nothing else is given.
        program: The name that the user called; ``horovodrun`` stands for ``hvdrun --compat``.

    Returns:
        The job.

    Raises:
        UsageError: Something is missing or not accepted.
        SystemExit: An unknown flag; or ``--help``, ``--version`` or ``--check-build``, which have been printed.
    """
    arguments, command = _read(argv, program)
    working_folder()
    number = _number_of_ranks(arguments.num_proc)
    settings, ignored = _settings(arguments)
    try:
        values = config.load({**environ, **settings})
    except ConfigError as error:
        raise UsageError(str(error)) from None
    gpus_name = _gpus_name(arguments, settings)
    if arguments.mpi and values.gpus_per_rank:
        raise UsageError(
            f"{given(gpus_name, values.gpus_per_rank)} cannot be used with --mpi: mpirun starts the ranks. Leave it "
            "out, and choose in the script, for instance with torch.cuda.set_device(hvd.local_rank())"
        )
    settings |= elastic_options.fault_plan(arguments.chaos)
    elastic = elastic_options.find_elastic(arguments, values)
    nodes = find_nodes(arguments, environ)
    if elastic is not None:
        settings[config.SETTINGS["network_timeout"].variable] = f"{values.heartbeat_timeout:g}"
    where = HostResolution(number)
    if nodes is None:
        where = elastic_options.choose_hosts(elastic, arguments.hosts, arguments.hostfile, number, environ)
    if arguments.selftest:
        if command:
            raise UsageError(f"--selftest runs a program of its own: leave out {command[0]}")
        command = (sys.executable, str(_SELFTEST))
        where = replace(where, num_proc=where.num_proc or _SELFTEST_RANKS)
    if where.num_proc is None:
        raise UsageError(f"how many ranks? Give -np N, for instance: {program} -np 2 python train.py")
    if elastic is None or elastic.discovery_script is None:
        has_rank_0 = nodes.number == 0 if nodes else not where.hosts or where.hosts[0].host == where.here
        check_files(values, _file_names(arguments, settings), where.here, has_rank_0, {**environ, **settings})
    return JobSpec(
        num_proc=where.num_proc,
        command=command,
        settings=settings,
        hosts=where.hosts,
        here=where.here,
        remote=_remote(arguments, where.slurm, where.cpus),
        nodes=nodes,
        elastic=elastic,
        start_timeout=values.start_timeout,
        network_timeout=values.network_timeout,
        network_interface=values.network_interface,
        bind_to=Binding(arguments.bind_to),
        gpus_per_rank=values.gpus_per_rank,
        output_directory=arguments.output_filename,
        timestamps=arguments.timestamps,
        verbose=arguments.verbose,
        compat=arguments.compat,
        mpi=arguments.mpi,
        mpi_args=_mpi_args(arguments),
        ignored=tuple(ignored),
        names={"--gpus-per-rank": gpus_name},
        reasons=(where.reason,),
        files=files_of_all_hosts(values),
    )


def main(argv: Sequence[str] | None = None, program: str = "hvdrun") -> int:
    """Runs ``hvdrun``; returns its exit code."""
    open_standard_streams()
    try:
        spec = parse(sys.argv[1:] if argv is None else argv, os.environ, program)
        command, reason = resolve_command(spec.command, os.environ, program)
        reasons = [*spec.reasons, reason]
        if spec.compat:
            command, reason = with_horovod_names(command, program)
            reasons.append(reason)
        check_interpreter(command[0])
        reasons += config.without_effect(os.environ)
        if spec.ignored:
            print(f"{program}: without effect here: {', '.join(spec.ignored)}", file=sys.stderr)

        if spec.nodes is not None:
            from horovodlike.launcher.supervisor.node_job import run_nodes

            return run_nodes(spec, spec.nodes, command, os.environ, reasons).exit_code

        if spec.elastic is not None:
            from horovodlike.launcher.elastic.elastic_job import run_elastic

            return run_elastic(spec, spec.elastic, command, os.environ, take_signals=True, reasons=reasons).exit_code
        if spec.mpi:
            from horovodlike.launcher.schedulers.mpirun import run_mpirun

            return run_mpirun(spec, command, os.environ, reasons)
        from horovodlike.launcher.supervisor.static_job import run_job  # after the errors that need no more than this

        return run_job(spec, command, os.environ, take_signals=True, reasons=reasons).exit_code
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (OSError, HostsError, RendezvousError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the ranks were there to pass it on to
        return 130


def horovodrun() -> int:
    """Runs ``hvdrun --compat`` under Horovod's name for it; returns its exit code."""
    return main(program=HOROVODRUN)


if __name__ == "__main__":
    sys.exit(main())
