"""The loss inside a training program: ties, modes, dtypes, compilers, threads, scalers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from loss_cases import assert_same, gradients
from loss_plans import CONFIGS, IMPLS, ROW_BYTES, evaluate
from oracle import policy_loss_oracle
from torch.utils.checkpoint import checkpoint

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, head
from fgrpo_kernels.testing import assert_error_rule, make_inputs


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tied_embedding_sums_head_and_embedding_gradients(config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    shift = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(head, embedding):
        hidden = torch.tanh(torch.nn.functional.embedding(inputs.completion_ids, embedding) + shift)
        tied = replace(inputs, hidden=hidden, lm_head_weight=head)
        focal_policy_loss(**tied.arguments(), config=config, impl=impl).loss.backward()

    weight = inputs.lm_head_weight.detach()
    head, embedding, tied = (weight.clone().requires_grad_() for _ in range(3))
    run(head, embedding)
    run(tied, tied)
    assert head.grad.abs().max() > 0 and embedding.grad.abs().max() > 0
    assert_same("tied", tied.grad, head.grad + embedding.grad)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_grad_gives_the_same_values_and_no_graph(config):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    expected = focal_policy_loss(**inputs.arguments(), config=config, impl="torch")
    with torch.no_grad():
        out = focal_policy_loss(**inputs.arguments(), config=config, impl="torch")
    with torch.inference_mode():
        inferred = focal_policy_loss(**inputs.arguments(), config=config, impl="torch")
    assert not out.loss.requires_grad and not inferred.loss.requires_grad
    for field in ("loss", "per_token_loss", "logps", "entropy"):
        assert_same(field, getattr(out, field), getattr(expected, field).detach())
        assert torch.equal(getattr(out, field), getattr(inferred, field))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_auto_takes_the_chunked_torch_path_on_cpu(config):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    auto, auto_grads = evaluate(inputs, config=config)
    chunked, grads = evaluate(inputs, config=config, impl="torch")
    assert torch.equal(auto.loss, chunked.loss)
    for name, grad in auto_grads.items():
        assert torch.equal(grad, grads[name])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_checkpointing_in_the_backbone(config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double()
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        hidden = run(inputs.hidden)
        backbone = replace(inputs, hidden=hidden)
        focal_policy_loss(**backbone.arguments(), config=config, impl=impl).loss.backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    for checkpointed, plain in zip(*grads, strict=True):
        assert plain.abs().max() > 0
        assert_same("parameter", checkpointed, plain)


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("hidden_dtype,weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("impl", IMPLS)
def test_dtypes_by_the_error_rule(config, hidden_dtype, weight_dtype, impl, monkeypatch):
    """Operands in the promoted dtype; each gradient in its tensor's; error as plain torch's."""
    # narrow weights are upcast in blocks of the vocabulary: 20 of its 67 entries at a time
    monkeypatch.setattr(head, "UPCAST_BLOCK_BYTES", 20 * 32 * 4)
    base = make_inputs(8, 12, 32, 67, dtype=torch.float64, seed=5)
    inputs = replace(
        base.to(torch.float32),
        hidden=base.hidden.detach().to(hidden_dtype).requires_grad_(),
        lm_head_weight=base.lm_head_weight.detach().to(weight_dtype).requires_grad_(),
    )
    exact, promoted = inputs.to(torch.float64), torch.promote_types(hidden_dtype, weight_dtype)
    config = replace(config, max_chunk_bytes=20 * 67 * 4)
    truth = policy_loss_oracle(**exact.arguments(), config=config)
    plain = policy_loss_oracle(**inputs.arguments(), config=config, dtype=promoted)
    out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    assert out.loss.dtype == torch.float32
    for field in ("logps", "entropy", "per_token_loss"):
        assert_error_rule(field, *(getattr(o, field).detach() for o in (out, plain, truth)))
    losses = (o.loss.detach() for o in (out, plain, truth))
    assert_error_rule("loss", *losses, largest=float(truth.per_token_loss.abs().max()))
    true_grads, plain_grads = gradients(truth.loss, exact), gradients(plain.loss, inputs)
    for name, grad in gradients(out.loss, inputs).items():
        assert grad.dtype == getattr(inputs, name).dtype
        assert_error_rule(f"d{name}", grad, plain_grads[name], true_grads[name])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("impl", IMPLS)
def test_one_float64_operand_makes_the_loss_float64(config, impl):
    base = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    inputs = replace(base, hidden=base.hidden.detach().float().requires_grad_())
    exact = inputs.to(torch.float64)
    truth = policy_loss_oracle(**exact.arguments(), config=config)
    out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    assert out.loss.dtype == torch.float64
    assert_same("loss", out.loss, truth.loss)
    expected = gradients(truth.loss, exact)
    grads = gradients(out.loss, inputs)
    assert_same("weight", grads["lm_head_weight"], expected["lm_head_weight"])
    assert_same("hidden", grads["hidden"], expected["hidden"].float())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_runs_in_its_dtype(config, impl):
    """float32 tensors under bf16 autocast: the same numbers as bf16 tensors, fp32 gradients."""
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    narrow = replace(
        inputs,
        hidden=inputs.hidden.detach().bfloat16().requires_grad_(),
        lm_head_weight=inputs.lm_head_weight.detach().bfloat16().requires_grad_(),
    )
    expected, expected_grads = evaluate(narrow, config=config, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    grads = gradients(out.loss, inputs)
    torch.testing.assert_close(out.logps, expected.logps, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-7)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        # the same fp32 sums; those of `narrow` are rounded to bf16 at the end (half of eps 2^-7)
        torch.testing.assert_close(grad.bfloat16(), expected_grads[name], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_side_inputs_other_than_token_weights_are_constants(impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    weights = torch.ones(4, 5, dtype=torch.float64)
    config = PolicyLossConfig(kl_coef=0.1, rollout_correction="truncate")
    attached = replace(
        inputs,
        token_weights=weights.requires_grad_(),
        **{
            name: getattr(inputs, name).clone().requires_grad_()
            for name in ("advantages", "success_rate", "old_logps", "ref_logps", "rollout_logps")
        },
    )
    out = focal_policy_loss(**attached.arguments(), config=config, impl=impl)
    out.loss.backward()
    assert weights.grad.abs().sum() > 0 and inputs.hidden.grad.abs().sum() > 0
    for name in ("advantages", "success_rate", "old_logps", "ref_logps", "rollout_logps"):
        assert getattr(attached, name).grad is None, name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_inputs_are_not_written_to(config, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    before = {k: v.clone() for k, v in inputs.arguments().items() if v is not None}
    evaluate(inputs, config=replace(config, rollout_correction="mask"), impl=impl)
    for name, value in before.items():
        assert torch.equal(getattr(inputs, name), value), name


def test_torch_compile_does_not_recompile_per_length():
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter)
    def step(arguments):
        hidden = torch.tanh(arguments.pop("hidden"))
        return focal_policy_loss(hidden, **arguments, impl="torch").loss * 2

    losses, frames = [], []
    for length in (5, 6, 7, 9):
        inputs = make_inputs(4, length, 6, 11, group_size=2)
        losses.append(step(inputs.arguments()))
        eager = replace(inputs, hidden=torch.tanh(inputs.hidden))
        expected = focal_policy_loss(**eager.arguments(), impl="torch").loss * 2
        torch.testing.assert_close(losses[-1], expected)
        frames.append(counter.frame_count)
    # the second length may turn a size dynamic; from the third on nothing is compiled
    assert frames[1] == frames[2] == frames[3]


def in_a_fresh_thread(function):
    """What is kept between calls is kept per thread: a new one starts without it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_after_a_call_in_inference_mode(config):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    expected, expected_grads = evaluate(inputs, config=config, impl="torch")

    def both():
        with torch.inference_mode():
            focal_policy_loss(**inputs.arguments(), config=config, impl="torch")
        return evaluate(inputs, config=config, impl="torch")

    out, grads = in_a_fresh_thread(both)
    assert torch.equal(out.loss, expected.loss)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name])


@pytest.mark.parametrize("chunk_bytes", [None, 3 * ROW_BYTES])
@pytest.mark.parametrize("first", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("second", CONFIGS.values(), ids=CONFIGS)
def test_calls_may_be_interleaved(first, second, chunk_bytes):
    """Both forwards before both backwards: no call spoils what another one keeps."""
    runs = []
    for seed, config in enumerate((first, second)):
        inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64, seed=seed)
        config = replace(config, max_chunk_bytes=chunk_bytes)
        _, alone = evaluate(inputs, config=config, impl="torch")
        out = focal_policy_loss(**inputs.arguments(), config=config, impl="torch")
        runs.append((inputs, out, alone))
    for inputs, out, alone in runs:
        for name, grad in gradients(out.loss, inputs).items():
            assert torch.equal(grad, alone[name]), name


def test_calls_from_several_threads():
    config = PolicyLossConfig(max_chunk_bytes=3 * ROW_BYTES)
    batches = [make_inputs(8, 9, 6, 11, dtype=torch.float64, seed=seed) for seed in range(8)]
    expected = [evaluate(inputs, config=config, impl="torch") for inputs in batches]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: evaluate(x, config=config, impl="torch"), batches * 4))
    for i, (out, grads) in enumerate(results):
        assert torch.equal(out.loss, expected[i % 8][0].loss)
        for name, grad in grads.items():
            assert torch.equal(grad, expected[i % 8][1][name])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("chunk_bytes", [None, 3 * 11 * 4])
def test_a_backward_inside_autocast_is_the_same(config, chunk_bytes):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    config = replace(config, max_chunk_bytes=chunk_bytes)
    grads = []
    for backward_too in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            out = focal_policy_loss(**inputs.arguments(), config=config, impl="torch")
            if backward_too:
                grads.append(gradients(out.loss, inputs))
        if not backward_too:
            grads.append(gradients(out.loss, inputs))
    for name, grad in grads[0].items():
        assert grad.dtype == torch.float32 and torch.equal(grad, grads[1][name])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("impl", IMPLS)
def test_float16_gradients_survive_large_denominators_with_a_loss_scale(config, impl):
    """A factor of 2^-24 and its inverse cancel: dlogits alone would be 0 in float16."""
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float16)
    denominators = dict(global_valid_tokens=16, global_sequences=4)
    _, expected = evaluate(inputs, config=config, impl=impl, **denominators)
    scaled = {name: value * 2**24 for name, value in denominators.items()}
    _, grads = evaluate(inputs, upstream=2.0**24, config=config, impl=impl, **scaled)
    for name, grad in grads.items():
        assert grad.dtype == torch.float16 and expected[name].abs().max() > 1e-3
        # the same float32 numbers, rounded once (reference rounds a matrix product's result)
        torch.testing.assert_close(grad, expected[name], rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_token_weights_alone_get_a_gradient(config, weight):
    """With a frozen policy, and at weight 0, where the token's own coefficient vanishes."""
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    inputs.hidden.requires_grad_(False)
    inputs.lm_head_weight.requires_grad_(False)
    weights = torch.full((4, 5), weight, dtype=torch.float64, requires_grad=True)
    inputs = replace(inputs, token_weights=weights)
    expected, expected_grads = evaluate(inputs, config=config, impl="reference")
    for return_logps in (True, False):
        out, grads = evaluate(inputs, config=config, impl="torch", return_logps=return_logps)
        assert_same("loss", out.loss, expected.loss)
        assert_same("token_weights", grads["token_weights"], expected_grads["token_weights"])
    assert expected_grads["token_weights"].abs().max() > 1e-3


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_call_is_repeatable_bit_for_bit(config):
    inputs = make_inputs(8, 9, 6, 11)
    first, first_grads = evaluate(inputs, config=config, impl="torch")
    second, second_grads = evaluate(inputs, config=config, impl="torch")
    assert torch.equal(first.loss, second.loss)
    for name, grad in first_grads.items():
        assert torch.equal(grad, second_grads[name])
