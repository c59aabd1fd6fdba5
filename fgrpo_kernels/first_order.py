"""Gradients that were computed by hand and have no derivative of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(
            "the chunked paths have no second derivative: use impl='reference' for a double "
            "backward"
        )


def first_order(tensor: Tensor) -> Tensor:
    """The same values; their gradient has no derivative."""
    return _FirstOrder.apply(tensor)  # type: ignore[no-any-return]


def first_order_only(backward: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Decorates `Function.backward`: with `create_graph=True` its gradients carry a graph whose
    backward raises. (`once_differentiable` leaves them detached where the upstream gradient is a
    constant, so that a penalty on them would be lost without a word.)"""

    @functools.wraps(backward)
    def call(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients: tuple[Any, ...] = backward(ctx, *upstream)
        if not torch.is_grad_enabled():
            return gradients
        return tuple(
            g if g is None else _NoDerivative.apply(g.detach().requires_grad_()) for g in gradients
        )

    return call


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor]:
        return (gradient,)
