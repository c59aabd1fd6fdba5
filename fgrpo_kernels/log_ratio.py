"""exp of a log-ratio that can be anything: bounded in value, alive in gradient."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of a log-ratio is taken at clamp(x, -20, 20): 4.9e8 and its square stay finite in fp32."""


class _StraightThroughClamp(torch.autograd.Function):
    """clamp(x, -20, 20) with derivative 1: a token far away is still pushed the right way."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def bounded(log_ratio: Tensor) -> Tensor:
    """clamp(log_ratio, -20, 20), straight-through; exp and expm1 of it are safe."""
    return _StraightThroughClamp.apply(log_ratio)  # type: ignore[no-any-return]
