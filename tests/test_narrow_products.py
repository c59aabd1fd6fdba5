"""Gradients whose E is stored in bf16 or fp16, as on a GPU, against float64."""

from dataclasses import replace

import pytest
import torch
from loss_cases import gradients
from narrow_products import NarrowProducts
from oracle import policy_loss_oracle

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss
from fgrpo_kernels.testing import assert_error_rule, make_inputs

CONFIGS = {
    "clip with kl": PolicyLossConfig(kl_coef=0.1),
    "cispo, soft-cap": PolicyLossConfig(surrogate="cispo", logit_softcap=5.0, temperature=0.7),
    "entropy, soft-cap": PolicyLossConfig(entropy_coef=0.1, logit_softcap=5.0),
    "large entropy bonus": PolicyLossConfig(entropy_coef=30.0),
    "sequence ratio": PolicyLossConfig.gspo(focal_gamma=0.5),
    "recomputed": PolicyLossConfig.gspo(max_chunk_bytes=4 * 67 * 4),
}
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture
def narrow():
    with NarrowProducts() as products:
        yield products


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_errors_are_at_most_twice_plain_torchs(name, dtype, impl, narrow):
    config = CONFIGS[name]
    inputs = make_inputs(4, 6, 32, 67, group_size=2, seed=5, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = replace(inputs, lm_head_bias=torch.randn(67, generator=generator).requires_grad_())
    exact = inputs.to(torch.float64)
    truth = policy_loss_oracle(**exact.arguments(), config=config)
    plain = policy_loss_oracle(**inputs.arguments(), config=config, dtype=dtype)
    out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    for field in ("logps", "entropy", "per_token_loss"):
        assert_error_rule(field, *(getattr(o, field).detach() for o in (out, plain, truth)))
    true_grads, plain_grads = gradients(truth.loss, exact), gradients(plain.loss, inputs)
    for name, grad in gradients(out.loss, inputs).items():
        if name == "lm_head_bias":  # plain torch's is fp32 all along; ours sums what is stored
            largest = true_grads[name].abs().max()
            error = (grad - true_grads[name]).abs().max()
            assert error <= 2 * torch.finfo(dtype).eps * largest
        else:
            assert_error_rule(f"d{name}", grad, plain_grads[name], true_grads[name])
    assert narrow.count > 0


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("entropy_coef", [0.0, 1e-9])
def test_what_is_rare_is_kept(entropy_coef, dtype, impl, narrow):
    """Row 0: p_y = 1 - 1e-7, of which E keeps 1e-7. Row 1: p_v = 5e-9 beside p_y = 0.7, both less
    than fp16's smallest number; E is stored with more room."""
    logits = torch.full((2, 4), -40.0)
    logits[0, :2] = torch.tensor([0.0, -16.11809565])  # log 1e-7
    logits[1, :3] = torch.tensor([0.7, 0.3, 5e-9]).log()
    weight = torch.eye(4, dtype=dtype).requires_grad_()
    hidden = logits.to(dtype).requires_grad_()
    ids, advantages = torch.zeros(2, dtype=torch.int64), torch.ones(2, 1)
    config = PolicyLossConfig(
        surrogate="reinforce", focal_gamma=0, reduction="fixed_length", fixed_length=1,
        entropy_coef=entropy_coef,
    )  # fmt: skip
    out = focal_policy_loss(
        hidden[:, None], weight, ids[:, None], advantages, config=config, impl=impl
    )
    (grad,) = torch.autograd.grad(2 * out.loss, hidden)
    log_probs = hidden.detach().double().log_softmax(1)
    expected = log_probs.exp()
    expected[:, 0] = torch.expm1(log_probs[:, 0])
    # The stored E and the finished gradient are rounded once each; the bonus is 1e-9 of the rest.
    relative = 2 * torch.finfo(dtype).eps
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        value = expected[row, column].item()
        smallest = 6e-8 if dtype == torch.float16 else 0  # of the gradient itself, in hidden's type
        assert grad[row, column].item() == pytest.approx(value, rel=relative, abs=smallest)
