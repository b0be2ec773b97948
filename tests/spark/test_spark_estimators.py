"""Estimators: the digits from a DataFrame, parameters, steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovodlike.spark.store import Store
from horovodlike.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("framework", ["torch", pytest.param("keras", marks=pytest.mark.thorough)])
def test_the_digits_are_learned(framework: str, tmp_path: Path) -> None:
    environ = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONWARNINGS": "ignore"}
    script = ROOT / "examples" / "spark" / f"digits_{framework}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--store", str(tmp_path / "store"), "--ranks", "2"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = re.search(r"test accuracy: ([\d.]+)%", done.stdout)
    assert found is not None and float(found[1]) >= 96, done.stdout
    left = {path.name.partition(".")[0] for path in (tmp_path / "store").iterdir()}
    assert left == {"runs"}, "the data are removed, the checkpoint is kept"


@pytest.mark.thorough
def test_a_run_is_continued_and_vectors_are_columns(spark: Any, tmp_path: Path) -> None:
    import torch
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([float(n), 1.0]), 3.0 * n + 1, n % 5 == 0) for n in range(50)]
    frame = spark.createDataFrame(rows, ["x", "y", "held_out"])
    model = torch.nn.Linear(2, 1)
    settings = {
        **{"store": Store.create(str(tmp_path)), "model": model, "run_id": "mine", "verbose": 0, "num_proc": 1},
        **{"optimizer": torch.optim.SGD(model.parameters(), lr=1e-4), "loss": torch.nn.functional.mse_loss},
        **{"feature_cols": ["x"], "label_cols": ["y"], "label_shapes": [[1]], "validation": "held_out"},
    }
    first = TorchEstimator(epochs=2, **settings).fit(frame)
    second = TorchEstimator(epochs=5, **settings).fit(frame)
    assert len(first.getHistory()["loss"]) == 2
    assert second.getHistory()["val_loss"][:2] == first.getHistory()["val_loss"]
    assert len(second.getHistory()["loss"]) == 5
    predicted = second.transform(frame).select("y", "y__output").collect()
    weight, bias = second.getModel().weight[0].tolist(), second.getModel().bias.item()
    assert len(predicted) == 50
    assert predicted[7]["y__output"] == pytest.approx(7 * weight[0] + weight[1] + bias, rel=1e-4)
    assert TorchModel(model=second.getModel(), feature_columns=["x"], label_columns=["y"], output_cols=["p"]).transform(
        frame
    ).columns == ["x", "y", "held_out", "p"]


def test_the_state_of_an_optimizer_follows_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    import torch

    import horovodlike.torch as hvd
    from horovodlike.spark import torch as module
    from horovodlike.spark._estimator import Training

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    training = Training({"use_gpu": True}, Store.create(str(tmp_path)), "mine", "train", None, 0)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    training.save_checkpoint({**states, "history": {}, "epoch": 1})

    class Stopped(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stopped

    calls: list[str] = []
    monkeypatch.setattr(module, "_Run", stop)
    monkeypatch.setattr(torch.nn.Linear, "to", lambda self, device: calls.append("model"))
    monkeypatch.setattr(torch.optim.Adam, "load_state_dict", lambda self, state: calls.append("optimizer"))
    with pytest.raises(Stopped):
        module._train(training, pickle.dumps((model, optimizer)))
    hvd.shutdown()
    assert calls == ["model", "optimizer"], "the state is loaded to where the parameters are"


@pytest.mark.parametrize(("passes", "steps"), [(1, 14), (3, 6)])
def test_a_step_takes_several_backward_passes(
    passes: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    import torch

    from horovodlike.spark import torch as module
    from horovodlike.spark._estimator import Training

    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 14, "y": [[3.0]] * 14}), tmp_path / "part.parquet")
    model = torch.nn.Linear(2, 1)
    params = {name: default for name, (default, _) in TorchEstimator.PARAMS.items()} | {
        **{"feature_cols": ["x"], "label_cols": ["y"], "loss": torch.nn.functional.mse_loss, "batch_size": 2},
        **{"epochs": 2, "verbose": 0, "use_gpu": False, "backward_passes_per_step": passes},
    }
    taken: list[int] = []
    step = torch.optim.SGD.step

    def counted(self: Any, *args: Any) -> Any:
        taken.append(1)
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    packed = pickle.dumps((model, torch.optim.SGD(model.parameters(), lr=0.01)))
    trained = module._train(Training(params, Store.create(str(tmp_path)), "mine", str(tmp_path), None, 0), packed)
    assert trained is not None and len(trained.history["loss"]) == 2
    assert len(taken) == steps, "of 7 batches in each of 2 epochs"


def test_parameters_have_accessors_and_errors(tmp_path: Path) -> None:
    estimator = TorchEstimator(store=Store.create(str(tmp_path)), feature_cols=["a"], label_cols=["b"])
    assert (estimator.getBatchSize(), estimator.getEpochs()) == (32, 1)
    assert estimator.setBatchSize(7).setEpochs(3).getBatchSize() == 7
    assert "partitions_per_process" in estimator.explainParams()
    with pytest.raises(TypeError, match="no parameter 'batchsize'"):
        TorchEstimator(batchsize=3)
    with pytest.warns(DeprecationWarning, match="reader_pool_type has no effect"):
        TorchEstimator(reader_pool_type="process")
    with pytest.raises(ValueError, match="Model parameter is required"):
        estimator._check()
    estimator.setModel(object())
    with pytest.raises(ValueError, match=r"Feature columns \['a'\] not found"):
        estimator._check(["b"])
    for name, value, called in (("SampleWeightCol", "w", "Sample weight"), ("Validation", "v", "Validation")):
        other = getattr(estimator.copy(), f"set{name}")(value)
        with pytest.raises(ValueError, match=rf"{called} columns \['{value}'\] not found"):
            other._check(["a", "b"])
    with pytest.raises(ValueError, match="Optimizer parameter is required"):
        estimator._check(["a", "b"])


def test_rows_of_neither_part_are_an_error(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(3).selectExpr("double(id) AS a", "if(id = 1, NULL, id = 0) AS held_out")
    settings = {"feature_cols": ["a"], "label_cols": ["a"], "validation": "held_out", "num_proc": 1}
    estimator = TorchEstimator(store=Store.create(str(tmp_path)), **settings)
    with pytest.raises(ValueError, match="'held_out' has 1 nulls"):
        estimator._write(frame, str(tmp_path / "train"), str(tmp_path / "val"))


def test_every_parameter_and_every_omission_is_documented() -> None:
    from horovodlike.spark._estimator import WITHOUT_EFFECT
    from horovodlike.spark.keras import KerasEstimator

    page = (ROOT / "docs" / "users" / "spark.md").read_text()
    for name in (*TorchEstimator.PARAMS, *KerasEstimator.PARAMS, *WITHOUT_EFFECT):
        assert f"`{name}`" in page, name
