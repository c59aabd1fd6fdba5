"""What the storage of logits and E does to log-probs and gradients, as inequalities.

Measured at a small size in the emulation of `benchmarks/numerics.py`. One rounding to bf16 is off
by at most 2^-8 = 3.9e-3 of the value, to fp16 by 2^-11 = 4.9e-4.
"""

import importlib
import json
import math
import sys

import pytest
import torch
from test_imports import ROOT

sys.path.append(str(ROOT / "benchmarks"))
numerics = importlib.import_module("numerics")

SIZE = numerics.Size(batch=16, length=8, hidden=64, vocab=2048)
STORED = [numerics.PROBABILITIES, numerics.OURS_BF16, numerics.TWO_READS]
STORED += [numerics.MAXIMUM, numerics.HINT]
"""What keeps fp32 logits, or accumulators, and rounds E alone."""


@pytest.fixture(scope="module")
def measured():
    """By operands and kind of rows, then by form."""
    found = {}
    for m in numerics.measure_all(SIZE):
        found.setdefault(m.rows, {})[m.form] = m
    return found


def test_every_figure_says_how_it_was_measured(measured):
    figures = [m for forms in measured.values() for m in forms.values()]
    assert {m.how for m in figures} == {"measured (CPU emulation of storage)"}
    assert list(measured) == [
        *(f"{kind}, bf16" for kind in numerics.KINDS),
        *(f"{kind}, fp16" for kind in numerics.KINDS[:2]),
    ]


@pytest.mark.parametrize("kind", numerics.KINDS)
def test_fp32_statistics_keep_every_ratio(measured, kind):
    """Logits of size 30 in fp32 are off by some 1e-6, at an offset of 1e4 by 1e4 x 2^-24 = 6e-4;
    1 % is far."""
    for form in (numerics.OURS_CPU, *STORED):
        found = measured[f"{kind}, bf16"][form]
        assert found.ratio_off == 0
        assert found.logp_max < (3e-3 if kind == numerics.OFFSET else 3e-5)


def test_bf16_logits_lose_ratios(measured):
    """A logit of 8 to 16 is rounded by up to 2^-5 = 3 %: of the tokens that are not nearly certain,
    a fifth of the mix, many are off; of flat rows, more."""
    assert measured["mix, bf16"][numerics.PLAIN].ratio_off > 0.02
    assert measured["flat, bf16"][numerics.PLAIN].ratio_off > 0.1
    # An exact target beside rounded logits: errors that cancelled before no longer do.
    mixed = measured["mix, bf16"][numerics.MIXED]
    assert mixed.ratio_off > 2 * measured["mix, bf16"][numerics.PLAIN].ratio_off


def test_nearly_certain_tokens_keep_their_gradient(measured):
    """logp = -1e-7 to the relative error of S / e, that is the absolute one of fp32 logits."""
    forms = measured["p = 1 - 1e-7, bf16"]
    for form in (numerics.OURS_CPU, *STORED):
        assert forms[form].logp_rel < 2e-4
        assert forms[form].rows_lost == 0
    # log_softmax knows 1 - p to a multiple of 2^-24 = 6e-8 at best, in bf16 not at all.
    assert forms[numerics.PLAIN].logp_rel > 0.1
    assert forms[numerics.PLAIN_NARROW].rows_lost == 1


@pytest.mark.parametrize("kind", numerics.KINDS)
def test_e_loses_no_more_than_twice_what_finished_logit_gradients_do(measured, kind):
    """One more rounding, of g x: sqrt(2) in dW where roundings are independent."""
    forms = measured[f"{kind}, bf16"]
    for form in STORED:
        assert forms[form].dhidden <= 2 * forms[numerics.TWO_READS].dhidden
        assert forms[form].dweight <= 2 * forms[numerics.TWO_READS].dweight
        # Two roundings, of which each is at most this and a fraction of it in the mean square.
        assert max(forms[form].dhidden, forms[form].dweight) <= 2**-8
        assert forms[numerics.OURS_CPU].dweight < 0.5 * forms[form].dweight


@pytest.mark.parametrize("operands", ["bf16", "fp16"])
@pytest.mark.parametrize("stale", numerics.STALE)
def test_a_stale_hint_is_exact_or_falls_back(measured, operands, stale):
    forms = measured[f"mix, {operands}"]
    found, exact = forms[f"hint stale by {stale}"], forms[numerics.MAXIMUM]
    assert found.ratio_off == 0
    assert found.dhidden <= 2 * exact.dhidden
    assert found.dweight <= 2 * exact.dweight
    assert found.rows_lost == 0
    if operands == "bf16":  # as much room as fp32: e^44 either way
        assert found.fallback == (0 if stale <= 40 else 1)


def test_a_finite_s_does_not_say_that_e_was_stored(measured):
    """fp16 ends at 65504 and at 6e-8, e^11 and e^-17: E is lost while its fp32 sum is fine. bf16
    ends where fp32 does, and there a small S is 0, which is finite."""
    forms = measured["mix, fp16"]
    assert forms["hint stale by 20, any finite S"].fallback == 0
    assert forms["hint stale by 20, any finite S"].rows_lost > 0.5
    assert measured["mix, bf16"]["hint stale by 40, any finite S"].rows_lost == 0
    assert measured["mix, bf16"]["hint stale by 100, any finite S"].rows_lost > 0.4


def test_fp16_probabilities_need_a_power_of_two(measured):
    """p < 6e-8 is 0 in fp16, and 1 - p = 1e-7 has one bit; 2^14 p keeps both."""
    forms = measured["p = 1 - 1e-7, fp16"]
    assert forms[numerics.PROBABILITIES].dhidden > 0.05
    assert forms[numerics.OURS_FP16].dhidden < 2**-11
    assert forms[numerics.OURS_FP16].rows_lost == 0
    mix = measured["mix, fp16"]
    assert mix[numerics.OURS_FP16].dhidden_row < 0.1 * mix[numerics.PROBABILITIES].dhidden_row


def test_the_report_and_its_file(measured, tmp_path, monkeypatch, capsys):
    figures = [m for forms in measured.values() for m in forms.values()]
    monkeypatch.setattr(numerics, "measure_all", lambda size: figures)
    path = tmp_path / "numerics.json"
    monkeypatch.setattr(sys, "argv", ["numerics.py", "--json", str(path), "--markdown"])
    threads = torch.get_num_threads()
    numerics.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert all(m.form in printed for m in figures)
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert len(written["measured"]) == len(figures)
    infinite = next(m for m in figures if math.isinf(m.logp_max))
    assert written["measured"][figures.index(infinite)]["logp_max"] is None
