"""The table of all settings, with the name, type, default, unit and help of each.

The fields of :class:`Config` are its rows. The command line, the documentation and the native side read the settings
from :data:`SETTINGS`, which is made from these fields. A setting ``x`` is read from ``HOROVODLIKE_X`` or else, if
Horovod has the same setting, from Horovod's variable (mostly ``HOROVOD_X``), so that job scripts keep working. A
variable that is set to the empty string counts as not set.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from horovodlike import routes
from horovodlike.errors import ConfigError

__all__ = [
    "GPU_OPERATIONS",
    "LOG_LEVELS",
    "SETTINGS",
    "WITHOUT_EFFECT",
    "Config",
    "Setting",
    "Value",
    "did_you_mean",
    "is_set",
    "load",
    "parse",
    "render_markdown",
    "render_without_effect",
    "without_effect",
]

Value = int | float | bool | str

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
"""The log levels. ``LOG_LEVELS.index(config.log_level)`` is the native side's number of a level."""

GPU_OPERATIONS = ("auto", "nccl", "staging")
"""The choices of ``gpu_operations``, in the order of the native enum ``hvl_gpu_operations``."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings.

    Attributes:
        name: The attribute of :class:`Config`.
        type: ``int``, ``float``, ``bool`` or ``str``.
        default: The value if no variable is set.
        help: One sentence or two, for ``--help`` and for the documentation.
        unit: ``bytes``, ``s``, ``ms`` or an empty string.
        horovod_name: Horovod's variable of the same meaning, or None.
        minimum: The smallest value that is accepted, or None.
        maximum: The largest value that is accepted, or None.
        above: An exclusive lower bound, or None.
        multiple_of: The value must be a multiple of this.
        choices: The values that are accepted (compared without regard to case), or an empty tuple for any.
        by_operation: The value may also be rules for operations and sizes: see :mod:`horovodlike.routes`.
        same_on_all_ranks: ``init()`` refuses to start if the ranks have different values.
    """

    name: str
    type: type
    default: Value
    help: str
    unit: str = ""
    horovod_name: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    by_operation: bool = False
    same_on_all_ranks: bool = False

    @property
    def variable(self) -> str:
        """The environment variable of this setting."""
        return f"HOROVODLIKE_{self.name.upper()}"

    @property
    def variables(self) -> tuple[str, ...]:
        """Every environment variable that this setting is read from; the first one that is set wins."""
        return (self.variable,) if self.horovod_name is None else (self.variable, self.horovod_name)

    @property
    def accepts(self) -> str:
        """The accepted values, in words."""
        if self.choices:
            rules = "; or rules, such as allreduce:<64K={1},broadcast={0}" if self.by_operation else ""
            return "one of " + ", ".join(self.choices) + rules.format(*self.choices)
        if self.type is bool:
            return "1/true/yes/on or 0/false/no/off"
        if self.type is str:
            return "any text"
        words = "an integer" if self.type is int else "a number"
        if self.minimum is not None:
            words += f" of at least {self.minimum}"
        if self.above is not None:
            words += f" greater than {self.above:g}"
        if self.maximum is not None:
            words += f" and at most {self.maximum}"
        if self.multiple_of != 1:
            words += f" that is a multiple of {self.multiple_of}"
        return f"{words} ({self.unit})" if self.unit else words


def _row(default: Value, help: str, *, horovod: bool | str = False, **more: Any) -> Any:  # noqa: ANN401 - a dataclass field
    """Return a field of :class:`Config`. ``horovod``: True, or another name, if Horovod has this setting."""
    return dataclasses.field(default=default, metadata={"help": help, "horovod": horovod, **more})


@dataclass(frozen=True)
class Config:
    """The values of all settings. ``Config()`` holds the defaults; :func:`load` reads an environment."""

    fusion_threshold: int = _row(
        128 * 1024 * 1024,
        "The most bytes that are reduced together as one batch; 0 turns fusion off. It bounds a batch and costs no "
        "memory: there is no fusion buffer.",
        unit="bytes",
        horovod=True,
        minimum=0,
        maximum=2**62,
        same_on_all_ranks=True,
    )
    cycle_time: float = _row(
        0.0,
        "How long an idle engine waits for more tensors before it starts a batch that no thread waits for.",
        unit="ms",
        horovod=True,
        minimum=0,
        maximum=10**6,
    )
    join_average: str = _row(
        "present",
        "The divisor of Average while ranks have joined (join()): the number of ranks that take part (present), or "
        "the number of all ranks of the process set (all), as in Horovod.",
        choices=("present", "all"),
        same_on_all_ranks=True,
    )
    hierarchical_adasum: bool = _row(
        False,
        "Adasum averages the tensors of a host's ranks and combines the hosts' averages, not the ranks' tensors. "
        "On one host the result is the average.",
        same_on_all_ranks=True,
    )
    cpu_operations: str = _row(
        "auto",
        "The transport of tensors on the CPU. mpi: an MPI library, through mpi4py, see mpi.md. auto: horovodlike's own "
        "transport; native, gloo and ccl are other names for it. Rules: by operation and size, see below.",
        horovod=True,
        choices=("auto", "mpi", "native", "gloo", "ccl"),
        by_operation=True,
        same_on_all_ranks=True,
    )
    mpi_threads_disable: bool = _row(
        False,
        "Asks MPI for MPI_THREAD_SERIALIZED and not for MPI_THREAD_MULTIPLE: then do not call MPI while operations are "
        "in flight.",
        horovod=True,
    )
    overlap: str = _row(
        "auto",
        "Whether tensors are reduced while the framework computes (always) or when a thread waits for a result "
        "(never). On a processor without a core to spare, overlapping costs more than it saves; auto overlaps if the "
        "ranks of the host times OMP_NUM_THREADS are fewer than its cores. Tensors on GPUs are reduced at once in any "
        "case.",
        choices=("auto", "always", "never"),
    )
    cache_capacity: int = _row(
        8192,
        "How many tensors the ranks remember, so that they name them by a number; 0 sends every request in full.",
        horovod=True,
        minimum=0,
        maximum=2**20,
        same_on_all_ranks=True,
    )
    slot_bytes: int = _row(
        256 * 1024,
        "The size of one slot of shared memory, through which the tensors' bytes flow. It should fit into a core's "
        "level 2 cache a few times. An allreduce uses at most 32 KiB for each rank of the host.",
        unit="bytes",
        minimum=4096,
        maximum=2**30,
        multiple_of=64,
        same_on_all_ranks=True,
    )
    slot_depth: int = _row(
        4, "How many slots of shared memory each rank has.", minimum=2, maximum=64, same_on_all_ranks=True
    )
    autotune: bool = _row(
        False,
        "Tries other values of the fusion threshold and the cycle time while the job runs, and keeps the fastest: see "
        "autotune.md. A setting that a variable sets is not tuned.",
        horovod=True,
    )
    autotune_log: str = _row(
        "", "A CSV file into which rank 0 writes the values that it tries and their speed; empty: none.", horovod=True
    )
    autotune_warmup_samples: int = _row(
        3, "How many samples at the start do not count.", horovod=True, minimum=0, maximum=10**6
    )
    autotune_steps_per_sample: int = _row(
        10, "How many training steps a sample has.", horovod=True, minimum=1, maximum=10**6
    )
    stall_check_disable: bool = _row(
        False, "Turns off the warning about ranks that others have been waiting for.", horovod=True
    )
    stall_check_time_seconds: float = _row(
        60.0,
        "After how long a warning names the tensors that some ranks have not submitted, those ranks, and where "
        "in their Python code they are.",
        unit="s",
        horovod=True,
        minimum=0,
        maximum=10**9,
    )
    stall_shutdown_time_seconds: float = _row(
        0.0,
        "After how long a tensor that some ranks have not submitted, or a rank that has stopped, breaks the job; 0 "
        "means never.",
        unit="s",
        horovod=True,
        minimum=0,
        maximum=10**9,
    )
    timeline: str = _row(
        "",
        "A file for the timeline of rank 0; the other ranks' timelines go beside it, see start_timeline(). Empty or "
        "DYNAMIC: no timeline until start_timeline() is called.",
        horovod=True,
    )
    timeline_mark_cycles: bool = _row(False, "Marks in that timeline where batches begin.", horovod=True)
    flight_recorder: str = _row(
        "",
        "A folder into which each rank writes its last collectives and the requests that wait, as rank0.json and so "
        "on, when the job breaks. Empty: they can only be read with horovodlike.flight_recorder().",
    )
    flight_recorder_size: int = _row(256, "How many collectives each rank remembers.", minimum=1, maximum=2**16)
    monitor_host: str = _row(
        "127.0.0.1",
        "The address at which the job's monitor (hvdrun --monitor) answers. With an address that is not a loopback "
        "address, other hosts can read it, without encryption.",
    )
    monitor_names: str = _row(
        "",
        "Names, separated by commas, by which browsers and Prometheus call the monitor; addresses and localhost are "
        "always accepted.",
    )
    monitor_token_file: str = _row(
        "",
        "A file of mode 0600 with the monitor's token, 64 hexadecimal digits, for readers that need the same one for "
        "each job. Empty: a random one.",
    )
    start_timeout: float = _row(
        30.0, "How long init() waits for the other ranks.", unit="s", horovod=True, above=0, maximum=10**6
    )
    log_level: str = _row("warning", "The least severe messages that are logged.", horovod=True, choices=LOG_LEVELS)
    hostid: str = _row(
        "",
        "Replaces the identity of the host: ranks that have different values are on different hosts even where shared "
        "memory would reach, and those that have the same one share a host if they can share memory. Empty: the "
        "launcher's node.",
    )
    network_interface: str = _row(
        "",
        "The network over which ranks of different hosts communicate: names of interfaces or networks (10.0.0.0/8, "
        "fd00::/16), separated by commas; the first that this host has counts. Empty: the one through which it reaches "
        "the rendezvous server.",
        horovod="GLOO_IFACE",
    )
    network_timeout: float = _row(
        30.0,
        "How long another host may be silent, without even an acknowledgement, before it counts as lost. In elastic "
        "jobs hvdrun sets it to the heartbeat timeout.",
        unit="s",
        minimum=1,
        maximum=86400,
        same_on_all_ranks=True,
    )
    tcp_streams: int = _row(
        1,
        "How many TCP connections carry data between two ranks of different hosts. More than one helps where one "
        "cannot fill the link.",
        minimum=1,
        maximum=16,
        same_on_all_ranks=True,
    )
    tcp_congestion: str = _row(
        "auto",
        "The congestion control of TCP connections for data: the name of an algorithm that the kernel has; system: the "
        "kernel's default; auto: the default too, but in place of BBR, which stops each connection for a moment every "
        "10 s, cubic or reno where the round trip is shorter than 1 ms.",
    )
    seal_data: bool = _row(
        False,
        "Gives each frame of the TCP connections for data between hosts a MAC, so that tensors that were changed on "
        "the way are never used: the job breaks. It costs time, see hosts.md. Refused with MPI (mpi in "
        "cpu_operations) and with NCCL between hosts (nccl in gpu_operations; auto means staging there). Shared memory "
        "within a host is not sealed.",
        same_on_all_ranks=True,
    )
    elastic_timeout: float = _row(
        600.0,
        "Elastic jobs: how long the job waits for enough workers before it ends.",
        unit="s",
        above=0,
        maximum=10**6,
        horovod=True,
    )
    discovery_timeout: float = _row(
        30.0,
        "Elastic jobs: how long the host discovery script may take. Then it is ended with its children, and counts as "
        "one that has failed: the hosts stay as they were, and it is asked again.",
        unit="s",
        above=0,
        maximum=86400,
    )
    heartbeat_timeout: float = _row(
        5.0,
        "Elastic jobs: how long a worker may be stopped, or another host silent, before it counts as lost.",
        unit="s",
        minimum=1,
        maximum=86400,
    )
    grace_period: float = _row(
        5.0,
        "How long ranks may take to end once hvdrun has received a signal. After SIGTERM, ranks of elastic training "
        "commit and leave; without hvdrun --min-np only if the state is persistent.",
        unit="s",
        minimum=1,
        maximum=86400,
    )
    gpu_operations: str = _row(
        "auto",
        "The transport of tensors on GPUs. auto: NCCL, if all ranks of a process set have it and a GPU of their "
        "own; else they are copied to the host and reduced there. nccl: the same, but an error where NCCL cannot be "
        "used. staging: never NCCL. Rules: by operation and size, see below.",
        choices=GPU_OPERATIONS,
        by_operation=True,
        same_on_all_ranks=True,
    )
    gpu_staging_bytes: int = _row(
        8 * 1024 * 1024,
        "The part of a tensor on a GPU that is copied to the host at once, if it is reduced there. Twice as much "
        "memory of the host is pinned.",
        unit="bytes",
        minimum=4096,
        maximum=2**40,
        multiple_of=64,
        same_on_all_ranks=True,
    )
    cuda_library: str = _row("", "The file of the CUDA driver; empty: libcuda.so.1, as the loader finds it.")
    nccl_library: str = _row(
        "",
        "The file of NCCL; empty: the file of the package nvidia-nccl, which PyTorch uses, or else libnccl.so.2, as "
        "the loader finds it.",
    )
    gpus_per_rank: int = _row(
        0,
        "hvdrun: the number of GPUs that each rank sees, in CUDA_VISIBLE_DEVICES: its own, by local rank. 0: all that "
        "the job has on its host.",
        minimum=0,
        maximum=2**16,
    )
    fan_out: int = _row(
        16,
        "The number of other hosts to which a host passes on the ranks' agreements; hosts form a tree.",
        minimum=1,
        maximum=2**16,
        same_on_all_ranks=True,
    )


def _settings() -> dict[str, Setting]:
    table = {}
    defaults = Config()
    for field in dataclasses.fields(Config):
        more = dict(field.metadata)
        horovod = more.pop("horovod")
        suffix = horovod if isinstance(horovod, str) else field.name.upper()
        horovod_name = f"HOROVOD_{suffix}" if horovod else None
        assert isinstance(field.type, type)
        table[field.name] = Setting(
            name=field.name, type=field.type, default=getattr(defaults, field.name), horovod_name=horovod_name, **more
        )
    return table


SETTINGS: dict[str, Setting] = _settings()
"""The table of settings by name."""

_REASONS: dict[str, tuple[str, ...]] = {
    "the hierarchy follows from the hosts": ("HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLGATHER", "TORUS_ALLREDUCE"),
    "autotuning compares a few values in turn, which ends by itself: there is no Bayesian search": (
        *("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
    ),
    "ranks communicate through shared memory, and over TCP between hosts": (
        *("CONTROLLER", "GLOO_TIMEOUT_SECONDS", "CCL_CACHE"),
        "ADASUM_MPI_CHUNK_SIZE",
    ),
    "there is no fusion buffer to copy into": ("BATCH_D2D_MEMCOPIES",),
    "NCCL is called for one thing after the other, on one stream": ("NUM_NCCL_STREAMS",),
    "operations on a GPU are always complete before it has done them": ("ENABLE_ASYNC_COMPLETION",),
    "there are no NVTX ranges": ("DISABLE_NVTX_RANGES",),
    "a group is carried out as a whole, however large it is": ("DISABLE_GROUP_FUSION",),
    "hvdrun --bind-to binds ranks; the engine's thread needs no core of its own": ("THREAD_AFFINITY",),
    "process sets can always be added": ("DYNAMIC_PROCESS_SETS",),
    "collectives cannot be part of what XLA compiles": ("ENABLE_XLA_OPS",),
    "hvdrun sets it for the workers of an elastic job": ("ELASTIC",),
    "messages have no time": ("LOG_HIDE_TIME",),
}
WITHOUT_EFFECT: dict[str, str] = {f"HOROVOD_{name}": reason for reason, names in _REASONS.items() for name in names}
"""Horovod's variables that are accepted and ignored, each with the reason."""


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each of Horovod's variables that is set and has no effect."""
    return [f"{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if environ.get(name, "").strip()]


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return a question that continues a message with the nearest of some names; empty if none is near.

    Args:
        name: The name that is wrong.
        names: The right ones.
        prefix: The prefix that it shares with the names to consider.
    """
    rests = [each.removeprefix(prefix) for each in names if each.startswith(prefix)]
    near = difflib.get_close_matches(name.removeprefix(prefix), rests, 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _fits(setting: Setting, value: Value) -> bool:
    if isinstance(value, str | bool):
        return True
    return (
        math.isfinite(value)
        and (setting.minimum is None or value >= setting.minimum)
        and (setting.maximum is None or value <= setting.maximum)
        and (setting.above is None or value > setting.above)
        and (setting.multiple_of == 1 or value % setting.multiple_of == 0)
    )


def _convert(setting: Setting, text: str) -> Value:
    text = text.strip()
    if setting.type is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(text)
    if setting.by_operation and routes.has_rules(text):
        return routes.normalise(text, setting.choices)
    if setting.choices:
        if text.lower() in setting.choices:
            return text.lower()
        raise ValueError(text)
    value: Value = setting.type(text)
    return value


def parse(setting: Setting, text: str, source: str | None = None) -> Value:
    """Convert the text of one setting and check it.

    Args:
        setting: The row of the table.
        text: The value in the environment or on the command line.
        source: The name of the variable or option that the user has set, for errors; ``setting.variable`` if None.

    Returns:
        The value, of ``setting.type``.

    Raises:
        ConfigError: The value is not accepted; the message names the source, the value and the accepted values.
    """
    try:
        value = _convert(setting, text)
        fits = _fits(setting, value)
    except routes.RuleError as error:
        raise ConfigError(f"{source or setting.variable}={text!r} cannot be used: {error}") from None
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{source or setting.variable}={text!r} cannot be used: it must be {setting.accepts}"
        ) from None
    return value


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read every setting.

    Args:
        environ: The variables; ``os.environ`` if None.

    Returns:
        The values. A setting whose variables are not set, or are empty, has its default.

    Raises:
        ConfigError: A value is not accepted.
    """
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for setting in SETTINGS.values():
        variable = variable_of(setting.name, source)
        if variable is not None:
            values[setting.name] = parse(setting, source[variable], variable)
    return Config(**values)


def is_set(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether an environment variable sets the setting, even if only to its default."""
    return variable_of(name, environ) is not None


def variable_of(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the environment variable that a setting is read from; None if no variable sets it."""
    return next((variable for variable in SETTINGS[name].variables if environ.get(variable, "").strip()), None)


def _shown(setting: Setting) -> str:
    if setting.type is bool:
        return "1" if setting.default else "0"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default) or "(empty)"


def render_markdown() -> str:
    """Return the table of settings for the documentation, as Markdown."""
    lines = ["| variable | also read from | default | accepted | meaning |", "|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        also = f"`{setting.horovod_name}`" if setting.horovod_name else ""
        lines.append(f"| `{setting.variable}` | {also} | {_shown(setting)} | {setting.accepts} | {setting.help} |")
    return "\n".join(lines) + "\n"


def render_without_effect() -> str:
    """Return the table of Horovod's variables that have no effect, as Markdown."""
    rows = [f"| `{name}` | {reason} |" for name, reason in WITHOUT_EFFECT.items()]
    return "\n".join(["| variable | why |", "|---|---|", *rows]) + "\n"
