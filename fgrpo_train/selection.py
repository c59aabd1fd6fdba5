"""Selection: which sequences of a mini-batch the trunk has to see."""

from __future__ import annotations

from fgrpo_kernels import PolicyLossConfig
from fgrpo_train.batching import Batch


def drop_inactive(batch: Batch, config: PolicyLossConfig) -> Batch:
    """Leave out the sequences that cannot contribute to the gradient, before the trunk runs.

    A sequence with advantage 0 has a zero gradient whatever its log-probs, unless the entropy bonus
    or the KL term acts on it. The gradient of the rest is unchanged because the loss is given its
    denominators, counted before the selection. One sequence always stays: a process without any
    would miss the collective operations of the backward pass.
    """
    if config.entropy_coef != 0 or config.kl_coef > 0:
        return batch
    active = batch.advantages != 0
    if not active.any():
        active[0] = True
    return batch.rows(active).trimmed()
