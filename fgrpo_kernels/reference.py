"""The specification of the linear head: full logits, plain autograd, any dtype.

    logp_i = z_i[y_i] - logsumexp(z_i),   H_i = -sum_v p_iv log p_iv

It holds (n, V) logits and is differentiable twice. Narrow operands are upcast before the product,
as the chunked paths' sums are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fgrpo_kernels.head import LinearHead


def reference_logps(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: LinearHead
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (n,) of hidden (n, D), attached to hidden and the head's tensors."""
    hidden = hidden.to(head.operand_dtype).to(head.dtype)
    weight = weight.to(head.operand_dtype).to(head.dtype)
    logits = hidden @ weight.t()
    if head.lora is not None:
        a, b = (t.to(head.lora.operand_dtype).to(head.dtype) for t in (head.lora.a, head.lora.b))
        logits = logits + head.lora.scale * (hidden @ a.t() @ b.t())
    if bias is not None:
        logits = logits + bias.to(head.dtype)
    logits = logits * head.logit_scale
    if head.logit_softcap is not None:
        logits = head.logit_softcap * torch.tanh(logits / head.logit_softcap)
    log_probs = torch.log_softmax(logits / head.temperature, dim=-1)
    logps = log_probs.gather(1, ids[:, None]).squeeze(1)
    # A forbidden token has p = 0 and log p = -inf: its term is 0, in the gradient too.
    finite = torch.where(log_probs == -torch.inf, 0, log_probs)
    return logps, -(log_probs.exp() * finite).sum(1)
