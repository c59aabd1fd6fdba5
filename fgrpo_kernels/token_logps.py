"""token_logps: differentiable log-probs and entropies of a linear head, never holding (N, V)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels.backends import choose_impl, launching_on, row_ops
from fgrpo_kernels.compiler import opaque_to_compiler
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.first_order import first_order_only
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.inputs import HostFacts, check_ids, read_head_inputs
from fgrpo_kernels.linear_head import (
    ChunkPass,
    HeadGradients,
    HeadRows,
    chunk_rows,
    chunk_shape,
    chunks,
    finished_gradients,
    head_pass,
    new_gradients,
    split_row_pass,
    wants_gradient,
)
from fgrpo_kernels.reference import reference_logps
from fgrpo_kernels.workspace import chunk_buffer


@opaque_to_compiler
def token_logps(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    completion_mask: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    lm_head_lora: tuple[Tensor, Tensor, float] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    with_entropy: bool = False,
    impl: str = "auto",
    tp_group: Any = None,
    vocab_size: int | None = None,
    max_chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the given tokens, and entropies, under a linear head.

        z = softcap(logit_scale * (W h + b)) / temperature
        logps = z[y] - logsumexp(z),   entropy = -sum_v p_v log p_v   (nats)

    Args: as in `focal_policy_loss`; with_entropy=False returns None for the entropy.
    Returns: (logps, entropy), shape of completion_ids, float32 (float64 for float64 input), 0.0 at
        masked positions, attached to hidden, lm_head_weight, lm_head_bias and lm_head_lora for any
        upstream gradient. One backward only, except with impl="reference".
    Raises: as `focal_policy_loss`.
    Cost: 2 N V D without gradient; head trained 8 (the logits are recomputed in the backward), of
        its adapter alone 6, head frozen 4, with entropy 6.
    """
    # The loss's config holds the checks of these four numbers.
    PolicyLossConfig(
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        max_chunk_bytes=max_chunk_bytes,
    )
    facts = HostFacts()
    inputs = read_head_inputs(
        hidden,
        lm_head_weight,
        completion_ids,
        completion_mask,
        lm_head_bias,
        lm_head_lora,
        tp_group,
        vocab_size,
        impl=impl,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        facts=facts,
    )
    impl = choose_impl(impl, hidden.device)
    known = facts.read()
    check_ids(inputs, known)
    num_valid = known["num_valid"]
    index = None
    if num_valid < len(inputs.valid):
        index = torch.nonzero_static(inputs.valid, size=num_valid).squeeze(1)
    ids = inputs.ids if index is None else inputs.ids[index]
    rows = HeadRows(index, ids, num_valid, max_chunk_bytes, row_ops(impl), with_entropy)
    with launching_on(hidden.device), torch.autocast(hidden.device.type, enabled=False):
        logps, entropy = head_logps(
            inputs.hidden, inputs.head, rows, impl, entropy_gradient=with_entropy
        )
        if index is not None:
            logps, entropy = (
                values.new_zeros(len(inputs.valid)).index_copy(0, index, values)
                for values in (logps, entropy)
            )
    return logps.view(inputs.shape), entropy.view(inputs.shape) if with_entropy else None


def head_logps(
    hidden: Tensor,
    head: LinearHead,
    rows: HeadRows,
    impl: str,
    *,
    keep: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (n,) of the rows, attached where a gradient is wanted.

    keep: rows that fit one chunk keep it for the backward, whose entropy gradient must then be
    announced by `entropy_gradient`.
    """
    if impl == "reference":
        selected = hidden if rows.index is None else hidden[rows.index]
        return reference_logps(selected, head.weight, head.bias, rows.ids, head)
    tensors = (hidden, *head.tensors)
    if not wants_gradient(tensors):
        return head_pass(head, hidden, rows, HeadGradients(), None)
    return TokenLogps.apply(*tensors, head, rows, keep, entropy_gradient)  # type: ignore[no-any-return]


class TokenLogps(torch.autograd.Function):
    """(logps, entropy) with any upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        head: LinearHead,
        rows: HeadRows,
        keep: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        plan: _Recompute | _KeptChunk | _UnitGradients
        if not any(ctx.needs_input_grad[1:5]):
            plan = _UnitGradients(head, hidden, rows, entropy_gradient)
        elif keep and 0 < len(rows) <= chunk_rows(head, rows.max_chunk_bytes):
            plan = _KeptChunk(head, hidden, rows, entropy_gradient)
        else:
            plan = _Recompute(head, hidden, rows)
        ctx.plan, ctx.head, ctx.hidden, ctx.num_rows = plan, head, hidden.detach(), len(rows)
        # The plan reads these again in the backward; autograd watches that nobody writes to them.
        tensors = (hidden, weight, bias, lora_a, lora_b)
        ctx.save_for_backward(*tensors, rows.ids)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in tensors)
        ctx.set_materialize_grads(False)
        return plan.forward()

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, dlogps: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        plan, ctx.plan = ctx.plan, None
        if plan is None:
            raise RuntimeError(
                "these log-probs were already differentiated and what their gradient needs is "
                "freed: call again, or use impl='reference', which keeps the graph"
            )
        ctx.saved_tensors  # noqa: B018 - raises if one of them was written to since
        if dlogps is None:
            dlogps = torch.zeros(ctx.num_rows, dtype=ctx.head.dtype, device=ctx.hidden.device)
        wanted = new_gradients(ctx.head, ctx.hidden, ctx.needs_input_grad[:5], ctx.num_rows)
        plan.backward(wanted, dlogps, dentropy)
        return (*finished_gradients(wanted, ctx.head, ctx.dtypes), None, None, None, None)


class _Recompute:
    """Statistics now, a second pass with the coefficients in the backward: 2 + 6 N V D."""

    def __init__(self, head: LinearHead, hidden: Tensor, rows: HeadRows) -> None:
        self._head, self._hidden, self._rows = head, hidden.detach(), rows

    def forward(self) -> tuple[Tensor, Tensor]:
        return head_pass(self._head, self._hidden, self._rows, HeadGradients(), None)

    def backward(self, wanted: HeadGradients, dlogps: Tensor, dentropy: Tensor | None) -> None:
        def given(part: slice, *_: Tensor) -> tuple[Tensor, Tensor | None]:
            return dlogps[part], None if dentropy is None else dentropy[part]

        rows = replace(self._rows, num_active=len(self._rows))
        row_pass = split_row_pass(self._head, rows, given, entropy_gradient=dentropy is not None)
        head_pass(self._head, self._hidden, rows, wanted, row_pass)


class _KeptChunk:
    """All rows are one chunk, whose buffer waits for the coefficients: 6 N V D."""

    def __init__(
        self, head: LinearHead, hidden: Tensor, rows: HeadRows, entropy_gradient: bool
    ) -> None:
        self._head, self._rows = head, rows
        logits = torch.empty(chunk_shape(head, rows), dtype=head.dtype, device=hidden.device)
        self._run = ChunkPass(head, hidden, rows, logits)
        self._x = self._run.x(slice(0, len(rows)))
        self._buffer = self._run.logits(self._x)
        self._stats = rows.row_ops.row_statistics(
            self._buffer, rows.ids, head, keep_logits=entropy_gradient
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        # Copies: an output kept by its own graph node would never be freed.
        return self._stats.logps.clone(), self._stats.entropy.clone()

    def backward(self, wanted: HeadGradients, dlogps: Tensor, dentropy: Tensor | None) -> None:
        e = self._run.e(self._x)
        g = self._rows.row_ops.row_gradient(
            self._buffer, self._stats, dlogps, dentropy, self._head, e
        )
        self._run.add_gradients(wanted, slice(0, len(self._rows)), self._x, e, g)


class _UnitGradients:
    """Frozen head (and adapter): d logp / d hidden (and d entropy / d hidden) kept, scaled in the
    backward: 4 (6) N V D."""

    def __init__(
        self, head: LinearHead, hidden: Tensor, rows: HeadRows, entropy_gradient: bool
    ) -> None:
        self._head, self._hidden, self._rows = head, hidden.detach(), rows
        needs = (True, False, False, False, False)
        self._of_logps = new_gradients(head, hidden, needs, len(rows))
        self._of_entropy = (
            new_gradients(head, hidden, needs, len(rows)) if entropy_gradient else None
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        head, rows, device = self._head, self._rows, self._hidden.device
        logps = torch.empty(len(rows), dtype=head.dtype, device=device)
        entropy = torch.empty_like(logps)
        with chunk_buffer(chunk_shape(head, rows), head.dtype, device) as buffer:
            self._run(ChunkPass(head, self._hidden, rows, buffer), logps, entropy)
        return logps, entropy

    def _run(self, run: ChunkPass, logps: Tensor, entropy: Tensor) -> None:
        head, rows, ops = self._head, self._rows, self._rows.row_ops
        for part in chunks(len(rows), run.size):
            x = run.x(part)
            logits = run.logits(x)
            stats = ops.row_statistics(
                logits, rows.ids[part], head, keep_logits=self._of_entropy is not None
            )
            logps[part], entropy[part] = stats.logps, stats.entropy
            one, zero = torch.ones_like(stats.logps), torch.zeros_like(stats.logps)
            e = run.e(x, apart=self._of_entropy is not None)
            if self._of_entropy is None:
                g = ops.row_gradient(logits, stats, one, None, head, e)
                run.add_gradients(self._of_logps, part, x, e, g)
                continue
            for unit, pair in ((self._of_logps, (one, zero)), (self._of_entropy, (zero, one))):
                g = ops.row_gradient(logits, stats, *pair, head, e)
                run.add_gradients(unit, part, x, e, g)

    def backward(self, wanted: HeadGradients, dlogps: Tensor, dentropy: Tensor | None) -> None:
        wanted.hidden = self._scaled(self._of_logps, dlogps)
        if dentropy is not None:
            assert self._of_entropy is not None
            wanted.hidden += self._scaled(self._of_entropy, dentropy)

    def _scaled(self, unit: HeadGradients, coefficients: Tensor) -> Tensor:
        assert unit.hidden is not None
        index = self._rows.index
        if index is not None:
            full = coefficients.new_zeros(len(unit.hidden))
            full[index] = coefficients
            coefficients = full
        return unit.hidden.mul_(coefficients[:, None])
