"""focal_policy_loss: from hidden states and the LM head to the policy loss and its gradients.

The front door: what a call takes, and the checks. What it does is in `loss_call.py`, the
mathematics in `surrogates.py` (logps -> per-token loss), `reductions.py` (-> scalar) and
`linear_head.py` (hidden -> logps and back).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels.backends import choose_impl, launching_on
from fgrpo_kernels.compiler import opaque_to_compiler
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.inputs import HostFacts, read_head_inputs
from fgrpo_kernels.loss_call import LossCall, PolicyLossOutput
from fgrpo_kernels.loss_inputs import read_loss_inputs
from fgrpo_kernels.surrogates import Objective


@opaque_to_compiler
def focal_policy_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    success_rate: Tensor | None = None,
    *,
    completion_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    token_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    lm_head_lora: tuple[Tensor, Tensor, float] | None = None,
    global_valid_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    config: PolicyLossConfig = PolicyLossConfig(),  # noqa: B008 - frozen
    impl: str = "auto",
    objective: Objective | None = None,
    return_logps: bool = True,
    tp_group: Any = None,
    vocab_size: int | None = None,
) -> PolicyLossOutput:
    """Policy loss of a linear head and its gradients in one chunked pass, never holding (N, V).

        z = softcap(logit_scale * (W h + b)) / temperature,   logp_t = z[y_t] - logsumexp(z)
        A'_t = (1 - success_rate)^focal_gamma * token_weights_t * advantages
        l_t = w_t * surrogate(logp_t, old_logps_t, A'_t) + kl_coef * kl_t - entropy_coef * H_t
        loss = sum over M of l_t / denominator

    with the surrogate, the rollout weight w, the final mask M and the denominator of `config`.
    B sequences, T completion tokens, N = B T or packed tokens, V vocabulary, D hidden size.

    Args:
        hidden: (B, T, D) or packed (N, D); hidden[., t] predicts completion_ids[., t] (shifted).
        lm_head_weight: (V, D). Its dtype may differ from hidden's: products use the autocast dtype
            under autocast, else the promoted one; sums are float32 (float64 for float64). A DTensor
            is gathered, its gradient averaged over the mesh as FSDP2 does.
        completion_ids: (B, T) or (N,), int64.
        advantages: (B,) or the shape of completion_ids; a constant, as all inputs below but
            token_weights and the head's. With B == N the (B,) reading wins.
        success_rate: (B,) success rate of each sequence's group; needed when focal_gamma > 0.
        completion_mask: bool, shape of completion_ids; None: all valid. What is masked is ignored.
        old_logps: behaviour policy as recomputed by the trainer; None: on-policy, ratio 1.
        ref_logps: frozen reference; needed when kl_coef > 0.
        rollout_logps: as reported by the sampler; needed when rollout_correction is set.
        token_weights: factor on each token's advantage; may require a gradient.
        cu_seqlens: (B+1,) sequence bounds of packed input; needed when anything is per sequence.
        lm_head_bias: (V,); may require a gradient.
        lm_head_lora: (A (r, D), B (V, r), scale): the weight is W + scale B A, which is not formed.
            A and B may require a gradient; W's dtype rule holds for them, hidden and no other.
        global_valid_tokens, global_sequences: denominators over ranks and accumulation steps, > 0,
            used as given. Micro-batches then sum to the gradient of the whole batch; where an
            engine averages over ranks or steps, multiply the loss by their number.
        config: the objective.
        impl: "auto" (triton on GPUs, torch on CPU), "triton", "torch" or "reference" (full logits,
            differentiable twice). An explicit choice never falls back.
        objective: callable (logps, rows) -> per-token loss in place of the surrogate, plain torch
            on flat rows (`PolicyRows`). With `objective.row_local = False` it sees all rows at
            once, else a chunk at a time. It is evaluated twice, for gradient and for value, so it
            must be deterministic; its own parameters get their gradient.
        return_logps: False: rows with a zero coefficient are not scored, logps and entropy are
            None, and the token metrics cover the scored rows.
        tp_group: a ProcessGroup over whose ranks the head's rows are spread: lm_head_weight and
            lm_head_bias are this rank's contiguous shard in the order of ranks, of any size. All
            else is the same on every rank; ids count the whole vocabulary. The loss is the same on
            each rank, hidden's gradient is summed over them. Every rank must call, and call
            backward, alike: one whose input is refused leaves the others waiting. Shard sizes are
            gathered once for each weight object: pass the parameter, not a new view of it.
        vocab_size: the whole head's rows from this one on are padding, with no part in the softmax
            and gradient 0. None: there is none.
    Returns: PolicyLossOutput.
    Raises: ValueError with expected and received for shapes, dtypes, devices, ids out of range at
        unmasked positions, ranges and missing tensors; RuntimeError for impl="triton" without a
        device and for a second backward.
    Numerics: a NaN at a scored position gives a NaN loss. Gradients are finished in the forward
        where the objective allows it (`is_row_local`), so inside a checkpointed region the work is
        done twice; checkpoint the backbone, not the loss.
    Source: F-GRPO 2602.06717; the surrogates' sources are in PolicyLossConfig.
    """
    if not isinstance(config, PolicyLossConfig):
        raise ValueError(f"config: expected a PolicyLossConfig, received {type(config).__name__}")
    if objective is not None and not callable(objective):
        raise ValueError(
            "objective: expected a callable (logps, rows) -> per-token loss, received "
            f"{type(objective).__name__}"
        )
    facts = HostFacts()
    head_inputs = read_head_inputs(
        hidden,
        lm_head_weight,
        completion_ids,
        completion_mask,
        lm_head_bias,
        lm_head_lora,
        tp_group,
        vocab_size,
        impl=impl,
        temperature=config.temperature,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        facts=facts,
    )
    loss_inputs = read_loss_inputs(
        head_inputs,
        advantages,
        success_rate,
        old_logps=old_logps,
        ref_logps=ref_logps,
        rollout_logps=rollout_logps,
        token_weights=token_weights,
        cu_seqlens=cu_seqlens,
        global_valid_tokens=global_valid_tokens,
        global_sequences=global_sequences,
        config=config,
        facts=facts,
    )
    impl = choose_impl(impl, hidden.device)
    with launching_on(hidden.device), torch.autocast(hidden.device.type, enabled=False):
        call = LossCall(head_inputs, loss_inputs, config, impl, objective, return_logps, facts)
        return call.run()
