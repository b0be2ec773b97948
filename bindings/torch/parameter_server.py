"""Parameter servers for PyTorch: the parameters of a module, or tensors, split among servers.

Example::

    server = ParameterServer(model)          # collective: the servers begin with rank 0's parameters
    server.send(rule="sgd", lr=0.1).wait()   # the gradients of the model; not collective
    server.receive().wait()                  # into the parameters of the model

Everything else is as in `horovodlike.parameter_server`, whose calls these are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovodlike import parameter_server
from horovodlike.parameter_server import Handle, register_rule
from horovodlike.process_set import ProcessSet

__all__ = ["Handle", "ParameterServer", "register_rule"]


class ParameterServer(parameter_server.ParameterServer):
    """Tensors whose elements are split evenly among servers: see `horovodlike.parameter_server.ParameterServer`.

    Tensors in the memory of the host are sent and received without copies. Those on a GPU are copied there, to it and
    from it, in the call and in `wait`. Autograd does not see received values: receive into the parameters of a model
    only when no backward pass needs their present values, as before the forward pass.

    Args:
        value: A module, whose parameters are meant, a tensor, or several tensors.
        process_set: As for the class above, like all that follow.
        **options: ``servers``, ``init``, ``root``, ``staleness``, ``payload`` and ``name``.

    Raises:
        TypeError: `value` is none of these, or has no parameters.
        ValueError: As for the class above, which has further errors.
    """

    def __init__(self, value: Any, *, process_set: ProcessSet | None = None, **options: Any) -> None:
        """Make the parts and fill them. A collective call of all ranks of the process set."""
        self._single = isinstance(value, torch.Tensor)
        super().__init__(value, process_set=process_set, **options)

    def _prepare(self, value: Any, *arguments: Any) -> Any:
        self._tensors = _tensors_of(value)
        return super()._prepare(self._hosted(self._tensors), *arguments)

    def send(self, value: Any = None, rule: str = "add", **arguments: float) -> Handle:
        """Update the elements with as many others.

        Args:
            value: A tensor, or several tensors, shaped like the constructor's. None: the gradients of the constructor's
                tensors; a parameter without a gradient counts as one with zeros.
            rule: As for `horovodlike.parameter_server.ParameterServer.send`.
            **arguments: The arguments of the rule.
        """
        if value is not None:
            return super().send(self._hosted(_tensors_of(value)), rule, **arguments)
        if rule == "zero":
            return super().send(None, rule, **arguments)
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._tensors]
        return super().send(self._hosted(gradients), rule, **arguments)

    def receive(self, out: Any = None) -> Handle:
        """Receive all elements into tensors.

        Args:
            out: A tensor, or several tensors, shaped like the constructor's; None: the constructor's tensors.

        Returns:
            A handle, whose `wait` returns the tensors.
        """
        tensors = self._tensors if out is None else _tensors_of(out)
        return super().receive(self._hosted(tensors)).then(lambda hosted: self._back(tensors, hosted))

    def send_rows(self, indices: Any, rows: Any, rule: str = "add", **arguments: float) -> Handle:
        """Update some rows of a single tensor; `indices` and `rows` may be tensors."""
        return super().send_rows(_integers(indices), _hosted(rows), rule, **arguments)

    def receive_rows(self, indices: Any, out: Any = None) -> Handle:
        """Receive some rows of a single tensor, into `out` or a new tensor in the memory of the host."""
        if out is None:
            return super().receive_rows(_integers(indices))
        hosted = _hosted(out)
        return super().receive_rows(_integers(indices), hosted).then(lambda _: self._back([out], hosted))

    def __enter__(self) -> ParameterServer:
        """Return the object."""
        return self

    def _hosted(self, tensors: list[Any]) -> Any:
        hosted = [_hosted(each) for each in tensors]
        return hosted[0] if self._single and len(hosted) == 1 else hosted

    def _back(self, tensors: list[Any], hosted: Any) -> Any:
        """Copy the values received for tensors on a GPU there; return the tensors."""
        with torch.no_grad():
            for tensor, memory in zip(tensors, hosted if isinstance(hosted, list) else [hosted], strict=True):
                if tensor.device.type != "cpu":
                    tensor.copy_(memory)
        return tensors[0] if self._single else tensors


def _hosted(tensor: Any) -> Any:
    """Return a tensor without its gradient in the memory of the host: on the same memory if it is there already."""
    return tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else tensor


def _integers(indices: Any) -> Any:
    return indices.cpu().numpy() if isinstance(indices, torch.Tensor) else indices


def _tensors_of(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        value = value.parameters()
    tensors = list(value) if isinstance(value, Iterable) else []
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise TypeError(f"ParameterServer: expected a module with parameters, or tensors, got {type(value).__name__}")
    return tensors
