"""Refusing a gradient whose norm is too large, inside DeepSpeed's optimizers, which know the norm only in their step.

They drop an update, on all ranks and whatever the ZeRO stage, when its norm is not finite. The gate stands where they ask
for the norm, or for what it is made of: above a limit it answers NaN, so weights and optimizer state stay as they were.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class NormGate:
    """Stands before one of DeepSpeed's ZeRO optimizers.

    Args:
        optimizer: of stage 1 or 2 (it has `scaled_global_norm`), 3 (`_get_norm_groups`), or that of bfloat16 at stage 1
            (`get_grads_for_norm`).

    Attributes:
        limit: the largest norm that is let through.
        norm: of the last gradient that was refused for it, before clipping.
    """

    def __init__(self, optimizer: Any) -> None:
        self.limit, self.norm, self._optimizer = math.inf, math.nan, optimizer
        guards = {
            "scaled_global_norm": self._guard_norm,
            "_get_norm_groups": self._guard_norm,
            "get_grads_for_norm": self._guard_gradients,
        }
        name = next(name for name in guards if hasattr(optimizer, name))
        setattr(optimizer, name, guards[name](getattr(optimizer, name)))

    def _guard_norm(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: Any, **settings: Any) -> Any:
            found = ask(*arguments, **settings)
            parts = [float(part) for part in (found if isinstance(found, list) else [found])]
            if not self._is_refused(math.hypot(*parts) if min(parts) >= 0 else math.nan):  # theirs is -1 if not finite
                return found
            return _as_nan(found) if isinstance(found, list) else _as_nan([found])[0]

        return answer

    def _guard_gradients(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        def answer(*arguments: Any, **settings: Any) -> Any:
            found = ask(*arguments, **settings)
            self.norm = math.nan
            if settings.get("for_clipping") or math.isinf(self.limit):
                return found
            gradients, of_experts = found
            optimizer = self._optimizer
            norm = get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type)
            return (_as_nan(gradients), of_experts) if self._is_refused(float(norm)) else found

        return answer

    def _is_refused(self, norm: float) -> bool:
        self.norm = norm
        return norm > self.limit


def _as_nan(values: list[Any]) -> list[Tensor]:
    return [torch.full_like(torch.as_tensor(value, dtype=torch.float32), math.nan) for value in values]
