"""Layers of Keras 3 that are split among the ranks of a process set (tensor parallelism): `hvd.layers`.

Output, gradients of the input and gradients of the weights are the same as with the unsplit layers, which are Keras's
`Dense`. docs/users/model_parallel.md describes how to use them. On tf_keras (Keras 2) they are not available.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horovodlike.arrays import functions as arrays
from horovodlike.keras import _backend
from horovodlike.keras._backend import is_tf_keras
from horovodlike.process_set import ProcessSet, global_process_set, registered_of
from horovodlike.splits import Split, even_share

if is_tf_keras:
    raise NotImplementedError(
        "horovodlike.keras.layers is for Keras 3, and this process uses tf_keras: unset TF_USE_LEGACY_KERAS"
    )

import keras
from keras import ops

__all__ = ["ColumnParallelLinear", "ParallelMLP", "RowParallelLinear", "full_weights", "load_full_weights"]

_COLUMNS, _ROWS, _OF_BIAS = Split(1), Split(0), Split(0)  # of a kernel of shape (inputs, units)
_register = keras.saving.register_keras_serializable("horovodlike")


class _Parallel(keras.layers.Layer):
    """A layer that has a process set in its configuration: the ranks, or None for all of the job."""

    def __init__(self, process_set: ProcessSet, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.process_set = process_set
        self.supports_jit = False

    def get_config(self) -> dict[str, Any]:
        """Return the options; the process set becomes the list of its ranks, or None if it is the global one."""
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer from its configuration.

        Raises:
            ValueError: No process set of these ranks is registered.
        """
        ranks = config["process_set"]
        chosen = global_process_set if ranks is None else registered_of(ranks)
        return super().from_config({**config, "process_set": chosen})


class _ParallelLinear(_Parallel):
    def __init__(
        self,
        units: int,
        activation: Any,
        use_bias: bool,
        kernel_initializer: Any,
        bias_initializer: Any,
        process_set: ProcessSet,
        **kwargs: Any,
    ) -> None:
        super().__init__(process_set, **kwargs)
        self.units, self.use_bias = units, use_bias
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.region = _backend.current().region(type(self).__name__, process_set)
        self.splits: dict[str, Split] = {}

    def _add_weights(self, inputs: int, kernel: Split, bias: Split | None) -> None:
        self.kernel = self._add("kernel", (inputs, self.units), self.kernel_initializer, kernel)
        self.bias = self._add("bias", (self.units,), self.bias_initializer, bias) if self.use_bias else None

    def _add(self, name: str, shape: tuple[int, ...], initializer: Any, split: Split | None) -> Any:
        """Add a weight: this rank's part of the unsplit layer's, which the initializer draws."""
        if split is None:
            return self.add_weight(name=name, shape=shape, initializer=initializer)
        self.splits[name] = split
        own = list(shape)
        own[split.dim] //= self.region.num_ranks

        def part(_: Any, dtype: Any = None) -> Any:
            whole = initializer(shape, dtype=dtype)
            return split.part(whole, self.region.place, self.region.num_ranks, ops.concatenate)

        weight = self.add_weight(name=name, shape=tuple(own), initializer=part)
        weight.is_part = self.region.num_ranks > 1  # for the optimizers that refuse it
        return weight

    def get_config(self) -> dict[str, Any]:
        """Return the options."""
        return {
            **super().get_config(),
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }


@_register
class ColumnParallelLinear(_ParallelLinear):
    """A `keras.layers.Dense` whose units are split among the ranks of a process set.

    Forward, the input is used as it is, and nothing is sent unless `gather_output` is set. Backward, the ranks'
    gradients of the input are summed. All ranks of the set must give the same input, and make and run the same layers
    in the same order. The initializers draw the weights of the unsplit layer, of which each rank keeps its part: so the
    ranks need the same seed (`keras.utils.set_random_seed`).

    Args:
        units: The units of all ranks together; a multiple of the number of ranks.
        activation: As for `Dense`. Without `gather_output` it sees this rank's units only.
        use_bias: True if the layer adds a bias.
        kernel_initializer: As for `Dense`.
        bias_initializer: As for `Dense`.
        gather_output: True: every rank returns all units. False: its own part, as `RowParallelLinear` with
            `input_is_parallel=True` takes it.
        process_set: The ranks.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: `units` cannot be split evenly, or this rank is not in the process set. When it is called: the last
            dimension of the input has another size than in the first call.
        Exception: When it is called: the ranks disagree, or the job is broken; the type depends on the backend.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        gather_output: bool = True,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, activation, use_bias, kernel_initializer, bias_initializer, process_set, **kwargs)
        self._share = even_share(units, "ColumnParallelLinear: units", self.region.num_ranks)
        self.gather_output = gather_output

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the weights: `kernel` of shape (inputs, units / ranks), and `bias` of shape (units / ranks)."""
        inputs = _last(input_shape, "ColumnParallelLinear")
        self._add_weights(inputs, _COLUMNS, _OF_BIAS)
        self.input_spec = keras.InputSpec(min_ndim=1, axes={-1: inputs})

    def call(self, inputs: Any) -> Any:
        """Return a tensor (..., units) for one of (..., inputs); this rank's part if not gathered."""
        outputs = ops.matmul(self.region.copy(inputs), self.kernel)
        if self.bias is not None:
            outputs = ops.add(outputs, self.bias)
        return self.activation(self.region.gather(outputs) if self.gather_output else outputs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the output's shape for an input's shape."""
        return (*input_shape[:-1], self.units if self.gather_output else self._share)

    def get_config(self) -> dict[str, Any]:
        """Return the options."""
        return {**super().get_config(), "gather_output": self.gather_output}


@_register
class RowParallelLinear(_ParallelLinear):
    """A `keras.layers.Dense` whose inputs are split among the ranks of a process set.

    Forward, the ranks' products are summed, and then the bias is added once. Backward, nothing is sent unless the input
    is whole. The requirements on the ranks are the same as for `ColumnParallelLinear`.

    Args:
        units: The size of the last dimension of the output.
        activation: As for `Dense`.
        use_bias: True if the layer adds a bias.
        kernel_initializer: As for `Dense`.
        bias_initializer: As for `Dense`.
        input_is_parallel: True: the input is this rank's part of the features, as `ColumnParallelLinear` with
            `gather_output=False` returns it. False: all ranks give the same whole input, whose last dimension is a
            multiple of the number of ranks.
        process_set: The ranks.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: This rank is not in the process set. When it is called: the last dimension of the input cannot be
            split evenly, or has another size than in the first call.
        Exception: When it is called: the ranks disagree, or the job is broken; the type depends on the backend.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        input_is_parallel: bool = False,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, activation, use_bias, kernel_initializer, bias_initializer, process_set, **kwargs)
        self.input_is_parallel = input_is_parallel

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the weights: `kernel` of shape (inputs / ranks, units), and `bias` of shape (units)."""
        inputs, num_ranks = _last(input_shape, "RowParallelLinear"), self.region.num_ranks
        if not self.input_is_parallel:
            even_share(inputs, "RowParallelLinear: inputs", num_ranks)
        self._add_weights(inputs * num_ranks if self.input_is_parallel else inputs, _ROWS, None)
        self.input_spec = keras.InputSpec(min_ndim=1, axes={-1: inputs})

    def call(self, inputs: Any) -> Any:
        """Return a tensor (..., units) for one of (..., inputs), or for this rank's part of it."""
        own = inputs if self.input_is_parallel else self.region.split(inputs)
        outputs = self.region.sum(ops.matmul(own, self.kernel))
        return self.activation(outputs if self.bias is None else ops.add(outputs, self.bias))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the output's shape for an input's shape."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """Return the options."""
        return {**super().get_config(), "input_is_parallel": self.input_is_parallel}


@_register
class ParallelMLP(_Parallel):
    """Two `Dense` layers, of which the first has an activation, split by the hidden units among the ranks of a set.

    A forward pass costs one allreduce, and so does a backward pass.

    Args:
        hidden_units: The units of the first layer; a multiple of the number of ranks.
        units: The units of the second layer. None: as many as the input has.
        activation: The first layer's activation, which treats each unit alone: a rank has only its part of them.
        use_bias: True if both layers add a bias.
        kernel_initializer: As for `Dense`, for both layers.
        bias_initializer: As for `Dense`, for both layers.
        process_set: The ranks.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: `hidden_units` cannot be split evenly, or this rank is not in the process set.
        Exception: When it is called: as for `ColumnParallelLinear`.
    """

    def __init__(
        self,
        hidden_units: int,
        units: int | None = None,
        activation: Any = "gelu",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        super().__init__(process_set, **kwargs)
        self.units = units
        options = {
            "use_bias": use_bias,
            "kernel_initializer": kernel_initializer,  # a name: each layer then makes its own initializer
            "bias_initializer": bias_initializer,
            "process_set": process_set,
            "dtype": self.dtype_policy,
        }
        self.up = ColumnParallelLinear(hidden_units, activation, gather_output=False, name="up", **options)
        self.down = RowParallelLinear(units or 0, input_is_parallel=True, name="down", **options)

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the weights of both layers."""
        self.down.units = self.units or _last(input_shape, "ParallelMLP")
        self.up.build(input_shape)
        self.down.build(self.up.compute_output_shape(input_shape))

    def call(self, inputs: Any) -> Any:
        """Return a tensor (..., units) for one of (..., inputs), the same on all ranks."""
        return self.down(self.up(inputs))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the output's shape for an input's shape."""
        return (*input_shape[:-1], self.units or input_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Return the options."""
        of_up = self.up.get_config()
        shared = ("activation", "use_bias", "kernel_initializer", "bias_initializer")
        own = {"hidden_units": self.up.units, "units": self.units}
        return {**super().get_config(), **own, **{name: of_up[name] for name in shared}}


def full_weights(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    """Return the weights of the unsplit model, on all ranks, in the order of `model.get_weights()`.

    All ranks of the process sets of the model's layers have to call this. Unsplit weights are taken from this rank.

    Args:
        model: A built model, some of whose layers are split.

    Returns:
        Arrays, for `load_full_weights` of a model that is split in any way, or `set_weights` of the unsplit model.

    Raises:
        HorovodInternalError: The ranks have different models, or the job is broken or shut down.
    """
    weights = []
    for index, (value, layer, split) in enumerate(_with_splits(model)):
        own = ops.convert_to_numpy(value)
        if split is not None and layer.region.num_ranks > 1:
            parts = arrays.allgather(own[np.newaxis], f"full_weights.{index}", layer.process_set)
            own = split.join(list(parts), np.concatenate)
        weights.append(own)
    return weights


def load_full_weights(model: keras.Model, weights: Sequence[Any]) -> None:
    """Set the weights from the unsplit model's weights: each split layer takes this rank's part. Nothing is sent.

    Args:
        model: A built model, some of whose layers are split, in any way.
        weights: The result of `full_weights`, or of `get_weights()` of the unsplit model.

    Raises:
        ValueError: Their number or a shape does not fit; nothing has been set.
    """
    own = list(_with_splits(model))
    if len(own) != len(weights):
        raise ValueError(f"load_full_weights: {model.name} has {len(own)} weights, got {len(weights)}")
    values = []
    for (variable, layer, split), whole in zip(own, map(np.asarray, weights), strict=True):
        expected = list(variable.shape)
        if split is not None:
            expected[split.dim] *= layer.region.num_ranks
        if list(whole.shape) != expected:
            raise ValueError(
                f"load_full_weights: {variable.path} of the unsplit model has the shape {tuple(expected)}, got "
                f"{whole.shape}: give the weights of a model of the same sizes"
            )
        if split is not None:
            whole = split.part(whole, layer.region.place, layer.region.num_ranks, np.concatenate)
        values.append(whole)
    for (variable, _, _), value in zip(own, values, strict=True):
        variable.assign(value)


def _with_splits(model: keras.Model) -> Iterator[tuple[Any, Any, Split | None]]:
    """Yield each weight of a model, its layer if that is split, and its split."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, _ParallelLinear)]
    owners = {id(getattr(layer, name)): (layer, split) for layer in layers for name, split in layer.splits.items()}
    for variable in model.weights:
        yield (variable, *owners.get(id(variable), (None, None)))


def _last(input_shape: Sequence[int | None], layer: str) -> int:
    if not input_shape or input_shape[-1] is None:
        raise ValueError(f"{layer}: the last dimension of the input must be known, got the shape {tuple(input_shape)}")
    return input_shape[-1]
