"""The policy as the learner computes it: trunk, head, and how the settings shape them.

The trunk gives hidden states; the loss module owns the head and never forms the logits of the whole
batch.

Dimensions: B sequences, P prompt columns, T completion columns, N completion tokens, D hidden size.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig, PolicyLossOutput, token_logps
from fgrpo_train.batching import Batch
from fgrpo_train.settings import ConfigError, PolicySettings


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of a mini-batch over all processes, before any sequence is left out."""

    valid_tokens: float
    sequences: float


class TokenLogps(nn.Module):
    """Log-probs under the head, as a module that owns it: ZeRO-3 gathers it while this runs."""

    def __init__(self, lm_head: Any, config: PolicyLossConfig) -> None:
        super().__init__()
        self.weight, self.bias = lm_head.weight, lm_head.bias
        self.config = config

    def forward(self, hidden: Tensor, completion_ids: Tensor, mask: Tensor | None) -> Tensor:
        """float32 log-probs in the shape of `completion_ids`."""
        logps, _ = token_logps(
            hidden,
            self.weight,
            completion_ids,
            completion_mask=mask,
            lm_head_bias=self.bias,
            temperature=self.config.temperature,
            max_chunk_bytes=self.config.max_chunk_bytes,
        )
        return logps


class PolicyWithLoss(nn.Module):
    """Trunk and head as the one module that DeepSpeed wraps.

    packing: lay the sequences end to end in one row; transformers keeps them apart by their
    positions, which start at 0 again, when it is given no attention mask.
    """

    def __init__(
        self, model: PreTrainedModel, config: PolicyLossConfig, *, packing: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = FocalPolicyLoss(model.get_output_embeddings(), config)
        self.token_logps = TokenLogps(model.get_output_embeddings(), config)
        self.packing = packing
        self.loss_seconds = 0.0

    def forward(self, batch: Batch, denominators: Denominators | None) -> Any:
        """The loss, a PolicyLossOutput; without denominators log-probs (B, T), 0 where masked."""
        hidden = self.hidden(batch)
        mask = batch.completion_mask
        if denominators is None:
            if not self.packing:
                return self.token_logps(hidden, batch.completion_ids, mask)
            return _unpacked(self.token_logps(hidden, batch.completion_ids[mask], None), mask)
        synchronize(hidden.device)
        start = time.perf_counter()
        output = self.policy_loss(hidden, batch, denominators)
        synchronize(hidden.device)
        self.loss_seconds += time.perf_counter() - start
        return output

    def hidden(self, batch: Batch) -> Tensor:
        """(B, T, D): row t predicts completion token t; packed (N, D), the masked ones left out."""
        positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        first = batch.num_prompt_columns - 1
        if not self.packing:
            outputs = self.model.base_model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=positions,
                use_cache=False,
            )
            return outputs.last_hidden_state[:, first:-1]
        real = batch.attention_mask.bool()
        outputs = self.model.base_model(
            input_ids=batch.input_ids[real][None],
            position_ids=positions[real][None],
            use_cache=False,
        )
        predicts = torch.zeros_like(real)
        predicts[:, first:-1] = batch.completion_mask
        return outputs.last_hidden_state[0, predicts[real]]

    def policy_loss(
        self, hidden: Tensor, batch: Batch, denominators: Denominators
    ) -> PolicyLossOutput:
        """The loss of `hidden`; its `logps` are (B, T), also of packed sequences."""
        mask = batch.completion_mask
        ends = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])

        def per_token(values: Tensor | None) -> Tensor | None:
            return values[mask] if self.packing and values is not None else values

        output = self.loss(
            hidden,
            per_token(batch.completion_ids),
            batch.advantages,
            batch.success_rate,
            completion_mask=None if self.packing else mask,
            old_logps=per_token(batch.old_logps),
            ref_logps=per_token(batch.ref_logps),
            rollout_logps=per_token(batch.rollout_logps),
            cu_seqlens=ends if self.packing else None,
            global_valid_tokens=denominators.valid_tokens,
            global_sequences=denominators.sequences,
        )
        return output._replace(logps=_unpacked(output.logps, mask)) if self.packing else output


def _unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with the values (N,) where the mask is True, else 0."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock tells what was computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare_policy(model: PreTrainedModel, settings: PolicySettings) -> None:
    """Give the model the dtype, attention, kernels and checkpointing of the settings, in place.

    It is in eval mode: dropout would make the ratio differ from 1 without any update. Only the
    layers that are to be recomputed are told that they train, for transformers asks them.

    Raises: ConfigError if this machine or model lacks what a setting asks for.
    """
    dtype = getattr(torch, settings.dtype)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    try:
        model.set_attn_implementation(settings.attention)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"policy.attention {settings.attention}: {reason}") from None
    model.eval()
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
    if settings.liger_kernels and torch.cuda.is_available():
        apply_liger_kernels(model)


def apply_liger_kernels(model: PreTrainedModel) -> None:
    """Liger's RMSNorm, RoPE and SwiGLU in the trunk; the loss stays ours.

    Raises: ConfigError if liger-kernel is missing or does not know the model.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "policy.liger_kernels needs liger-kernel on a GPU: pip install 'fgrpo[liger]', or set "
            "policy.liger_kernels false"
        )
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"policy.liger_kernels: liger-kernel does not know {model.config.model_type} models; "
            "set policy.liger_kernels false"
        )
    # The entry that transformers uses too; each model's own function takes what it knows of these.
    monkey_patch._apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
