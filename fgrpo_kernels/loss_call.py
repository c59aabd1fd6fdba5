"""One call of the loss: which rows are active, which plan serves them, averaging and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fgrpo_kernels.backends import row_ops
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.first_order import first_order
from fgrpo_kernels.inputs import HeadInputs, HostFacts, check_ids
from fgrpo_kernels.linear_head import (
    AddGradients,
    ChunkPass,
    Coefficients,
    HeadRows,
    RowLocalGradient,
    RowPass,
    split_row_pass,
    wants_gradient,
)
from fgrpo_kernels.loss_inputs import LossInputs, check_loss_facts
from fgrpo_kernels.metrics import batch_metrics, policy_metrics, quotients
from fgrpo_kernels.reductions import denominator, row_weights, weighted_sum
from fgrpo_kernels.rollout_correction import rollout_correction
from fgrpo_kernels.sparse_backward import SparseBackward, check_tolerance
from fgrpo_kernels.surrogates import Objective, PolicyRows, corrected_rows, per_token_loss
from fgrpo_kernels.token_logps import head_logps


class PolicyLossOutput(NamedTuple):
    """What `focal_policy_loss` returns; all but `loss` is detached.

    A tuple, because engines with backward hooks on modules (ZeRO-3) look for the tensors of a
    module's output in tuples, lists and dicts alone.
    """

    loss: Tensor
    """0-dim, float32 (float64 for float64 input), attached even when nothing is active."""
    per_token_loss: Tensor
    """Shape of completion_ids, 0.0 at masked positions; rejected tokens keep theirs."""
    logps: Tensor | None
    """Log-probs of completion_ids, same shape; None with return_logps=False."""
    entropy: Tensor | None
    """Entropy of the next-token distribution in nats, same shape; None with return_logps=False."""
    metrics: dict[str, Tensor]
    """0-dim means over the final mask (see `metrics.py`); reading one waits for the device."""
    metric_sums: dict[str, tuple[Tensor, Tensor]]
    """(numerator, count) of each metric, for sums over ranks; ratio_max: take the maximum."""


def is_row_local(
    config: PolicyLossConfig,
    *,
    has_old_logps: bool,
    constant_advantages: bool,
    objective: Objective | None,
) -> bool:
    """Whether a row's gradient coefficient follows from that row, up to one global scalar.

    constant_advantages: A' is the same for all tokens of a sequence.
    """
    if objective is not None:
        if not getattr(objective, "row_local", True):
            return False
    elif config.surrogate == "vespo" or config.ratio_level == "geometric_mean":
        # On-policy w_i = s_i = 1, and the mean over a sequence of equal A' is A'.
        on_policy = not has_old_logps and config.rollout_correction is None
        return on_policy and (config.surrogate == "vespo" or constant_advantages)
    elif config.ratio_level == "sequence" and config.surrogate != "reinforce" and has_old_logps:
        return False
    if config.rollout_correction is None or has_old_logps:
        return True
    # Weights and rejections now come from the current log-probs.
    decides_counts = config.rollout_correction == "mask" and config.reduction == "sequence_mean"
    return config.rollout_level == "token" and not decides_counts


class LossCall:
    """One call: its rows in the order active, scored, unscored, and what is done with them."""

    def __init__(
        self,
        head_inputs: HeadInputs,
        loss_inputs: LossInputs,
        config: PolicyLossConfig,
        impl: str,
        objective: Objective | None,
        return_logps: bool,
        facts: HostFacts,
    ) -> None:
        self.inputs, self.side, self.config = head_inputs, loss_inputs, config
        self.head, self.impl, self.objective = head_inputs.head, impl, objective
        self.return_logps = return_logps
        has_old = loss_inputs.old_logps is not None
        self.row_local = is_row_local(
            config,
            has_old_logps=has_old,
            constant_advantages=loss_inputs.constant_advantages,
            objective=objective,
        )
        self.sparse: SparseBackward | None = None
        if config.grad_tol > 0:
            check_tolerance(impl, head_inputs.head, self.row_local)
        self.mask_known = config.rollout_correction != "mask" or has_old
        rows = self._all_rows()
        active = rows.mask if self._skips else head_inputs.valid
        if self._skips and self._zero_advantage_is_inactive:
            active = active & (rows.advantages != 0)
        facts.ask("num_active", active.sum())
        known = facts.read()
        check_ids(head_inputs, known)
        check_loss_facts(known)
        self.num_active, num_valid = known["num_active"], known["num_valid"]
        skip_forward = self._skips and not return_logps and self.row_local and self.mask_known
        self.num_scored = self.num_active if skip_forward else num_valid
        self.index = self._order(active, num_valid)
        self.rows = rows if self.index is None else rows.map(lambda t: t[self.index])
        self.rows = self._weighted(self.rows)

    @property
    def _skips(self) -> bool:
        return self.config.skip_inactive and self.row_local and self.objective is None

    @property
    def _zero_advantage_is_inactive(self) -> bool:
        return self.config.kl_coef == 0 and self.config.entropy_coef == 0

    def _all_rows(self) -> PolicyRows:
        """Every position's row, before compaction; token weights are not in yet where they carry a
        gradient (a weight of 0 has one)."""
        side, config = self.side, self.config
        weights, mask = None, self.inputs.valid
        if config.rollout_correction is not None and side.old_logps is not None:
            assert side.rollout_logps is not None
            weights, mask = rollout_correction(
                side.old_logps,
                side.rollout_logps,
                self.inputs.valid,
                side.sequence,
                side.num_sequences,
                config,
            )
        advantages = side.advantages
        if side.token_weights is not None and not side.token_weights.requires_grad:
            advantages = advantages * side.token_weights
        return PolicyRows(
            mask=mask,
            advantages=advantages,
            old_logps=side.old_logps,
            ref_logps=side.ref_logps,
            rollout_logps=side.rollout_logps,
            rollout_weights=weights,
            sequence=side.sequence,
            num_sequences=side.num_sequences,
        )

    def _weighted(self, rows: PolicyRows) -> PolicyRows:
        weights = self.side.token_weights
        if weights is None or not weights.requires_grad:
            return rows
        if self.impl != "reference":
            weights = first_order(weights)
        weights = weights if self.index is None else weights[self.index]
        return replace(rows, advantages=rows.advantages * weights)

    def _order(self, active: Tensor, num_valid: int) -> Tensor | None:
        """Positions of the valid rows, the active ones first; None when that is all in order."""
        valid = self.inputs.valid
        if self.num_active == num_valid == len(valid):
            return None
        first = torch.nonzero_static(active, size=self.num_active)
        rest = torch.nonzero_static(valid & ~active, size=num_valid - self.num_active)
        return torch.cat((first, rest)).squeeze(1)

    def run(self) -> PolicyLossOutput:
        config, dtype = self.config, self.head.dtype
        rows, scored = self.rows, slice(0, self.num_scored)
        sequences = (rows.sequence, rows.num_sequences)
        given = self.side.denominators
        weights = row_weights(rows.mask, *sequences, config, dtype)
        divisor = denominator(rows.mask, *sequences, config, given, dtype)
        logps, entropy, anchor, anchor_scale = self._logps(weights, divisor)

        scored_rows = corrected_rows(logps, rows.map(lambda t: t[scored]), config)
        mask = rows.mask
        if not self.mask_known:
            mask = scored_rows.mask
            weights = row_weights(mask, *sequences, config, dtype)
            divisor = denominator(mask, *sequences, config, given, dtype)
        losses = per_token_loss(logps, entropy, scored_rows, config, self.objective)
        loss = weighted_sum(losses, scored_rows.mask, weights[scored]) / divisor
        loss = loss + logps[:0].sum()  # attached, whatever the objective depends on
        if anchor is not None:
            loss = loss + anchor * (1 / divisor if anchor_scale is None else anchor_scale)
        with torch.no_grad():
            sums = policy_metrics(logps, entropy, scored_rows, config)
            custom = self.objective is not None
            sums |= batch_metrics(rows, mask, self.side, config, custom)
            sums |= {} if self.sparse is None else self.sparse.metric_sums()
            sums = {name: (a.detach(), b.detach()) for name, (a, b) in sums.items()}
        return PolicyLossOutput(
            loss=loss,
            per_token_loss=self._spread(losses),
            logps=self._spread(logps) if self.return_logps else None,
            entropy=self._spread(entropy) if self.return_logps else None,
            metrics=quotients(sums),
            metric_sums=sums,
        )

    def _logps(
        self, weights: Tensor, divisor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
        """Log-probs and entropies of the scored rows; with a finished gradient, its anchor and the
        anchor's scale (None: one over the denominator)."""
        head, hidden = self.head, self.inputs.hidden
        index = None if self.index is None else self.index[: self.num_scored]
        ids = self.inputs.ids if index is None else self.inputs.ids[index]
        budget = self.config.max_chunk_bytes
        head_rows = HeadRows(index, ids, self.num_active, budget, row_ops(self.impl))
        tensors = (hidden, *head.tensors)
        if not (wants_gradient(tensors) and self.row_local and self.impl != "reference"):
            entropy_gradient = self.config.entropy_coef != 0
            pair = head_logps(
                hidden, head, head_rows, self.impl, keep=True, entropy_gradient=entropy_gradient
            )
            return *pair, None, None
        # On CPU the coefficients are fp32 whatever the operands: dividing them early saves a pass
        # over the weight's gradient. Elsewhere narrow types would underflow.
        early = self.mask_known and hidden.device.type == "cpu"
        steps = self._chunk_steps(head_rows, weights / divisor if early else weights)
        anchor, logps, entropy = RowLocalGradient.apply(*tensors, head, head_rows, *steps)
        return logps, entropy, anchor, 1.0 if early else None

    def _chunk_steps(self, head_rows: HeadRows, weights: Tensor) -> tuple[RowPass, AddGradients]:
        """What `head_pass` does with a chunk's logits, and then with its E and g."""
        head, config, rows = self.head, self.config, self.rows.map(Tensor.detach)
        if config.grad_tol > 0:
            coefficients = self._coefficients(rows, weights)
            self.sparse = SparseBackward(head, head_rows, coefficients, config.grad_tol)
            return self.sparse.row_pass, self.sparse.add_gradients
        fused = self.impl == "triton" and self.objective is None and head.shard is None
        if fused:
            row_pass = head_rows.row_ops.policy_row_pass(head, head_rows, rows, weights, config)
        else:
            row_pass = split_row_pass(
                head,
                head_rows,
                self._coefficients(rows, weights),
                entropy_gradient=config.entropy_coef != 0,
            )
        return row_pass, ChunkPass.add_gradients

    def _coefficients(self, rows: PolicyRows, weights: Tensor) -> Coefficients:
        config = self.config

        def coefficients(
            part: slice, logps: Tensor, entropy: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                logps, entropy = logps.detach().requires_grad_(), entropy.detach().requires_grad_()
                part_rows = corrected_rows(logps, rows.map(lambda t: t[part]), config)
                losses = per_token_loss(logps, entropy, part_rows, config, self.objective)
                total = weighted_sum(losses, part_rows.mask, weights[part])
                total = total + logps[:0].sum()  # attached, whatever the objective depends on
                dlogps, dentropy = torch.autograd.grad(
                    total, (logps, entropy), allow_unused=True, materialize_grads=True
                )
            return dlogps, dentropy if config.entropy_coef != 0 else None

        return coefficients

    def _spread(self, values: Tensor) -> Tensor:
        """The scored rows' values at their positions, 0 elsewhere."""
        values = values.detach()
        if self.index is None:
            return values.reshape(self.inputs.shape)
        full = values.new_zeros(self.inputs.valid.shape)
        full[self.index[: self.num_scored]] = values
        return full.reshape(self.inputs.shape)
