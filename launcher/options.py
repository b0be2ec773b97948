"""The flags and configuration-file keys that stand for settings; the rest about a setting is in its own table."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovodlike.config import LOG_LEVELS, SETTINGS, Setting, parse
from horovodlike.errors import ConfigError
from horovodlike.launcher.errors import UsageError, shown

__all__ = ["OPTIONS", "Option", "add_arguments", "from_arguments", "from_mapping", "read_file"]

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Option:
    """A setting on the command line and in the configuration file.

    Attributes:
        setting: Its row of ``horovodlike.config.SETTINGS``.
        flag: The flag, or of a pair the one that means yes.
        key: ``section.key`` of the configuration file, or None if it has none.
        opposite: The flag that means no; only of settings that are yes or no.
        scale: How many of the setting's units one unit of the flag is.
        inverted: The flag means the opposite of the setting.
        metavar: What stands for the value in ``--help``.
        note: A sentence for ``--help`` besides the setting's own.
    """

    setting: str
    flag: str
    key: str | None = None
    opposite: str | None = None
    scale: int = 1
    inverted: bool = False
    metavar: str = "N"
    note: str = ""

    @property
    def row(self) -> Setting:
        """The setting."""
        return SETTINGS[self.setting]

    @property
    def shown(self) -> str:
        """The flag in ``--help``: of a pair, the one that changes something."""
        return self.flag if self.opposite is None or self.row.default == self.inverted else self.opposite

    @property
    def destination(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.lstrip("-").replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("start_timeout", "--start-timeout", metavar="S"),
    Option("elastic_timeout", "--elastic-timeout", metavar="S"),
    Option("discovery_timeout", "--discovery-timeout", metavar="S"),
    Option("heartbeat_timeout", "--heartbeat-timeout", metavar="S"),
    Option("grace_period", "--grace-period", metavar="S"),
    Option("gpus_per_rank", "--gpus-per-rank", "library_options.gpus_per_rank"),
    Option("fusion_threshold", "--fusion-threshold-mb", "params.fusion_threshold_mb", scale=_MIB, note="In MiB."),
    Option("cycle_time", "--cycle-time-ms", "params.cycle_time_ms", metavar="X"),
    Option("cache_capacity", "--cache-capacity", "params.cache_capacity"),
    Option("autotune", "--autotune", "autotune.enabled", opposite="--no-autotune"),
    Option("autotune_log", "--autotune-log-file", "autotune.log_file", metavar="FILE"),
    Option("autotune_warmup_samples", "--autotune-warmup-samples", "autotune.warmup_samples"),
    Option("autotune_steps_per_sample", "--autotune-steps-per-sample", "autotune.steps_per_sample"),
    Option(
        "stall_check_disable",
        "--stall-check",
        "stall_check.enabled",
        opposite="--no-stall-check",
        inverted=True,
    ),
    Option("stall_check_time_seconds", "--stall-check-warning-time-seconds", "stall_check.warning_time_seconds"),
    Option("stall_shutdown_time_seconds", "--stall-check-shutdown-time-seconds", "stall_check.shutdown_time_seconds"),
    Option("timeline", "--timeline-filename", "timeline.filename", metavar="FILE"),
    Option(
        "timeline_mark_cycles",
        "--timeline-mark-cycles",
        "timeline.mark_cycles",
        opposite="--no-timeline-mark-cycles",
    ),
    Option(
        "mpi_threads_disable",
        "--mpi-threads-disable",
        "library_options.mpi_threads_disable",
        opposite="--no-mpi-threads-disable",
    ),
    Option("log_level", "--log-level", "logging.level", metavar="{" + ",".join(LOG_LEVELS).upper() + "}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag (or a pair) for each option."""
    group = parser.add_argument_group("settings of the ranks", "Only those that are given are passed on.")
    for option in OPTIONS:
        text = f"{option.row.help} {option.note}".strip().replace("%", "%%")
        if option.opposite is None:
            text = f"{text} (default: {_default(option)})"
            group.add_argument(option.flag, dest=option.destination, metavar=option.metavar, help=text)
            continue
        pair = group.add_mutually_exclusive_group()
        for flag, value in ((option.flag, "1"), (option.opposite, "0")):
            shown = text if flag == option.shown else argparse.SUPPRESS
            pair.add_argument(flag, dest=option.destination, action="store_const", const=value, help=shown)


def _default(option: Option) -> str:
    default = option.row.default
    return f"{default / option.scale:g}" if isinstance(default, int | float) else default


def _variable(option: Option, text: str, source: str) -> str:
    """The text of the environment variable for a value that was given; checks it."""
    if option.inverted:
        text = {"1": "0", "0": "1"}[text]
    if option.scale != 1:
        text = _scaled(option, text, source)
    try:
        parse(option.row, text, source)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return text.strip()


def _scaled(option: Option, text: str, source: str) -> str:
    try:
        number = float(text)
        if number < 0 or number * option.scale != int(number * option.scale):
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise UsageError(f"{source}={text} cannot be used: it must be a number >= 0") from None
    return str(int(number * option.scale))


def from_arguments(arguments: argparse.Namespace) -> dict[str, str]:
    """The environment variables of the options that were given on the command line.

    Raises:
        UsageError: A value is not accepted.
    """
    given = ((option, getattr(arguments, option.destination)) for option in OPTIONS)
    return {option.row.variable: _variable(option, text, option.flag) for option, text in given if text is not None}


def read_file(path: str) -> Any:
    """What a configuration file holds.

    Raises:
        UsageError: The file is missing, is no YAML or has a key twice; the message names it.
    """
    import yaml  # only those who have a file pay for it

    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            root = loader.get_single_node()
            content = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise UsageError(f"--config-file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no date, too long a number, too deep
        raise UsageError(f"--config-file {path} is not YAML: {error}") from None
    if isinstance(root, yaml.MappingNode):
        _refuse_repetitions(root, path)
        for key, section in root.value:
            if isinstance(section, yaml.MappingNode):
                _refuse_repetitions(section, path, f"{key.value}.")
    return {} if content is None else content


def _refuse_repetitions(mapping: Any, path: str, prefix: str = "") -> None:
    """Refuses a key that comes again, whose first value YAML drops."""
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise UsageError(
                f"--config-file {path}: {name} comes twice, in lines {lines[name]} and {line}; make it one"
            )
        lines[name] = line


def from_mapping(content: Any, path: str) -> dict[str, str]:
    """The environment variables of the options in what a configuration file holds.

    Args:
        content: Sections by name, each with its keys and values.
        path: The file's name, for messages.

    Raises:
        UsageError: A key or a value is not accepted.
    """
    by_key = {option.key: option for option in OPTIONS if option.key is not None}
    accepted = "accepted keys: " + ", ".join(sorted(by_key))
    if not isinstance(content, Mapping):
        raise UsageError(f"{path}: sections with keys are expected, not {shown(content)}; {accepted}")
    variables = {}
    for section, keys in content.items():
        if not any(key.startswith(f"{section}.") for key in by_key):
            raise UsageError(f"{path}: there is no section {shown(section)}; remove it ({accepted})")
        if not isinstance(keys, Mapping):
            raise UsageError(
                f"{path}: section {shown(section)} must hold keys and values, not {shown(keys)}; {accepted}"
            )
        for name, value in keys.items():
            option = by_key.get(f"{section}.{name}")
            if option is None:
                raise UsageError(f"{path}: there is no key {section}.{name}; remove it ({accepted})")
            source = f"{path}: {section}.{name}"
            variables[option.row.variable] = _variable(option, _text(option, value, source), source)
    return variables


def _text(option: Option, value: Any, source: str) -> str:
    if option.row.type is bool:
        fits, wanted = isinstance(value, bool), "true or false"
    elif option.row.type is str:
        fits, wanted = isinstance(value, str), option.row.accepts
    else:
        fits, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if not fits:
        raise UsageError(f"{source}={shown(value)} cannot be used: it must be {wanted}")
    try:
        return str(int(value)) if isinstance(value, bool) else str(value)
    except ValueError:  # Python does not write out thousands of digits
        raise UsageError(f"{source} cannot be used: the number is too large; it must be {option.row.accepts}") from None
