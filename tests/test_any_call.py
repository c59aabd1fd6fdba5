"""Calls of any shape, layout, chunk and plan against the reference."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import assert_same, poisoned_memory

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss
from fgrpo_kernels.testing import make_inputs

PLANS = {
    "row-local": dict(kl_coef=0.1),
    "row-local-skipping": dict(surrogate="cispo", clip_eps_high=0.1),
    "row-local-entropy": dict(entropy_coef=0.1, reduction="sequence_mean"),
    "sequence": dict(ratio_level="sequence", clip_eps_low=0.02, clip_eps_high=0.02),
    "sequence-entropy": dict(ratio_level="sequence", entropy_coef=0.1, kl_coef=0.1),
    "sapo": dict(surrogate="sapo"),
    "dppo": dict(surrogate="dppo_tv", clip_eps_low=0.02, clip_eps_high=0.02),
    "geometric-mean": dict(ratio_level="geometric_mean", clip_eps_low=0.1, clip_eps_high=0.1),
    "vespo": dict(surrogate="vespo", rollout_correction="mask", rollout_max=1.05),
    "masked": dict(rollout_correction="mask", rollout_max=1.05, reduction="sequence_mean"),
}


@st.composite
def calls(draw):
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    hidden_size, vocab = draw(st.integers(1, 9)), draw(st.integers(1, 17))
    seed = draw(st.integers(0, 2**16))
    inputs = make_inputs(
        batch, length, hidden_size, vocab, group_size=1, dtype=torch.float64, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(batch, generator=generator, dtype=torch.float64)
    advantages *= torch.rand(batch, generator=generator) < 0.7
    share = draw(st.sampled_from((0.0, 0.5, 1.0)))
    mask = torch.rand(batch, length, generator=generator) < share
    inputs = replace(inputs, advantages=advantages, completion_mask=mask)
    if draw(st.booleans()):
        inputs = replace(inputs, old_logps=None)
    if draw(st.booleans()):
        bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
        inputs = replace(inputs, lm_head_bias=bias.requires_grad_())
    trained = draw(st.sampled_from([(1, 1), (1, 0), (0, 1)]))
    inputs.hidden.requires_grad_(bool(trained[0]))
    inputs.lm_head_weight.requires_grad_(bool(trained[1]))
    config = PolicyLossConfig(
        **PLANS[draw(st.sampled_from(sorted(PLANS)))],
        focal_gamma=0.0,
        logit_softcap=draw(st.sampled_from((None, 2.0))),
        skip_inactive=draw(st.booleans()),
        max_chunk_bytes=draw(st.integers(1, 8)) * vocab * 8 - draw(st.integers(0, 1)),
    )
    layout = draw(st.sampled_from(("contiguous", "transposed", "sliced", "packed")))
    return inputs, config, layout, draw(st.booleans())


def laid_out(inputs, layout):
    def view(name, value):
        if value is None or value.dim() < 2:
            return value
        if layout == "transposed":
            return value.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "sliced":
            wide = torch.cat([value, torch.zeros_like(value)], -1)
            return wide[..., : value.shape[-1]]
        if layout == "packed" and name != "lm_head_weight":
            return value.flatten(0, 1)
        return value

    arguments = {name: view(name, value) for name, value in inputs.arguments().items()}
    if layout == "packed":
        batch, length = inputs.completion_ids.shape
        arguments["cu_seqlens"] = torch.arange(batch + 1) * length
    return arguments


@settings(max_examples=150)
@given(calls())
def test_any_shape_stride_and_chunk_equals_reference(call):
    inputs, config, layout, return_logps = call
    expected = focal_policy_loss(**inputs.arguments(), config=config, impl="reference")
    leaves = list(inputs.leaves().values())
    with poisoned_memory():
        actual = focal_policy_loss(
            **laid_out(inputs, layout), config=config, impl="torch", return_logps=return_logps
        )
        grads = torch.autograd.grad(actual.loss, leaves)
    assert_same("loss", actual.loss, expected.loss)
    if return_logps:
        assert_same("logps", actual.logps.reshape(expected.logps.shape), expected.logps)
        assert_same("entropy", actual.entropy.reshape(expected.entropy.shape), expected.entropy)
    for grad, value in zip(grads, torch.autograd.grad(expected.loss, leaves), strict=True):
        assert_same("gradient", grad, value)
