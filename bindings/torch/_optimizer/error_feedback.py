"""Error feedback: the part of a gradient that a compression leaves out is added to the gradient of the next step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovodlike.torch._optimizer.gradient_reducer import Collectives, GradientReducer, NamedGradients

# Tensors by kind ("residuals" and others), then by parameter name. They are replaced, and never changed in place.
State = dict[str, dict[str, torch.Tensor]]


class ErrorFeedbackReducer(GradientReducer):
    """A reducer that keeps, for each parameter, the sum of values not sent yet: the residual, in float32 or wider.

    Residuals take as much memory as the model. Gradients that are not worth compressing, and all gradients of the
    first `start_step` steps, are averaged as they are. If any result is not finite, a gradient scaler skips the step;
    then residuals stay as they were.

    Error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient Descent and Its Application to Data-Parallel
    Distributed Training of Speech DNNs"; its convergence: Karimireddy et al. 2019, arXiv:1901.09847.
    """

    def __init__(self, start_step: int, *kinds: str) -> None:
        """Start with an empty state; `kinds` are the kinds of tensors in it besides residuals."""
        if start_step < 0:
            raise ValueError(f"start_step must be >= 0, got {start_step}")
        self._start_step = start_step
        self._steps = 0
        self._state: State = {kind: {} for kind in ("residuals", *kinds)}

    @abstractmethod
    def _pays(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is worth compressing; the answer must be the same on all ranks."""

    @abstractmethod
    def _reduce_compressed(self, gradients: NamedGradients, ranks: Collectives) -> State:
        """Replace the gradients as `reduce` does; return the new state, dropped if a result is not finite."""

    def reduce(self, gradients: NamedGradients, ranks: Collectives) -> None:
        """Replace each gradient by an approximation of its average over the ranks."""
        compressed: list[tuple[str, torch.Tensor]] = []
        plain: list[tuple[str, torch.Tensor]] = []
        for name, gradient in gradients:
            pays = self._steps >= self._start_step and self._pays(gradient)
            (compressed if pays else plain).append((name, gradient))
        ranks.average([gradient for _, gradient in plain], "plain")
        state = self._reduce_compressed(compressed, ranks)
        # All ranks decide alike, because the reduced gradients are equal.
        if compressed and all_finite([gradient for _, gradient in gradients]):
            for kind, entries in state.items():
                self._state[kind].update(entries)
        self._steps += 1

    def _recall(self, kind: str, name: str, like: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Return the tensor of a parameter from the state, on the device of `like`; None if there is none."""
        known = self._state[kind].get(name)
        if known is not None and known.shape != shape:
            raise ValueError(
                f"{name}: {type(self).__name__} remembers {kind} of shape {list(known.shape)}, not {list(shape)}: each "
                "optimizer needs an object of its own, and a state to load has to be of the same model and options"
            )
        return None if known is None else known.to(like.device)

    def _total(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of gradient and residual: a new tensor of the gradient's shape, of float32 or wider."""
        residual = self._recall("residuals", name, gradient, gradient.shape)
        if residual is None:
            return gradient.to(computing_dtype(gradient), copy=True, memory_format=torch.contiguous_format)
        return (residual + gradient).contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the tensors of each kind by the parameter's name.

        "residuals" differ between ranks; the rest is equal on all ranks. If only rank 0 saves a checkpoint, set
        `state["residuals"] = {}` in it: then only the values that were not sent yet are lost.
        """
        return {"steps": self._steps, **{kind: dict(entries) for kind, entries in self._state.items()}}

    def shared_state_dict(self) -> dict[str, Any]:
        """Return `state_dict` without the residuals, which differ between ranks."""
        return {kind: entries for kind, entries in self.state_dict().items() if kind != "residuals"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. All ranks have to call this.

        Raises:
            ValueError: It is the state of another kind of object.
        """
        expected = {"steps", *self._state}
        if set(state_dict) != expected:
            raise ValueError(
                f"the state of {type(self).__name__} has {', '.join(sorted(expected))}; "
                f"got {', '.join(sorted(map(str, state_dict))) or 'nothing'}"
            )
        self._steps = int(state_dict["steps"])
        self._state = {kind: dict(state_dict[kind]) for kind in self._state}


def computing_dtype(gradient: torch.Tensor) -> torch.dtype:
    """Return float32 for narrower types, else the gradient's own: sums of many small residuals need the precision."""
    return torch.promote_types(gradient.dtype, torch.float32)


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements are finite, judged by the tensors' sums: one pass without a temporary tensor.

    A sum that overflows counts as not finite, too: no training survives gradients that large. The host waits once for
    each device and dtype, not for each tensor.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        dtype = computing_dtype(tensor)
        sums.setdefault((tensor.device, dtype), []).append(tensor.sum(dtype=dtype))
    return all(bool(torch.stack(alike).isfinite().all().item()) for alike in sums.values())
