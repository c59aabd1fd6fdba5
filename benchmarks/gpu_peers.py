"""The contestants that only a GPU session has, and how each is reached without its dependencies.

Two of these packages are looked up by name at run time, because nothing else here needs them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from contestants import (
    CONFIG,
    Loss,
    Size,
    clip_loss,
    liger_grpo,
    linear_cross_entropy,
    plain,
    plain_logps,
    plain_scores,
    trl_chunked,
)
from torch import Tensor

from fgrpo_kernels import focal_policy_loss, token_logps
from fgrpo_kernels.testing import LossInputs

OURS = "ours"


def ours(inputs: LossInputs, size: Size, *, share: float = 1.0, scored: bool = True) -> Tensor:
    """share: of the rows with an advantage other than 0. scored: with log-probs of all rows."""
    arguments = inputs.arguments()
    if share < 1:
        rows = torch.arange(size.rows, device=inputs.hidden.device).view(size.batch, size.length)
        live = rows % 10 < round(10 * share)
        arguments["advantages"] = torch.where(live, inputs.advantages[:, None], 0.0)
    config = type(CONFIG)(**{**vars(CONFIG), "max_chunk_bytes": size.chunk_bytes})
    return focal_policy_loss(**arguments, config=config, impl="triton", return_logps=scored).loss


@torch.no_grad()
def our_scores(inputs: LossInputs, size: Size) -> Tensor:
    arguments = (inputs.hidden, inputs.lm_head_weight, inputs.completion_ids)
    return token_logps(*arguments, impl="triton", max_chunk_bytes=size.chunk_bytes)[0]


@cache
def _compiled_logps() -> Callable[..., Tensor]:
    return torch.compile(plain_logps)


def compiled_plain(inputs: LossInputs, size: Size) -> Tensor:
    logps = _compiled_logps()(inputs.hidden, inputs.lm_head_weight, inputs.completion_ids)
    return clip_loss(logps, inputs)


def _without_init(package: str, *inner: str) -> None:
    """Stand-ins for a package and some of its own: the files below import, their __init__, which
    may want what is not installed, does not run."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed")
    folder = Path(next(iter(found.submodule_search_locations)))
    for name in (package, *inner):
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = module


def trl_head(inputs: LossInputs, size: Size) -> Tensor:
    """Of its trainers only the gathering of ZeRO-3 weights is replaced, by nothing."""
    if "trl" not in sys.modules:
        _without_init("trl", "trl.trainer", "trl.kernels")
        utilities: Any = types.ModuleType("trl.trainer.utils")
        utilities.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
        sys.modules["trl.trainer.utils"] = utilities
    return trl_chunked(inputs, size)


def liger_scaled(inputs: LossInputs, size: Size) -> Tensor:
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # a synchronisation a call
    function = importlib.import_module(
        "liger_kernel.ops"
    ).LigerFusedLinearScaledCrossEntropyFunction
    nll = function.apply(
        inputs.hidden.flatten(0, 1),
        inputs.lm_head_weight,
        inputs.completion_ids.flatten(),
        1.0,
        -100,
        1,
        False,
    )
    return clip_loss(-nll.view_as(inputs.completion_ids), inputs)


def verl_fused(inputs: LossInputs, size: Size) -> Tensor:
    _without_init("verl", "verl.utils", "verl.utils.kernel")
    function = importlib.import_module(
        "verl.utils.kernel.linear_cross_entropy"
    ).linear_cross_entropy
    logps, _ = function(
        inputs.hidden.flatten(0, 1),
        inputs.lm_head_weight,
        inputs.completion_ids.flatten(),
        1.0,
        "none",
        None,
    )
    return clip_loss(logps.view_as(inputs.completion_ids), inputs)


def cut_cross_entropy(inputs: LossInputs, size: Size, *, exact: bool) -> Tensor:
    """exact: without the filter that drops small gradients."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    nll = function(
        inputs.hidden.flatten(0, 1),
        inputs.lm_head_weight,
        inputs.completion_ids.flatten(),
        reduction="none",
        impl="cce",
        **({"filter_eps": None} if exact else {}),
    )
    return clip_loss(-nll.view_as(inputs.completion_ids), inputs)


TRAINED: dict[str, Loss] = {
    OURS: ours,
    "ours, no log-probs": partial(ours, scored=False),
    "ours, 0.6 live": partial(ours, share=0.6),
    "ours, 0.6 live, no log-probs": partial(ours, share=0.6, scored=False),
    "ours, 0.3 live": partial(ours, share=0.3),
    "ours, 0.3 live, no log-probs": partial(ours, share=0.3, scored=False),
}
SCORED: dict[str, Loss] = {"ours, no grad": our_scores, "plain PyTorch, no grad": plain_scores}
PEERS: dict[str, Loss] = {
    "plain PyTorch": plain,
    "plain PyTorch, compiled": compiled_plain,
    "TRL ChunkedLogProb": trl_head,
    "Liger scaled CE": liger_scaled,
    "verl linear_cross_entropy": verl_fused,
    "cut-cross-entropy": partial(cut_cross_entropy, exact=False),
    "cut-cross-entropy, no filter": partial(cut_cross_entropy, exact=True),
    "F.linear_cross_entropy": linear_cross_entropy,
    "Liger fused GRPO, compiled": partial(liger_grpo, compiled=True),
}
NEEDS_GPU = {
    "plain PyTorch, compiled",
    "verl linear_cross_entropy",
    "cut-cross-entropy",
    "cut-cross-entropy, no filter",
    "Liger fused GRPO, compiled",
}
