"""Preference losses whose gradient looks ahead: Future Policy Approximation (FPA).

The gradient of a preference loss is -C_w grad logp(y_w) + C_l grad logp(y_l). FPA takes the
coefficients from the policy that training is heading for, an extrapolation in logits:

    p_future = softmax(z + lam (z - z_ref)),   z of the policy, z_ref of the reference

Three passes over chunks of rows: logits of both models, side by side, for the three log-probs of
every token; the coefficients of the pairs from their sums; the policy's gradient. Full logits of
neither model exist: the temporaries are two chunks.

P pairs, T tokens, N = 2 P T rows, V vocabulary, D hidden size. Cost: 2 N V D for each model, and
6 (head frozen: 4) for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fgrpo_kernels.backends import choose_impl, launching_on, row_ops
from fgrpo_kernels.compiler import opaque_to_compiler
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.inputs import HeadInputs, HostFacts, check_ids, read_head_inputs
from fgrpo_kernels.linear_head import (
    ChunkPass,
    HeadRows,
    RowLocalGradient,
    chunk_budget,
    chunk_shape,
    chunks,
    split_row_pass,
    wants_gradient,
)
from fgrpo_kernels.workspace import chunk_buffer


@dataclass(frozen=True)
class PairLogps:
    """Sums over the tokens of each completion, and their numbers; all (P,)."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    def margin(self, beta: float) -> Tensor:
        """beta ((chosen - ref_chosen) - (rejected - ref_rejected))."""
        return beta * (self.chosen - self.ref_chosen - self.rejected + self.ref_rejected)


def dpo(pairs: PairLogps, *, beta: float, nll_coef: float) -> Tensor:
    """-log sigmoid(margin)."""
    return -F.logsigmoid(pairs.margin(beta))


def rpo(pairs: PairLogps, *, beta: float, nll_coef: float) -> Tensor:
    """-log sigmoid(margin) - nll_coef chosen / |chosen|."""
    likelihood = pairs.chosen / pairs.chosen_length
    return dpo(pairs, beta=beta, nll_coef=nll_coef) - nll_coef * likelihood


def simper(pairs: PairLogps, *, beta: float, nll_coef: float) -> Tensor:
    """-exp(chosen / |chosen|) + exp(rejected / |rejected|): inverse perplexities, no reference."""
    chosen = (pairs.chosen / pairs.chosen_length).exp()
    return (pairs.rejected / pairs.rejected_length).exp() - chosen


LOSSES: dict[str, Callable[..., Tensor]] = {"dpo": dpo, "rpo": rpo, "simper": simper}


@dataclass(frozen=True)
class PreferenceOutput:
    """What `preference_loss` returns; all but `loss` detached."""

    loss: Tensor
    """Scalar: the plain loss's mean over pairs, with the gradient of the extrapolated one."""
    logps: Tensor
    """(2 P,) sums of the policy's log-probs, chosen first."""
    ref_logps: Tensor
    """(2 P,), of the reference."""
    future_logps: Tensor
    """(2 P,), of the extrapolated policy."""
    coefficients: Tensor
    """(2 P,): C_w of the chosen, then C_l of the rejected, before the mean over pairs."""


@opaque_to_compiler
def preference_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    ref_hidden: Tensor,
    ref_lm_head_weight: Tensor,
    *,
    completion_mask: Tensor | None = None,
    kind: str = "dpo",
    lam: float = 1.0,
    beta: float = 0.1,
    nll_coef: float = 1.0,
    lm_head_bias: Tensor | None = None,
    ref_lm_head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    max_chunk_bytes: int | None = None,
) -> PreferenceOutput:
    """DPO, RPO or SimPER with coefficients from the extrapolated policy, from hidden states.

        m = beta ((chosen - ref_chosen) - (rejected - ref_rejected)),  each a sum of log-probs
        dpo     -log sigmoid(m)                                C_w = C_l = beta sigmoid(-m)
        rpo     -log sigmoid(m) - nll_coef chosen / |y_w|      C_w = C_l + nll_coef / |y_w|
        simper  -exp(chosen / |y_w|) + exp(rejected / |y_l|)   C = exp(logp(y) / |y|) / |y|
        gradient = mean over pairs of -C_w grad chosen + C_l grad rejected,
                   C taken at softmax(z + lam (z - z_ref)), and constant

    lam = 0 is the plain loss. The value of `loss` always is the plain loss's: with lam > 0 the
    gradient is not that of any loss, and finite differences of the value do not give it.

    Args:
        hidden: (2 P, T, D), chosen completions first, then the rejected ones in the same order;
            hidden[., t] predicts completion_ids[., t].
        lm_head_weight: (V, D). completion_ids: (2 P, T) int64. completion_mask: bool, None = all.
        ref_hidden: (2 P, T, D') of the frozen reference, ref_lm_head_weight: (V, D').
        lam: >= 0; 0.5 to 2 was stable in the paper, 10 harmful.
        beta: of dpo and rpo. nll_coef: of rpo.
        logit_scale, logit_softcap: as in `PolicyLossConfig`, the same for both models.
        max_chunk_bytes: for the logits of both models together.
    Returns: PreferenceOutput; `loss` is attached to hidden, lm_head_weight and lm_head_bias.
    Raises: ValueError as `focal_policy_loss`, and for an odd number of sequences or a sequence
        without a token.
    Source: FPA 2509.19893; no code was found, so this is the derived form: both coefficients are
        extrapolated (the paper says that the rejected one's suffices), the reference's log-probs
        inside m are not. DPO 2305.18290; RPO 2404.19733, DPO with a likelihood term; SimPER
        2502.00883.
    """
    if kind not in LOSSES:
        raise ValueError(f"kind: expected one of {list(LOSSES)}, received {kind!r}")
    for name, value in (("lam", lam), ("beta", beta), ("nll_coef", nll_coef)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}: expected a finite number >= 0, received {value!r}")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) % 2 or not len(hidden):
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(f"hidden: expected shape (2 P, T, D) with P >= 1, received {got}")
    facts = HostFacts()
    read = partial(
        read_head_inputs,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        lm_head_lora=None,
        tp_group=None,
        vocab_size=None,
        impl="auto",
        temperature=1.0,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
    inputs = read(hidden, lm_head_weight, lm_head_bias=lm_head_bias, facts=facts)
    if not isinstance(ref_hidden, Tensor) or ref_hidden.shape[:-1] != hidden.shape[:-1]:
        got = tuple(ref_hidden.shape) if isinstance(ref_hidden, Tensor) else type(ref_hidden)
        raise ValueError(
            f"ref_hidden: expected {tuple(hidden.shape[:-1])} rows as hidden, received {got}"
        )
    ref = read(
        ref_hidden.detach(),
        ref_lm_head_weight.detach(),
        lm_head_bias=None if ref_lm_head_bias is None else ref_lm_head_bias.detach(),
        facts=HostFacts(),
    )
    if ref.head.vocab_size != inputs.head.vocab_size:
        raise ValueError(
            f"ref_lm_head_weight: expected V = {inputs.head.vocab_size} rows as lm_head_weight, "
            f"received {ref.head.vocab_size}"
        )
    lengths = inputs.valid.view(inputs.shape).sum(1)
    facts.ask("empty", (lengths == 0).sum())
    known = facts.read()
    check_ids(inputs, known)
    if known["empty"]:
        raise ValueError(
            "completion_mask: expected a token in every sequence, received "
            f"{known['empty']} without"
        )
    loss = partial(LOSSES[kind], beta=beta, nll_coef=nll_coef)
    with launching_on(hidden.device), torch.autocast(hidden.device.type, enabled=False):
        return _preference_loss(
            inputs, ref, lengths, known["num_valid"], loss, lam, max_chunk_bytes
        )


def _preference_loss(
    inputs: HeadInputs,
    ref: HeadInputs,
    lengths: Tensor,
    num_valid: int,
    loss: Callable[[PairLogps], Tensor],
    lam: float,
    max_chunk_bytes: int | None,
) -> PreferenceOutput:
    head, hidden = inputs.head, inputs.hidden
    index = None
    if num_valid < len(inputs.valid):
        index = torch.nonzero_static(inputs.valid, size=num_valid).squeeze(1)
    ids = inputs.ids if index is None else inputs.ids[index]
    ops = row_ops(choose_impl("auto", hidden.device))
    budget = max(1, chunk_budget(head, max_chunk_bytes) // 2)
    rows = HeadRows(index, ids, num_valid, budget, ops, with_entropy=False)
    sequence = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    with torch.no_grad():
        policy, reference, future = (
            logps.new_zeros(len(lengths)).index_add_(0, sequence, logps)
            for logps in _three_logps(head, hidden, ref.head, ref.hidden, rows, lam)
        )
        value = loss(_pairs(policy, reference, lengths)).mean()
    future_leaf = future.clone().requires_grad_()
    with torch.enable_grad():
        total = loss(_pairs(future_leaf, reference, lengths)).sum()
    (slopes,) = torch.autograd.grad(total, future_leaf)
    tensors = (hidden, *head.tensors)
    if wants_gradient(tensors):
        of_rows = slopes[sequence]
        row_pass = split_row_pass(
            head, rows, lambda part, *_: (of_rows[part], None), entropy_gradient=False
        )
        anchor, *_ = RowLocalGradient.apply(*tensors, head, rows, row_pass, ChunkPass.add_gradients)
        value = value + anchor * (2 / len(lengths))
    chosen, rejected = slopes.chunk(2)
    return PreferenceOutput(value, policy, reference, future, torch.cat((-chosen, rejected)))


def _three_logps(
    head: LinearHead,
    hidden: Tensor,
    ref_head: LinearHead,
    ref_hidden: Tensor,
    rows: HeadRows,
    lam: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs (n,) of the rows' tokens under the policy, the reference, the extrapolation."""
    dtype = torch.promote_types(head.dtype, ref_head.dtype)
    results = torch.empty((3, len(rows)), dtype=dtype, device=hidden.device)
    shape, device = chunk_shape(head, rows), hidden.device
    with (
        chunk_buffer(shape, head.dtype, device) as first,
        chunk_buffer(shape, ref_head.dtype, device) as second,
    ):
        run, ref_run = (
            ChunkPass(head, hidden, rows, first),
            ChunkPass(ref_head, ref_hidden, rows, second),
        )
        for part in chunks(len(rows), run.size):
            ids = rows.ids[part]
            statistics = partial(
                rows.row_ops.row_statistics, ids=ids, keep_logits=True, with_entropy=False
            )
            z, z_ref = run.logits(run.x(part)), ref_run.logits(ref_run.x(part))
            results[0, part] = statistics(z, head=head).logps
            results[1, part] = statistics(z_ref, head=ref_head).logps
            # In the reference's buffer: z + lam (z - z_ref), exactly z for lam = 0.
            future = z_ref.sub_(z).mul_(-lam).add_(z)
            if head.bias is not None:  # a forbidden token stays so: -inf - -inf is not a number
                future.masked_fill_(z == -torch.inf, -torch.inf)
            results[2, part] = statistics(future, head=head).logps
    return results[0], results[1], results[2]


def _pairs(logps: Tensor, ref_logps: Tensor, lengths: Tensor) -> PairLogps:
    """(2 P,) each, chosen first."""
    parts = [half for values in (logps, ref_logps, lengths) for half in values.chunk(2)]
    return PairLogps(*parts)
