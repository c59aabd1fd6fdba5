"""How exact log-probs, ratios and gradients are, by what is stored between the products.

    python benchmarks/numerics.py [--json FILE] [--markdown]

Measured on CPU, in emulation of what a GPU stores: products of bf16 or fp16 operands in fp32 (each
single product is exact there), stored logits Z and stored E rounded to the named type. Truth is
float64 on the same rounded operands. The objective is the policy gradient, c = dL/dlogp = -ratio A.
Gradients are compared before their last rounding to the parameters' type, the same in every form
and alone 1.7e-3 in bf16. N rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from datetime import date
from pathlib import Path

import torch
from roofline import table
from storage_forms import (
    Form,
    Hint,
    Rows,
    narrow_logits,
    narrow_logits_exact_target,
    narrow_logits_narrow_softmax,
    probabilities,
    relative_to_target,
    running_maximum,
    two_reads,
)
from torch import Tensor

from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.testing import lm_like_inputs
from fgrpo_kernels.torch_rows import row_statistics

LABEL = "measured (CPU emulation of storage)"
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


KINDS = (MIX, CERTAIN, FLAT, OFFSET) = ("mix", "p = 1 - 1e-7", "flat", "offset 1e4")


@dataclass(frozen=True)
class Size:
    batch: int = 16
    length: int = 16
    hidden: int = 256
    vocab: int = 32768


def with_truth(
    kind: str, x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None
) -> Rows:
    """Old log-probs a factor exp(0.05 normal) from the true ones, advantages normal."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(2, len(ids), generator=generator, dtype=torch.float64)
    none = torch.empty(0)
    rows = Rows(kind, x, weight, bias, ids, none, normal[0], none, none, none)
    log_probs = rows.logits(torch.float64).log_softmax(1)
    logps = log_probs.gather(1, ids[:, None]).squeeze(1)
    rows = replace(rows, logps=logps, old_logps=(logps * (0.05 * normal[1]).exp()).float())
    dlogits = log_probs.exp_().neg_().scatter_(1, ids[:, None], -torch.expm1(logps)[:, None])
    dlogits *= rows.coefficients(logps)[:, None]
    return replace(
        rows,
        advantages=rows.advantages.float(),
        dhidden=dlogits @ weight.double(),
        dweight=dlogits.t() @ x.double(),
    )


def make_rows(size: Size, dtype: torch.dtype, kinds: tuple[str, ...]) -> Iterator[Rows]:
    """The entropies of an RLVR policy; nearly certain tokens; nearly uniform rows; a common offset.

    The second and fourth are made of the first.
    """
    sizes, mix = astuple(size), None
    for kind in kinds:
        if kind == FLAT:
            flat = 0.77 * math.log(size.vocab)
            inputs = lm_like_inputs(*sizes, confident_share=0, mean_entropy=flat, dtype=dtype)
        else:
            inputs = mix = mix or lm_like_inputs(*sizes, dtype=dtype)
        x = inputs.hidden.detach().flatten(0, 1)
        weight, ids = inputs.lm_head_weight.detach(), inputs.completion_ids.flatten()
        if kind == CERTAIN:
            yield with_truth(kind, *certain(x, weight, 1e-7))
        else:
            bias = torch.full((size.vocab,), 1e4) if kind == OFFSET else None
            yield with_truth(kind, x, weight, ids, bias)


def certain(x: Tensor, weight: Tensor, rest: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, ids): the rows whose likeliest token has p > 0.99, made longer until it has
    p = 1 - rest, up to the rounding of x."""
    products = x.float() @ weight.float().t()
    likely = products.softmax(1).amax(1) > 0.99
    products, ids = products[likely], products[likely].argmax(1)
    head = LinearHead(weight, None, torch.float32)
    low, high = torch.ones(len(ids), 1), torch.full((len(ids), 1), 16.0)
    for _ in range(16):
        scale = (low + high) / 2
        stats = row_statistics(scale * products, ids, head, keep_logits=True, with_entropy=False)
        too_short = (stats.rest / stats.total > rest)[:, None]
        low, high = torch.where(too_short, scale, low), torch.where(too_short, high, scale)
    return (scale * x[likely].float()).to(x.dtype), weight, ids


@dataclass(frozen=True)
class Measured:
    """Errors against float64. Gradients: relative, in the Frobenius norm and of the worst row."""

    rows: str
    form: str
    logp_max: float
    logp_rms: float
    logp_rel: float
    """Largest error relative to the log-prob itself."""
    ratio_off: float
    """Share of tokens whose ratio is off by more than 1 %."""
    dhidden: float
    dhidden_row: float
    rows_lost: float
    """Share of rows whose dhidden is off by more than half."""
    dweight: float
    dweight_row: float
    fallback: float
    how: str = LABEL


def measure(form_name: str, form: Form, rows: Rows, z: Tensor) -> Measured:
    result = form(rows, z.clone())
    error = result.logps.double() - rows.logps
    values = {
        "logp_max": error.abs().max(),
        "logp_rms": error.square().mean().sqrt(),
        "logp_rel": (error / rows.logps).abs().max(),
        "ratio_off": (~(torch.expm1(error).abs() <= 0.01)).double().mean(),
    }
    for name in ("dhidden", "dweight"):
        exact = getattr(rows, name)
        by_row = (getattr(result, name).double() - exact).norm(dim=1)
        values[name] = by_row.norm() / exact.norm()
        relative = (by_row / exact.norm(dim=1)).nan_to_num(math.inf)
        values[f"{name}_row"] = relative.max()
        if name == "dhidden":
            values["rows_lost"] = (relative > 0.5).double().mean()
    numbers = {name: float(value) for name, value in values.items()}
    kind = f"{rows.kind}, {SHORT[rows.operands]}"
    return Measured(kind, form_name, **numbers, fallback=result.fallback)


PLAIN_NARROW, PLAIN = "Z narrow, softmax narrow", "Z narrow, softmax fp32"
MIXED = "Z narrow, target logit fp32"
OURS_CPU, PROBABILITIES = "Z fp32, E = p fp32 (ours, CPU)", "Z fp32, E = p narrow"
OURS_BF16 = "Z fp32, E = exp(z - z_y) narrow (ours, GPU, bf16)"
TWO_READS, MAXIMUM = "Z fp32, dlogits narrow", "Z fp32, E = exp(z - max) narrow"
OURS_FP16 = "Z fp32, E = 2^14 p narrow (ours, GPU, fp16)"
HINT = "no Z, E by hint narrow"
FORMS: dict[str, Form] = {
    PLAIN_NARROW: narrow_logits_narrow_softmax,
    PLAIN: narrow_logits,
    MIXED: narrow_logits_exact_target,
    OURS_CPU: probabilities(torch.float32),
    PROBABILITIES: probabilities(),
    TWO_READS: two_reads,
    MAXIMUM: running_maximum,
    HINT: Hint(0),
}
STALE = (1, 5, 20, 40, 100)


def stale_forms() -> dict[str, Form]:
    guarded = {f"hint stale by {stale}": Hint(stale) for stale in STALE}
    finite = {
        f"{name}, any finite S": replace(form, guarded=False) for name, form in guarded.items()
    }
    return guarded | finite


def forms_for(rows: Rows) -> dict[str, Form]:
    forms = dict(FORMS)
    if rows.operands == torch.float16:  # bf16 has fp32's exponents: a power of two changes nothing
        forms[OURS_FP16] = probabilities(scale=2.0**14)
    else:
        forms[OURS_BF16] = relative_to_target
    return forms | stale_forms() if rows.kind == MIX else forms


def measure_all(size: Size) -> Iterator[Measured]:
    for dtype, kinds in ((torch.bfloat16, KINDS), (torch.float16, KINDS[:2])):
        for rows in make_rows(size, dtype, kinds):
            z = rows.logits(torch.float32)
            for name, form in forms_for(rows).items():
                yield measure(name, form, rows, z)


HEAD = ["form", "logp max", "rms", "relative", "ratio off 1 %", "dhidden", "worst row", "rows lost"]
HEAD += ["dW", "worst row", "fallback"]


def report(results: list[Measured], size: Size, *, markdown: bool) -> Iterator[str]:
    yield f"{LABEL}, {date.today()}, torch {torch.__version__}, errors against float64:"
    yield f"D = {size.hidden}, V = {size.vocab}, N = {size.batch * size.length} (fewer if certain)."
    for kind, group in itertools.groupby(results, lambda m: m.rows):
        lines = [
            [
                m.form,
                *(f"{v:.1e}" for v in (m.logp_max, m.logp_rms, m.logp_rel)),
                f"{100 * m.ratio_off:.1f} %",
                *(f"{v:.1e}" for v in (m.dhidden, m.dhidden_row)),
                f"{100 * m.rows_lost:.1f} %",
                *(f"{v:.1e}" for v in (m.dweight, m.dweight_row)),
                f"{100 * m.fallback:.0f} %",
            ]
            for m in group
        ]
        yield f"\n{kind}\n"
        yield from table([HEAD, *lines], markdown=markdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = Size()
    results = list(measure_all(size))
    print(*report(results, size, markdown=arguments.markdown), sep="\n")
    if arguments.json:
        facts = {"how": LABEL, "date": date.today().isoformat(), "torch": torch.__version__}
        figures = [
            # JSON has no infinity.
            {k: v if isinstance(v, str) or math.isfinite(v) else None for k, v in vars(m).items()}
            for m in results
        ]
        arguments.json.write_text(
            json.dumps({**facts, "size": asdict(size), "measured": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
