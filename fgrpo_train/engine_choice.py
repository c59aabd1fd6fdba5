"""The sampling engine that the settings ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor
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
    weights: Iterable[tuple[str, Tensor]],
    prompts: Sequence[Prompt],
) -> RolloutEngine:
    """An engine with the given weights.

    Args:
        policy: folder of the transformers model, for an engine in a process of its own.
        model: the same model here; transformers samples from a copy of it.
        weights: every parameter by its name in `model`.
        prompts: all that will be sampled from: the longest one decides the length of a sequence.
    Raises: ConfigError if the engine is not installed, EngineError if it does not start.
    """
    if config.engine.kind == "hf":
        return HFEngine(model)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = VLLMEngine(
        policy,
        config.engine,
        dtype=model.dtype,
        max_model_len=longest + config.sampling.max_new_tokens,
    )
    engine.load_weights(weights)
    return engine
