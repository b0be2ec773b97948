"""The names of `import horovodlike.tensorflow as hvd`: Horovod's names, with its parameters in its order."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import horovodlike.tensorflow as hvd
from horovodlike import basics
from horovodlike.compat import counterpart
from horovodlike.tensorflow import mpi_ops

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "users" / "tensorflow.md").read_text().split("## Horovod's names")[1]

REDUCTION = ["compression", "op", "prescale_factor", "postscale_factor"]
OPTIONS = ["device_dense", "device_sparse", "compression", "sparse_as_dense"]
GROUPS = ["num_groups", "groups", "process_set"]
# Horovod's parameters; what is new comes after them.
PARAMETERS = {
    "allreduce": ["tensor", "average", "device_dense", "device_sparse", *REDUCTION, "name", "process_set"],
    "grouped_allreduce": ["tensors", "average", "device_dense", "device_sparse", *REDUCTION, "process_set"],
    "reducescatter": ["tensor", "device_dense", "compression", "op", "name", "process_set", "ignore_name_scope"],
    "grouped_reducescatter": ["tensors", "device_dense", "compression", "op", "process_set"],
    "allgather": ["tensor", "name", "ignore_name_scope", "process_set"],
    "grouped_allgather": ["tensors", "name", "ignore_name_scope", "process_set"],
    "broadcast": ["tensor", "root_rank", "name", "ignore_name_scope", "process_set"],
    "broadcast_": ["variables", "root_rank", "name", "process_set"],
    "alltoall": ["tensor", "splits", "name", "ignore_name_scope", "process_set"],
    "size_op": ["process_set_id", "name"],
    "process_set_included_op": ["process_set_id", "name"],
    "rank_op": ["name"],
    "broadcast_variables": ["variables", "root_rank", "process_set", "inplace"],
    "broadcast_object": ["obj", "root_rank", "session", "name", "process_set"],
    "broadcast_object_fn": ["root_rank", "session", "name", "process_set"],
    "allgather_object": ["obj", "session", "name", "process_set"],
    "DistributedOptimizer": [
        *("optimizer", "name", "use_locking", *OPTIONS, "backward_passes_per_step", "op"),
        *("gradient_predivide_factor", "average_aggregated_gradients", *GROUPS, "scale_local_gradients"),
    ],
    "DistributedGradientTape": ["gradtape", *OPTIONS, "op", "gradient_predivide_factor", *GROUPS],
    "PartialDistributedGradientTape": [
        *("gradtape", *OPTIONS, "op", "gradient_predivide_factor", *GROUPS, "local_layers", "scale_local_gradients")
    ],
    "SyncBatchNormalization": ["fused"],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_horovods(name):
    actual = list(inspect.signature(getattr(hvd, name)).parameters)
    assert actual[: len(PARAMETERS[name])] == PARAMETERS[name]


def test_every_name_of_horovods_is_there_or_said_to_be_missing():
    names: set[str] = set()
    for row in re.findall(r"^\| `.*$", TABLE, flags=re.MULTILINE):
        listed, tests, differs = (cell.strip() for cell in row.strip("|").split("|"))
        row_names = set(re.findall(r"`(\w+)`", listed))
        names |= row_names
        if "not in this release" in differs:
            assert not any(hasattr(hvd, name) for name in row_names)
            continue
        assert all(hasattr(hvd, name) for name in row_names), row_names
        assert tests, row_names
        for test in re.findall(r"`(\w+)`", tests):
            assert list((ROOT / "tests").rglob(f"{test}.py")), test
    new = set(re.findall(r"`(\w+)`", TABLE.split("New are")[1]))
    assert names.isdisjoint(new)
    assert names | new == {*hvd.__all__}
    assert names >= PARAMETERS.keys()


def test_scripts_that_import_from_mpi_ops():
    others = ["ProcessSet", "global_process_set", "add_process_set", "remove_process_set", "check_num_rank_power_of_2"]
    for name in (*basics.__all__, *others, "start_timeline", "stop_timeline"):
        assert getattr(mpi_ops, name) is getattr(hvd, name), name
        assert name in mpi_ops.__all__


def test_what_does_not_depend_on_a_job():
    assert hvd.gloo_built()
    assert (hvd.cuda_built(), hvd.nccl_built()) == (basics.cuda_built(), basics.nccl_built())
    assert hvd.handle_average_backwards_compatibility(None, None) == hvd.Average
    assert hvd.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    with pytest.raises(ValueError, match="only one"):
        hvd.handle_average_backwards_compatibility(hvd.Sum, True)
    assert counterpart("horovod.tensorflow").module == hvd.__name__
