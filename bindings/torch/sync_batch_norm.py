"""`SyncBatchNorm`: batch normalization over the batches of all ranks.

The ranks exchange two small messages for each layer: mean, variance and count of every rank's batch in the forward
pass, and two sums per channel in the backward pass. Everything else is computed by torch's own kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from horovodlike import basics
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch._ops import disable_compile, gpu
from horovodlike.torch._ops.calls import result
from horovodlike.torch.mpi_ops import allgather, allgather_async, allreduce, grouped_allgather

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(slots=True, eq=False)
class _Layer:
    """The prefix of the names of a layer's operations, the same on all ranks, and a count for these names."""

    name: str
    # The number of forward passes since the last backward pass. It is part of the names of operations in the backward
    # pass, so ranks that run these in different orders wait for each other instead of mixing up the operations.
    recorded: int = 0


# A layer is numbered when it is first synchronized, because that order is the same on all ranks, whereas one rank
# may have made more layers than another. Numbers begin with 0 at each init(), as they do on new ranks of the job.
_layers: WeakKeyDictionary[_BatchNorm, _Layer] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[ProcessSet, Iterator[int]] = WeakKeyDictionary()


def _layer_of(module: SyncBatchNorm) -> _Layer:
    layer = _layers.get(module)
    if layer is None:
        number = next(_numbers.setdefault(module.process_set, itertools.count()))
        layer = _layers[module] = _Layer(f"sync_batch_norm.{number}")
    return layer


def _forget_numbers() -> None:
    _layers.clear()
    _numbers.clear()


basics.on_init(lambda _: _forget_numbers())


def _whole_batch(x: torch.Tensor, name: str, process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and (biased) variance of each channel over all ranks' batches, and the number of values per channel.

    The ranks' means, variances and counts are combined as in T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances" (1979): the total variance is the mean of the
    ranks' variances plus the variance of their means, both weighted by the counts. Unlike a difference of sums of
    squares, this does not lose digits to cancellation if the mean is large.
    """
    channels = x.shape[1]
    count = x.numel() // channels
    # On an empty batch, torch's kernel gives NaN, which would not vanish when it is multiplied by a count of 0.
    local = torch.cat(torch.batch_norm_update_stats(x, None, None, 0.0)) if count else x.new_zeros(2 * channels)
    moments, counts = _gathered(local.unsqueeze(0), torch.tensor([count], device="cpu"), name, process_set)
    means, variances = moments.double().view(-1, 2, channels).unbind(1)
    total = int(counts.sum())
    shares = (counts.double() / max(total, 1)).unsqueeze(1).to(moments.device, non_blocking=True)
    mean = (shares * means).sum(dim=0)
    variance = (shares * (variances + (means - mean).square())).sum(dim=0)
    return mean.to(x), variance.to(x), total


def _gathered(
    local: torch.Tensor, count: torch.Tensor, name: str, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the ranks' moments and counts; separately for moments on a GPU, so that counts do not wait for it."""
    if not gpu.is_on_gpu(local):
        moments, counts = grouped_allgather([local.cpu(), count], name, process_set)
        return moments, counts
    handle = allgather_async(local, name, process_set)
    counts = allgather(count, f"{name}.counts", process_set)
    return result(handle, torch.Tensor), counts


def _local_sums(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor) -> torch.Tensor:
    """Return the gradients of a layer's bias and weight on this rank: the sums of dy, and of dy times normalized x."""
    if x.numel() == 0:
        return x.new_zeros(2, x.shape[1])
    backward = torch.ops.aten.native_batch_norm_backward
    # Nothing in these two sums depends on eps, weight or the running statistics. On GPUs they take the weight's shape.
    weight = torch.ones_like(mean)
    _, dy_xhat, dy_sum = backward(dy, x, weight, None, None, mean, invstd, True, 0.0, [False, True, True])
    return torch.stack([dy_sum, dy_xhat])


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]
    needs_input_grad: tuple[bool, ...]
    eps: float
    layer: _Layer
    name: str
    process_set: ProcessSet
    count: int


class _Normalize(torch.autograd.Function):
    """The layer in training mode. Its results include the mean, the variance and the count that it has used."""

    @staticmethod
    def forward(
        ctx: _Context,
        tensor: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        layer: _Layer,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        x = tensor.to(_accumulated_in(tensor.dtype))
        mean, variance, count = _whole_batch(x, layer.name, process_set)
        if count == 1:
            raise ValueError(
                f"expected more than 1 value per channel when training, got 1 on all ranks together, with "
                f"input size {list(tensor.shape)} on this one"
            )
        ctx.save_for_backward(tensor, weight, mean, variance)  # type: ignore[arg-type]  # None may be saved as well
        ctx.mark_non_differentiable(mean, variance)
        ctx.eps, ctx.layer, ctx.process_set, ctx.count = eps, layer, process_set, count
        ctx.name = f"{layer.name}.grad.{layer.recorded}"
        if ctx.needs_input_grad[0]:
            layer.recorded += 1
        scale, shift = (None if parameter is None else parameter.to(x) for parameter in (weight, bias))
        y = functional.batch_norm(x, mean, variance, scale, shift, eps=eps)
        return y.to(tensor.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_output: torch.Tensor, *_: object) -> Gradients:
        tensor, weight, mean, variance = ctx.saved_tensors
        x, dy = tensor.to(mean.dtype), grad_output.to(mean.dtype)
        invstd = (variance + ctx.eps).rsqrt()
        sums = _local_sums(dy, x, mean, invstd)
        grad_bias, grad_weight = sums if weight is None else sums.to(weight.dtype)
        grad_input = None
        if ctx.needs_input_grad[0]:
            ctx.layer.recorded = 0
            whole = allreduce(sums, name=ctx.name, op=basics.Sum, process_set=ctx.process_set) / max(ctx.count, 1)
            scale = invstd if weight is None else invstd * weight.to(x)
            # scale * (dy - mean of dy - normalized x * mean of (dy * normalized x)), in two passes over memory.
            grad_input = functional.batch_norm(x, mean, variance, -scale * whole[1], -scale * whole[0], eps=ctx.eps)
            grad_input.addcmul_(dy, scale.view(-1, *[1] * (x.dim() - 2)))
            grad_input = grad_input.to(tensor.dtype)
        needed = ctx.needs_input_grad
        return grad_input, grad_weight if needed[1] else None, grad_bias if needed[2] else None, None, None, None


def _accumulated_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class SyncBatchNorm(_BatchNorm):
    """Batch normalization that in training sees the batches of all ranks as one.

    Replaces `torch.nn.BatchNorm1d`, `2d` and `3d`, on CPU and GPU tensors. Output, gradients and running statistics
    are the same as with the replaced layer on the joined batch. As for any layer, the gradients of weight and bias come
    from the rank's own share, and `DistributedOptimizer` averages them. In evaluation mode, and with one rank, nothing
    is sent and the layer works like the replaced layer.

    The ranks' batches may be of different sizes, and empty. All ranks have to run the same layers forward and
    backward in the same order. This includes a rank with an empty batch, whose loss must depend on its (empty) output.
    Only one thread of a process at a time may run a layer. For float16 and bfloat16 tensors, statistics and sums are
    computed in float32. Gradients of gradients are not available.

    Args:
        num_features: Number of channels C of an input of shape (N, C), or (N, C, ...) with up to 3 more dimensions.
        eps: Added to the variance.
        momentum: Weight of a new batch in the running statistics; None for the average over all batches.
        affine: True if the layer has a weight and a bias to be learnt.
        track_running_stats: True if the layer keeps running statistics and uses them in evaluation mode.
        process_set: The ranks whose batches are seen as one.

    Raises:
        ValueError: In forward: the input has less than 2 dimensions or another number of channels than
            `num_features`; or all ranks together have one value per channel, which has no variance.
        HorovodInternalError: In forward and backward: the ranks disagree, or the job is broken or shut down.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor of shape (N, C, ...); the result has its shape, dtype and memory format."""
        self._check_input_dim(input)
        return self._forward_in_training(input) if self.training else super().forward(input)

    def _forward_in_training(self, input: torch.Tensor) -> torch.Tensor:
        if self.process_set.size() == 1:
            return super().forward(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels, got size {list(input.shape)}")
        y, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]  # torch has no annotations here
            input, self.weight, self.bias, self.eps, _layer_of(self), self.process_set
        )
        if self.track_running_stats:
            self._track(mean, variance, count)
        result: torch.Tensor = y
        return result

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        if count > 0:
            self.running_mean.mul_(1.0 - factor).add_(mean, alpha=factor)
            self.running_var.mul_(1.0 - factor).add_(variance * (count / (count - 1)), alpha=factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace all batch normalization in a model by layers of this class; to be called before training.

        The new layers hold the same parameters and buffers, so an optimizer made before still works. Hooks that
        were registered on the replaced layers are lost.

        Args:
            module: The model, which is changed. If it is itself a batch normalization layer it is left as it is.
            process_set: The ranks whose batches are seen as one.

        Returns:
            The model, or the layer that replaces it.

        Raises:
            ValueError: A layer is a lazy one that has not seen its input yet.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        if module not in done:  # a model may use one module in several places
            done[module] = cls._replacing(module, process_set) if isinstance(module, _BatchNorm) else module
            for name, child in module._modules.items():
                converted = None if child is None else cls._converted(child, process_set, done)
                if converted is not child or done[module] is not module:
                    done[module].add_module(name, converted)
        return done[module]

    @classmethod
    def _replacing(cls, old: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(old, LazyModuleMixin) and old.has_uninitialized_params():
            raise ValueError(f"{type(old).__name__} has to see an input before it can be converted")
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_set)
        own: dict[str, Any] = {**old._parameters, **old._buffers}  # each may be None, for example the bias
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, own[name])
        new.training = old.training
        return new


disable_compile(SyncBatchNorm._forward_in_training)
