"""What the tests of small inputs share: log-probs set by hand, objectives that use everything."""

import math

import torch
from loss_cases import given_logps

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss

INF, NAN = math.inf, math.nan


def config(**kwargs):
    return PolicyLossConfig(**{"focal_gamma": 0.0} | kwargs)


def run(logps, advantages, *, impl, config, **kwargs):
    """The output and dloss/dlogps for log-probs given as a nested list."""
    given = given_logps(logps, torch.float32)
    for name, value in kwargs.items():
        if isinstance(value, list):
            dtype = torch.bool if name == "completion_mask" else torch.float32
            kwargs[name] = torch.tensor(value, dtype=dtype)
    advantages = torch.tensor(advantages, dtype=torch.float32)
    out = focal_policy_loss(
        given.hidden, given.head, given.ids, advantages, **kwargs, config=config, impl=impl
    )
    out.loss.backward()
    return out, given.dlogps()


def close(actual, expected, atol=1e-6):
    expected = torch.tensor(expected)
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=atol)


def k1(losses):
    """ref_logps that make logp - ref the given losses at logp = -1."""
    return [[-1.0 - loss for loss in row] for row in losses]


K1 = dict(kl_coef=1.0, kl_estimator="k1")
CONFIGS = {
    "clip": config(),
    "cispo-entropy": config(surrogate="cispo", entropy_coef=0.1),
    "grpo-kl": PolicyLossConfig.grpo(kl_coef=0.1),
    "dr_grpo": PolicyLossConfig.dr_grpo(fixed_length=4, rollout_correction="truncate"),
    "gspo": PolicyLossConfig.gspo(rollout_correction="mask", rollout_level="sequence"),
    "gspo-entropy": PolicyLossConfig.gspo(entropy_coef=0.1, kl_coef=0.1),
    "sapo": PolicyLossConfig.sapo(),
    "dppo": config(surrogate="dppo_kl"),
    "gmpo": PolicyLossConfig.gmpo(rollout_correction="mask"),
    "vespo": PolicyLossConfig.vespo(rollout_correction="truncate"),
}
