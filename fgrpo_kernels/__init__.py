"""Focal-weighted policy loss for RLVR in one chunked pass over a linear head."""

from fgrpo_kernels.advantages import (
    GroupAdvantages,
    advantage_collapse_rate,
    focal_weight,
    group_advantages,
)
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.loss_call import PolicyLossOutput
from fgrpo_kernels.module import FocalPolicyLoss
from fgrpo_kernels.policy_loss import focal_policy_loss
from fgrpo_kernels.rollout_correction import rollout_weights
from fgrpo_kernels.surrogates import PolicyRows
from fgrpo_kernels.token_logps import token_logps
from fgrpo_kernels.token_weights import future_kl_weights, length_weights

__all__ = [
    "FocalPolicyLoss",
    "GroupAdvantages",
    "PolicyLossConfig",
    "PolicyLossOutput",
    "PolicyRows",
    "advantage_collapse_rate",
    "focal_policy_loss",
    "focal_weight",
    "future_kl_weights",
    "group_advantages",
    "length_weights",
    "rollout_weights",
    "token_logps",
]
