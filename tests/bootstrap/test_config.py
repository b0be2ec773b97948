"""The table of settings, and the tree of exceptions."""

import dataclasses
import pickle

import pytest

from horovodlike import errors
from horovodlike.config import (
    SETTINGS,
    WITHOUT_EFFECT,
    Config,
    is_set,
    load,
    parse,
    render_markdown,
    render_without_effect,
    without_effect,
)


def test_defaults() -> None:
    assert load({}) == Config()
    config = Config()
    assert (config.fusion_threshold, config.cycle_time, config.cache_capacity) == (134217728, 0.0, 8192)
    assert (config.slot_bytes, config.slot_depth, config.start_timeout) == (262144, 4, 30.0)
    assert (config.stall_check_time_seconds, config.stall_shutdown_time_seconds) == (60.0, 0.0)
    assert not (config.stall_check_disable)
    assert (config.log_level, config.hostid) == ("warning", "")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_read_from_its_variables(name: str) -> None:
    setting = SETTINGS[name]
    text = {int: "12288", float: "2.5", bool: "yes", str: "x"}[setting.type]
    text = {
        "log_level": "DEBUG",
        "slot_depth": "8",
        "tcp_streams": "2",
        "overlap": "always",
        "cpu_operations": "MPI",
        "join_average": "all",
        "gpu_operations": "staging",
    }.get(name, text)
    expected = parse(setting, text)
    assert expected != setting.default
    assert type(expected) is setting.type
    for variable in setting.variables:
        assert getattr(load({variable: text}), name) == expected
        assert getattr(load({variable: "  "}), name) == setting.default


def test_our_variable_wins_over_horovods() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "1", "HOROVODLIKE_CYCLE_TIME": "3.5"}
    assert load(environ).cycle_time == 3.5
    assert load({"HOROVOD_SLOT_BYTES": "4096"}).slot_bytes == Config().slot_bytes


@pytest.mark.parametrize(
    ("variable", "text", "accepted"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "-1", "at least 0"),
        ("HOROVODLIKE_FUSION_THRESHOLD", "1" + "0" * 40, "at most"),
        ("HOROVODLIKE_FUSION_THRESHOLD", "64MB", "an integer"),
        ("HOROVODLIKE_CYCLE_TIME", "nan", "a number"),
        ("HOROVODLIKE_CYCLE_TIME", "inf", "(ms)"),
        ("HOROVODLIKE_SLOT_BYTES", "5000", "multiple of 64"),
        ("HOROVODLIKE_SLOT_DEPTH", "1", "at least 2"),
        ("HOROVODLIKE_START_TIMEOUT", "0", "greater than 0"),
        ("HOROVOD_LOG_LEVEL", "loud", "trace, debug, info, warning, error, fatal"),
        ("HOROVODLIKE_STALL_CHECK_DISABLE", "maybe", "1/true/yes/on"),
    ],
)
def test_bad_values_name_variable_value_and_what_is_accepted(variable: str, text: str, accepted: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        load({variable: text})
    assert f"{variable}={text!r}" in str(caught.value)
    assert accepted in str(caught.value)


def test_parse_names_the_flag() -> None:
    with pytest.raises(errors.ConfigError, match="--cycle-time-ms='x'"):
        parse(SETTINGS["cycle_time"], "x", "--cycle-time-ms")


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().slot_depth = 3  # type: ignore[misc]


def test_markdown_has_one_row_for_each_setting() -> None:
    lines = render_markdown().splitlines()
    assert len(lines) == 2 + len(SETTINGS)
    for setting, line in zip(SETTINGS.values(), lines[2:], strict=True):
        assert line.startswith(f"| `{setting.variable}` |")
        assert setting.help in line
        assert line.count("|") == 6


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "fusion_threshold", 64 * 1024 * 1024),
        ("HOROVOD_CYCLE_TIME", "3.5", "cycle_time", 3.5),
        ("HOROVOD_CACHE_CAPACITY", "1024", "cache_capacity", 1024),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_check_disable", True),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "stall_check_time_seconds", 30.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "stall_shutdown_time_seconds", 90.0),
        ("HOROVOD_START_TIMEOUT", "60", "start_timeout", 60.0),
        ("HOROVOD_AUTOTUNE", "1", "autotune", True),
        ("HOROVOD_AUTOTUNE_LOG", "tuned.csv", "autotune_log", "tuned.csv"),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "5", "autotune_warmup_samples", 5),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "20", "autotune_steps_per_sample", 20),
        ("HOROVOD_LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("HOROVOD_GLOO_IFACE", "eth0", "network_interface", "eth0"),
    ],
)
def test_horovods_variables_keep_their_meaning(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(load({variable: text}), name) == value


def test_what_is_set_is_told_from_defaults() -> None:
    default = str(Config().fusion_threshold)
    for variable in ("HOROVODLIKE_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"):
        assert is_set("fusion_threshold", {variable: default})
        assert not is_set("fusion_threshold", {variable: " ", "HOROVOD_CYCLE_TIME": "1"})


def test_horovods_variables_without_effect() -> None:
    assert not WITHOUT_EFFECT.keys() & {setting.horovod_name for setting in SETTINGS.values()}
    environ = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_GLOO_IFACE": " ", "HOROVOD_CYCLE_TIME": "1", "HOME": "/"}
    assert load(environ) == Config(cycle_time=1.0)
    reason = "ranks communicate through shared memory, and over TCP between hosts"
    assert without_effect(environ) == [f"HOROVOD_CONTROLLER has no effect: {reason}"]
    assert len(render_without_effect().splitlines()) == 2 + len(WITHOUT_EFFECT)


def test_the_tree_of_exceptions() -> None:
    for broken in (errors.MismatchError, errors.JobBrokenError, errors.ShutDownError):
        assert issubclass(broken, errors.HorovodInternalError)
    assert issubclass(errors.HorovodInternalError, RuntimeError)
    assert issubclass(errors.RendezvousError, RuntimeError)
    assert not issubclass(errors.RendezvousError, errors.HorovodInternalError)
    assert issubclass(errors.ConfigError, ValueError)
    assert str(errors.NotInitializedError()) == "horovodlike has not been initialized; use hvd.init()."


def test_exceptions_survive_pickling() -> None:
    interrupt = pickle.loads(pickle.dumps(errors.HostsUpdatedInterrupt(True)))
    assert interrupt.skip_sync is True
    mismatch = pickle.loads(pickle.dumps(errors.HorovodVersionMismatchError("torch", "2.1", "2.2")))
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.1", "2.2")
    assert isinstance(pickle.loads(pickle.dumps(errors.NotInitializedError())), errors.NotInitializedError)
