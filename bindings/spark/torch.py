"""``TorchEstimator``: trains a model of PyTorch on a DataFrame of Spark."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from horovodlike._net.object_seal import dumps
from horovodlike.spark._columns import Arrays, Batches, Shards
from horovodlike.spark._estimator import COMMON, MODEL_PARAMS, HorovodEstimator, HorovodModel, Trained, Training, shaped

__all__ = ["TorchEstimator", "TorchModel"]


class TorchEstimator(HorovodEstimator):
    """An estimator of Spark ML that trains a model of PyTorch.

    ``fit(df)`` writes the columns as Parquet to the store, trains on ``num_proc`` ranks, and returns a
    :class:`TorchModel`. After each epoch rank 0 writes a checkpoint to the store; a ``fit`` with the ``run_id`` of an
    earlier one continues after its last epoch. The optimizer must have been made with the model's parameters.

    A metric is a function from output and label to a number, an average over the rows; its name is the function's.
    With ``sample_weight_col`` the loss is called with ``reduction="none"``. ``train_minibatch_fn(model, optimizer,
    loss_fn, inputs, labels, sample_weights)`` replaces a step, and returns outputs and loss.

    Args:
        **params: The parameters, by name: see ``explainParams()`` and docs/users/spark.md.

    Raises:
        TypeError: There is no such parameter.
    """

    PARAMS = COMMON | {
        "input_shapes": (None, "the shape of each input, such as [[-1, 1, 28, 28]]; as stored if None"),
        "loss_constructors": (None, "functions that make the losses on the ranks, in place of loss"),
        "train_minibatch_fn": (None, "a function that makes a step"),
    }

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._begin(params)

    def _check(self, columns: Sequence[str] | None = None) -> None:
        super()._check(columns)
        if self._value("optimizer") is None:
            raise ValueError("Optimizer parameter is required: give optimizer=")
        if (self._value("loss") is None) == (self._value("loss_constructors") is None):
            raise ValueError("give either loss or loss_constructors")

    def _remote(self, training: Training) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # In one pickle, so that the optimizer refers to the parameters of this copy of the model.
        return _train, (training, dumps((self._value("model"), self._value("optimizer"))))

    def _transformer(self, trained: Trained, run_id: str) -> TorchModel:
        return TorchModel(
            model=_load(trained.model),
            history=trained.history,
            feature_columns=self._value("feature_cols"),
            label_columns=self._value("label_cols"),
            input_shapes=self._value("input_shapes"),
            run_id=run_id,
            output_sizes=list(trained.sizes),
        )


class TorchModel(HorovodModel):
    """The transformer that :class:`TorchEstimator` returns; it can also be made of a trained model, by name."""

    PARAMS = MODEL_PARAMS | {"input_shapes": (None, "the shape of each input; as stored if None")}

    def _predictor(self) -> Callable[[], Any]:
        model, shapes = dumps(self._value("model")), self._value("input_shapes")

        def load() -> Any:
            import torch

            module = pickle.loads(model)
            module.eval()

            def predict(columns: list[Any]) -> list[Any]:
                names = [str(number) for number in range(len(columns))]
                inputs = shaped(dict(zip(names, columns, strict=True)), names, shapes)
                with torch.no_grad():
                    outputs = _as_list(module(*[torch.tensor(each) for each in inputs]))
                return [output.cpu().numpy() for output in outputs]

            return predict

        return load


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dump(model: Any) -> bytes:
    """Pickle a model on the CPU, with its class if that is from a script."""
    import torch

    with io.BytesIO() as file:
        torch.save(model.state_dict(), file)
        state = file.getvalue()
    return dumps((model, state))


def _load(data: bytes) -> Any:
    import torch

    model, state = pickle.loads(data)
    model.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
    return model


def _train(training: Training, packed: bytes) -> Trained | None:
    """Train on this rank."""
    import torch

    import horovodlike.torch as hvd

    hvd.init()
    params = training.params
    torch.manual_seed(training.seed + hvd.rank())
    model, optimizer = pickle.loads(packed)
    saved = training.checkpoint() if hvd.rank() == 0 else None
    saved = hvd.broadcast_object(saved, root_rank=0, name="horovodlike.spark.checkpoint")
    history: dict[str, list[float]] = {}
    begin = 0
    device = _choose_device(params["use_gpu"])
    model.to(device)  # before the optimizer's state, which follows the parameters
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        history, begin = saved["history"], saved["epoch"]
    run = _Run(training, model, optimizer, device)
    sizes: tuple[int, ...] = ()
    train_shards, val_shards = training.shards()
    batches = run.batches(train_shards, params["batch_size"], params["train_steps_per_epoch"])
    val_size = params["val_batch_size"] or params["batch_size"]
    val = None
    if val_shards is not None:
        val = run.batches(val_shards, val_size, params["validation_steps_per_epoch"], is_training=False)
    for epoch in range(begin, params["epochs"]):
        batches.set_epoch(epoch)
        values, sizes = run.epoch(batches, is_training=True)
        if val is not None:
            values |= {f"val_{name}": value for name, value in run.epoch(val, is_training=False)[0].items()}
        for name, value in values.items():
            history.setdefault(name, []).append(value)
        if hvd.rank() == 0:
            if params["verbose"]:
                shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
                print(f"epoch {epoch + 1}/{params['epochs']}  {shown}", flush=True)
            training.save_checkpoint(
                {
                    **{"model": _on_cpu(model.state_dict()), "optimizer": _on_cpu(optimizer.state_dict())},
                    **{"history": history, "epoch": epoch + 1},
                }
            )
        for callback in params["callbacks"]:
            callback(epoch, values)
    rank = hvd.rank()
    hvd.shutdown()
    return Trained(_dump(model.cpu()), history, sizes or run.sizes(train_shards)) if rank == 0 else None


def _choose_device(use_gpu: bool) -> Any:
    import torch

    import horovodlike.torch as hvd

    if not (use_gpu and torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _on_cpu(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: _on_cpu(each) for name, each in value.items()}
    return [_on_cpu(each) for each in value] if isinstance(value, list) else value


class _Run:
    """The model of a rank with all that a step needs."""

    def __init__(self, training: Training, model: Any, optimizer: Any, device: Any) -> None:
        import horovodlike.torch as hvd

        self._training, self._params = training, training.params
        self._model, self._device = model, device
        self._passes = 0  # since the last step of the optimizer
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self._optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=self._params["gradient_compression"] or hvd.Compression.none,
            backward_passes_per_step=self._params["backward_passes_per_step"],
        )
        losses = self._params["loss"]
        if losses is None:
            losses = [make() for make in _as_list(self._params["loss_constructors"])]
        self._losses = _as_list(losses)
        self._weights = self._params["loss_weights"] or [1.0] * len(self._losses)
        if not len(self._losses) == len(self._weights) == len(self._params["label_cols"]):
            raise ValueError(
                f"there are {len(self._losses)} losses and {len(self._weights)} weights for "
                f"{len(self._params['label_cols'])} labels"
            )

    def batches(self, shards: Shards, batch_size: int, steps: int | None, is_training: bool = True) -> Batches:
        """Return the batches of this rank."""
        import horovodlike.torch as hvd

        params = self._params
        return Batches(
            shards,
            self._training.columns,
            batch_size,
            hvd.rank(),
            hvd.size(),
            seed=self._training.seed if is_training and params["shuffle"] else None,
            steps=steps,
            transformation=params["transformation_fn"],
            keep=params["inmemory_cache_all"],
            pad=is_training,
        )

    def sizes(self, shards: Shards) -> tuple[int, ...]:
        """Return how many numbers each output has in a row."""
        import torch

        self._model.eval()
        batch = next(iter(Batches(shards, self._training.columns, 1, 0, 1)))
        inputs, _, _ = self._tensors(batch)
        with torch.no_grad():
            return tuple(output[0].numel() for output in _as_list(self._model.cpu()(*[each.cpu() for each in inputs])))

    def _tensors(self, batch: Arrays) -> tuple[list[Any], list[Any], Any]:
        import torch

        params = self._params

        def on_device(array: Any) -> Any:
            return torch.tensor(array).to(self._device)

        inputs = [on_device(each) for each in shaped(batch, params["feature_cols"], params.get("input_shapes"))]
        labels = [on_device(each) for each in shaped(batch, params["label_cols"], params["label_shapes"])]
        weight = params["sample_weight_col"]
        return inputs, labels, None if weight is None else on_device(batch[weight])

    def _loss(self, outputs: list[Any], labels: list[Any], sample_weights: Any) -> Any:
        total: Any = 0.0
        for loss, weight, output, label in zip(self._losses, self._weights, outputs, labels, strict=True):
            if sample_weights is None:
                value = loss(output, label)
            else:
                rows = loss(output, label, reduction="none").reshape(len(label), -1).mean(1)
                value = (rows * sample_weights).mean()
            total = total + weight * value
        return total

    def _step(self, inputs: list[Any], labels: list[Any], sample_weights: Any) -> tuple[list[Any], Any]:
        replacement = self._params.get("train_minibatch_fn")
        if replacement is not None:
            outputs, loss = replacement(self._model, self._optimizer, self._loss, inputs, labels, sample_weights)
            return _as_list(outputs), loss
        if not self._passes:
            self._optimizer.zero_grad()
        outputs = _as_list(self._model(*inputs))
        loss = self._loss(outputs, labels, sample_weights)
        loss.backward()
        self._passes += 1
        if self._passes == self._params["backward_passes_per_step"]:
            self._finish_step()
        return outputs, loss

    def _finish_step(self) -> None:
        self._optimizer.step()
        self._passes = 0

    def epoch(self, batches: Batches, *, is_training: bool) -> tuple[dict[str, float], tuple[int, ...]]:
        """Train or validate; return averages over the rows of all ranks, and the sizes of outputs. Collective."""
        import torch

        import horovodlike.torch as hvd

        names = ["loss", *(metric.__name__ for metric in self._params["metrics"])]
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)
        sizes: tuple[int, ...] = ()
        self._model.train(is_training)
        with torch.set_grad_enabled(is_training):
            for batch in batches:
                inputs, labels, weights = self._tensors(batch)
                if is_training:
                    outputs, loss = self._step(inputs, labels, weights)
                else:
                    outputs = _as_list(self._model(*inputs))
                    loss = self._loss(outputs, labels, weights)
                rows = len(labels[0])
                sizes = tuple(output[0].numel() for output in outputs)
                values = [float(loss.detach())]
                with torch.no_grad():
                    for metric in self._params["metrics"]:
                        values.append(float(metric(outputs[0].detach(), labels[0])))
                sums += torch.tensor([*(value * rows for value in values), rows], dtype=torch.float64)
        if self._passes:
            self._finish_step()  # the last batches of the epoch are fewer
        totals = hvd.allreduce(sums, name="horovodlike.spark.epoch", op=hvd.Sum).tolist()
        return {name: value / max(totals[-1], 1) for name, value in zip(names, totals, strict=False)}, sizes
