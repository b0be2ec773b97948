"""``KerasEstimator``: trains a model of Keras 3, on TensorFlow or torch, on a DataFrame of Spark."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from horovodlike._net.object_seal import dumps
from horovodlike.spark._columns import Batches, Shards
from horovodlike.spark._estimator import COMMON, MODEL_PARAMS, HorovodEstimator, HorovodModel, Trained, Training, shaped

__all__ = ["KerasEstimator", "KerasModel"]


class KerasEstimator(HorovodEstimator):
    """An estimator of Spark ML that trains a model of Keras 3.

    ``fit(df)`` writes the columns as Parquet to the store, trains on ``num_proc`` ranks with the backend of Keras that
    this process has, and returns a :class:`KerasModel`. After each epoch rank 0 writes a checkpoint to the store; a
    ``fit`` with the ``run_id`` of an earlier one continues after its last epoch.

    Optimizer, loss, metrics and loss weights are as for ``compile()``; without an optimizer and a loss, the ones with
    which the model has been compiled.

    Args:
        **params: The parameters, by name: see ``explainParams()`` and docs/users/spark.md.

    Raises:
        TypeError: There is no such parameter.
    """

    PARAMS = COMMON | {
        "custom_objects": ({}, "classes and functions that Keras does not know, by name"),
        "checkpoint_callback": (None, "a callback of Keras that is used on rank 0 only"),
    }

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._begin(params)

    def _check(self, columns: Sequence[str] | None = None) -> None:
        super()._check(columns)
        model = self._value("model")
        if self._value("optimizer") is None and getattr(model, "optimizer", None) is None:
            raise ValueError("Optimizer parameter is required: give optimizer=, or a compiled model")
        if self._value("loss") is None and getattr(model, "loss", None) is None:
            raise ValueError("Loss parameter is required: give loss=, or a compiled model")

    def _env(self) -> dict[str, str]:
        import keras

        return {"KERAS_BACKEND": keras.backend.backend()}

    def _remote(self, training: Training) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import keras

        model = self._value("model")
        optimizer = self._value("optimizer") or model.optimizer
        custom = self._value("custom_objects")
        compiled = {
            "optimizer": keras.saving.serialize_keras_object(keras.optimizers.get(optimizer)),
            "loss": self._value("loss") if self._value("loss") is not None else model.loss,
            "metrics": self._value("metrics"),
            "loss_weights": self._value("loss_weights"),
        }
        return _train, (training, _dump(model), dumps(custom), dumps(compiled))

    def _transformer(self, trained: Trained, run_id: str) -> KerasModel:
        custom = self._value("custom_objects")
        return KerasModel(
            model=_load(trained.model, custom),
            history=trained.history,
            feature_columns=self._value("feature_cols"),
            label_columns=self._value("label_cols"),
            custom_objects=custom,
            run_id=run_id,
            output_sizes=list(trained.sizes),
        )


class KerasModel(HorovodModel):
    """The transformer that :class:`KerasEstimator` returns; it can also be made of a trained model, by name."""

    PARAMS = MODEL_PARAMS | {"custom_objects": ({}, "classes and functions that Keras does not know, by name")}

    def _predictor(self) -> Callable[[], Any]:
        import keras

        model, custom = _dump(self._value("model")), dumps(self._value("custom_objects"))
        backend = keras.backend.backend()

        def load() -> Any:
            os.environ.setdefault("KERAS_BACKEND", backend)
            loaded = _load(model, pickle.loads(custom))
            shapes = _input_shapes(loaded)

            def predict(columns: list[Any]) -> list[Any]:
                import numpy as np

                names = [str(number) for number in range(len(columns))]
                inputs = shaped(dict(zip(names, columns, strict=True)), names, shapes)
                outputs = loaded.predict_on_batch(inputs if len(inputs) > 1 else inputs[0])
                return [np.asarray(each) for each in (outputs if isinstance(outputs, list | tuple) else [outputs])]

            return predict

        return load


def _dump(model: Any) -> bytes:
    """Return a model in Keras's own format, without its optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path, include_optimizer=False)
        with open(path, "rb") as file:
            return file.read()


def _load(data: bytes, custom_objects: Mapping[str, Any]) -> Any:
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(data)
        return keras.saving.load_model(path, custom_objects=dict(custom_objects), compile=False)


def _input_shapes(model: Any) -> list[list[int]] | None:
    """Return the shapes of the model's inputs without the batch, or None if they are not known or not fixed."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    shapes = [list(each.shape[1:]) for each in inputs]
    return shapes if all(None not in shape for shape in shapes) else None


def _train(training: Training, data: bytes, custom: bytes, compiled: bytes) -> Trained | None:
    """Train on this rank."""
    import keras

    import horovodlike.keras as hvd

    hvd.init()
    params = training.params
    if keras.backend.backend() == "tensorflow":
        _choose_gpu(params["use_gpu"])
    keras.utils.set_random_seed((training.seed + hvd.rank()) % (1 << 31))
    custom_objects = pickle.loads(custom)
    settings = pickle.loads(compiled)
    saved = training.checkpoint() if hvd.rank() == 0 else None
    saved = _broadcast(saved)
    model = _load(data if saved is None else saved["model"], custom_objects)
    history: dict[str, list[float]] = {} if saved is None else saved["history"]
    begin = 0 if saved is None else saved["epoch"]
    optimizer = keras.saving.deserialize_keras_object(settings["optimizer"], custom_objects=custom_objects)
    if saved is not None and saved["optimizer"]:
        optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, saved["optimizer"], strict=True):
            variable.assign(value)
    model.compile(
        optimizer=hvd.DistributedOptimizer(
            optimizer,
            compression=params["gradient_compression"] or hvd.Compression.none,
            backward_passes_per_step=params["backward_passes_per_step"],
        ),
        loss=settings["loss"],
        metrics=settings["metrics"] or None,
        loss_weights=settings["loss_weights"],
        jit_compile=False,
    )
    train_shards, val_shards = training.shards()
    if begin < params["epochs"]:
        _fit(training, model, history, begin, train_shards, val_shards)
    rank = hvd.rank()
    hvd.shutdown()
    if rank:
        return None
    outputs = model.outputs
    sizes = tuple(_size(each.shape[1:]) for each in outputs)
    return Trained(_dump(model), history, sizes)


def _size(shape: Sequence[int | None]) -> int:
    size = 1
    for each in shape:
        if each is None:
            raise ValueError(f"an output of the model has the shape {tuple(shape)}, which is not fixed")
        size *= each
    return size


def _broadcast(value: Any) -> Any:
    from horovodlike.objects import broadcast_object

    return broadcast_object(value, root_rank=0, name="horovodlike.spark.checkpoint")


def _choose_gpu(use_gpu: bool) -> None:
    import tensorflow as tf

    import horovodlike.keras as hvd

    gpus = tf.config.list_physical_devices("GPU")
    chosen = [gpus[hvd.local_rank() % len(gpus)]] if gpus and use_gpu else []
    if gpus:
        tf.config.set_visible_devices(chosen, "GPU")


class _Stream:
    """The batches of all epochs, one after the other, as Keras takes them."""

    def __init__(self, training: Training, model: Any, batches: Batches, begin: int) -> None:
        self._training, self._batches, self._epoch = training, batches, begin
        self._shapes = _input_shapes(model)

    def __iter__(self) -> Iterator[Any]:
        params = self._training.params
        while True:
            self._batches.set_epoch(self._epoch)
            for batch in self._batches:
                inputs = shaped(batch, params["feature_cols"], self._shapes)
                labels = shaped(batch, params["label_cols"], params["label_shapes"])
                weight = params["sample_weight_col"]
                yield (
                    tuple(inputs) if len(inputs) > 1 else inputs[0],
                    tuple(labels) if len(labels) > 1 else labels[0],
                    *([batch[weight]] if weight else []),
                )
            self._epoch += 1


def _fit(
    training: Training, model: Any, history: dict[str, list[float]], begin: int, train: Shards, val: Shards | None
) -> None:
    """Train the epochs that are left; extend the history."""
    import keras

    import horovodlike.keras as hvd

    params = training.params

    def batches(shards: Shards, size: int, steps: int | None, seed: int | None) -> Batches:
        return Batches(
            shards,
            training.columns,
            size,
            hvd.rank(),
            hvd.size(),
            seed=seed,
            steps=steps,
            transformation=params["transformation_fn"],
            keep=params["inmemory_cache_all"],
        )

    seed = training.seed if params["shuffle"] else None
    data = batches(train, params["batch_size"], params["train_steps_per_epoch"], seed)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        *params["callbacks"],
    ]
    if hvd.rank() == 0:

        def save(epoch: int, logs: Mapping[str, Any] | None = None) -> None:
            for name, value in (logs or {}).items():
                history.setdefault(name, []).append(float(value))
            training.save_checkpoint(
                {
                    **{"model": _dump(model), "optimizer": _values(model.optimizer)},
                    **{"history": history, "epoch": epoch + 1},
                }
            )

        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=save))
        if params["checkpoint_callback"] is not None:
            callbacks.append(params["checkpoint_callback"])
    validation: dict[str, Any] = {}
    if val is not None:
        size = params["val_batch_size"] or params["batch_size"]
        val_data = batches(val, size, params["validation_steps_per_epoch"], None)
        validation = {"validation_data": iter(_Stream(training, model, val_data, 0)), "validation_steps": len(val_data)}
    model.fit(
        iter(_Stream(training, model, data, begin)),
        steps_per_epoch=len(data),
        epochs=params["epochs"],
        initial_epoch=begin,
        callbacks=callbacks,
        verbose=2 if params["verbose"] and hvd.rank() == 0 else 0,
        **validation,
    )


def _values(optimizer: Any) -> list[Any]:
    import keras

    return [keras.ops.convert_to_numpy(variable) for variable in optimizer.variables]
