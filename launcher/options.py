"""The options of ``hvdrun``, in one table: of the command line, the configuration file and ``horovodlike.run``."""

import argparse
import contextlib
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from horovodlike.config import LOG_LEVELS, SETTINGS, Config, Setting, did_you_mean, parse
from horovodlike.errors import ConfigError
from horovodlike.launcher.elastic import HostDiscovery
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import MOST_RANKS, Binding, ElasticSpec
from horovodlike.launcher.schedulers.registry import SCHEDULERS

_MIB = 1024 * 1024
_LONGEST_S = 1e6
_GENERAL, _HOSTS, _MPI, _ELASTIC, _SETTINGS = "", "hosts", "MPI", "elastic jobs", "settings of the ranks"
_BATCH = [scheduler.name for scheduler in SCHEDULERS]
_GROUPS = {
    _HOSTS: f"Without any, those of a {', '.join(_BATCH[:-1])} or {_BATCH[-1]} job, or else this machine.",
    _MPI: None,
    _ELASTIC: "Workers may come and go if one of the first three is given. The job starts with as many as there are "
    "slots, up to --max-np; with fewer than -np only after --elastic-timeout, and if they are --min-np.",
    _SETTINGS: "Only those that are given are passed on.",
}
_Kind = tuple[type | tuple[type, ...], str]
_FILE: _Kind = ((str, os.PathLike), "the name of a file")
_RANKS = (1, MOST_RANKS)


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes:
        field: The attribute of the parsed arguments.
        flags: The names on the command line, Horovod's spellings among them; of a yes/no pair, the flag for yes. Empty
            for an argument that only ``horovodlike.run`` takes.
        help: The text in ``--help``; for a setting, it follows the setting's own help.
        group: The group in ``--help``.
        metavar: The placeholder for the value in ``--help``.
        action: argparse's action; None keeps the value.
        more: Further arguments of ``add_argument``.
        arguments: The names of the argument of ``horovodlike.run``; empty if it has none.
        kind: The type of that argument, and its description in messages.
        bounds: The least and the greatest value; the option takes an integer.
        elastic: ``decides``: if given, it makes the job elastic; ``serves``: it has an effect in elastic jobs only.
        setting: The name of its row in ``horovodlike.config.SETTINGS``, if it stands for a setting.
        key: ``section.key`` of the configuration file, or None.
        opposite: The flag that means no; only for boolean settings.
        scale: The number of the setting's units in one unit of the flag, such as bytes in a MiB.
        inverted: Whether the flag means the opposite of the setting.
    """

    field: str
    flags: tuple[str, ...] = ()
    help: str = ""
    group: str = _GENERAL
    metavar: str | tuple[str, ...] | None = None
    action: str | None = None
    more: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    kind: _Kind | None = None
    bounds: tuple[int, int] | None = None
    elastic: str = ""
    setting: str | None = None
    key: str | None = None
    opposite: str | None = None
    scale: int = 1
    inverted: bool = False

    @property
    def flag(self) -> str:
        """The first flag."""
        return self.flags[0]

    @property
    def row(self) -> Setting:
        """The setting that the option stands for."""
        return SETTINGS[str(self.setting)]

    @property
    def shown(self) -> str:
        """The flag in ``--help``: the flag of a yes/no pair that changes the default."""
        return self.flag if self.opposite is None or self.row.default == self.inverted else self.opposite


def _setting(setting: str, flag: str, key: str | None = None, metavar: str = "N", **more: Any) -> Option:
    field = flag.lstrip("-").replace("-", "_")
    return Option(field, (flag,), more.pop("note", ""), _SETTINGS, metavar, setting=setting, key=key, **more)


def _duration(setting: str) -> Option:
    return _setting(setting, "--" + setting.replace("_", "-"), metavar="S", arguments=(setting,), elastic="serves")


_SWITCH = "store_true"
# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("version", ("-v", "--version"), "print the version", action="print_version", more={"nargs": 0}),
    Option("num_proc", ("-np", "--num-proc"), "the number of ranks; all slots if hosts are named", metavar="N",
           arguments=("num_proc", "np"), bounds=_RANKS),
    Option("check_build", ("-cb", "--check-build"), "print what this installation can do", action="print_build",
           more={"nargs": 0}),
    Option("selftest", ("--selftest",), "check the hosts: versions, latency and bandwidth; there is no command",
           action=_SWITCH),
    Option("verbose", ("--verbose",), "explain decisions on standard error", action=_SWITCH),
    Option("config_file", ("--config-file",), "YAML file with settings", metavar="FILE"),
    Option("output_filename", ("--output-filename",),
           "write each rank's output to DIR/rank.N/stdout and stderr as well", metavar="DIR",
           arguments=("output_filename",), kind=(_FILE[0], "the name of a folder")),
    Option("monitor", ("--monitor",),
           "show the job on a page, and to Prometheus; prints its address (default: any free port, of this host only)",
           metavar="PORT", more={"nargs": "?", "const": 0}, bounds=(0, 65535)),
    Option("metrics_file", ("--metrics-file",),
           "write the job's metrics to this file each second, for node_exporter (NAME.prom)", metavar="FILE"),
    Option("attach", ("--attach",),
           "look into a running job that has a monitor, by the process id of its hvdrun: --attach PID profile --steps "
           "N records its ranks, --attach PID stacks prints where they are; --attach PID profile --help says more",
           metavar="PID"),
    Option("servers", ("--servers",), "start N processes beside the ranks that serve parameters, on the hosts in turn",
           metavar="N", bounds=_RANKS),
    Option("server_modules", ("--server-module",), "a module that they import: the update rules of your own",
           metavar="NAME", action="append"),
    Option("timestamps", ("-prefix-timestamp", "--prefix-output-with-timestamp"),
           "begin each line of output with the time", action=_SWITCH),
    Option("show_ranks", ("--show-ranks",),
           "show only the output of these ranks here, such as 0 or 0,4-7; --output-filename writes the others' too",
           metavar="RANKS"),
    Option("no_fold", ("--no-fold",),
           "show every line of each rank, also on a terminal, where lines that ranks share are otherwise shown once",
           action=_SWITCH),
    Option("bind_to", ("--bind-to",),
           "core: an equal share of the physical cores for each rank; numa: ranks are spread over the NUMA nodes; "
           "none: the system decides (default)",
           more={"choices": [binding.value for binding in Binding], "default": Binding.NONE.value}),
    Option("compat", ("--compat",),
           "run a Python program that imports horovod, with horovodlike in its place; accept horovodrun's options",
           action=_SWITCH),
    Option("hosts", ("-H", "--hosts"), "the hosts, and how many ranks each of them may have", _HOSTS, "HOST:N,...",
           arguments=("hosts",), kind=(str, "a text such as 'node-1:4,node-2:4'")),
    Option("hostfile", ("-hostfile", "--hostfile"), "a file with hosts, in lines such as: worker-0 slots=2", _HOSTS,
           "FILE", arguments=("hostfile",), kind=_FILE),
    Option("nnodes", ("--nnodes",),
           "no ssh: hvdrun is started by itself on each of N nodes; with MIN:MAX the job is elastic: nodes come and go",
           _HOSTS, "N"),
    Option("node_rank", ("--node-rank",),
           "which of them this is (default: JOB_COMPLETION_INDEX; or, in an elastic job, none: such a node has a name)",
           _HOSTS, "N", bounds=(0, MOST_RANKS - 1)),
    Option("rendezvous", ("--rendezvous",), "where node 0 is found, and listens", _HOSTS, "HOST:PORT"),
    Option("no_detect", ("--no-detect",),
           "ignore what a platform, such as Kubernetes or SageMaker, says about nodes where no option does", _HOSTS,
           action=_SWITCH),
    Option("secret_key_file", ("--secret-key-file",),
           "a file of mode 0600 with 64 hexadecimal digits, alike on all nodes", _HOSTS, "FILE"),
    Option("ssh_port", ("-p", "--ssh-port"), "the port of ssh's servers", _HOSTS, "PORT",
           arguments=("ssh_port",), bounds=(1, 65535)),
    Option("ssh_identity_file", ("-i", "--ssh-identity-file"), "the private key for ssh", _HOSTS, "FILE",
           arguments=("ssh_identity_file",), kind=_FILE),
    Option("ssh_options", ("--ssh-options",), "more options for ssh, such as '-l user -o Compression=yes'", _HOSTS,
           "WORDS", more={"default": ""}),
    Option("network_interfaces", ("--network-interfaces", "--network-interface"),
           "the network between the hosts: names of interfaces, or networks such as 10.0.0.0/8", _HOSTS, "NAME,...",
           action="append", arguments=("network_interfaces",), kind=(Iterable, "a text, or a sequence of texts")),
    Option("mpi", ("--mpi",), "start the ranks with mpirun, and move their data with MPI, through mpi4py", _MPI,
           action=_SWITCH),
    Option("mpi_args", ("--mpi-args",), "more options for mpirun, such as '--mca btl self,tcp'; needs --mpi", _MPI,
           "WORDS"),
    Option("min_np", ("--min-np", "--min-num-proc"), "with fewer workers it waits (default: -np)", _ELASTIC, "N",
           arguments=("min_np", "min_num_proc"), bounds=_RANKS, elastic="decides"),
    Option("max_np", ("--max-np", "--max-num-proc"), "it never has more (default: all slots)", _ELASTIC, "N",
           arguments=("max_np", "max_num_proc"), bounds=_RANKS, elastic="decides"),
    Option("host_discovery_script", ("--host-discovery-script",),
           "a program that prints a line for each host: HOST or HOST:N", _ELASTIC, "FILE",
           arguments=("host_discovery_script",), kind=(str, "the name of a program"), elastic="decides"),
    Option("discover", ("--discover",),
           "the hosts are the pods with a label (kubernetes:SELECTOR) or the addresses of a name (dns:SERVICE); with "
           "--nnodes MIN:MAX only nodes among them take part", _ELASTIC, "WHERE", elastic="decides"),
    Option("slots", ("--slots", "--slots-per-host"), "slots of a host without a number (default: 1)", _ELASTIC, "N",
           arguments=("slots",), bounds=_RANKS, elastic="serves"),
    Option("reset_limit", ("--reset-limit",),
           "end the job when workers have come or gone more often (default: no limit)", _ELASTIC, "N",
           arguments=("reset_limit",), bounds=(0, 2**63 - 1), elastic="serves"),
    Option("cooldown_range", ("--blacklist-cooldown-range",),
           "leave a host alone after each failure of a worker there: LOW seconds the first time, then twice as long "
           "each time, HIGH at most (default: 1 to 60 seconds after many failures in a row)", _ELASTIC,
           ("LOW", "HIGH"), more={"nargs": 2}, arguments=("cooldown_range",), elastic="serves"),
    Option("chaos", ("--chaos",), "YAML file with faults to be made: horovodlike.testing.FaultPlan", metavar="FILE"),
    _setting("start_timeout", "--start-timeout", metavar="S"),
    *map(_duration, ("elastic_timeout", "discovery_timeout", "heartbeat_timeout")),
    _setting("grace_period", "--grace-period", metavar="S", arguments=("grace_period",)),
    _setting("network_timeout", "--network-timeout", metavar="S"),
    _setting("gpus_per_rank", "--gpus-per-rank", "library_options.gpus_per_rank"),
    _setting("fusion_threshold", "--fusion-threshold-mb", "params.fusion_threshold_mb", scale=_MIB, note="In MiB."),
    _setting("cycle_time", "--cycle-time-ms", "params.cycle_time_ms", "X"),
    _setting("cache_capacity", "--cache-capacity", "params.cache_capacity"),
    _setting("autotune", "--autotune", "autotune.enabled", opposite="--no-autotune"),
    _setting("autotune_log", "--autotune-log-file", "autotune.log_file", "FILE"),
    _setting("autotune_warmup_samples", "--autotune-warmup-samples", "autotune.warmup_samples"),
    _setting("autotune_steps_per_sample", "--autotune-steps-per-sample", "autotune.steps_per_sample"),
    _setting("stall_check_disable", "--stall-check", "stall_check.enabled", opposite="--no-stall-check", inverted=True),
    _setting("stall_check_time_seconds", "--stall-check-warning-time-seconds", "stall_check.warning_time_seconds"),
    _setting("stall_shutdown_time_seconds", "--stall-check-shutdown-time-seconds",
             "stall_check.shutdown_time_seconds"),
    _setting("timeline", "--timeline-filename", "timeline.filename", "FILE"),
    _setting("timeline_mark_cycles", "--timeline-mark-cycles", "timeline.mark_cycles",
             opposite="--no-timeline-mark-cycles"),
    _setting("mpi_threads_disable", "--mpi-threads-disable", "library_options.mpi_threads_disable",
             opposite="--no-mpi-threads-disable"),
    _setting("log_level", "--log-level", "logging.level", "{" + ",".join(LOG_LEVELS).upper() + "}"),
    Option("args", arguments=("args",), kind=(Iterable, "a sequence, such as (1, 2)")),
    Option("kwargs", arguments=("kwargs",), kind=(Mapping, "a mapping, such as {'first': 1}")),
    Option("env", arguments=("env",), kind=(Mapping, "a mapping of texts to texts")),
    Option("executable", arguments=("executable",), kind=(_FILE[0], "the name of a program")),
    Option("host_discovery", arguments=("host_discovery",),
           kind=(HostDiscovery, "a horovodlike.launcher.elastic.HostDiscovery")),
)
# fmt: on
_BY_FIELD = {option.field: option for option in OPTIONS}
_OF_SETTINGS = [option for option in OPTIONS if option.setting is not None]
_BY_ARGUMENT = {name: option for option in OPTIONS for name in option.arguments}
ELASTIC_ARGUMENTS = frozenset(name for name, option in _BY_ARGUMENT.items() if option.elastic)
"""The arguments of ``horovodlike.run`` that :func:`take_elastic` reads."""


# The command line.


class _Store(argparse.Action):
    """Checks the bounds of an integer; stores the value, and the name of the flag that the user typed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        row = _BY_FIELD[self.dest]
        if row.bounds is not None:
            values = _integer(row, values, int, f"{option} {values}")
        setattr(namespace, self.dest, values)
        namespace.given = {**namespace.given, self.dest: option}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of each option; the parser must know this program's own actions, such as ``print_version``."""
    parser.set_defaults(given={})
    groups: dict[str, Any] = {_GENERAL: parser}
    groups |= {name: parser.add_argument_group(name, text) for name, text in _GROUPS.items()}
    for option in OPTIONS:
        if option.setting is not None:
            _add_setting(groups[option.group], option)
        elif option.flags:
            more: dict[str, Any] = dict(option.more or {})
            if option.metavar is not None:
                more["metavar"] = option.metavar
            action = option.action or _Store
            groups[option.group].add_argument(*option.flags, dest=option.field, action=action, help=option.help, **more)


def _add_setting(group: Any, option: Option) -> None:
    text = f"{option.row.help} {option.help}".strip().replace("%", "%%")
    if option.opposite is None:
        text = f"{text} (default: {_default(option)})"
        group.add_argument(option.flag, dest=option.field, metavar=option.metavar, help=text)
        return
    pair = group.add_mutually_exclusive_group()
    for flag, value in ((option.flag, "1"), (option.opposite, "0")):
        shown = text if flag == option.shown else argparse.SUPPRESS
        pair.add_argument(flag, dest=option.field, action="store_const", const=value, help=shown)


def _default(option: Option) -> str:
    default = option.row.default
    return f"{default / option.scale:g}" if isinstance(default, int | float) else default


def from_arguments(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of the settings that were given on the command line.

    Raises:
        UsageError: A value is not accepted.
    """
    given = ((option, getattr(arguments, option.field)) for option in _OF_SETTINGS)
    return {option.row.variable: _variable(option, text, option.flag) for option, text in given if text is not None}


def _variable(option: Option, text: str, source: str) -> str:
    """Check a given value, and return it as the value of the setting's environment variable."""
    if option.scale != 1:
        text = _scaled(option, text, source)
    try:
        value = parse(option.row, text, source)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return str(int(value != option.inverted)) if isinstance(value, bool) else text.strip()


def _scaled(option: Option, text: str, source: str) -> str:
    try:
        number = float(text)
        if number < 0 or number * option.scale != int(number * option.scale):
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise UsageError(f"{source}={text} cannot be used: it must be a number >= 0") from None
    return str(int(number * option.scale))


# The configuration file.


def read_file(path: str) -> Any:
    """Return the content of a configuration file.

    Raises:
        UsageError: The file is missing, is not YAML or has a key twice; the message names it.
    """
    import yaml  # imported only where there is a file

    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            root = loader.get_single_node()
            content = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise UsageError(f"--config-file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date, for instance
        raise UsageError(f"--config-file {path} is not YAML: {error}") from None
    if isinstance(root, yaml.MappingNode):
        _refuse_repetitions(root, path)
        for key, section in root.value:
            if isinstance(section, yaml.MappingNode):
                _refuse_repetitions(section, path, f"{key.value}.")
    return {} if content is None else content


def _refuse_repetitions(mapping: Any, path: str, prefix: str = "") -> None:
    """Reject a key that occurs twice: the YAML parser would drop the first value."""
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise UsageError(
                f"--config-file {path}: {name} comes twice, in lines {lines[name]} and {line}; make it one"
            )
        lines[name] = line


def from_mapping(content: Any, path: str) -> dict[str, str]:
    """Translate the content of a configuration file into environment variables, one for each setting in it.

    Args:
        content: Sections by name, each with its keys and values.
        path: The file's name, for messages.

    Raises:
        UsageError: A key or a value is not accepted.
    """
    by_key = {option.key: option for option in OPTIONS if option.key is not None}
    accepted = "accepted keys: " + ", ".join(sorted(by_key))
    if not isinstance(content, Mapping):
        raise UsageError(f"{path}: sections with keys are expected, not {content!r}; {accepted}")
    variables = {}
    for section, keys in content.items():
        if not any(key.startswith(f"{section}.") for key in by_key):
            remedy = did_you_mean(str(section), {key.partition(".")[0] for key in by_key}) or "; remove it"
            raise UsageError(f"{path}: there is no section {section!r}{remedy} ({accepted})")
        if not isinstance(keys, Mapping):
            raise UsageError(f"{path}: section {section!r} must hold keys and values, not {keys!r}; {accepted}")
        for name, value in keys.items():
            option = by_key.get(f"{section}.{name}")
            if option is None:
                remedy = did_you_mean(f"{section}.{name}", by_key, f"{section}.") or "; remove it"
                raise UsageError(f"{path}: there is no key {section}.{name}{remedy} ({accepted})")
            source = f"{path}: {section}.{name}"
            is_text = option.row.type is str  # YAML has made a boolean of `off`, and a number of `1.10`
            if not isinstance(value, str if is_text else bool | int | float | str):
                raise UsageError(f"{source}={value!r} cannot be used: it must be {option.row.accepts}")
            variables[option.row.variable] = _variable(option, str(value), source)
    return variables


# The arguments of horovodlike.run.


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check that arguments of ``horovodlike.run`` have a type that can be used; all but the function may be None.

    Raises:
        UsageError: An argument cannot be used; the message names it.
    """
    if not callable(given["func"]):
        raise UsageError(f"run(): func={given['func']!r} cannot be used: it must be a function")
    for name, value in given.items():
        option = _BY_ARGUMENT.get(name)
        if value is None or option is None or option.kind is None:
            continue
        kind, wanted = option.kind
        if not isinstance(value, kind) or (name == "args" and isinstance(value, str)):
            raise UsageError(f"run(): {name}={value!r} cannot be used: it must be {wanted}")
    interfaces = given.get("network_interfaces")
    if interfaces is not None and not all(isinstance(each, str) for each in interfaces):
        raise UsageError(f"run(): network_interfaces={interfaces!r} cannot be used: each of them must be a text")
    for name, value in (given.get("env") or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise UsageError(f"run(): env has {name!r}: {value!r}; names and values must be texts")


def take_integer(name: str, value: Any) -> int | None:
    """Return an argument of ``horovodlike.run`` as an integer, or None if it is not given.

    Raises:
        UsageError: The argument is not an integer, or is out of bounds.
    """
    return None if value is None else _integer(_BY_ARGUMENT[name], value, operator.index, f"run(): {name}={value!r}")


def _integer(option: Option, value: Any, convert: Callable[[Any], int], source: str) -> int:
    assert option.bounds is not None
    least, most = option.bounds
    with contextlib.suppress(TypeError, ValueError):
        if least <= (number := convert(value)) <= most:
            return number
    raise UsageError(f"{source} cannot be used: it must be an integer >= {least}, and at most {most}")


def take_number_of_ranks(num_proc: Any, np: Any) -> int | None:
    """Return the number of ranks, which ``horovodlike.run`` takes under two names.

    Raises:
        UsageError: An argument is not an accepted integer, or the two differ.
    """
    first, second = take_integer("num_proc", num_proc), take_integer("np", np)
    if first is not None and second is not None and first != second:
        raise UsageError(f"run(): num_proc={first} and np={second} contradict each other; give one of them")
    return second if first is None else first


def setting_variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables for arguments that have the names of settings; those that are None are skipped.

    Raises:
        UsageError: A value is not accepted.
    """
    variables = {}
    for name, value in given.items():
        if value is None:
            continue
        setting = SETTINGS[name]
        try:
            parse(setting, f"{value}", f"run(): {name}")
        except ConfigError as error:
            raise UsageError(str(error)) from None
        variables[setting.variable] = f"{value}"
    return variables


# Elastic jobs.


def is_elastic(arguments: argparse.Namespace) -> bool:
    """Return whether the command line asks for an elastic job."""
    return any(_BY_FIELD[name].elastic == "decides" for name in arguments.given) or ":" in (arguments.nnodes or "")


def without_effect(arguments: argparse.Namespace) -> list[str]:
    """List the given flags that have no effect because the job is not elastic."""
    if is_elastic(arguments):
        return []
    given: dict[str, str] = arguments.given
    serving = (option.field for option in OPTIONS if option.elastic == "serves")
    return [given[name] for name in serving if name in given]


def find_elastic(arguments: argparse.Namespace, values: Config) -> ElasticSpec | None:
    """Read the flags of elastic jobs; return None if the job is not elastic.

    Args:
        arguments: The parsed command line.
        values: The settings.

    Raises:
        UsageError: A value is not accepted, flags contradict each other, or a flag for elastic jobs is given for
            another job; with ``compat`` it is ignored.
    """
    if not is_elastic(arguments):
        idle = without_effect(arguments)
        if idle and not arguments.compat:
            raise UsageError(
                f"{idle[0]} is for elastic jobs; add --min-np, --max-np or --host-discovery-script, or leave it out"
            )
        return None
    if arguments.nnodes is not None and ":" not in arguments.nnodes:
        raise UsageError(
            f"--nnodes {arguments.nnodes} cannot be used for an elastic job; write --nnodes MIN:MAX, or leave out the "
            "flags of elastic jobs"
        )
    for flag, given in (("--mpi", arguments.mpi), ("--selftest", arguments.selftest)):
        if given:
            raise UsageError(f"{flag} cannot be used for an elastic job; leave it out, or the flags of elastic jobs")
    found = {field: getattr(arguments, field) for field in arguments.given}
    if (words := found.get("cooldown_range")) is not None:
        found["cooldown_range"] = _range(words, f"{arguments.given['cooldown_range']} {' '.join(words)}")
    return _elastic_spec(found, values)


def take_elastic(given: Mapping[str, Any], always: bool, values: Config) -> ElasticSpec | None:
    """Read the arguments of ``horovodlike.run`` for elastic jobs; return None if the job is not elastic.

    Args:
        given: Arguments; only arguments in :data:`ELASTIC_ARGUMENTS` that are not None count.
        always: Whether the job is elastic even without these arguments.
        values: The settings.

    Raises:
        UsageError: A value is not accepted.
    """
    found: dict[str, Any] = {}
    elastic = always
    for name in sorted(name for name, value in given.items() if name in ELASTIC_ARGUMENTS and value is not None):
        option, value = _BY_ARGUMENT[name], given[name]
        elastic |= option.elastic == "decides"
        if option.bounds is not None:
            value = take_integer(name, value)
        elif option.field == "cooldown_range":
            value = _range(value, f"run(): {name}={value!r}")
        found[option.field] = value
    if not elastic and found:
        raise UsageError(f"run(): {min(found)} is for elastic jobs; give min_np, max_np or host_discovery_script")
    return _elastic_spec(found, values) if elastic else None


def _elastic_spec(found: Mapping[str, Any], values: Config) -> ElasticSpec:
    return ElasticSpec(
        min_np=found.get("min_np"),
        max_np=found.get("max_np"),
        discovery_script=found.get("host_discovery_script"),
        slots=found.get("slots"),
        reset_limit=found.get("reset_limit"),
        cooldown_range=found.get("cooldown_range"),
        discovery_timeout=values.discovery_timeout,
        elastic_timeout=values.elastic_timeout,
        heartbeat_timeout=values.heartbeat_timeout,
        grace_period=values.grace_period,
        discover=found.get("discover"),
    )


def _range(found: Any, source: str) -> tuple[float, float]:
    try:
        low, high = (float(each) for each in found)
    except (TypeError, ValueError, OverflowError):
        low = high = 0.0
    if not 0 < low <= high <= _LONGEST_S:
        raise UsageError(
            f"{source} cannot be used: it must be two numbers of seconds, such as 10 100, up to {_LONGEST_S:g}"
        )
    return low, high
