"""The weights of a step's gradients: their exchange among the ranks, and the scaling of this rank's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from horovodlike import weighting
from horovodlike._engine import ops
from horovodlike._engine.ops import DType, GpuStream, Kind, ReduceOp, Request
from horovodlike.errors import MismatchError
from horovodlike.process_set import members
from horovodlike.torch._ops import gpu
from horovodlike.torch._ops.handles import abandon
from horovodlike.torch._optimizer.gradient_state import GradientState
from horovodlike.torch._optimizer.submission import ReductionOptions


class WeightExchange:
    """The weights of one optimizer's step, if its gradients are weighted. For one thread at a time, but for `wait`.

    The exchange starts when the first gradients of the step could be handed over. They are handed over later, when this
    rank's factor is known: each gradient is multiplied by it first.
    """

    def __init__(self, options: ReductionOptions) -> None:
        """Start without a step."""
        self.is_used: bool | None = None  # whether gradients are weighted in this step; None: not decided yet
        # The factors of gradients that are reduced as dense and as sparse ones; None: not known, or not weighted.
        self.factors: tuple[float, float] | None = None
        self.last_factors: tuple[float, float] | None = None  # the last step's factors
        self._options = options
        self._own = 0.0  # this rank's weight
        self._sums = torch.empty(2, dtype=torch.float64, device="cpu")  # of the weights, and of a 1 from each rank
        self._name = ""
        self._set_id = 0
        self._request: Request | None = None
        self._handle = 0
        self._is_awaited = False  # the thread that ends the step waits for the sums
        self._failure: Exception | None = None
        self._scaled: set[GradientState] = set()

    def describe(self, name: str, process_set: int) -> None:
        """Set the name by which the ranks match the exchange, and the id of the process set.

        The name is the gradient mask's in a step without weights. If only some ranks weight their gradients, the
        two are different operations of one name: an error on all ranks.
        """
        self._name, self._set_id, self._request = name, process_set, None

    def begin(self, waits: bool) -> bool:
        """Start the exchange if gradients are weighted and it has not started; return whether they are weighted.

        Args:
            waits: The caller calls `wait` next.

        Raises:
            ValueError: A weight cannot be used, or was set after this step had begun to hand gradients over.
        """
        if self.is_used is None:
            weight = weighting.of_step(self._options.weight, self._options.op, "DistributedOptimizer")
            if weight is not None:
                self._start(weight)
            self.is_used = weight is not None
        elif waits and self._options.weight in (None, weighting.batch_weight) and weighting.is_set():
            raise ValueError(
                "hvd.set_batch_weight() was called when gradients of this step had been handed over: call it before "
                "backward(), and with several passes before each of backward_passes_per_step. If it was for another "
                "optimizer, give weight= to both of them"
            )
        self._is_awaited = waits and self.is_used
        return self.is_used

    def _start(self, weight: float) -> None:
        if self._request is None:
            described = [(DType["float64"], self._sums.shape)]
            self._request = Request(Kind.ALLREDUCE, self._name, described, op=ReduceOp.SUM, process_set=self._set_id)
        self._own = weight
        self._sums[0], self._sums[1] = weight, 1.0
        try:
            self._handle = self._request.enqueue_inplace(self._sums.data_ptr())
        except BaseException:
            self._request.keep_if_enqueued(self._sums)
            raise

    def allows_hand_over(self) -> bool:
        """Return whether gradients can be handed over before the end of the step: without weights, or with a factor.

        This never waits. Gradients of a rank without samples are left for `wait`, and so are errors of the exchange.
        """
        if self._is_awaited:
            return False
        if not self.begin(waits=False):
            return True
        if self.factors is None and self._failure is None:
            try:
                if ops.is_complete(self._handle):
                    self._conclude()
            except Exception as error:  # for `wait`
                self._failure = error
        return self.factors is not None and self._own > 0

    def wait(self) -> None:
        """Wait until the factor is known. To be called after `begin(waits=True)`.

        Raises:
            MismatchError: Only some ranks weight the gradients of this step.
            ValueError: All weights are 0, on all ranks.
            HorovodInternalError: The job is broken or shut down.
        """
        if self._failure is not None:
            raise self._failure
        if self.factors is None:
            self._conclude()

    def _conclude(self) -> None:
        handle = self._handle
        try:
            ops.wait_done(handle)
        except MismatchError as error:
            raise MismatchError(f"{error} {weighting.DISAGREE}") from error
        self._handle = 0
        total, present = self._sums.tolist()
        num_ranks = len(members(self._set_id))
        divisors = (weighting.divisor(present, num_ranks), num_ranks)
        dense, sparse = (weighting.factor(self._own, total, divisor) for divisor in divisors)
        self.factors = dense, sparse

    def alone(self, included: bool) -> None:
        """Use the weight of a step in which this rank reduces nothing; `included`: it is a member of the process set.

        Raises:
            ValueError: The weight cannot be used: it is 0, and this rank is the only member.
        """
        if self.is_used is not None:
            return
        weight = weighting.of_step(self._options.weight, self._options.op, "DistributedOptimizer")
        if weight is not None and included:
            weighting.factor(weight, weight, 1)
            self.factors = 1.0, 1.0

    def take_over(self, other: WeightExchange) -> None:
        """Weight the gradients of this step as those of another optimizer's last step."""
        self.is_used, self.factors = other.last_factors is not None, other.last_factors
        self._own = other._own

    def scale(self, states: Iterable[GradientState], streams: Mapping[GradientState, GpuStream]) -> None:
        """Multiply gradients that are about to be handed over, in place, each once in a step.

        Args:
            states: The parameters.
            streams: The streams on which gradients on a GPU were made, where that is not the current one.
        """
        if self.factors is None or self.factors == (1.0, 1.0):
            return
        by_stream: dict[GpuStream | None, list[torch.Tensor]] = {}
        for state in states:
            grad = state.gradient()
            if grad is not None and state not in self._scaled:
                self._scaled.add(state)
                by_stream.setdefault(streams.get(state), []).append(grad)
        for stream, grads in by_stream.items():
            with torch.no_grad(), nullcontext() if stream is None else gpu.as_current(stream):
                self._multiply(grads)

    def _multiply(self, grads: Sequence[torch.Tensor]) -> None:
        assert self.factors is not None
        of_dense, of_sparse = self.factors
        strided = [grad for grad in grads if grad.layout is torch.strided]
        if strided:
            torch._foreach_mul_(strided, of_dense)
        for grad in grads:
            if grad.layout is not torch.strided:
                grad.mul_(of_dense if self._options.sparse_as_dense else of_sparse)

    def drop_what_does_not_count(self, states: Iterable[GradientState]) -> None:
        """Drop this rank's gradients if its weight is 0: then it contributes what a rank without gradients does."""
        if self.factors is not None and self._own == 0:
            for state in states:
                state.param.grad = state.seen = None

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """Return this rank's loss times the factor of the last step's gradients."""
        if self.last_factors is None:
            return loss
        return loss * self.last_factors[0] if self.last_factors[0] else torch.zeros_like(loss)

    def end(self) -> None:
        """End the step. The sums of an exchange in flight are left to the engine, which may still use them."""
        if self._handle:
            abandon([self._handle], [self._sums])
            self._sums = torch.empty_like(self._sums)
            self._handle = 0
        self.last_factors = self.factors
        self.is_used = self.factors = self._failure = None
        self._is_awaited = False
        self._scaled.clear()
