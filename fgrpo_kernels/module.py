"""FocalPolicyLoss: the loss as a module that owns the head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.policy_loss import PolicyLossOutput, focal_policy_loss


class FocalPolicyLoss(nn.Module):
    """`focal_policy_loss` with a head of its own.

    The head's weight and bias are this module's parameters (the same objects, so tied embeddings
    stay tied): engines that shard parameters and gather a module's own ones while it runs (ZeRO-3,
    FSDP) gather the head around the loss.

    Args:
        lm_head: a module with `weight` (V, D) and optionally `bias` (V,), such as nn.Linear.
        config: the objective.
    """

    def __init__(self, lm_head: nn.Module, config: PolicyLossConfig | None = None) -> None:
        super().__init__()
        if hasattr(lm_head, "lora_A") or hasattr(lm_head, "base_layer"):
            raise ValueError(
                "lm_head: a LoRA adapter on the head is not implemented yet and would be dropped, "
                f"received {type(lm_head).__name__}; merge it or train the head's weight"
            )
        weight = getattr(lm_head, "weight", None)
        # One dimension: a sharded parameter while it is not gathered.
        if not isinstance(weight, nn.Parameter) or weight.dim() not in (1, 2):
            raise ValueError(
                "lm_head: expected a module whose weight (V, D) is a parameter, received "
                f"{type(lm_head).__name__} with weight of type {type(weight).__name__}"
            )
        self.weight = weight
        self.bias = getattr(lm_head, "bias", None)
        self.config = PolicyLossConfig() if config is None else config

    def forward(
        self,
        hidden: Tensor,
        completion_ids: Tensor,
        advantages: Tensor,
        success_rate: Tensor | None = None,
        **kwargs: Any,
    ) -> PolicyLossOutput:
        """`focal_policy_loss` of this head; `kwargs` are its other keyword arguments."""
        return focal_policy_loss(
            hidden,
            self.weight,
            completion_ids,
            advantages,
            success_rate,
            lm_head_bias=self.bias,
            config=self.config,
            **kwargs,
        )
