"""The Triton row kernels (interpreted without a GPU) against float64 and against plain torch.

Interpreted kernels cost some milliseconds a row, so the shapes are tiny and the tile is made small
where several tiles are wanted. Memory is poisoned: what a kernel leaves unwritten is NaN.
"""

from dataclasses import replace

import pytest
import torch
from loss_cases import OUTER, assert_same, cases, gradients, poisoned_memory
from oracle import policy_loss_oracle

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, token_logps, torch_rows, triton_rows
from fgrpo_kernels.head import LinearHead, e_scale
from fgrpo_kernels.linear_head import HeadRows
from fgrpo_kernels.surrogates import PolicyRows
from fgrpo_kernels.testing import assert_error_rule, make_inputs

INF, NAN = torch.inf, torch.nan
HEAD = LinearHead(torch.zeros(21, 1), torch.zeros(21), torch.float32)
"""A bias may forbid tokens with -inf."""


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_memory():
        yield


def use_tile(monkeypatch, size):
    monkeypatch.setattr(
        triton_rows, "launch_options", lambda vocab_size: {"BLOCK_V": size, "num_warps": 4}
    )


@pytest.mark.parametrize("outer", OUTER)
def test_fused_rows_equal_reference(outer, monkeypatch):
    """Three of the forty combinations of each outer one, other ones each time."""
    shift = OUTER.index(outer)
    use_tile(monkeypatch, (4, 8, 16)[shift % 3])  # V = 11: three tiles, two, one
    for case in list(cases(outer, batch=2, length=3))[shift % 13 : 39 : 13]:
        expected = focal_policy_loss(**case.arguments(), impl="reference")
        actual = focal_policy_loss(
            **{**case.arguments(), "config": replace(case.config, max_chunk_bytes=4 * 11 * 8)},
            impl="triton",
        )
        for field in ("loss", "per_token_loss", "logps", "entropy"):
            assert_same(f"{case.name} {field}", getattr(actual, field), getattr(expected, field))
        expected_grads = gradients(expected.loss, case.inputs)
        for name, grad in gradients(actual.loss, case.inputs).items():
            assert_same(f"{case.name} d{name}", grad, expected_grads[name])


@pytest.mark.parametrize("vocab", [1, 2, 101, 127, 128, 129, 4095, 4096, 4097, 4099])
def test_vocabularies_around_a_tile(vocab):
    """The launcher's own tiles of 128 to 4096 columns; 101 and 4099 are prime."""
    inputs = make_inputs(1, 2, 3, vocab, group_size=1, dtype=torch.float64)
    inputs = replace(inputs, advantages=torch.ones(1).double())
    inputs = replace(inputs, completion_ids=torch.tensor([[0, vocab - 1]]))
    base = PolicyLossConfig(focal_gamma=0.0, kl_coef=0.1)
    for config in (replace(base, entropy_coef=0.1), replace(base, surrogate="cispo")):
        expected = focal_policy_loss(**inputs.arguments(), config=config, impl="reference")
        actual = focal_policy_loss(**inputs.arguments(), config=config, impl="triton")
        assert_same("loss", actual.loss, expected.loss)
        assert_same("entropy", actual.entropy, expected.entropy)
        expected_grads = gradients(expected.loss, inputs)
        for name, grad in gradients(actual.loss, inputs).items():
            assert_same(name, grad, expected_grads[name])


@pytest.mark.parametrize("config", [PolicyLossConfig(), PolicyLossConfig.gspo()], ids=["c", "s"])
def test_a_single_row(config):
    inputs = make_inputs(1, 1, 3, 5, group_size=1, dtype=torch.float64)
    inputs = replace(inputs, advantages=torch.ones(1).double())
    expected = focal_policy_loss(**inputs.arguments(), config=config, impl="reference")
    actual = focal_policy_loss(**inputs.arguments(), config=config, impl="triton")
    assert_same("loss", actual.loss, expected.loss)
    expected_grads = gradients(expected.loss, inputs)
    for name, grad in gradients(actual.loss, inputs).items():
        assert_same(name, grad, expected_grads[name])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk_bytes", [None, 3 * 13 * 8])
def test_token_logps_with_any_upstream(frozen, chunk_bytes, monkeypatch):
    use_tile(monkeypatch, 8)
    inputs = make_inputs(2, 5, 6, 13, group_size=2, dtype=torch.float64)
    inputs.lm_head_weight.requires_grad_(not frozen)
    upstream = torch.randn(2, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for impl in ("reference", "triton"):
        logps, entropy = token_logps(
            inputs.hidden, inputs.lm_head_weight, inputs.completion_ids,
            completion_mask=inputs.completion_mask, logit_softcap=3.0, temperature=0.7,
            with_entropy=True, impl=impl, max_chunk_bytes=chunk_bytes,
        )  # fmt: skip
        total = (upstream[0] * logps + upstream[1] * entropy).sum()
        results.append([logps, entropy, *gradients(total, inputs).values()])
    for reference, triton in zip(*results, strict=True):
        assert_same("value", triton, reference)


def test_strided_inputs():
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    expected = focal_policy_loss(**inputs.arguments(), impl="reference")
    strided = {
        name: value.transpose(0, 1).contiguous().transpose(0, 1)
        if value is not None and value.dim() > 1
        else value
        for name, value in inputs.arguments().items()
    }
    actual = focal_policy_loss(**strided, impl="triton")
    assert_same("loss", actual.loss, expected.loss)
    expected_grads = gradients(expected.loss, inputs)
    for name, grad in gradients(actual.loss, inputs).items():
        assert_same(name, grad, expected_grads[name])


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        PolicyLossConfig(kl_coef=0.1),
        PolicyLossConfig(surrogate="cispo", entropy_coef=0.1, logit_softcap=5.0),
        PolicyLossConfig.gspo(focal_gamma=0.5),
    ],
    ids=["clip-kl", "cispo-entropy-softcap", "gspo"],
)
def test_dtypes_by_the_error_rule(config, dtypes, monkeypatch):
    use_tile(monkeypatch, 32)  # V = 67: three tiles
    base = make_inputs(4, 6, 32, 67, group_size=2, seed=5)
    inputs = replace(
        base,
        hidden=base.hidden.detach().to(dtypes[0]).requires_grad_(),
        lm_head_weight=base.lm_head_weight.detach().to(dtypes[1]).requires_grad_(),
    )
    exact = inputs.to(torch.float64)
    truth = policy_loss_oracle(**exact.arguments(), config=config)
    plain = policy_loss_oracle(
        **inputs.arguments(), config=config, dtype=torch.promote_types(*dtypes)
    )
    out = focal_policy_loss(**inputs.arguments(), config=config, impl="triton")
    for field in ("logps", "entropy", "per_token_loss"):
        assert_error_rule(field, *(getattr(o, field).detach() for o in (out, plain, truth)))
    losses = (o.loss.detach() for o in (out, plain, truth))
    assert_error_rule("loss", *losses, largest=float(truth.per_token_loss.abs().max()))
    true_grads, plain_grads = gradients(truth.loss, exact), gradients(plain.loss, inputs)
    for name, grad in gradients(out.loss, inputs).items():
        assert grad.dtype == getattr(inputs, name).dtype
        assert_error_rule(f"d{name}", grad, plain_grads[name], true_grads[name])


def hard_logits():
    """Rows of 21 logits that are easy to get wrong, with a target each."""
    spread = torch.linspace(-3, 3, 21)
    tail = torch.full((21,), -INF)
    tail[18:] = torch.tensor([1.0, 2.0, 0.5])
    head = torch.full((21,), -INF)
    head[:2] = torch.tensor([0.0, 1.0])
    certain = torch.full((21,), -100.0)
    certain[7] = 100.0
    rows = {
        "plain": (spread, 4),
        "offset": (spread.div(0.125).round().mul(0.125) + 2.0**20, 20),
        "first-tiles-forbidden": (tail, 19),
        "last-tiles-forbidden": (head, 1),
        "one-allowed": (torch.full((21,), -INF).index_fill_(0, torch.tensor(13), 5.0), 13),
        "certain": (certain, 7),
        "hopeless": (certain, 8),
        "forbidden-target": (tail, 2),
        "ascending": (torch.arange(21.0) * 3, 0),
        "huge": (spread * 1e30, 20),
        "equal": (torch.zeros(21), 10),
    }
    return rows


@pytest.mark.parametrize("tile", [4, 8, 32])
@pytest.mark.parametrize("ops", [torch_rows, triton_rows], ids=["torch", "triton"])
@pytest.mark.parametrize("name", hard_logits())
def test_row_statistics_of_hard_logits(name, ops, tile, monkeypatch):
    use_tile(monkeypatch, tile)
    values, target = hard_logits()[name]
    wide = torch.full((2, 29), NAN)  # a row stride that is not V, and NaN next to the row
    logits = wide[:, :21]
    logits.copy_(values)
    ids = torch.tensor([target, target])
    stats = ops.row_statistics(logits, ids, HEAD, keep_logits=True)
    exact = values.double().log_softmax(0)
    entropy = -(exact.exp() * exact.masked_fill(exact == -INF, 0)).sum()
    # a few float32 roundings of the result, and of sums of at most 21 terms below 1
    expected = (exact[target], entropy)
    for value, truth in zip((stats.logps, stats.entropy), expected, strict=True):
        torch.testing.assert_close(
            value.double(), truth.expand(2), rtol=5e-7, atol=1e-6 if truth.isfinite() else 0
        )
    p, onehot = exact.exp(), torch.zeros(21).double().index_fill_(0, torch.tensor(target), 1)
    finite = exact.masked_fill(exact == -INF, 0)
    c = torch.tensor([0.7, -0.7])
    for s in (None, torch.tensor([0.0, 0.3])):
        truth = c[:, None] * (onehot - p)
        if s is not None:
            truth = truth - s[:, None] * p * (finite + entropy)
        # E in place of the logits, apart from them, and in the narrow type of the products
        for dtype in (None, torch.float32, torch.bfloat16):
            buffer = logits.clone()
            stats = ops.row_statistics(buffer, ids, HEAD, keep_logits=s is not None)
            e = buffer if dtype is None else torch.empty(2, 21, dtype=dtype)
            g = ops.row_gradient(buffer, stats, c, s, HEAD, e)
            # one ulp: the interpreter cuts bits off where a GPU rounds
            tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close((g[:, None] * e).double(), truth, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", hard_logits())
def test_fused_rows_of_hard_logits(name, dtype, softcap, monkeypatch):
    """One read in bf16, where "hopeless" and "forbidden-target" need the second; else two."""
    use_tile(monkeypatch, 8)
    values, target = hard_logits()[name]
    head = replace(HEAD, logit_softcap=softcap)
    if softcap is not None:
        values = values.clamp(-0.9 * softcap, 0.9 * softcap)
    logits = values.repeat(2, 1)
    ids, advantages = torch.tensor([target, target]), torch.tensor([0.7, -0.7])
    nothing = {name: None for name in ("old_logps", "ref_logps", "rollout_logps")}
    rows = PolicyRows(
        mask=torch.ones(2, dtype=torch.bool), advantages=advantages, rollout_weights=None,
        sequence=torch.arange(2), num_sequences=2, **nothing,
    )  # fmt: skip
    config = PolicyLossConfig(surrogate="reinforce", focal_gamma=0, logit_softcap=softcap)
    head_rows = HeadRows(None, ids, 2, None, triton_rows)
    row_pass = triton_rows.policy_row_pass(head, head_rows, rows, torch.ones(2), config)
    e = torch.full((2, 21), NAN, dtype=dtype)
    logps, entropy, g = row_pass(logits, slice(0, 2), e)
    exact = values.double().log_softmax(0)
    p = exact.exp()
    truth = -(p * exact.masked_fill(exact == -INF, 0)).sum()
    # As for the statistics alone; the entropy is a difference of numbers as large as the log-prob.
    torch.testing.assert_close(logps.double(), exact[target].expand(2), rtol=5e-7, atol=1e-6)
    size = float(exact[target].abs()) if exact[target].isfinite() else 0.0
    torch.testing.assert_close(
        entropy.double(), truth.expand(2), rtol=5e-7, atol=1e-6 + 1.2e-7 * size
    )
    onehot = torch.zeros(21).double().index_fill_(0, torch.tensor(target), 1)
    expected = -advantages.double()[:, None] * (onehot - p)
    if softcap is not None:
        expected = expected * (1 - (values.double() / softcap).square())
    # one ulp: the interpreter cuts bits off where a GPU rounds
    relative = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype, 1e-6)
    absolute = 1e-7 if dtype == torch.float16 else 1e-6
    stored = (g / e_scale(dtype))[:, None] * e
    torch.testing.assert_close(stored.double(), expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("ops", [torch_rows, triton_rows], ids=["torch", "triton"])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", [2, 9])
def test_a_bad_logit_spoils_its_row_alone(bad, where, ops, monkeypatch):
    use_tile(monkeypatch, 8)
    logits = torch.linspace(-1, 1, 21).repeat(3, 1)
    logits[1, where] = bad
    stats = ops.row_statistics(logits, torch.tensor([2, 2, 2]), HEAD, keep_logits=False)
    assert stats.logps[1].isnan()
    assert stats.logps[[0, 2]].isfinite().all() and stats.entropy[[0, 2]].isfinite().all()


def test_the_launcher_takes_a_power_of_two_that_covers_small_vocabularies():
    for vocab in (1, 2, 100, 128, 129, 3000, 4096, 5000, 32000, 151936, 262144):
        tile = triton_rows.launch_options(vocab)["BLOCK_V"]
        assert tile & (tile - 1) == 0 and 128 <= tile and (tile >= vocab or vocab > 4096)
