from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from horovodlike.config import SETTINGS
from horovodlike.launcher import horovod_options
from horovodlike.launcher.cli import main, parse
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.horovod_options import HOROVOD_OPTIONS, without_effect
from horovodlike.launcher.options import OPTIONS, from_mapping
from horovodlike.launcher.planning import Binding, JobSpec, RemoteStart
from horovodlike.launcher.planning.hosts import HostSlots


def spec(*words: str, environ: dict[str, str] | None = None) -> JobSpec:
    return parse(["-np", "2", *words, "python", "train.py"], environ or {})


def test_defaults() -> None:
    assert spec() == JobSpec(num_proc=2, command=("python", "train.py"), settings={}, start_timeout=30.0)


def test_every_option_is_exported_and_no_other() -> None:
    job = spec(
        *("--fusion-threshold-mb", "32", "--cycle-time-ms=2.5", "--cache-capacity", "0", "--no-stall-check"),
        *("--stall-check-warning-time-seconds", "120", "--stall-check-shutdown-time-seconds", "240"),
        *("--log-level", "DEBUG", "--start-timeout", "7", "--autotune", "--autotune-log-file", "tuned.csv"),
        *("--autotune-warmup-samples", "0", "--autotune-steps-per-sample", "5"),
    )
    assert job.settings == {
        "HOROVODLIKE_FUSION_THRESHOLD": str(32 * 1024 * 1024),
        "HOROVODLIKE_CYCLE_TIME": "2.5",
        "HOROVODLIKE_CACHE_CAPACITY": "0",
        "HOROVODLIKE_STALL_CHECK_DISABLE": "1",
        "HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVODLIKE_LOG_LEVEL": "DEBUG",
        "HOROVODLIKE_START_TIMEOUT": "7",
        "HOROVODLIKE_AUTOTUNE": "1",
        "HOROVODLIKE_AUTOTUNE_LOG": "tuned.csv",
        "HOROVODLIKE_AUTOTUNE_WARMUP_SAMPLES": "0",
        "HOROVODLIKE_AUTOTUNE_STEPS_PER_SAMPLE": "5",
    }
    assert job.start_timeout == 7.0
    assert spec("--no-autotune").settings == {"HOROVODLIKE_AUTOTUNE": "0"}
    assert spec("--stall-check").settings == {"HOROVODLIKE_STALL_CHECK_DISABLE": "0"}


def test_options_name_settings_that_exist() -> None:
    assert {option.setting for option in OPTIONS} - {None} <= SETTINGS.keys()


def test_launcher_options() -> None:
    job = spec("--bind-to", "core", "--output-filename", "logs", "--prefix-output-with-timestamp", "--verbose")
    assert (job.bind_to, job.output_directory, job.timestamps, job.verbose) == (Binding.CORE, "logs", True, True)
    assert spec("-prefix-timestamp").timestamps
    assert spec().fold
    assert not spec("--no-fold").fold


def test_the_ranks_that_are_shown() -> None:
    assert spec().shown_ranks is None
    assert spec("--show-ranks", "0,1").shown_ranks == {0, 1}
    assert parse(["-np", "9", "--show-ranks", "8,2-4", "true"], {}).shown_ranks == {2, 3, 4, 8}
    assert parse(["-np", "1", "--max-np", "9", "--show-ranks", "8", "true"], {}).shown_ranks == {8}
    for text in ("", "one", "2-1", "0;1", "-1", "9"):
        with pytest.raises(UsageError, match=f"--show-ranks {text}: "):
            parse(["-np", "9", f"--show-ranks={text}", "true"], {})


def test_the_time_after_which_a_silent_host_is_lost() -> None:
    assert spec("--network-timeout", "12").settings == {"HOROVODLIKE_NETWORK_TIMEOUT": "12"}


def test_abbreviations_are_accepted() -> None:
    assert spec("--fusion", "1", "--bind", "numa").bind_to is Binding.NUMA


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            ["python", "x.py", "--st", "3", "-np", "9", "--verbose"],
            ("python", "x.py", "--st", "3", "-np", "9", "--verbose"),
        ),
        (["--", "prog", "--", "-v"], ("prog", "--", "-v")),
        (["--verbose", "prog", "--version"], ("prog", "--version")),
        (["--cycle-time-ms=3", "prog"], ("prog",)),
        ([], ()),
    ],
)
def test_the_command_keeps_its_own_options(words: list[str], command: tuple[str, ...]) -> None:
    assert parse(["-np", "2", *words], {}).command == command


def test_values_that_are_options_themselves() -> None:
    job = spec("--mpi", "--mpi-args", "--report-bindings", "--ssh-options", "-v", "--compat", "--binding-args", "-x")
    assert (job.mpi_args, job.remote.ssh_options) == (("--report-bindings",), ("-v",))
    assert (job.ignored, job.command) == (("--binding-args",), ("python", "train.py"))
    assert spec("--ssh-o", "-4 -v").remote.ssh_options == ("-4", "-v")
    assert spec("--ssh-options", "--compat").compat is False


@pytest.mark.parametrize("words", [["--mpi-args"], ["--ssh-port", "-v", "true"]])
def test_values_that_are_missing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["-np", "2", *words], {})
    assert re.search(rf"argument .*{words[0]}: expected one argument", capsys.readouterr().err)


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", ""])
def test_a_bad_number_of_ranks(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--num-proc={number}", "true"]) == 2
    error = capsys.readouterr().err
    assert error == f"hvdrun: --num-proc {number} cannot be used: it must be an integer >= 1, and at most 65536\n"


def test_no_number_of_ranks() -> None:
    with pytest.raises(UsageError, match="how many ranks.*-np"):
        parse(["true"], {})


def test_a_negative_number_as_a_word_of_its_own_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-np", "-1", "true"]) == 2
    assert "-np -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--no-such-flag"],
        ["--autotune", "--no-autotune"],
        ["--gaussian"],
        ["--bind-to", "socket"],
        ["--stall-check", "--no-stall-check"],
    ],
)
def test_unknown_flags_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        spec(*words)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cycle-time-ms", "-1"], r"--cycle-time-ms='-1' cannot be used: it must be a number of at least 0"),
        (["--autotune-steps-per-sample", "0"], r"--autotune-steps-per-sample='0' cannot be used: it must be an int"),
        (["--cycle-time-ms", "soon"], r"--cycle-time-ms='soon' cannot be used"),
        (["--cache-capacity", "1.5"], r"--cache-capacity='1.5' cannot be used: it must be an integer"),
        (["--fusion-threshold-mb", "-3"], r"--fusion-threshold-mb=-3 cannot be used: it must be a number >= 0"),
        (["--fusion-threshold-mb", "nan"], r"--fusion-threshold-mb=nan cannot be used"),
        (["--log-level", "LOUD"], r"--log-level='LOUD' cannot be used: it must be one of trace, debug"),
        (["--start-timeout", "0"], r"--start-timeout='0' cannot be used: it must be a number greater than 0"),
        (["-H", "localhost"], r"Invalid host input 'localhost'"),
        (["-H", "localhost:1"], r"Requested more processes \(2\) than there are available slots \(1\)"),
        (["-H", "localhost:2", "--hostfile", "x"], r"-H and --hostfile contradict each other"),
        (["--hostfile", "/no/such/file"], r"--hostfile /no/such/file: No such file"),
        (["-H", "localhost:2", "--ssh-options", "'"], r"--ssh-options .* cannot be used: No closing quotation"),
    ],
)
def test_bad_values_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec(*words)


def test_bad_settings_in_the_environment_are_named() -> None:
    with pytest.raises(UsageError, match="HOROVOD_CYCLE_TIME='soon'"):
        spec(environ={"HOROVOD_CYCLE_TIME": "soon"})


def test_the_start_timeout_comes_from_the_environment_too() -> None:
    job = spec(environ={"HOROVOD_START_TIMEOUT": "90"})
    assert (job.start_timeout, job.settings) == (90.0, {})


def test_hosts() -> None:
    for text in ("localhost:2", "127.0.0.1:1,localhost:1", f"{socket.gethostname()}:2", "127.0.0.2:2", "[::1]:3"):
        job = spec("-H", text)
        assert job.num_proc == 2
        assert [placement.name for placement in job.placements] == [job.here]
    job = spec("-H", "node1.invalid:1,localhost:1,node1.invalid:2")
    assert job.hosts == (HostSlots("node1.invalid", 3), HostSlots("localhost", 1))
    assert [placement.counts for placement in job.placements] == [(2,)]
    assert parse(["-H", "node1.invalid:1,127.0.0.1:2", "true"], {}).num_proc == 3


def test_how_hosts_are_reached() -> None:
    job = spec(
        "-H", "localhost:2", "-p", "2222", "-i", "key", "--ssh-options=-l me", "--network-interfaces", "eth0,eth1"
    )
    assert job.remote == RemoteStart(2222, "key", ("-l", "me"))
    assert job.settings == {"HOROVODLIKE_NETWORK_INTERFACE": "eth0,eth1"}
    assert spec("--network-interface", "a", "--network-interface", "b").network_interface == "a,b"


def test_an_allocation() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2].invalid", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert parse(["true"], environ).hosts == (HostSlots("n1.invalid", 2), HostSlots("n2.invalid", 2))
    assert spec(environ=environ).num_proc == 2
    assert spec("-H", "localhost:2", environ=environ).here == "localhost"
    with pytest.raises(UsageError, match=r"more processes \(5\) than there are available slots \(4\).*n1.invalid:2"):
        parse(["-np", "5", "true"], environ)
    here = {**environ, "SLURM_JOB_NODELIST": "n1.invalid", "SLURMD_NODENAME": "n1.invalid", "SLURM_TASKS_PER_NODE": "1"}
    assert spec(environ=here).hosts == ()  # the tasks of the only node are no limit


def test_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "params: {fusion_threshold_mb: 32, cycle_time_ms: 5, cache_capacity: 2048}\n"
        "stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}\n"
        "autotune: {enabled: true, log_file: tuned.csv, warmup_samples: 5, steps_per_sample: 20}\n"
        "logging: {level: INFO}\n"
    )
    assert spec("--config-file", str(path)).settings == {
        "HOROVODLIKE_FUSION_THRESHOLD": str(32 * 1024 * 1024),
        "HOROVODLIKE_CYCLE_TIME": "5",
        "HOROVODLIKE_CACHE_CAPACITY": "2048",
        "HOROVODLIKE_STALL_CHECK_DISABLE": "1",
        "HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVODLIKE_AUTOTUNE": "1",
        "HOROVODLIKE_AUTOTUNE_LOG": "tuned.csv",
        "HOROVODLIKE_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVODLIKE_AUTOTUNE_STEPS_PER_SAMPLE": "20",
        "HOROVODLIKE_LOG_LEVEL": "INFO",
    }
    # The command line wins wherever it stands.
    for words in (
        ["--cycle-time-ms", "1", "--config-file", str(path)],
        ["--config-file", str(path), "--cycle-time-ms", "1"],
    ):
        assert spec(*words).settings["HOROVODLIKE_CYCLE_TIME"] == "1"
    path.write_text("")
    assert spec("--config-file", str(path)).settings == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"params": {"cycle_time": 1}},
            r"no key params.cycle_time; did you mean params.cycle_time_ms\? \(accepted keys: ",
        ),
        ({"parms": {}}, r"no section 'parms'; did you mean params\? \(accepted keys: "),
        ({"library_options": {"num_nccl_streams": 2}}, r"no key library_options.num_nccl_streams; remove it"),
        ({"elastic": {"timeout": 2}}, r"no section 'elastic'; remove it"),
        ({"autotune": {"enabled": 2}}, r"autotune.enabled='2' cannot be used: it must be 1/true"),
        ({"controller": "gloo"}, r"no section 'controller'"),
        ({"params": 3}, r"section 'params' must hold keys and values, not 3"),
        ([1], r"sections with keys are expected, not \[1\]"),
        ({"params": {"cycle_time_ms": "fast"}}, r"params.cycle_time_ms='fast' cannot be used: it must be a number"),
        ({"params": {"cycle_time_ms": True}}, r"params.cycle_time_ms='True' cannot be used: it must be a number"),
        ({"params": {"cache_capacity": -1}}, r"params.cache_capacity='-1' cannot be used: it must be an integer of at"),
        ({"logging": {"level": 3}}, r"logging.level=3 cannot be used: it must be one of trace"),
        ({"autotune": {"log_file": ["a"]}}, r"autotune.log_file=\['a'\] cannot be used: it must be any text"),
        ({"params": {"cycle_time_ms": None}}, r"params.cycle_time_ms=None cannot be used"),
    ],
)
def test_bad_configuration_is_named(content: object, message: str) -> None:
    with pytest.raises(UsageError, match="job.yaml.*" + message):
        from_mapping(content, "job.yaml")


def test_a_configuration_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--config-file .*missing.yaml: No such file"):
        spec("--config-file", str(tmp_path / "missing.yaml"))
    (tmp_path / "bad.yaml").write_text("params: {a: [")
    with pytest.raises(UsageError, match="bad.yaml is not YAML"):
        spec("--config-file", str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {cycle_time_ms: 3}\n\nparams: {cache_capacity: 7}\n", "params comes twice, in lines 1 and 3"),
        ("params:\n  cycle_time_ms: 3\n  cycle_time_ms: 4\n", "params.cycle_time_ms comes twice, in lines 2 and 3"),
    ],
)
def test_a_key_that_comes_twice_in_the_configuration_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"--config-file .*job.yaml: {message}; make it one"):
        spec("--config-file", str(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("word", "question"), [("--fusion-treshold-mb=3", "; did you mean --fusion-threshold-mb?"), ("--zzz", "")]
)
def test_an_option_that_is_none(capsys: pytest.CaptureFixture[str], word: str, question: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", word, "python", "train.py"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {word}{question}\n")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS:
        if not option.flags:
            continue
        assert re.search(rf"^  {option.shown}\b", text, re.MULTILINE)
    assert [option.shown for option in OPTIONS if option.opposite] == [
        *("--autotune", "--no-stall-check", "--timeline-mark-cycles", "--mpi-threads-disable")
    ]


FLAGS = [(row, flag) for row in HOROVOD_OPTIONS for flag in (*row.switches, *row.flags)]


def with_values(row: horovod_options.HorovodOption, flag: str) -> list[str]:
    if flag in row.switches:
        return [flag]
    return [flag, "3"]


@pytest.mark.parametrize(("row", "flag"), FLAGS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_of_horovodruns_options_is_known(row: horovod_options.HorovodOption, flag: str) -> None:
    words = with_values(row, flag)
    job = spec("--compat", *words)
    assert (job.command, job.ignored, job.settings) == (("python", "train.py"), (flag,), {})
    assert spec(*words, "--compat").ignored == (flag,)


def test_horovodruns_options_are_in_one_table_only() -> None:
    assert len(horovod_options.flags()) == len(FLAGS)
    ours = {flag for option in OPTIONS for flag in (*option.flags, option.opposite)}
    assert not ours & horovod_options.flags().keys()


@pytest.mark.parametrize("word", ["--gloo", "--autotune-gaussian-process-noise=0.5", "--disable-cache"])
def test_horovodruns_options_need_compat(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        spec(word, "1")
    assert caught.value.code == 2
    assert f"error: {word} is an option of Horovod's, which only --compat accepts" in capsys.readouterr().err


def test_compat() -> None:
    assert spec("--compat").compat
    assert not spec().compat
    assert parse(["-np", "1", "python", "train.py", "--compat"], {}) == JobSpec(1, ("python", "train.py", "--compat"))
    job = parse(["-np", "1", "--gloo", "python", "train.py"], {}, "horovodrun")
    assert job == JobSpec(1, ("python", "train.py"), compat=True, ignored=("--gloo",))


def test_horovodruns_options_that_mean_something() -> None:
    job = parse(
        [
            *(
                "-np",
                "2",
                "-H",
                "localhost:2",
                "--fusion-threshold-mb",
                "32",
                "--cycle-time-ms",
                "5",
                "--no-stall-check",
            ),
            *("--stall-check-warning-time-seconds", "9", "--cache-capacity", "0", "--start-timeout", "8", "--tcp", "x"),
        ],
        {},
        "horovodrun",
    )
    assert job.settings == {
        "HOROVODLIKE_FUSION_THRESHOLD": str(32 * 1024 * 1024),
        "HOROVODLIKE_CYCLE_TIME": "5",
        "HOROVODLIKE_STALL_CHECK_DISABLE": "1",
        "HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVODLIKE_CACHE_CAPACITY": "0",
        "HOROVODLIKE_START_TIMEOUT": "8",
    }
    assert (job.ignored, job.start_timeout) == (("--tcp",), 8.0)


def test_keys_without_effect() -> None:
    content = {
        "controller": "gloo",
        "params": {"cycle_time_ms": 5, "torus_allreduce": False},
        "autotune": {"enabled": True, "bayes_opt_max_samples": 50},
        "logging": {},
        "other": 3,
    }
    assert without_effect(content) == (
        {"params": {"cycle_time_ms": 5}, "autotune": {"enabled": True}, "logging": {}, "other": 3},
        ["controller", "params.torus_allreduce", "autotune.bayes_opt_max_samples"],
    )
    assert without_effect([1]) == ([1], [])


def test_a_configuration_file_of_horovods(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("controller: gloo\nparams: {cycle_time_ms: 5, hierarchical_allreduce: true}\n")
    job = spec("--compat", "--config-file", str(path))
    assert job.settings == {"HOROVODLIKE_CYCLE_TIME": "5"}
    assert job.ignored == ("controller", "params.hierarchical_allreduce")
    with pytest.raises(UsageError, match="there is no section 'controller'"):
        spec("--config-file", str(path))
    path.write_text("params: {cycle_times: 5}\n")
    with pytest.raises(UsageError, match="there is no key params.cycle_times"):
        spec("--compat", "--config-file", str(path))


def test_the_controller_in_a_configuration_file_of_horovods(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    with_file = ("--compat", "--config-file", str(path))
    for name in ("mpi", "MPI"):
        path.write_text(f"controller: {name}\n")
        job = spec(*with_file, "--mpi-args", "-x A")
        assert (job.mpi, job.mpi_args, job.ignored) == (True, ("-x", "A"), ())
        assert job.settings == {"HOROVODLIKE_CPU_OPERATIONS": "mpi"}
    assert spec(*with_file, "--mpi").ignored == ()
    for words in (["--gloo"], ["--min-np", "1"]):  # the command line wins; elastic jobs run without MPI in Horovod, too
        job = spec(*with_file, *words)
        assert (job.mpi, job.ignored[-1]) == (False, "controller")
    path.write_text("controller: tcp\n")
    assert (spec(*with_file).mpi, spec(*with_file).ignored) == (False, ("controller",))
    assert spec(*with_file, "--mpi").ignored == ("controller",)


def test_mpi_follows_the_rules_of_the_environment() -> None:
    variable = "HOROVODLIKE_CPU_OPERATIONS"
    for value, passed in (("", "mpi"), ("auto", "mpi"), ("allreduce:<64K=mpi", "allreduce:<64K=mpi")):
        assert spec("--mpi", environ={variable: value}).settings == {variable: passed}
    assert spec("--mpi", environ={"HOROVOD_CPU_OPERATIONS": "broadcast=mpi"}).settings == {variable: "broadcast=mpi"}
    with pytest.raises(UsageError, match="'tcp' must be one of auto, mpi, native"):
        spec("--mpi", environ={variable: "allreduce=tcp"})
