"""Preference losses with the extrapolated policy, against plain autograd on full logits."""

import math
from dataclasses import dataclass

import pytest
import torch
from test_plans import LargestTensor

from fgrpo_kernels.preference import preference_loss
from fgrpo_kernels.testing import assert_error_rule

PAIRS, LENGTH, WIDTH, REF_WIDTH, VOCAB = 3, 7, 6, 5, 40
ONE_ROW = 2 * VOCAB * 8
"""A budget of one float64 row of each model."""


@dataclass
class Case:
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    ref_hidden: torch.Tensor
    ref_weight: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor

    def leaves(self):
        return self.hidden, self.weight, self.bias

    def loss(self, **options):
        return preference_loss(
            self.hidden,
            self.weight,
            self.ids,
            self.ref_hidden,
            self.ref_weight,
            completion_mask=self.mask,
            lm_head_bias=self.bias,
            **options,
        )


def make_case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    lengths = torch.randint(2, LENGTH + 1, (2 * PAIRS,), generator=generator)
    return Case(
        hidden=normal(2 * PAIRS, LENGTH, WIDTH).requires_grad_(),
        weight=normal(VOCAB, WIDTH).requires_grad_(),
        bias=normal(VOCAB).requires_grad_(),
        ref_hidden=normal(2 * PAIRS, LENGTH, REF_WIDTH),
        ref_weight=normal(VOCAB, REF_WIDTH),
        ids=torch.randint(VOCAB, (2 * PAIRS, LENGTH), generator=generator),
        mask=torch.arange(LENGTH) < lengths[:, None],
    )


def full_logits(case):
    """(policy, reference) logits, all at once."""
    policy = case.hidden @ case.weight.T + case.bias
    return policy, case.ref_hidden @ case.ref_weight.T


def sums(logits, case):
    logps = logits.log_softmax(-1).gather(-1, case.ids[..., None]).squeeze(-1)
    return torch.where(case.mask, logps, 0).sum(1)


def coefficients(kind, logps, ref_logps, lengths, *, beta, nll_coef):
    """C_w and C_l as the papers write them, by hand."""
    (won, lost), (ref_won, ref_lost) = logps.chunk(2), ref_logps.chunk(2)
    n_won, n_lost = lengths.double().chunk(2)
    if kind == "simper":
        return (won / n_won).exp() / n_won, (lost / n_lost).exp() / n_lost
    pull = beta * torch.sigmoid(-beta * ((won - ref_won) - (lost - ref_lost)))
    return (pull + nll_coef / n_won if kind == "rpo" else pull), pull


def plain_loss(kind, logps, ref_logps, lengths, *, beta, nll_coef):
    (won, lost), (ref_won, ref_lost) = logps.chunk(2), ref_logps.chunk(2)
    n_won, n_lost = lengths.double().chunk(2)
    if kind == "simper":
        return ((lost / n_lost).exp() - (won / n_won).exp()).mean()
    loss = torch.log1p(torch.exp(-beta * ((won - ref_won) - (lost - ref_lost))))
    return (loss - nll_coef * won / n_won if kind == "rpo" else loss).mean()


CONSTANTS = {"beta": 0.3, "nll_coef": 0.7}


def expected_gradients(case, kind, lam):
    """-C_w grad logp(y_w) + C_l grad logp(y_l), C from the extrapolated full logits."""
    policy, reference = full_logits(case)
    future = (1 + lam) * policy - lam * reference
    lengths = case.mask.sum(1)
    c_w, c_l = coefficients(
        kind, sums(future, case).detach(), sums(reference, case), lengths, **CONSTANTS
    )
    chosen, rejected = sums(policy, case).chunk(2)
    return torch.autograd.grad((c_l * rejected - c_w * chosen).mean(), case.leaves())


@pytest.mark.parametrize("chunk", [None, ONE_ROW, 4 * ONE_ROW])
@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["dpo", "rpo", "simper"])
def test_gradients_equal_plain_autograd_with_the_extrapolated_coefficients(kind, lam, chunk):
    """Float64: 1e-12 of the largest element."""
    case = make_case()
    out = case.loss(kind=kind, lam=lam, max_chunk_bytes=chunk, **CONSTANTS)
    out.loss.backward()
    for leaf, expected in zip(case.leaves(), expected_gradients(case, kind, lam), strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("kind", ["dpo", "rpo", "simper"])
def test_lam_zero_is_the_plain_loss(kind):
    """Value and gradient against autograd through the plain loss itself, float64."""
    case = make_case()
    out = case.loss(kind=kind, lam=0.0, **CONSTANTS)
    assert torch.equal(out.future_logps, out.logps)
    policy, reference = full_logits(case)
    lengths = case.mask.sum(1)
    plain = plain_loss(kind, sums(policy, case), sums(reference, case), lengths, **CONSTANTS)
    assert float(out.loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-13)
    out.loss.backward()
    for leaf, expected in zip(
        case.leaves(), torch.autograd.grad(plain, case.leaves()), strict=True
    ):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["dpo", "rpo", "simper"])
def test_gradients_agree_with_finite_differences(kind, lam):
    """Of the plain value for lam = 0; else of C_l logp(y_l) - C_w logp(y_w) with C held.

    Central differences at 1e-5: an error of about 1e-10.
    """
    case = make_case()
    out = case.loss(kind=kind, lam=lam, **CONSTANTS)
    out.loss.backward()

    def value(moved):
        leaf.data += moved
        new = case.loss(kind=kind, lam=lam, **CONSTANTS)
        leaf.data -= moved
        if lam == 0:
            return float(new.loss.detach())
        chosen, rejected = (new.logps * out.coefficients).chunk(2)
        return float((rejected - chosen).mean())

    generator = torch.Generator().manual_seed(1)
    for leaf in case.leaves():
        step = 1e-5 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        slope = (value(step) - value(-step)) / 2
        assert slope == pytest.approx(float((leaf.grad * step).sum()), rel=1e-5, abs=1e-12)


def test_the_value_is_the_plain_losss_for_any_lam():
    values = [float(make_case().loss(kind="rpo", lam=lam).loss.detach()) for lam in (0, 1, 2)]
    assert values[0] == values[1] == values[2]


def test_extrapolation_moves_the_coefficients_and_the_reference_is_where_it_starts():
    """A policy that is its reference has no direction: all lam agree."""
    case = make_case()
    assert not torch.allclose(case.loss(lam=1.0).coefficients, case.loss(lam=0.0).coefficients)
    case.ref_hidden, case.ref_weight = case.hidden.detach(), case.weight.detach()
    same = case.loss(lam=1.0, ref_lm_head_bias=case.bias.detach())
    assert torch.equal(same.future_logps, same.logps)
    assert same.coefficients.tolist() == pytest.approx([0.05] * 6), "beta sigmoid(0)"


def test_masked_positions_are_ignored():
    case = make_case()
    clean = case.loss()
    clean.loss.backward()
    dirty = make_case()
    with torch.no_grad():
        dirty.hidden[~dirty.mask] = torch.nan
        dirty.ref_hidden[~dirty.mask] = torch.inf
        dirty.ids[~dirty.mask] = -1
    out = dirty.loss()
    out.loss.backward()
    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(dirty.hidden.grad, case.hidden.grad)
    assert torch.equal(dirty.weight.grad, case.weight.grad)


def test_a_token_forbidden_by_both_models_stays_forbidden():
    case = make_case()
    with torch.no_grad():
        case.bias[0] = -torch.inf
    case.ids[case.ids == 0] = 1
    ref_bias = torch.zeros(VOCAB, dtype=torch.float64)
    ref_bias[0] = -torch.inf
    out = case.loss(lam=1.0, ref_lm_head_bias=ref_bias)
    out.loss.backward()
    assert out.future_logps.isfinite().all()
    assert case.weight.grad.isfinite().all() and not case.weight.grad[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs_keep_the_error_rule(dtype):
    """No worse than twice plain torch at the same dtype, against float64 on the same values."""
    case = make_case(dtype)
    case.loss(kind="rpo", lam=1.0, **CONSTANTS).loss.backward()
    plain = expected_gradients(case, "rpo", 1.0)
    exact_case = Case(
        *(
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for t in vars(case).values()
        )
    )
    exact = expected_gradients(exact_case, "rpo", 1.0)
    for name, leaf, simple, true in zip("hwb", case.leaves(), plain, exact, strict=True):
        assert_error_rule(name, leaf.grad, simple, true)


def test_the_triton_rows_give_the_same(monkeypatch):
    """In Triton's interpreter, fp32: the error rule against plain torch."""
    monkeypatch.setattr("fgrpo_kernels.preference.choose_impl", lambda *_: "triton")
    case, exact_case = make_case(torch.float32), make_case()
    for name in ("hidden", "weight", "bias", "ref_hidden", "ref_weight"):
        getattr(exact_case, name).data = getattr(case, name).detach().double()
    case.loss(kind="rpo", lam=1.0, max_chunk_bytes=4 * ONE_ROW, **CONSTANTS).loss.backward()
    plain, exact = (expected_gradients(c, "rpo", 1.0) for c in (case, exact_case))
    for name, leaf, simple, true in zip("hwb", case.leaves(), plain, exact, strict=True):
        assert_error_rule(name, leaf.grad, simple, true)


def test_only_chunks_are_held():
    """N V = 42 * 40 elements; chunks of 2 rows; the largest tensor is the weight or hidden."""
    case = make_case()
    case.mask[:] = True
    with LargestTensor() as largest:
        case.loss(max_chunk_bytes=2 * ONE_ROW).loss.backward()
    assert largest.elements == max(VOCAB * WIDTH, 2 * PAIRS * LENGTH * WIDTH)


def test_without_gradients_there_is_none_and_a_frozen_head_gets_none():
    case = make_case()
    with torch.no_grad():
        assert not case.loss().loss.requires_grad
    expected = expected_gradients(case, "dpo", 1.0)[0]
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    case.loss(**CONSTANTS).loss.backward()
    torch.testing.assert_close(case.hidden.grad, expected, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    "change,options,message",
    [
        ({}, {"kind": "ipo"}, r"kind: expected one of .*received 'ipo'"),
        ({}, {"lam": -1.0}, "lam: .*received -1.0"),
        ({}, {"beta": math.inf}, "beta: .*received inf"),
        (
            {"hidden": torch.zeros(3, 7, 6)},
            {},
            r"hidden: expected shape \(2 P, T, D\).*\(3, 7, 6\)",
        ),
        ({"ref_weight": torch.zeros(41, 5)}, {}, "ref_lm_head_weight: expected V = 40.*ed 41"),
        ({"ref_hidden": torch.zeros(6, 8, 5)}, {}, r"ref_hidden: expected \(6, 7\).*\(6, 8, 5\)"),
        (
            {"mask": torch.zeros(6, 7, dtype=torch.bool)},
            {},
            "completion_mask: .*received 6 without",
        ),
        ({"ids": torch.full((6, 7), 40)}, {}, r"completion_ids: .*received 40 at \[0, 0\]"),
    ],
)
def test_errors_name_expected_and_received(change, options, message):
    case = make_case()
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        case.loss(**options)
