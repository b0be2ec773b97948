"""The gradient mask: one byte for each gradient of an optimizer says whether any rank has it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.ops import DType, Kind, Request
from horovodlike.errors import MismatchError


class GradientMask:
    """One byte for each parameter, on the CPU, reduced by Max in every step.

    0: this rank has no gradient; 1: a dense gradient; n > 1: a sparse gradient with n - 1 sparse dimensions.
    """

    def __init__(self) -> None:
        """Start without parameters."""
        self.handle = 0  # of the mask's reduction; 0: not announced in this step
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._requests: list[Request] = []  # of steps without and with weights
        self._is_full = False  # the bytes are all 1

    def describe(self, num_parameters: int, name: str, process_set: int) -> None:
        """Set the number of parameters, the name by which the ranks match the reduction, and the process set's id.

        If gradients are weighted the name is another one, because the exchange of the weights has this name.
        """
        self.bytes = torch.ones(num_parameters, dtype=torch.uint8, device="cpu")
        self._is_full = True
        described = [(DType["uint8"], self.bytes.shape)]
        self._requests = [
            Request(Kind.ALLREDUCE, each, described, op=basics.Max, process_set=process_set)
            for each in (name, f"{name}.weighted")
        ]

    def announce(self, absent: Iterable[int], sparse_dims: dict[int, int], weighted: bool) -> None:
        """Set the bytes of this step's mask, and start to reduce it.

        Args:
            absent: The indices of the gradients that this rank lacks.
            sparse_dims: The number of sparse dimensions of each sparse gradient, by its index.
            weighted: The gradients are weighted.
        """
        if not self._is_full:
            self.bytes.fill_(1)
        self._is_full = True
        for number, value in [*((number, 1 + dim) for number, dim in sparse_dims.items()), *((n, 0) for n in absent)]:
            self.bytes[number] = value
            self._is_full = False
        request = self._requests[weighted]
        try:
            self.handle = request.enqueue_inplace(self.bytes.data_ptr())
        except BaseException:
            request.keep_if_enqueued(self.bytes)
            raise

    def wait(self) -> None:
        """Wait until the mask is reduced over all ranks.

        Raises:
            MismatchError: The ranks have different numbers of parameters.
            HorovodInternalError: The job is broken or shut down.
        """
        try:
            ops.wait_done(self.handle)
        except MismatchError as error:
            raise MismatchError(
                f"{error} (one byte for each parameter that requires a gradient: do all ranks have the same model? Or "
                "do only some ranks weight their gradients, with hvd.set_batch_weight() or weight=?)"
            ) from error

    def abandon(self) -> None:
        """Leave the bytes to the engine, which may still use them, and make new ones."""
        self.bytes = torch.ones_like(self.bytes)
        self._is_full = True
