"""The options of ``horovodrun`` that are accepted but have no effect here, so that job scripts keep working."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HorovodOption:
    """Some flags and configuration-file keys of Horovod's that have no effect for the same reason.

    Attributes:
        reason: The reason why they have no effect.
        switches: The flags without a value.
        flags: The flags with a value.
        keys: The keys of the configuration file, as ``section.key`` or, at the top level, ``key``.
    """

    reason: str
    switches: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


# fmt: off
HOROVOD_OPTIONS = (
    HorovodOption("ranks communicate through shared memory, and over TCP between hosts",
        switches=("--gloo", "--jsrun", "--tcp"),
        flags=("--num-nccl-streams", "--gloo-timeout-seconds"),
        keys=("controller", "library_options.num_nccl_streams", "library_options.gloo_timeout_seconds")),
    HorovodOption("hosts are checked whenever a job starts", switches=("--disable-cache",)),
    HorovodOption("the hierarchy follows from the hosts",
        switches=("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
                  "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce"),
        keys=("params.hierarchical_allreduce", "params.hierarchical_allgather", "params.torus_allreduce")),
    HorovodOption("there is no Bayesian search",
        flags=("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
        keys=("autotune.bayes_opt_max_samples", "autotune.gaussian_process_noise")),
    HorovodOption("use --bind-to to bind ranks",
        flags=("--thread-affinity", "--binding-args"), keys=("library_options.thread_affinity",)),
    HorovodOption("messages of the engine have no time",
        switches=("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp",
                  "--no-log-hide-timestamp"),
        keys=("logging.with_timestamp",)),
)
# fmt: on
"""Options that have an effect are in ``options``."""


def flags() -> dict[str, HorovodOption]:
    """Return the row of each flag, by flag."""
    return {flag: row for row in HOROVOD_OPTIONS for flag in (*row.switches, *row.flags)}


class _Note(argparse.Action):
    """Adds the flag to the list of given flags; ignores its value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), self.option_strings[0]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag; they are not shown by ``--help``."""
    for row in HOROVOD_OPTIONS:
        for flag in (*row.switches, *row.flags):
            values: int | None = 0 if flag in row.switches else None
            more: dict[str, Any] = {"dest": "horovod_flags", "default": [], "help": argparse.SUPPRESS}
            parser.add_argument(flag, action=_Note, nargs=values, **more)


def given(arguments: argparse.Namespace) -> list[str]:
    """List the flags that were given and have no effect."""
    names: list[str] = arguments.horovod_flags
    return names


def chooses_mpi(content: Any) -> bool:
    """Return whether the content of a configuration file, of any shape, chooses MPI as ``--mpi`` does."""
    return isinstance(content, Mapping) and str(content.get("controller")).lower() == "mpi"


def without_effect(content: Any, mpi: bool = False) -> tuple[Any, list[str]]:
    """Remove the choice of MPI and the keys that have no effect from the content of a configuration file.

    Args:
        content: The content of the file, of any shape.
        mpi: Whether the job runs with MPI, so that the choice of MPI has an effect.

    Returns:
        The remaining content, and the removed keys that have no effect.
    """
    if not isinstance(content, Mapping):
        return content, []
    keys = {key for row in HOROVOD_OPTIONS for key in row.keys}
    left, found = {}, []
    for section, values in content.items():
        if section == "controller" and mpi and chooses_mpi(content):
            continue
        if section in keys:
            found.append(section)
        elif not isinstance(values, Mapping):
            left[section] = values
        else:
            found += [f"{section}.{name}" for name in values if f"{section}.{name}" in keys]
            rest = {name: value for name, value in values.items() if f"{section}.{name}" not in keys}
            if rest or not values:
                left[section] = rest
    return left, found
