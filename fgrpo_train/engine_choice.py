"""The sampling engine that the settings ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import RolloutEngine
from fgrpo_train.settings import TrainConfig
from fgrpo_train.vllm_engine import VLLMEngine


def make_engine(
    config: TrainConfig,
    policy: Path,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
) -> RolloutEngine:
    """An engine; it has no weights of use before its `load_weights`.

    Args:
        policy: folder of the transformers model, for an engine in a process of its own.
        model: the same model here, whole: transformers samples from a copy of it.
        prompts: all that will be sampled from: the longest one decides the length of a sequence.
    Raises: ConfigError if the engine is not installed, EngineError if it does not start.
    """
    if config.engine.kind == "hf":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        return HFEngine(model.to(device))  # type: ignore[arg-type]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return VLLMEngine(
        policy,
        config.engine,
        dtype=model.dtype,
        max_model_len=longest + config.sampling.max_new_tokens,
    )
