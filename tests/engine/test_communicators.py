"""The arguments of `init(comm=...)` and `ProcessSet`: lists of ranks, and communicators of mpi4py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from horovodlike import basics
from horovodlike.process_set import ProcessSet, global_process_set


def _lists(size: int) -> None:
    rank = basics.rank()
    basics.init(comm="ignored, because this is a job already")
    for all_ranks in (list(range(size)), range(size), []):
        basics.shutdown()
        basics.init(comm=all_ranks)
        assert (basics.rank(), basics.size()) == (rank, size)
    basics.shutdown()
    for wrong in ("ranks", 0, ["0"], [0.0], object()):
        with pytest.raises(ValueError, match="comm must be a list of ranks or a communicator of mpi4py, got"):
            basics.init(comm=wrong)
    for wrong in ([0, 0], [-1], [size], [*range(size), size]):
        with pytest.raises(ValueError, match=f"comm must be different ranks from 0 to {size - 1}, got"):
            basics.init(comm=wrong)
    assert not basics.is_initialized()
    basics.init()


@pytest.mark.parametrize("size", [1, 3])
def test_lists_of_ranks(fresh_ranks, size):
    fresh_ranks(size).run(_lists, size)


def _some_ranks() -> None:
    basics.shutdown()
    for some in ([0, 2], [2], [1, 0, 2]):
        with pytest.raises(NotImplementedError, match=r"all 3 ranks, in their order.*hvd\.ProcessSet\(\["):
            basics.init(comm=some)
    basics.init(process_sets=[ProcessSet([0, 2])])  # what the message says
    assert basics.size() == 3


def test_some_of_the_ranks_are_a_process_set(fresh_ranks):
    fresh_ranks(3).run(_some_ranks)


def test_a_set_of_ranks_has_no_communicator():
    one = ProcessSet([1, 0])
    assert one.mpi_comm is None and str(one) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    assert global_process_set.mpi_comm is None


UNDER_MPI = """
    import json, sys
    from pathlib import Path
    from mpi4py import MPI
    from horovodlike import basics
    from horovodlike.process_set import ProcessSet, add_process_set

    def error_of(call, given):
        try:
            return f"no error: {call(given)}"
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"

    world = MPI.COMM_WORLD
    backwards = world.Split(key=-world.rank)
    parts = world.Split(color=world.rank % 2, key=-world.rank)  # one of 2 and 0, one of 1
    others = backwards.Split(int(world.rank > 0))
    part = ProcessSet(parts)
    refused = [error_of(basics.init, backwards), error_of(basics.init, parts), error_of(ProcessSet, MPI.COMM_NULL)]
    basics.init(comm=world, process_sets=[ProcessSet(others) if world.rank else [1, 2]])
    added = [add_process_set(part if world.rank % 2 == on else ranks) for on, ranks in enumerate([[0, 2], [1]])]
    result = {
        "job": [basics.rank(), basics.size()],
        "part": part.ranks,
        "text": str(part) == f"ProcessSet(process_set_id={part.process_set_id}, ranks={part.ranks}, mpi_comm={parts})",
        "added": [[one.process_set_id, one.ranks, one.mpi_comm is parts] for one in added],
        "refused": refused,
    }
    Path(sys.argv[1], str(world.rank)).write_text(json.dumps(result))  # what ranks print may arrive in one line
"""


def _run(command: list[str], source: str, folder: Path) -> None:
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(source))
    foreign = ("HOROVOD", "OMPI", "PMI")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # mpi4py looks where Python is installed, and then where the system has libraries.
    for library in (Path(_program("mpirun")).parents[1] / "lib").glob("libmpi.so.*"):
        environ["MPI4PY_LIBMPI"] = str(library)
    done = subprocess.run(
        [*command, sys.executable, str(script), str(folder)],
        env={**environ, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr


def _program(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert path is not None, f"{name} is not installed"
    return path


def test_communicators(tmp_path):
    _run(
        [_program("mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"],
        UNDER_MPI,
        tmp_path,
    )
    for rank in range(3):
        result = json.loads((tmp_path / str(rank)).read_text())
        assert result["job"] == [rank, 3]
        assert result["part"] == ([1] if rank == 1 else [0, 2])
        assert result["text"]
        assert result["added"] == [[2, [0, 2], rank != 1], [3, [1], rank == 1]]
        assert [error.partition(":")[0] for error in result["refused"]] == [*["NotImplementedError"] * 2, "ValueError"]
        assert "init(comm=...) with ranks [2, 1, 0] is not supported" in result["refused"][0]
        assert f"with ranks {[1] if rank == 1 else [2, 0]}" in result["refused"][1]
        assert "hvd.ProcessSet(" in result["refused"][1]
        assert "MPI.COMM_NULL, which has no ranks" in result["refused"][2]


OF_ANOTHER_LAUNCHER = """
    import sys
    from pathlib import Path
    from mpi4py import MPI
    from horovodlike import basics
    from horovodlike.process_set import ProcessSet

    for call in (ProcessSet, basics.init):
        try:
            call(MPI.COMM_WORLD)
        except ValueError as error:
            with Path(sys.argv[1], "errors").open("a") as file:
                print(error, file=file)
"""


def test_communicators_that_say_nothing_about_the_job(tmp_path):
    _run([_program("hvdrun"), "-np", "2"], OF_ANOTHER_LAUNCHER, tmp_path)
    errors = (tmp_path / "errors").read_text().splitlines()
    assert len(errors) == 4
    for rank in range(2):
        told = f"in MPI.COMM_WORLD this process is rank 0 of 1, in the job rank {rank} of 2. Give a list of ranks"
        assert sum(told in error for error in errors) == 2
