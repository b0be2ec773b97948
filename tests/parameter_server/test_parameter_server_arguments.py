"""Wrong arguments of parameter servers: clear errors before anything is sent, on all ranks where all take part."""

from __future__ import annotations

import os
import re
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike._engine.parameters import Array, Remembered
from horovodlike.errors import MismatchError, StateFileError
from horovodlike.parameter_server import ParameterServer, register_rule
from horovodlike.parameter_server._rules import registered

VALUE = (3, 4)


def _refusals():
    """Each call is refused, and the elements stay as they were."""
    register_rule("my_rule", lambda values, pushed: None)
    with ParameterServer(np.zeros(VALUE), name="ps") as server, ParameterServer([np.zeros(4), np.zeros(3)]) as listed:
        good, refused = np.ones(VALUE), []

        def expect(error, text, call, *args, **kwargs):
            with pytest.raises(error, match=re.escape(text)):
                call(*args, **kwargs)
            refused.append(text)

        built_in = {"adam", "add", "copy", "max", "min", "momentum", "scale_add", "sgd", "zero"}
        # Other tests have registered rules in these ranks.
        known = ", ".join(sorted({*built_in, "my_rule", *registered()}))
        expect(ValueError, f"there is no update rule 'none'; there are {known}", server.send, good, "none")
        expect(ValueError, "rule 'sgd' needs lr: its arguments are lr", server.send, good, "sgd")
        expect(ValueError, "rule 'add' does not take lr: its arguments are none", server.send, good, "add", lr=1)
        expect(
            ValueError,
            "adam' does not take x: its arguments are lr, beta1=0.9, beta2=0.999, epsilon=1e-08",
            server.send,
            good,
            "adam",
            lr=1,
            x=1,
        )
        expect(TypeError, "rule 'sgd': lr must be a number, got 'x'", server.send, good, "sgd", lr="x")
        expect(ValueError, "rule 'sgd': lr must be finite, got inf", server.send, good, "sgd", lr=float("inf"))
        expect(
            ValueError, "has 5 arguments, and can have 4 at most", server.send, good, "my_rule", a=1, b=1, c=1, d=1, e=1
        )
        expect(ValueError, "have more than 64 bytes", server.send, good, "my_rule", **{"a" * 70: 1})
        expect(ValueError, "ps: send: the array must have the shape (3, 4), got (4, 3)", server.send, good.T)
        expect(ValueError, "must have elements of float64, got float32", server.send, good.astype(np.float32))
        expect(TypeError, "ps: send: expected one array, as in the constructor, got 1 of them", server.send, [good])
        expect(TypeError, "ps: send: expected a NumPy array", server.send, None)
        expect(TypeError, "send: expected a list of 2 arrays, as in the constructor, got ndarray", listed.send, good)
        expect(ValueError, "array 1 must have the shape (3,), got (4,)", listed.send, [np.zeros(4), np.zeros(4)])
        expect(ValueError, "ps: receive: the array must have the shape", server.receive, np.zeros(3))
        expect(ValueError, "read-only", server.receive, np.broadcast_to(np.zeros(4), VALUE))
        expect(ValueError, "there is no row 3: the array has 3 rows", server.receive_rows, [0, 3])
        expect(ValueError, "there is no row -1", server.send_rows, [-1], good[:1])
        expect(TypeError, "indices must be integers in one dimension", server.receive_rows, [[0]])
        expect(TypeError, "indices must be integers in one dimension", server.receive_rows, [0.5])
        expect(ValueError, "must have the shape (1, 4), got (2, 4)", server.send_rows, [0], good[:2])
        expect(ValueError, "rows are those of one array", listed.receive_rows, [0])
        expect(ValueError, "tick() needs staleness=", server.tick)
        expect(ValueError, "'add' is a rule of the core", register_rule, "add", print)
        expect(ValueError, "must be an identifier", register_rule, "a b", print)
        expect(TypeError, "needs a function, got int", register_rule, "number", 3)
        assert not server.receive().wait().any()
        hvd.barrier()
    with ParameterServer(np.zeros(5, np.int64)) as integers:
        expect(
            ValueError,
            "rule 'sgd' is for float32 and float64, and these parameters are int64",
            integers.send,
            np.ones(5, np.int64),
            "sgd",
            lr=1,
        )
        hvd.barrier()
    expect(ValueError, "ps cannot be used: it was closed; make a new ParameterServer", server.send, good)
    server.close()
    return refused


def test_wrong_calls(ranks):
    assert len(ranks(2).run(_refusals)[0]) == 28


def _refused_constructions():
    rank = hvd.rank()
    for error, text, value, options in (
        (ValueError, "2 elements cannot be split among 3 servers", np.zeros(2), {}),
        (TypeError, "expected a NumPy array", "text", {}),
        (ValueError, "root=7 is not one of the ranks [0, 1, 2]", np.zeros(5), {"root": 7}),
        (ValueError, "init must be 'root' or 'own', got 'x'", np.zeros(5), {"init": "x"}),
        (ValueError, "servers must be None, 'ranks' or 'dedicated', got 2", np.zeros(5), {"servers": 2}),
        (ValueError, "hvdrun --servers N starts them", np.zeros(5), {"servers": "dedicated"}),
        (ValueError, "staleness must be 0 or more, got -1", np.zeros(5), {"staleness": -1}),
        (ValueError, "payload must be None, 'bfloat16' or 'int8', got 'fp4'", np.zeros(5), {"payload": "fp4"}),
        (ValueError, "payload='int8' is for float32 and float64, not for int64", np.zeros(5, int), {"payload": "int8"}),
        (
            MismatchError,
            "the shapes differ between the ranks: [(4,)] on rank 0, [(5,)] on rank 1",
            np.zeros(4 + min(rank, 1)),
            {},
        ),
        (
            MismatchError,
            "the element types differ between the ranks: ['float32'] on rank 0, ['float64'] on rank 2",
            np.zeros(5, np.float64 if rank == 2 else np.float32),
            {},
        ),
        (MismatchError, "init and root differ between the ranks", np.zeros(5), {"root": rank}),
    ):
        with pytest.raises(error, match=re.escape(text)):
            ParameterServer(value, **options)
    value = "text" if rank == 1 else np.zeros(5)
    with pytest.raises(TypeError if rank == 1 else MismatchError) as raised:
        ParameterServer(value, name="ps")
    if rank != 1:
        assert "ps: rank 1 cannot take part: TypeError: ps: expected a NumPy array" in str(raised.value)
    with pytest.raises(TypeError if rank == 1 else MismatchError, match="name must be a string or None"):
        ParameterServer(np.zeros(5), name=5 if rank == 1 else "ps")
    with ParameterServer(np.zeros(5)) as server:  # all ranks are still together
        server.send(np.ones(5)).wait()


def test_wrong_arguments_of_the_constructor(ranks):
    ranks(3).run(_refused_constructions)


def test_before_init():
    with pytest.raises(ValueError, match="has not been initialized"):
        ParameterServer(np.zeros(5))


def _checkpoints(folder, size):
    rank, path = hvd.rank(), f"{folder}/parameters.npz"
    value = [np.arange(70_001.0) + rank, np.full((3, 5), rank, np.int32)]
    gradient = [np.ones(70_001), np.ones((3, 5), np.int32)]
    chosen = hvd.add_process_set(range(size))
    with ParameterServer(value) as server:
        for _ in range(3):
            server.send(gradient).wait()
        hvd.barrier()
        if rank == 0:
            server.save(path)
            server.send(gradient, "zero").wait()
            server.load(path)
        hvd.barrier()
        expected = server.receive().wait()
        assert (expected[0] == np.arange(70_001.0) + 3 * hvd.size()).all()
        hvd.barrier()
        for shown, other in (
            ("2 arrays, and the servers have 1", np.zeros(9)),
            ("array 1 has the shape", [value[0]] * 2),
        ):
            with ParameterServer(other) as wrong:
                if rank == 0:
                    with pytest.raises(ValueError, match=shown):
                        wrong.load(path)
    with ParameterServer(value) if size == hvd.size() else _on(chosen, value) as other:
        if other is not None and rank == 0:
            other.load(path)
        if other is not None:
            hvd.barrier(process_set=chosen)
            assert all(map(np.array_equal, other.receive().wait(), expected))
            hvd.barrier(process_set=chosen)
    hvd.remove_process_set(chosen)


class _on:
    def __init__(self, chosen, value):
        self._server = ParameterServer(value, process_set=chosen) if chosen.included() else None

    def __enter__(self):
        return self._server

    def __exit__(self, *_):
        if self._server is not None:
            self._server.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_with_another_number_of_servers(ranks, tmp_path, size):
    ranks(3).run(_checkpoints, str(tmp_path), size)


def _continued(path):
    """Training that goes on from a checkpoint, on one server, is that on all servers."""
    chosen = hvd.add_process_set([0])
    rng = np.random.default_rng(3)
    steps = [rng.standard_normal(200_001) for _ in range(4)]
    with ParameterServer(np.zeros(200_001)) as server:
        if hvd.rank() == 0:
            for index, step in enumerate(steps):
                if index == 2:
                    server.save(path)
                server.send(step, "adam", lr=0.1).wait()
            expected = server.receive().wait()
        hvd.barrier()
    if chosen.included():
        with ParameterServer(np.zeros(200_001), process_set=chosen) as server:
            server.load(path)
            for step in steps[2:]:
                server.send(step, "adam", lr=0.1).wait()
            np.testing.assert_array_equal(server.receive().wait(), expected)
    hvd.remove_process_set(chosen)


def test_what_rules_remember_is_in_the_checkpoint(ranks, tmp_path):
    ranks(3).run(_continued, str(tmp_path / "adam.npz"))


def _saved_while_others_send(path):
    with ParameterServer([np.zeros(70_001), np.zeros(7, np.float32)]) as server:
        over = hvd.allreduce_async(np.ones(1), name="over") if hvd.rank() else None
        while over is not None and not hvd.poll(over):
            server.send([np.ones(70_001), np.ones(7, np.float32)], "momentum", lr=0.1, momentum=0.5).wait()
        if over is None:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(300):  # until an update has come at the wrong moment
                    server.save(path)
                    if said:
                        break
            over = hvd.allreduce_async(np.ones(1), name="over")
            assert [warning.category for warning in said] == [RuntimeWarning]
            assert "mixes elements of different moments" in str(said[0].message) and path in str(said[0].message)
            assert said[0].filename.endswith("test_parameter_server_arguments.py")
        hvd.synchronize(over)


def _saved_between_barriers(path):
    """Ranks of different speeds and numbers of steps: rank 0 makes the most."""
    ones, steps, found = [np.ones(70_001), np.ones(7)], 6 - 2 * hvd.rank(), []
    with ParameterServer([np.zeros(70_001), np.zeros(7)]) as server:
        for step in range(1, steps + 1):
            server.send(ones).wait()
            if step % 2 == 0:
                hvd.barrier()
                if hvd.rank() == 0:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        server.save(path)
                    with np.load(path) as file:
                        found.append({*file["values.0"].tolist(), *file["values.1"].tolist()})
                hvd.barrier()
        hvd.join()
    if hvd.rank() == 0:
        made = [sum(min(step, 6 - 2 * rank) for rank in range(hvd.size())) for step in (2, 4, 6)]
        assert found == [{number} for number in made]


@pytest.mark.parametrize("size", [2, 3])
def test_a_file_that_mixes_moments_is_warned_of_and_barriers_avoid_it(ranks, tmp_path, size):
    ranks(size).run(_saved_while_others_send, str(tmp_path / "mixed.npz"))
    ranks(size).run(_saved_between_barriers, str(tmp_path / "whole.npz"))


def _damaged(path, folder):
    with ParameterServer(np.arange(100_000.0)) as server:
        if hvd.rank() == 0:
            server.save(path)
            content = Path(path).read_bytes()
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limit[1]))  # as a full disk
            try:
                with pytest.raises(OSError, match="the parameters cannot be written: File too large"):
                    server.save(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            assert Path(path).read_bytes() == content
            assert os.listdir(folder) == [os.path.basename(path)]
            server.load(path)
            for damaged in (content[:1000], content[:5000] + b"\1\2" + content[5002:], b"", b"text"):
                with open(path, "wb") as file:
                    file.write(damaged)
                with pytest.raises(StateFileError, match="is damaged, or was not written by ParameterServer.save"):
                    server.load(path)
            with pytest.raises(FileNotFoundError):
                server.load(path + ".none")
            assert (server.receive().wait() == np.arange(100_000.0)).all()
        hvd.barrier()


def test_a_full_disk_and_damaged_files(ranks, tmp_path):
    ranks(2).run(_damaged, str(tmp_path / "parameters.npz"), str(tmp_path))


def _tampered(path):
    """A file whose entries do not go together is refused; nothing is sent, and no memory beside it is read."""
    with ParameterServer([np.arange(100_000.0), np.arange(5)], name="ps") as server:
        if hvd.rank() == 0:
            server.send([np.ones(100_000), np.zeros(5, int)], "copy").wait()
            server.save(path)
            with np.load(path) as file:
                good = dict(file)
            assert not [name for name in good if name.startswith("slot")]
            slots = {"slot_0.0": np.ones(100_000), "slot_1.0": np.ones(100_000)}
            for name, value, shown in (
                ("dtypes", None, "dtypes"),
                ("values.1", None, "values.1"),
                ("counters.0", None, "counters.0"),
                ("blocks.0", None, "blocks.0"),
                ("values.0", good["values.0"].astype(np.float32), "values.0 has the shape .* float32, not .* float64"),
                ("values.1", good["values.1"].astype(np.int8), "values.1 has the shape .* int8, not .* int64"),
                ("slot_0.0", np.ones(1), r"slot_0.0 has the shape \(1,\)"),
                ("slot_1.0", slots["slot_1.0"].astype(np.float32), "slot_1.0 has the shape .* float32"),
                ("counters.0", good["counters.0"][:1], r"counters.0 has the shape \(1,\)"),
                ("counters.0", good["counters.0"].astype(np.int32), "counters.0 has the shape .* int32"),
                ("blocks.0", good["blocks.0"] + 1, "blocks.0 does not begin with 0"),
                ("blocks.0", good["blocks.0"][:0], "counters.0 has the shape"),
            ):
                entries = {key: each for key, each in (good | slots | {name: value}).items() if each is not None}
                with open(path, "wb") as file:
                    np.savez(file, **entries)
                with pytest.raises(StateFileError, match=f"is damaged, or was not written by .*{shown}"):
                    server.load(path)
            first, second = server.receive().wait()
            assert (first == 1).all() and not second.any()
        hvd.barrier()


def test_files_whose_entries_do_not_go_together(ranks, tmp_path):
    ranks(2).run(_tampered, str(tmp_path / "parameters.npz"))


def _slots_of_the_file(path):
    """A file without slots makes those of the servers zeros, and none where there are none."""
    ones = np.ones(100_000)
    with ParameterServer(np.zeros(100_000)) as server:
        if hvd.rank() == 0:
            server.save(path)
            sent, original = [], Array.send_state
            Array.send_state = lambda self, state, *args: sent.append(state) or original(self, state, *args)
            try:
                server.load(path)
                assert sent == [Remembered.COUNTERS]
                server.send(ones, "momentum", lr=1, momentum=0.5).wait()
                server.load(path)
                assert sorted(sent[1:]) == [Remembered.SLOT_0, Remembered.COUNTERS]
            finally:
                Array.send_state = original
            server.send(ones, "momentum", lr=1, momentum=0.5).wait()
            assert (server.receive().wait() == -1).all()
        hvd.barrier()


def test_a_file_without_slots(ranks, tmp_path):
    ranks(2).run(_slots_of_the_file, str(tmp_path / "parameters.npz"))
