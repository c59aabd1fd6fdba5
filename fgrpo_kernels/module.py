"""FocalPolicyLoss: the loss as a module that owns the head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.loss_call import PolicyLossOutput
from fgrpo_kernels.policy_loss import focal_policy_loss


class FocalPolicyLoss(nn.Module):
    """`focal_policy_loss` with a head of its own.

    The head's weight and bias are this module's parameters (the same objects, so tied embeddings
    stay tied): engines that shard parameters and gather a module's own ones while it runs (ZeRO-3,
    FSDP) gather the head around the loss.

    FSDP2: `fully_shard([lm_head, loss])` where both are modules of one model, or `fully_shard` of
    the model alone: a parameter has one FSDP group. With mixed precision pass
    `cast_forward_inputs=False`, or log-probs and advantages are rounded to the parameters' dtype.

    Args:
        lm_head: a module with `weight` (V, D) and optionally `bias` (V,), such as nn.Linear; or
            PEFT's LoRA layer around one, whose active adapter then also is this module's own. Its
            scaling is read at each call.
        config: the objective.
    Raises: ValueError for what would be dropped or is no LoRA: more than one active adapter, none,
        dropout, a bias of the adapter's, DoRA and other variants, merged or disabled adapters.
    """

    def __init__(self, lm_head: nn.Module, config: PolicyLossConfig | None = None) -> None:
        super().__init__()
        self._adapted: tuple[Any, str] | None = None  # in a tuple: not a submodule
        if hasattr(lm_head, "lora_A") or hasattr(lm_head, "base_layer"):
            layer: Any = lm_head
            name = active_lora(layer)
            self._adapted = (layer, name)
            self.lora_A, self.lora_B = layer.lora_A[name].weight, layer.lora_B[name].weight
            lm_head = layer.base_layer
        weight = getattr(lm_head, "weight", None)
        # One dimension: a sharded parameter while it is not gathered.
        if not isinstance(weight, nn.Parameter) or weight.dim() not in (1, 2):
            raise ValueError(
                "lm_head: expected a module whose weight (V, D) is a parameter, received "
                f"{type(lm_head).__name__} with weight of type {type(weight).__name__}"
            )
        self.weight = weight
        self.bias = getattr(lm_head, "bias", None)
        self.config = PolicyLossConfig() if config is None else config

    def forward(
        self,
        hidden: Tensor,
        completion_ids: Tensor,
        advantages: Tensor,
        success_rate: Tensor | None = None,
        **kwargs: Any,
    ) -> PolicyLossOutput:
        """`focal_policy_loss` of this head; `kwargs` are its other keyword arguments."""
        return focal_policy_loss(
            hidden,
            self.weight,
            completion_ids,
            advantages,
            success_rate,
            lm_head_bias=self.bias,
            lm_head_lora=self._lora(),
            config=self.config,
            **kwargs,
        )

    def _lora(self) -> tuple[Tensor, Tensor, float] | None:
        if self._adapted is None:
            return None
        layer, name = self._adapted
        active = active_lora(layer)
        if active != name:
            raise ValueError(
                f"lm_head: expected the active adapter to be {name!r} as at construction, received "
                f"{active!r}; set_adapter({name!r}), or build a FocalPolicyLoss for {active!r}"
            )
        return self.lora_A, self.lora_B, layer.scaling[name]


def active_lora(layer: Any) -> str:
    """The name of the one active adapter of PEFT's LoRA layer, if the layer computes
    base(x) + scaling * B A x; else ValueError. The attributes are those of `LoraLayer` in
    peft/tuners/lora/layer.py, version 0.21; earlier ones have `use_dora` without `lora_variant`.
    """

    def refuse(received: str, advice: str) -> ValueError:
        return ValueError(
            "lm_head: expected one active LoRA adapter without dropout, bias or variant, received "
            f"{received}; {advice}"
        )

    merge = "merge it into the head (merge_and_unload) or leave the head out of target_modules"
    base = getattr(layer, "base_layer", None)
    if not hasattr(layer, "lora_A") or base is None or hasattr(base, "base_layer"):
        kinds = (f"{type(module).__module__}.{type(module).__name__}" for module in (layer, base))
        raise refuse(" around ".join(kinds), merge)
    if layer.merged:
        raise refuse(f"merged adapters {layer.merged_adapters}", "call unmerge_adapter first")
    if layer.disable_adapters:
        raise refuse("disabled adapters", "call enable_adapter_layers first")
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        raise refuse(f"active adapters {names}", "call set_adapter with one name")
    (name,) = names
    a, b = layer.lora_A[name], layer.lora_B[name]
    if not (isinstance(a, nn.Linear) and isinstance(b, nn.Linear)):
        raise refuse(f"A of type {type(a).__name__} and B of type {type(b).__name__}", merge)
    if a.bias is not None or b.bias is not None:
        raise refuse(f"adapter {name!r} with a bias", f"set lora_bias=False, or {merge}")
    variant = getattr(layer, "lora_variant", {}).get(name)
    if variant is not None or getattr(layer, "use_dora", {}).get(name):
        kind = "DoRA" if variant is None else type(variant).__name__
        raise refuse(f"adapter {name!r} with {kind}", f"use plain LoRA, or {merge}")
    dropout = layer.lora_dropout[name]
    if not isinstance(dropout, nn.Identity) and getattr(dropout, "p", None) != 0:
        raise refuse(f"adapter {name!r} with {dropout}", "set lora_dropout=0 for the head")
    return name
