"""Every Triton kernel against float64 on this device, by the error rule of `fgrpo_kernels.testing`.

    python benchmarks/gpu_correctness.py --out FOLDER --budget SECONDS

The largest error may be twice that of plain torch with logits in the operands' dtype. Exit code 1
if a case fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_inputs import DEVICE, ON_GPU, Clock, Results
from torch import Tensor

from fgrpo_kernels import (
    PolicyLossConfig,
    focal_policy_loss,
    token_logps,
    triton_linear_stats,
    triton_rows,
)
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.reference import reference_logps
from fgrpo_kernels.testing import LossInputs, assert_error_rule, make_inputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# batch, length, hidden, vocabulary: the head of Qwen2.5-7B, that of 0.5B, tails and odd widths
LARGE = (4, 24, 3584, 152064) if ON_GPU else (4, 3, 32, 97)
OTHERS = [(4, 5, 896, 151936), (4, 3, 64, 1009), (4, 4, 100, 50257)] if ON_GPU else [(4, 2, 20, 67)]
CONFIGS = {
    "clip": {},
    "clip, dual, k3, truncate": {
        "dual_clip": 3.0,
        "kl_coef": 0.1,
        "rollout_correction": "truncate",
    },
    "clip, k1, mask": {"kl_coef": 0.1, "kl_estimator": "k1", "rollout_correction": "mask"},
    "clip, entropy, soft-cap": {"entropy_coef": 0.1, "logit_softcap": 10.0},
    "cispo, k2, truncate": {
        "surrogate": "cispo",
        "clip_eps_high": 4.0,
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "rollout_correction": "truncate",
    },
    "cispo, entropy, mask": {
        "surrogate": "cispo",
        "entropy_coef": 0.1,
        "rollout_correction": "mask",
    },
    "reinforce, k3": {"surrogate": "reinforce", "kl_coef": 0.1},
    "reinforce, entropy, k1, soft-cap": {
        "surrogate": "reinforce",
        "entropy_coef": 0.1,
        "kl_coef": 0.1,
        "kl_estimator": "k1",
        "logit_softcap": 10.0,
    },
    "sapo": {"surrogate": "sapo"},
    "dppo_tv": {"surrogate": "dppo_tv", "clip_eps_low": 0.02, "clip_eps_high": 0.02},
    "dppo_kl": {"surrogate": "dppo_kl", "clip_eps_low": 0.002, "clip_eps_high": 0.002},
    "clip, temperature, scale": {"temperature": 0.7, "logit_scale": 1.3},
    "sequence ratio": {"ratio_level": "sequence", "reduction": "sequence_mean"},
}
ON_POLICY = {"clip", "clip, k1, mask", "clip, dual, k3, truncate"}
"""Also without old log-probs, where the kernel computes the rollout weights itself."""
FEW = ("clip", "cispo, entropy, mask", "clip, dual, k3, truncate")


def plain_logps(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: LinearHead
) -> tuple[Tensor, Tensor]:
    """`reference_logps` with the product in the operands' dtype."""
    z = (hidden.to(head.operand_dtype) @ weight.to(head.operand_dtype).t()).to(head.dtype)
    z = z if bias is None else z + bias.to(head.dtype)
    z = z * head.logit_scale
    if head.logit_softcap is not None:
        z = head.logit_softcap * torch.tanh(z / head.logit_softcap)
    log_probs = torch.log_softmax(z / head.temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return log_probs.gather(1, ids[:, None]).squeeze(1), entropy


Run = Callable[[LossInputs, str], tuple[Tensor, dict[str, Tensor | None]]]
"""(inputs, impl) -> (a scalar to differentiate, values to compare)."""


def compare(inputs: LossInputs, run: Run) -> None:
    """Raises AssertionError where the Triton path breaks the error rule."""
    results = []
    for impl, twin in (
        ("triton", inputs),
        ("plain", inputs),
        ("reference", inputs.to(torch.float64)),
    ):
        rounded = plain_logps if impl == "plain" else reference_logps
        with mock.patch.object(
            sys.modules["fgrpo_kernels.token_logps"], "reference_logps", rounded
        ):
            scalar, values = run(twin, "triton" if impl == "triton" else "reference")
        leaves = twin.leaves()
        gradients = torch.autograd.grad(scalar, list(leaves.values()))
        found = {"value": scalar.detach(), **values}
        found |= {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
        results.append(found)
    actual, plain, exact = results
    for name, value in actual.items():
        if value is not None:
            # The scalar is a sum of terms of either sign about as large as 1.
            largest = 1.0 if name == "value" else None
            assert_error_rule(name, value, plain[name], exact[name], largest=largest)


def loss_run(
    config: PolicyLossConfig, inputs: LossInputs, impl: str
) -> tuple[Tensor, dict[str, Tensor | None]]:
    out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
    return out.loss, {"logps": out.logps, "entropy": out.entropy}


def logps_run(inputs: LossInputs, impl: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Log-probs and entropies with an upstream gradient, and without any gradient."""
    ids, mask = inputs.completion_ids, inputs.completion_mask
    call = partial(token_logps, completion_mask=mask, with_entropy=True, impl=impl)
    arguments = (inputs.hidden, inputs.lm_head_weight, ids)
    upstream = torch.linspace(-1, 1, ids.numel(), device=ids.device).view(ids.shape)
    logps, entropy = call(*arguments)
    assert entropy is not None
    with torch.no_grad():
        scored = call(*arguments)
    total = (upstream * logps).sum() + 0.3 * (upstream.flip(0) * entropy).sum()
    return total / ids.numel(), {"logps, no grad": scored[0], "entropy, no grad": scored[1]}


def check_linear_statistics(dtype: torch.dtype, shape: Any, *, bias: bool, cap: bool) -> None:
    """The product with the log-sum-exp epilogue, called directly."""
    rows, width, vocab = shape
    generator = torch.Generator(DEVICE).manual_seed(1)
    like: Any = {"generator": generator, "device": DEVICE}
    hidden = torch.randn(rows, width, **like).to(dtype)
    weight = (torch.randn(vocab, width, **like) * (2 / width**0.5)).to(dtype)
    ids = torch.randint(vocab, (rows,), **like)
    shift = torch.randn(vocab, **like) if bias else None
    head = LinearHead(weight, shift, dtype, 1.1, 0.8, 10.0 if cap else None)
    actual = triton_linear_stats.linear_statistics(hidden, head, ids, with_entropy=True)
    plain = plain_logps(hidden, weight, shift, ids, head)
    exact_head = replace(head, operand_dtype=torch.float64)
    exact = reference_logps(hidden, weight, shift, ids, exact_head)
    for name, *values in zip(("logps", "entropy"), actual, plain, exact, strict=True):
        assert_error_rule(name, *values)


def check_far_offsets() -> None:
    """A chunk of more than 2^31 logits: its last row equals that row alone, bit for bit."""
    vocab = 152064
    rows = 2**31 // vocab + 8
    logits = torch.empty(rows, vocab, device=DEVICE)
    logits[-1].normal_()
    logits[:-1] = 0
    ids = torch.full((rows,), vocab - 1, device=DEVICE)
    head = LinearHead(torch.zeros(1, 1, device=DEVICE), None, torch.float32)
    alone, e_alone = logits[-1:].clone(), torch.empty(1, vocab, device=DEVICE)
    for buffer, out in ((logits, logits), (alone, e_alone)):
        stats = triton_rows.row_statistics(buffer, ids[: len(buffer)], head, keep_logits=True)
        one = torch.ones_like(stats.logps)
        triton_rows.row_gradient(buffer, stats, one, None, head, out)
    torch.testing.assert_close(logits[-1], e_alone[0], rtol=0, atol=0)


@cache
def made(shape: tuple[int, ...]) -> LossInputs:
    """In fp32: half a billion random numbers are drawn on the host once."""
    return make_inputs(*shape, group_size=2, device=DEVICE, seed=3)


def make(shape: Any, dtype: torch.dtype, config: PolicyLossConfig, *, bias: bool) -> LossInputs:
    vocab = shape[3]
    inputs = made(shape).to(dtype)
    if bias:
        shift = torch.randn(vocab, generator=torch.Generator().manual_seed(4))
        inputs = replace(inputs, lm_head_bias=shift.to(DEVICE).requires_grad_())
    return replace(
        inputs,
        ref_logps=inputs.ref_logps if config.kl_coef else None,
        rollout_logps=inputs.rollout_logps if config.rollout_correction else None,
    )


def case_of(shape: Any, dtype: torch.dtype, flags: dict[str, Any], *, old: bool) -> None:
    vocab = shape[3]
    config = PolicyLossConfig(
        **flags,
        focal_gamma=0.5,
        rollout_min=0.97 if flags.get("rollout_correction") == "mask" else None,
        rollout_max=1.03,
        max_chunk_bytes=4 * vocab * 40 if ON_GPU else 4 * vocab * 5,  # several chunks
    )
    inputs = make(shape, dtype, config, bias="logit_softcap" in flags)
    inputs = inputs if old else replace(inputs, old_logps=None)
    compare(inputs, partial(loss_run, config))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """What matters most first: the list may be cut off."""
    for dtype in DTYPES:
        what = str(dtype).removeprefix("torch.")
        for name, flags in CONFIGS.items():
            yield f"{what} {LARGE} {name}", partial(case_of, LARGE, dtype, flags, old=True)
        for name in sorted(ON_POLICY):
            run = partial(case_of, LARGE, dtype, CONFIGS[name], old=False)
            yield f"{what} {LARGE} {name}, on policy", run
        inputs = partial(make, LARGE, dtype, PolicyLossConfig(), bias=False)
        yield f"{what} {LARGE} token_logps", lambda inputs=inputs: compare(inputs(), logps_run)
    for dtype in DTYPES[:2]:
        what = str(dtype).removeprefix("torch.")
        shapes = [(300, 3584, 152064), (1, 896, 1009)] if ON_GPU else [(5, 32, 300)]
        for shape in shapes:
            for bias, cap in ((False, False), (True, True)):
                run = partial(check_linear_statistics, dtype, shape, bias=bias, cap=cap)
                yield f"{what} {shape} linear_statistics, bias and cap: {bias}", run
    for shape in OTHERS:
        for dtype in DTYPES:
            for name in FEW:
                what = str(dtype).removeprefix("torch.")
                yield (
                    f"{what} {shape} {name}",
                    partial(case_of, shape, dtype, CONFIGS[name], old=True),
                )
    if ON_GPU:
        yield "row kernels beyond 2^31 logits", check_far_offsets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=150, metavar="SECONDS")
    arguments = parser.parse_args()
    clock = Clock("correctness", arguments.budget)
    results = Results("correctness", arguments.out, ["case", "result"])
    for name, run in cases():
        if clock.over():
            break
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the other cases still have something to say
            results.add({"case": name, "result": f"FAILED {type(error).__name__}: {error}"[:500]})
        else:
            results.add({"case": name, "result": "passed"})
    failed = sum(record["result"] != "passed" for record in results.records)
    print(f"== correctness: {len(results.records)} cases, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
