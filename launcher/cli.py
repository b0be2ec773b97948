"""The command line of ``hvdrun``, and of ``horovodrun`` if it is installed under that name too."""

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from horovodlike import compat, config, routes
from horovodlike._bootstrap.hostlist import expand_hosts
from horovodlike.errors import ConfigError, RendezvousError
from horovodlike.launcher import horovod_options, nodes, options
from horovodlike.launcher.errors import HostsError, UsageError, given
from horovodlike.launcher.launch import launch, make_spec
from horovodlike.launcher.planning import Binding, ElasticSpec, JobSpec, MonitorSpec, RemoteStart
from horovodlike.launcher.planning.command import (
    HOROVODRUN,
    check_interpreter,
    check_reads_environment,
    resolve_command,
    working_folder,
)
from horovodlike.launcher.schedulers.registry import HostResolution, find_hosts

if TYPE_CHECKING:
    from horovodlike.launcher.supervisor.job import Outcome

__all__ = ["horovodrun", "main", "parse"]

USAGE_ERROR = 2
_SELFTEST = Path(__file__).with_name("tools") / "selftest.py"
_SELFTEST_RANKS = 2
_NO_NUMBER = " (this node has no number: is there another one with --node-rank 0?)"
_OF_OTHERS = ("--binding-args", "--mpi-args", "--ssh-options")
"""Flags whose values are options of other programs, and so begin with a dash."""

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
    parser.register("action", "print_version", _Version)
    parser.register("action", "print_build", _CheckBuild)
    options.add_arguments(parser)
    if compat:
        horovod_options.add_arguments(parser)
    return parser


def _mpi_args(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.mpi_args is not None and not arguments.mpi:
        if arguments.compat:
            return ()
        raise UsageError("--mpi-args is for mpirun, which only --mpi starts; add --mpi, or leave --mpi-args out")
    return _words("--mpi-args", arguments.mpi_args or "")


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{flag} {text} cannot be used: {error}") from None


def _split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the words into options and the command.

    Without this, argparse would parse the command's own options as hvdrun's, if only to report that an abbreviation is
    ambiguous. A value that is another program's option is joined to its flag with an equals sign for the same reason.
    """
    values = {
        name: 1 if action.nargs is None else 0 if action.nargs == argparse.OPTIONAL else int(action.nargs)
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
    """Return how many of the words after an option are its values; the option may be abbreviated."""
    name, equals, _ = word.partition("=")
    meant = [name] if name in values else [known for known in values if known.startswith(name)]
    return 0 if equals else max((values[known] for known in meant), default=0)


def _read(argv: Sequence[str], program: str) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Parse the words; return the options, with ``compat`` set for ``horovodrun`` too, and the command."""
    parser = _make_parser(program, compat=True)
    words, command = _split(parser, argv)
    if program != HOROVODRUN and "--compat" not in words:
        known = horovod_options.flags()
        foreign = next((word for word in words if word.partition("=")[0] in known), None)
        # Horovod's flags would make abbreviations of hvdrun's flags ambiguous, so only --compat adds them.
        parser = _make_parser(program, compat=False)
        if foreign is not None:
            parser.error(f"{foreign} is an option of Horovod's, which only --compat accepts")
        words, command = _split(parser, argv)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        question = config.did_you_mean(unknown[0].partition("=")[0], parser._option_string_actions)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{question}")
    arguments.compat |= program == HOROVODRUN
    if command[:1] and command[0].isdigit() and words[-1:] == ["--monitor"]:
        parser.error(f"--monitor {command[0]}: a port follows after '=': write --monitor={command[0]}")
    return arguments, command


def _settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the settings that were given, and the names of Horovod's options that were given and have no effect.

    If a configuration file of Horovod's chooses MPI, this sets ``arguments.mpi``.
    """
    settings = {}
    keys: list[str] = []
    path = arguments.config_file
    if path is not None:
        content = options.read_file(path)
        if arguments.compat:
            if "--gloo" not in horovod_options.given(arguments) and not options.is_elastic(arguments):
                arguments.mpi |= horovod_options.chooses_mpi(content)
            content, keys = horovod_options.without_effect(content, arguments.mpi)
        settings = options.from_mapping(content, path)
    if arguments.network_interfaces:
        settings[config.SETTINGS["network_interface"].variable] = ",".join(arguments.network_interfaces)
    if arguments.mpi:
        # Rules say which operations MPI carries out.
        rules = environ.get(config.variable_of("cpu_operations", environ) or "", "")
        settings[config.SETTINGS["cpu_operations"].variable] = rules if routes.has_rules(rules) else "mpi"
    return settings | options.from_arguments(arguments), [*_flags_without_effect(arguments), *keys]


def _flags_without_effect(arguments: argparse.Namespace) -> list[str]:
    if not arguments.compat:
        return []
    of_mpi = ["--mpi-args"] if arguments.mpi_args is not None and not arguments.mpi else []
    return [*horovod_options.given(arguments), *options.without_effect(arguments), *of_mpi]


def _names(arguments: argparse.Namespace, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the flag or key with which the user has given each setting; settings from variables are left out."""
    return {
        option.setting: option.flag if getattr(arguments, option.field) is not None else str(option.key)
        for option in options.OPTIONS
        if option.setting is not None and option.row.variable in settings
    }


def _remote(arguments: argparse.Namespace, where: HostResolution) -> RemoteStart:
    ssh_options = _words("--ssh-options", arguments.ssh_options)
    return RemoteStart(arguments.ssh_port, arguments.ssh_identity_file, ssh_options, where.scheduler, where.cpus)


def _servers(
    arguments: argparse.Namespace, elastic: ElasticSpec | None, has_nodes: bool
) -> tuple[int, tuple[str, ...]]:
    """Read ``--servers`` and ``--server-module``.

    Raises:
        UsageError: Something is missing or not accepted.
    """
    count: int | None = arguments.servers
    modules = tuple(arguments.server_modules or ())
    if count is None:
        if modules:
            raise UsageError("--server-module needs --servers N: ranks that serve parameters import modules themselves")
        return 0, ()
    for flag, given_too in (("--mpi", arguments.mpi), ("--nnodes", has_nodes), ("elastic jobs", elastic)):
        if given_too:
            raise UsageError(f"--servers cannot be used with {flag}: leave it out, and the ranks serve parameters")
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--server-module {name}: give the name of a module, such as my_rules, not that of a file")
    return count, modules


def _shown_ranks(text: str | None, size: int | None) -> frozenset[int] | None:
    """Read ``--show-ranks``; return None without it.

    Args:
        text: Numbers and ranges, such as ``0,4-7``.
        size: The number of ranks; None if it is not known here.

    Raises:
        UsageError: The text has another form, or names a rank that the job does not have.
    """
    if text is None:
        return None
    try:
        ranks = frozenset(map(int, expand_hosts(f"[{text}]")))
    except ValueError:
        raise UsageError(f"{given('--show-ranks', text)}: give numbers of ranks, such as 0 or 0,4-7") from None
    if size is not None and max(ranks) >= size:
        raise UsageError(f"--show-ranks {text}: the ranks of this job are 0 to {size - 1}")
    return ranks


def _fault_plan(path: str | None) -> Mapping[str, str]:
    """Return the environment variable that passes the fault plan to the ranks; no variable without a plan.

    Raises:
        UsageError: The file cannot be read, or is no plan.
    """
    if path is None:
        return {}
    from horovodlike.testing import FaultPlan

    try:
        return {"HOROVODLIKE_FAULT_PLAN": FaultPlan.load(path).to_json()}
    except OSError as error:
        raise UsageError(f"--chaos {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the message names the file
        raise UsageError(f"--chaos {error}") from None


def parse(argv: Sequence[str], environ: Mapping[str, str], program: str = "hvdrun") -> JobSpec:
    """Read the command line.

    Args:
        argv: The words after the program's name.
        environ: The environment; its settings are checked, and used where nothing else is given.
        program: The name by which the user started it; ``horovodrun`` stands for ``hvdrun --compat``.

    Returns:
        The job.

    Raises:
        UsageError: Something is missing or not accepted.
        SystemExit: An unknown flag; or ``--help``, ``--version`` or ``--check-build``, which have been printed.
    """
    return _make_spec(*_read(argv, program), environ, program)


def _make_spec(
    arguments: argparse.Namespace, command: tuple[str, ...], environ: Mapping[str, str], program: str
) -> JobSpec:
    working_folder()
    number: int | None = arguments.num_proc
    settings, ignored = _settings(arguments, environ)
    names = _names(arguments, settings)
    place = nodes.detect(arguments, environ)
    settings = nodes.settings_of(place, environ) | settings
    try:
        values = config.load({**environ, **settings})
    except ConfigError as error:
        raise UsageError(str(error)) from None
    gpus_name = names.get("gpus_per_rank", config.SETTINGS["gpus_per_rank"].variable)
    if arguments.mpi and values.gpus_per_rank:
        raise UsageError(
            f"{given(gpus_name, values.gpus_per_rank)} cannot be used with --mpi: mpirun starts the ranks. Leave it "
            "out, and choose in the script, for instance with torch.cuda.set_device(hvd.local_rank())"
        )
    settings |= _fault_plan(arguments.chaos)
    elastic = options.find_elastic(arguments, values)
    found = nodes.find_nodes(arguments, place, environ)
    if found is not None and found.least is None and elastic is not None:
        raise UsageError(f"an elastic job cannot have one hvdrun on each node ({place}); leave out its flags")
    servers, server_modules = _servers(arguments, elastic, found is not None)
    alone = place is not None and place.nnodes == 1 and elastic is None
    if number is None and (found is not None or alone):
        number = nodes.number_of_ranks(place, environ)
    where = HostResolution(number)
    if found is None:
        where = find_hosts(arguments.hosts, arguments.hostfile, number, environ, elastic)
    if arguments.selftest:
        if command:
            raise UsageError(f"--selftest runs a program of its own: leave out {command[0]}")
        command = (sys.executable, str(_SELFTEST))
        where = replace(where, num_proc=where.num_proc or _SELFTEST_RANKS)
    if where.num_proc is None:
        raise UsageError(f"how many ranks? Give -np N, for instance: {program} -np 2 python train.py")
    has_monitor = arguments.monitor is not None or arguments.metrics_file is not None
    asked = JobSpec(
        where.num_proc,
        command,
        remote=_remote(arguments, where),
        nodes=found,
        bind_to=Binding(arguments.bind_to),
        output_directory=arguments.output_filename,
        timestamps=arguments.timestamps,
        shown_ranks=_shown_ranks(arguments.show_ranks, where.num_proc if found is None and elastic is None else None),
        fold=not arguments.no_fold,
        verbose=arguments.verbose,
        compat=arguments.compat,
        mpi=arguments.mpi,
        mpi_args=_mpi_args(arguments),
        monitor=MonitorSpec(arguments.monitor, arguments.metrics_file) if has_monitor else None,
        servers=servers,
        server_modules=server_modules,
        ignored=tuple(ignored),
        names={"--gpus-per-rank": gpus_name},
        reasons=(where.reason,),
        place=None if place is None else str(place),
    )
    is_discovered = elastic is not None and (elastic.discovery_script or elastic.discover)
    files = None if is_discovered else names
    return make_spec(asked, values, where, elastic, settings, environ, files=files)


def _attach(arguments: argparse.Namespace, own: Sequence[str], command: Sequence[str], program: str) -> int:
    from horovodlike.launcher.tools import attach

    if [word for word in own if word not in ("--attach", arguments.attach, f"--attach={arguments.attach}")]:
        raise UsageError(
            f"--attach {arguments.attach} looks into a job that runs: leave out the other options of {program}"
        )
    return attach.run(arguments.attach, command, program)


def _open_standard_streams() -> None:
    """Open ``/dev/null`` in place of closed standard streams; the next file opened would get their number and output.

    Call this before any other thread is started or any file is opened.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(opened, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # print(file=None) would write to standard output
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(null, "w", closefd=False))  # noqa: SIM115 - stays open


def _explain(outcome: "Outcome", spec: JobSpec) -> str:
    """Return the reason of a failure; an empty text if the job was not ended by one."""
    if outcome.failure is None and outcome.trouble is None:
        return ""
    from horovodlike.launcher.supervisor.node_job import explain_outcome

    return explain_outcome(outcome, socket.gethostname(), "worker" if spec.elastic else "rank").decode(errors="replace")


def _hint(spec: JobSpec) -> str:
    """Return what may be wrong with this node if the job does not start; say so too while it waits for other nodes."""
    hint = "" if spec.place is None else f" (this is {spec.place}; --no-detect ignores that)"
    if spec.nodes is not None and spec.nodes.number is None:
        hint += _NO_NUMBER
    if spec.nodes is not None:
        from horovodlike.launcher.supervisor.waiting import Waiting

        Waiting.hint = hint
    return hint


def main(argv: Sequence[str] | None = None, program: str = "hvdrun") -> int:
    """Run ``hvdrun``; return its exit code."""
    _open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    hint = ""
    try:
        arguments, command = _read(words, program)
        if arguments.attach is not None:
            return _attach(arguments, words[: len(words) - len(command)], command, program)
        spec = _make_spec(arguments, command, os.environ, program)
        hint = _hint(spec)
        if spec.verbose and spec.place is not None:
            print(f"{program}: {spec.place}; --no-detect ignores that", file=sys.stderr)
        command, reason = resolve_command(spec.command, os.environ, program)
        reasons = [*spec.reasons, reason]
        environ: Mapping[str, str] = os.environ
        if spec.compat:
            check_reads_environment(spec.command)
            environ = compat.environment(os.environ)
            reasons.append("horovodlike.compat stands in for Horovod")
        check_interpreter(command[0])
        reasons += config.without_effect(os.environ)
        if spec.ignored:
            print(f"{program}: without effect here: {', '.join(spec.ignored)}", file=sys.stderr)

        outcome = launch(spec, command, environ, take_signals=True, reasons=reasons)
        code, trouble = outcome.exit_code, _explain(outcome, spec)
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        code, trouble = USAGE_ERROR, str(error)
    except (OSError, HostsError, RendezvousError) as error:
        trouble = f"{error}{hint.replace(_NO_NUMBER, '') if str(error).startswith('node 0 says') else hint}"
        print(f"{program}: {trouble}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:  # interrupted before there were ranks to pass the signal on to
        return 130
    if trouble and "--no-detect" not in words:
        nodes.report_failure(trouble, os.environ)
    return code


def horovodrun() -> int:
    """Run ``hvdrun --compat`` under Horovod's name for it; return its exit code."""
    return main(program=HOROVODRUN)


if __name__ == "__main__":
    sys.exit(main())
