"""The chunked path against float64 autograd of `reference`, and what the contract says of the loss.

Bounds: float64 comparisons as in `loss_cases.assert_same`; lower precisions by the error rule.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from loss_cases import OUTER, assert_same, cases, given_logps, gradients, poisoned_memory
from loss_plans import CONFIGS, IMPLS, ROW_BYTES, evaluate

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss
from fgrpo_kernels.testing import make_inputs


@pytest.mark.parametrize("outer", OUTER)
def test_torch_equals_reference(outer):
    for case in cases(outer):
        draw = random.Random(case.name)
        config = replace(
            case.config,
            max_chunk_bytes=draw.choice((None, 1, ROW_BYTES, 3 * ROW_BYTES, 7 * ROW_BYTES)),
            skip_inactive=draw.choice((True, False)),
        )
        upstream = draw.choice((1.0, -3.0, 1e-6))
        expected, expected_grads = evaluate(
            case.inputs, upstream=upstream, config=case.config, impl="reference", **case.extra
        )
        with poisoned_memory():
            actual, grads = evaluate(
                case.inputs, upstream=upstream, config=config, impl="torch", **case.extra
            )
        for field in ("loss", "per_token_loss", "logps", "entropy"):
            assert_same(f"{case.name} {field}", getattr(actual, field), getattr(expected, field))
        for name, grad in grads.items():
            assert_same(f"{case.name} d{name}", grad / upstream, expected_grads[name] / upstream)
        assert actual.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert_same(f"{case.name} {name}", actual.metrics[name].double(), value.double())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_output_record(config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    assert out.loss.shape == () and out.loss.dtype == torch.float32 and out.loss.requires_grad
    for field in (out.per_token_loss, out.logps, out.entropy):
        assert field.shape == inputs.completion_ids.shape and not field.requires_grad
        assert (field[~inputs.completion_mask] == 0).all()
        assert (field[inputs.completion_mask] != 0).any()
    assert out.metrics.keys() == out.metric_sums.keys()


class Rerun(torch.autograd.Function):
    """gradcheck differentiates one graph many times, which fused paths refuse: make a new one."""

    @staticmethod
    def forward(ctx, function, *leaves):
        ctx.function = function
        ctx.save_for_backward(*leaves)
        return function(*leaves)

    @staticmethod
    def backward(ctx, upstream):
        leaves = [leaf.detach().requires_grad_() for leaf in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(upstream * ctx.function(*leaves), leaves)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradcheck(config):
    inputs = make_inputs(2, 3, 3, 5, group_size=2, zero_advantage=0.0, dtype=torch.float64)
    bias = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    # Finite differences need a differentiable point and a loss without stop-gradients: sapo, gmpo
    # or clip within its bounds; detached factors are compared with `reference` elsewhere.
    if config.surrogate != "sapo" and config.ratio_level != "geometric_mean":
        config = replace(config, surrogate="clip", ratio_level="token")
        config = replace(config, clip_eps_low=0.999, clip_eps_high=9.0)
    config = replace(config, max_chunk_bytes=2 * 5 * 8)
    fixed = inputs.arguments()
    for name in ("hidden", "lm_head_weight", "lm_head_bias", "token_weights"):
        del fixed[name]

    def loss(hidden, weight, lm_head_bias, token_weights):
        return focal_policy_loss(
            hidden=hidden, lm_head_weight=weight, lm_head_bias=lm_head_bias,
            token_weights=token_weights, **fixed, config=config, impl="torch",
        ).loss  # fmt: skip

    leaves = (inputs.hidden, inputs.lm_head_weight, bias, weights)
    assert torch.autograd.gradcheck(lambda *leaves: Rerun.apply(loss, *leaves), leaves)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("upstream", [0.0, -2.5, 1e8])
def test_any_upstream_scalar(upstream, impl, config):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    _, unit = evaluate(inputs, config=config, impl=impl)
    _, scaled = evaluate(inputs, upstream=upstream, config=config, impl=impl)
    for name, grad in scaled.items():
        torch.testing.assert_close(grad, upstream * unit[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fused_paths_refuse_a_second_backward(config):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    loss = focal_policy_loss(**inputs.arguments(), config=config, impl="torch").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already"):
        loss.backward()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fused_paths_refuse_a_double_backward(config):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    loss = focal_policy_loss(**inputs.arguments(), config=config, impl="torch").loss
    (grad,) = torch.autograd.grad(loss, inputs.hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("skip_inactive", [False, True])
def test_without_logps_the_loss_and_gradients_are_the_same(config, impl, skip_inactive):
    inputs = make_inputs(8, 5, 6, 11, group_size=2, zero_advantage=0.5, dtype=torch.float64)
    config = replace(config, skip_inactive=skip_inactive)
    out, grads = evaluate(inputs, config=config, impl=impl)
    bare, bare_grads = evaluate(inputs, config=config, impl=impl, return_logps=False)
    assert bare.logps is None and bare.entropy is None
    assert_same("loss", bare.loss, out.loss)
    assert_same("per_token_loss", bare.per_token_loss, out.per_token_loss)
    for name, grad in bare_grads.items():
        assert_same(name, grad, grads[name])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "field", ["hidden", "old_logps", "ref_logps", "advantages", "rollout_logps", "token_weights"]
)
def test_nan_at_a_scored_position_surfaces_as_a_nan_loss(field, config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, zero_advantage=0.0)
    config = replace(config, kl_coef=0.1, rollout_correction="mask")
    inputs = replace(inputs, token_weights=torch.ones(4, 5))
    values = getattr(inputs, field).detach().clone()
    values[1] = torch.nan
    out = focal_policy_loss(
        **replace(inputs, **{field: values}).arguments(), config=config, impl=impl
    )
    assert out.loss.isnan()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_anything_is_allowed_where_a_sequence_has_no_valid_token(impl, gamma):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    mask = inputs.completion_mask.clone()
    mask[2] = False
    inputs = replace(inputs, completion_mask=mask)
    config = PolicyLossConfig(focal_gamma=gamma, reduction="sequence_mean")
    expected, expected_grads = evaluate(inputs, config=config, impl=impl)
    rate, advantages = inputs.success_rate.clone(), inputs.advantages.clone()
    rate[2], advantages[2] = torch.nan, torch.nan
    spoiled = replace(inputs, success_rate=rate, advantages=advantages)
    out, grads = evaluate(spoiled, config=config, impl=impl)
    assert torch.equal(out.loss, expected.loss)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name])


SPLIT_CONFIGS = {
    "clip": PolicyLossConfig(kl_coef=0.1),
    "grpo": PolicyLossConfig.grpo(focal_gamma=0.5, entropy_coef=0.05),
    "dr_grpo": PolicyLossConfig.dr_grpo(fixed_length=9),
    "gspo": PolicyLossConfig.gspo(),
    "gmpo": PolicyLossConfig.gmpo(rollout_correction="truncate"),
    "vespo": PolicyLossConfig.vespo(),
    "gspo-token-mean": PolicyLossConfig.gspo(reduction="token_mean", rollout_correction="truncate"),
    "masked": PolicyLossConfig.cispo(
        rollout_correction="mask", rollout_level="sequence", rollout_min=0.98, rollout_max=1.02
    ),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", SPLIT_CONFIGS.values(), ids=SPLIT_CONFIGS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_micro_batches_with_global_denominators_sum_to_the_whole(steps, config, impl):
    inputs = make_inputs(8, 5, 6, 11, group_size=2, dtype=torch.float64)
    whole = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    sums = whole.metric_sums["ratio_mean"]
    counted = whole.per_token_loss  # per sequence: does it count for the sequence mean
    sequences = 8
    if config.rollout_correction == "mask" and config.reduction == "sequence_mean":
        sequences = int((counted != 0).any(1).sum())
    denominators = {"global_valid_tokens": sums[1], "global_sequences": sequences}
    full, full_grads = evaluate(inputs, config=config, impl=impl, **denominators)
    assert_same("whole", full.loss, whole.loss)
    loss = torch.zeros((), dtype=torch.float64)
    grads = {name: torch.zeros_like(leaf) for name, leaf in inputs.leaves().items()}
    # uneven parts, and each cut to its own longest sequence, as a trainer would do
    bounds = [0, 8] if steps == 1 else [0, 3, 8] if steps == 2 else [0, 1, 3, 7, 8]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        longest = int(inputs.completion_mask[start:stop].sum(1).max())
        part = {}
        for name, value in inputs.arguments().items():
            if name == "lm_head_weight" or value is None:
                part[name] = value
            else:
                part[name] = value[start:stop] if value.dim() == 1 else value[start:stop, :longest]
        out = focal_policy_loss(**part, config=config, impl=impl, **denominators)
        loss += out.loss.detach()
        for name, grad in gradients(out.loss, inputs).items():
            grads[name] += grad
    assert_same("loss", loss, whole.loss.detach())
    for name, grad in grads.items():
        assert_same(name, grad, full_grads[name])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", SPLIT_CONFIGS.values(), ids=SPLIT_CONFIGS)
def test_padding_changes_nothing(config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    expected, expected_grads = evaluate(inputs, config=config, impl=impl)

    def padded(name, value):
        if value is None or value.dim() < 2 or name == "lm_head_weight":
            return value
        width = [0, 0, 3, 2] if value.dim() == 3 else [3, 2]
        fill = 0 if name == "completion_mask" else 10**9 if name == "completion_ids" else torch.nan
        return torch.nn.functional.pad(value, width, value=fill)

    arguments = {name: padded(name, value) for name, value in inputs.arguments().items()}
    out = focal_policy_loss(**arguments, config=config, impl=impl)
    assert_same("loss", out.loss, expected.loss)
    assert_same("per_token_loss", out.per_token_loss[:, 3:-2], expected.per_token_loss)
    for name, grad in gradients(out.loss, inputs).items():
        assert_same(name, grad, expected_grads[name])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", SPLIT_CONFIGS.values(), ids=SPLIT_CONFIGS)
@pytest.mark.parametrize("per_token_advantages", [False, True])
def test_packed_equals_padded(config, impl, per_token_advantages):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    mask = inputs.completion_mask.clone()
    mask[1] = False  # an empty sequence
    mask[2, 1] = False  # a hole inside a sequence stays in the packed input, masked
    inputs = replace(inputs, completion_mask=mask)
    if per_token_advantages:
        inputs = replace(inputs, advantages=inputs.advantages[:, None] + inputs.old_logps)
    expected, expected_grads = evaluate(inputs, config=config, impl=impl)
    kept = mask | torch.zeros_like(mask).index_fill_(0, torch.tensor(2), True)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    for dtype in (torch.int64, torch.int32):
        arguments = {
            name: value[kept]
            if value is not None and value.dim() >= 2 and name != "lm_head_weight"
            else value
            for name, value in inputs.arguments().items()
        }
        out = focal_policy_loss(
            **arguments, cu_seqlens=cu_seqlens.to(dtype), config=config, impl=impl
        )
        assert_same("loss", out.loss, expected.loss)
        assert_same("logps", out.logps, expected.logps[kept])
        for name, grad in gradients(out.loss, inputs).items():
            assert_same(name, grad, expected_grads[name])


@pytest.mark.parametrize("impl", IMPLS)
def test_packed_without_bounds_when_nothing_is_per_sequence(impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    config = PolicyLossConfig.dapo(kl_coef=0.1)
    per_token = replace(inputs, advantages=inputs.advantages[:, None].expand(4, 5))
    expected, expected_grads = evaluate(per_token, config=config, impl=impl)
    arguments = {
        name: value.flatten(0, 1)
        if value is not None and value.dim() > 1 and name != "lm_head_weight"
        else value
        for name, value in per_token.arguments().items()
    }
    assert config.focal_gamma == 0 and arguments["success_rate"] is not None  # and so not used
    out = focal_policy_loss(**arguments, config=config, impl=impl)
    assert_same("loss", out.loss, expected.loss)
    for name, grad in gradients(out.loss, inputs).items():
        assert_same(name, grad, expected_grads[name])


@pytest.mark.parametrize("impl", IMPLS)
def test_as_many_sequences_as_tokens_reads_advantages_per_sequence(impl):
    # sequences of 2, 0 and 1 tokens: three advantages for three tokens
    given = given_logps([-1.0, -1.0, -1.0])
    out = focal_policy_loss(
        given.hidden,
        given.head,
        given.ids,
        torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 2, 2, 3]),
        config=PolicyLossConfig(surrogate="reinforce", focal_gamma=0.0),
        impl=impl,
    )
    assert out.per_token_loss.tolist() == pytest.approx([1.0, 1.0, 100.0], rel=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_any_strides(config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    expected, expected_grads = evaluate(inputs, config=config, impl=impl)

    def strided(value):
        if value is None:
            return None
        if value.dim() == 1:
            return value[:, None].expand(-1, 3).contiguous()[:, 1]
        return value.transpose(0, 1).contiguous().transpose(0, 1)

    arguments = {name: strided(value) for name, value in inputs.arguments().items()}
    assert not arguments["lm_head_weight"].is_contiguous()
    out = focal_policy_loss(**arguments, config=config, impl=impl)
    assert_same("loss", out.loss, expected.loss)
    for name, grad in gradients(out.loss, inputs).items():
        assert_same(name, grad, expected_grads[name])


@pytest.mark.parametrize("impl", IMPLS)
def test_expanded_side_inputs(impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    row = inputs.old_logps[:1]
    expanded = replace(
        inputs,
        old_logps=row.expand(4, 5),
        completion_mask=torch.tensor(True).expand(4, 5),
        advantages=torch.tensor(1.5, dtype=torch.float64).expand(4),
    )
    copied = replace(
        expanded,
        old_logps=row.repeat(4, 1),
        completion_mask=None,
        advantages=torch.full((4,), 1.5, dtype=torch.float64),
    )
    config = PolicyLossConfig()
    out, grads = evaluate(expanded, config=config, impl=impl)
    expected, expected_grads = evaluate(copied, config=config, impl=impl)
    assert_same("loss", out.loss, expected.loss)
    for name, grad in grads.items():
        assert_same(name, grad, expected_grads[name])
