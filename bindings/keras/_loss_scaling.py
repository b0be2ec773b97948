"""Loss scaling: all ranks take a step or all skip it.

`keras.optimizers.LossScaleOptimizer` looks whether the gradients are finite, and only then gives them to the optimizer
inside. If that one reduced them, a rank whose own are not finite would leave the others waiting. So they are reduced
before anybody looks, and an infinity of one rank is one of all.

`compile()` puts a LossScaleOptimizer around any other under the policy "mixed_float16", without asking: only its class
can be told.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from keras.optimizers import LossScaleOptimizer

from horovodlike.keras._gradients import Gradients


def gradients_of(optimizer: Any) -> Gradients | None:
    """Return what reduces the gradients of an optimizer, or of the one inside it; None if nothing does."""
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return getattr(optimizer, "_distributed_gradients", None)


@functools.lru_cache(maxsize=1)
def teach() -> None:
    """Have LossScaleOptimizer reduce gradients before it looks at them, if the optimizer inside is distributed."""
    apply = LossScaleOptimizer.apply

    @functools.wraps(apply)
    def reducing_apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        gradients = gradients_of(self)
        if gradients is None or gradients.is_done:
            apply(self, grads, trainable_variables)
            return
        variables = build(self, trainable_variables)

        def apply_reduced(reduced: list[Any]) -> None:
            with gradients.done():
                apply(self, reduced, variables)

        gradients.apply(list(grads), variables, apply_reduced)

    LossScaleOptimizer.apply = reducing_apply


def build(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Build an optimizer if necessary, and return its trained variables.

    Raises:
        ValueError: `variables` is None, and the optimizer is not built.
    """
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                f"{optimizer.name} got gradients without variables, and is not built: pass the variables, or call "
                "optimizer.build(trainable_variables) before"
            )
        return list(optimizer._trainable_variables)
    variables = list(variables)
    if not optimizer.built:
        optimizer.build(variables)
    return variables
