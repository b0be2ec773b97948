"""The base classes of estimators and of the transformers that they return: parameters, data, and results."""

from __future__ import annotations

import pickle
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params

from horovodlike._net.object_seal import dumps
from horovodlike.spark._columns import Arrays, Shards, to_numpy
from horovodlike.spark.backend import Backend, SparkBackend
from horovodlike.spark.store import Store

if TYPE_CHECKING:
    import numpy as np

WITHOUT_EFFECT = {
    "cache": "nothing is cached on the driver",
    "categorical_cols": "all columns are read as they are",
    "compress_sparse_cols": "vectors are written as Spark writes them",
    "continuous_cols": "all columns are read as they are",
    "data_module": "Parquet is read through pyarrow",
    "mp_start_method": "a thread reads ahead, no process",
    "reader_pool_type": "a thread reads ahead",
    "shuffle_buffer_size": "rows are shuffled within a row group, and row groups among each other",
    "tensorflow_dataset_prefetch_buffer_size": "a thread reads ahead",
    "train_reader_num_workers": "a thread reads ahead",
    "transformation_edit_fields": "transformation_fn may return other columns",
    "transformation_removed_fields": "transformation_fn may return fewer columns",
    "val_reader_num_workers": "a thread reads ahead",
}
"""Parameters that only petastorm needed, with the reason why nothing takes their place."""

COMMON: dict[str, tuple[Any, str]] = {
    "num_proc": (None, "the number of ranks; spark.default.parallelism if None. Not together with backend"),
    "backend": (None, "what runs the ranks, such as SparkBackend; made from num_proc if None"),
    "store": (None, "where data and checkpoints are kept: Store.create(folder)"),
    "model": (None, "the model to train"),
    "optimizer": (None, "the optimizer"),
    "loss": (None, "the loss function, or a list of one for each label"),
    "loss_weights": (None, "the weights of the losses, by label"),
    "metrics": ([], "metrics to compute beside the loss"),
    "feature_cols": (None, "the columns that the model takes, in the order of its inputs"),
    "label_cols": (None, "the columns that the model predicts, in the order of its outputs"),
    "sample_weight_col": (None, "the column with the weight of each row"),
    "validation": (None, "the share of rows to validate on, or a column that is true or over 0 in these rows"),
    "gradient_compression": (None, "as compression of DistributedOptimizer"),
    "batch_size": (32, "rows of one rank's batch"),
    "val_batch_size": (None, "rows of a batch in validation; batch_size if None"),
    "epochs": (1, "passes over the data"),
    "train_steps_per_epoch": (None, "steps of an epoch; as many as the data have if None"),
    "validation_steps_per_epoch": (None, "steps of a validation; as many as the data have if None"),
    "callbacks": ([], "callbacks of the framework"),
    "random_seed": (None, "the seed of everything random; a new one if None"),
    "shuffle": (True, "whether rows come in another order in each epoch"),
    "verbose": (1, "0: silent; 1: losses by epoch; 2: the launcher's decisions as well"),
    "partitions_per_process": (10, "the Parquet files for each rank"),
    "run_id": (None, "the name of the run: with the name of an earlier one its last checkpoint is continued"),
    "transformation_fn": (None, "applied to each batch: from arrays by column to arrays by column"),
    "label_shapes": (None, "the shape of each label without the batch, such as [[8, 8]]; as stored if None"),
    "inmemory_cache_all": (False, "keep the rows of a rank in memory once they are read"),
    "use_gpu": (True, "train on a GPU if the executor has one"),
    "backward_passes_per_step": (1, "as for DistributedOptimizer"),
    "backend_env": ({}, "variables for the ranks"),
}
"""The parameters of all estimators: default and meaning."""


def _accessors(cls: type[_WithParams]) -> type[_WithParams]:
    """Add the parameters of a class, with ``getName`` and ``setName`` for each."""

    def add(name: str, meaning: str) -> None:
        camel = "".join(word.capitalize() for word in name.split("_"))

        def getter(self: _WithParams) -> Any:
            return self._value(name)

        def setter(self: _WithParams, value: Any) -> Any:
            return self._change({name: value})

        getter.__doc__, setter.__doc__ = f"Return ``{name}``: {meaning}.", f"Set ``{name}``: {meaning}."
        setattr(cls, f"get{camel}", getter)
        setattr(cls, f"set{camel}", setter)
        setattr(cls, name, Param(Params._dummy(), name, meaning))

    for name, (_, meaning) in cls.PARAMS.items():
        add(name, meaning)
    return cls


class _WithParams(Params):
    """Parameters of Spark ML, of any type, from a table."""

    PARAMS: ClassVar[dict[str, tuple[Any, str]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "PARAMS" in vars(cls):
            _accessors(cls)

    def _begin(self, given: Mapping[str, Any]) -> None:
        self._setDefault(**{name: default for name, (default, _) in self.PARAMS.items()})
        self._change(given)

    def _change(self, given: Mapping[str, Any]) -> Any:
        for name, value in given.items():
            if name in WITHOUT_EFFECT:
                warnings.warn(f"{name} has no effect: {WITHOUT_EFFECT[name]}", DeprecationWarning, stacklevel=4)
            elif name not in self.PARAMS:
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}")
            elif value is not None:
                self._set(**{name: value})
        return self

    def setParams(self, **params: Any) -> Any:
        """Set parameters by name; None leaves one as it is."""
        return self._change(params)

    def _value(self, name: str) -> Any:
        return self.getOrDefault(self.getParam(name))


@dataclass(frozen=True)
class Training:
    """The order for a rank to train, without the model. Can be pickled.

    Attributes:
        params: The parameters of the estimator by name, without model, optimizer, store and backend.
        store: The store.
        run_id: The name of the run.
        train: The folder of the training data.
        val: The folder of the validation data, or None.
        seed: The seed.
    """

    params: Mapping[str, Any]
    store: Store
    run_id: str
    train: str
    val: str | None
    seed: int

    @property
    def columns(self) -> list[str]:
        """The columns to read."""
        weight = self.params["sample_weight_col"]
        return [*self.params["feature_cols"], *self.params["label_cols"], *([weight] if weight else [])]

    def shards(self) -> tuple[Shards, Shards | None]:
        """Return the training and the validation data; rank 0 reads the footers. Collective."""
        from horovodlike.basics import rank
        from horovodlike.objects import broadcast_object

        found = None
        if rank() == 0:
            found = Shards.scan(self.store, self.train), None if self.val is None else Shards.scan(self.store, self.val)
        shards: tuple[Shards, Shards | None] = broadcast_object(found, root_rank=0, name="horovodlike.spark.shards")
        return shards

    def checkpoint(self) -> Any:
        """Return the last checkpoint of the run, or None. It is a pickle, so the store must be trusted."""
        path = self.store.get_checkpoint_path(self.run_id)
        if not self.store.saving_runs() or not self.store.exists(path):
            return None
        return pickle.loads(self.store.read(path))

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the last checkpoint of the run."""
        if self.store.saving_runs():
            self.store.write(self.store.get_checkpoint_path(self.run_id), dumps(dict(state)))


@dataclass(frozen=True)
class Trained:
    """The result of rank 0.

    Attributes:
        model: The model as the framework's module writes it.
        history: Losses and metrics: lists over the epochs, by name.
        sizes: For each output, how many numbers a row has.
    """

    model: bytes
    history: dict[str, list[float]] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()


class HorovodEstimator(_WithParams, Estimator[Any]):
    """An estimator of Spark ML that trains a model on all ranks of a job."""

    PARAMS = COMMON

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | str | None = None) -> Any:
        """Train on the Parquet files that are in the store already.

        Args:
            params: Other values of parameters for this call, as for ``fit``.
            dataset_idx: The number or name of a data set of the store, as for ``get_train_data_path(dataset_idx)``.

        Returns:
            The transformer.
        """
        if params:
            return self.copy(dict(params)).fit_on_parquet(dataset_idx=dataset_idx)
        self._check()
        store = self._value("store")
        val = store.get_val_data_path(dataset_idx)
        has_val = self._value("validation") is not None and store.is_parquet_dataset(val)
        return self._train(store.get_train_data_path(dataset_idx), val if has_val else None, self._run_id())

    def _fit(self, dataset: Any) -> Any:
        """Write the data to the store, train, and remove the data."""
        self._check(dataset.columns)
        store, run_id = self._value("store"), self._run_id()
        name = f"{run_id}-{uuid.uuid4().hex[:8]}"
        paths = store.get_train_data_path(name), store.get_val_data_path(name)
        try:
            has_val = self._write(dataset, *paths)
            return self._train(paths[0], paths[1] if has_val else None, run_id)
        finally:
            for path in paths:
                store.remove(path)

    def _run_id(self) -> str:
        return str(self._value("run_id") or f"run-{uuid.uuid4().hex[:12]}")

    def _check(self, columns: Sequence[str] | None = None) -> None:
        for name, what in (("model", "Model"), ("store", "Store"), ("feature_cols", "Feature columns")):
            if self._value(name) is None:
                raise ValueError(f"{what} parameter is required: give {name}=")
        if not self._value("label_cols"):
            raise ValueError("Label columns parameter is required: give label_cols=")
        if self._value("num_proc") is not None and self._value("backend") is not None:
            raise ValueError("give either num_proc or backend, not both")
        weight, validation = self._value("sample_weight_col"), self._value("validation")
        wanted = {
            **{"Feature": self._value("feature_cols"), "Label": self._value("label_cols")},
            **{"Sample weight": [weight] if weight else []},
            **{"Validation": [validation] if isinstance(validation, str) else []},
        }
        for what, names in wanted.items():
            missing = [] if columns is None else [name for name in names if name not in columns]
            if missing:
                raise ValueError(f"{what} columns {missing} not found in training DataFrame metadata: it has {columns}")

    def _write(self, dataset: Any, train_path: str, val_path: str) -> bool:
        """Write the columns as Parquet; return whether there are validation data."""
        from pyspark.sql import functions

        validation, weight = self._value("validation"), self._value("sample_weight_col")
        names = [*self._value("feature_cols"), *self._value("label_cols"), *([weight] if weight else [])]
        train, val = dataset, None
        if isinstance(validation, str):
            flag = functions.col(validation).cast("double") > 0
            unknown = dataset.where(flag.isNull()).count()
            if unknown:
                raise ValueError(f"column {validation!r} has {unknown} nulls: fill or drop them before")
            train, val = dataset.where(~flag), dataset.where(flag)
        elif validation:
            if not 0 < validation < 1:
                raise ValueError(f"validation={validation} is no share of rows between 0 and 1, and no column")
            train, val = dataset.randomSplit([1.0 - validation, validation], self._seed())
        files = self._backend().num_processes() * self._value("partitions_per_process")
        store = self._value("store")
        for frame, path in ((train, train_path), (val, val_path)):
            if frame is not None:
                frame = frame.select(*names).repartition(files)
                frame.write.mode("overwrite").parquet(store.spark_path(path))
        return val is not None

    def _backend(self) -> Backend:
        backend: Backend | None = self._value("backend")
        if backend is None:
            backend = SparkBackend(self._value("num_proc"), verbose=self._value("verbose"))
        return backend

    def _seed(self) -> int:
        seed = self._value("random_seed")
        return uuid.uuid4().int % (1 << 31) if seed is None else int(seed)

    def _train(self, train: str, val: str | None, run_id: str) -> Any:
        omitted = {"model", "optimizer", "store", "backend", "custom_objects"}
        params = {name: self._value(name) for name in self.PARAMS if name not in omitted}
        training = Training(params, self._value("store"), run_id, train, val, self._seed())
        function, args = self._remote(training)
        env = {**self._env(), **self._value("backend_env")}
        trained = self._backend().run(function, args, env=env)[0]
        return self._transformer(trained, run_id)

    def _env(self) -> dict[str, str]:
        return {}

    def _remote(self, training: Training) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function that each rank runs, and its arguments. Rank 0 returns a :class:`Trained`."""
        raise NotImplementedError

    def _transformer(self, trained: Trained, run_id: str) -> Any:
        """Return the transformer."""
        raise NotImplementedError


MODEL_PARAMS: dict[str, tuple[Any, str]] = {
    "model": (None, "the trained model"),
    "history": (None, "losses and metrics by name, lists over the epochs"),
    "feature_columns": (None, "the columns that the model takes"),
    "label_columns": (None, "the columns that it predicts"),
    "output_cols": (None, "the names of the predictions; <label>__output for each label if None"),
    "run_id": (None, "the name of the run"),
    "batch_size": (256, "how many rows are predicted at once"),
    "output_sizes": (None, "for each output, how many numbers a row has; found out from a row if None"),
}


class HorovodModel(_WithParams, Model):
    """A transformer that adds the predictions of a model to a DataFrame.

    A prediction of one number is a ``float``, another one a list of them, in the order of the output's memory.
    """

    PARAMS = MODEL_PARAMS

    def __init__(self, **params: Any) -> None:
        """Take the parameters by name; see ``explainParams()``."""
        super().__init__()
        self._begin(params)

    def _predictor(self) -> Callable[[], Callable[[list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]]:
        """Return a function that loads the model where it is called, and returns one from inputs to outputs."""
        raise NotImplementedError

    def _transform(self, dataset: Any) -> Any:
        """Return the DataFrame with the columns of the predictions."""
        from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

        features, labels = list(self._value("feature_columns")), list(self._value("label_columns"))
        names = list(self._value("output_cols") or [f"{label}__output" for label in labels])
        if len(names) != len(labels):
            raise ValueError(f"output_cols has {len(names)} names for {len(labels)} labels")
        missing = [name for name in features if name not in dataset.columns]
        if missing:
            raise ValueError(f"Feature columns {missing} not found in the DataFrame: it has {dataset.columns}")
        sizes, load, rows = self._value("output_sizes"), self._predictor(), int(self._value("batch_size"))
        if sizes is None:
            first = dataset.select(*features).limit(1).mapInArrow(_sizer(load, features), "size int").collect()
            sizes = [row["size"] for row in first] or [1] * len(names)
        kinds = [FloatType() if size == 1 else ArrayType(FloatType(), containsNull=False) for size in sizes]
        kept = [each for each in dataset.schema.fields if each.name not in names]
        fields = [StructField(name, kind, nullable=False) for name, kind in zip(names, kinds, strict=True)]
        schema = StructType([*kept, *fields])
        frame = dataset.select(*[each.name for each in kept])
        return frame.mapInArrow(_mapper(load, features, names, tuple(sizes), rows), schema)


def _inputs(batch: Any, features: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(batch.column(batch.schema.get_field_index(name)), name) for name in features]


def _sizer(load: Callable[[], Any], features: Sequence[str]) -> Callable[[Any], Any]:
    def sizes(batches: Any) -> Iterator[Any]:
        import pyarrow

        predict = load()
        for batch in batches:
            if batch.num_rows:
                found = [output.size // len(output) for output in predict(_inputs(batch, features))]
                yield pyarrow.RecordBatch.from_arrays([pyarrow.array(found, pyarrow.int32())], names=["size"])

    return sizes


def _mapper(
    load: Callable[[], Any], features: Sequence[str], names: Sequence[str], sizes: Sequence[int], rows: int
) -> Callable[[Any], Any]:
    def predicted(batches: Any) -> Iterator[Any]:
        import numpy as np
        import pyarrow

        predict = None
        for whole in batches:
            predict = predict or load()
            for start in range(0, whole.num_rows, rows):
                batch = whole.slice(start, rows)
                outputs = predict(_inputs(batch, features))
                if len(outputs) != len(names):
                    raise ValueError(f"the model has {len(outputs)} outputs, and there are {len(names)} labels")
                columns = list(batch.columns)
                for output, size in zip(outputs, sizes, strict=True):
                    flat = pyarrow.array(np.ascontiguousarray(output, np.float32).reshape(-1))
                    ends = np.arange(0, size * batch.num_rows + 1, size, dtype=np.int32)
                    columns.append(flat if size == 1 else pyarrow.ListArray.from_arrays(ends, flat))
                yield pyarrow.RecordBatch.from_arrays(columns, names=[*batch.schema.names, *names])

    return predicted


def shaped(arrays: Arrays, names: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> list[Any]:
    """Return columns of a batch as arrays of these shapes; a shape may begin with -1 for the batch."""
    found = [arrays[name] for name in names]
    if shapes is None:
        return found
    if len(shapes) != len(names):
        raise ValueError(f"there are {len(shapes)} shapes for {len(names)} columns {list(names)}")
    return [
        array.reshape([-1, *(shape[1:] if len(shape) and shape[0] == -1 else shape)])
        for array, shape in zip(found, shapes, strict=True)
    ]
