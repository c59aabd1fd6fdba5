"""Small parts of a training run that several tests put together."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fgrpo_kernels import group_advantages
from fgrpo_train.base_policy import make_model, make_tokenizer
from fgrpo_train.batching import Batch, make_batch
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.prompts import CountdownTask, prompt_batch
from fgrpo_train.rollout import RolloutEngine, Sampling


def random_policy(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The shape of the shipped policy with random weights, large enough that log-probs differ."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    return model, tokenizer


def sampling_of(tokenizer: PreTrainedTokenizerBase, temperature: float = 1.0) -> Sampling:
    return Sampling(
        temperature=temperature,
        max_new_tokens=12,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


def sampled_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_correct: list[int],
    group_size: int = 4,
    temperature: float = 1.0,
    engine: RolloutEngine | None = None,
) -> Batch:
    """Completions of one prompt per entry of `num_correct`, of which so many count as correct.

    They come from `engine`, or from transformers with the weights of `model`.
    """
    prompts = prompt_batch(
        CountdownTask().train_prompts(tokenizer), step=0, batch_size=len(num_correct), seed=0
    )
    rollouts = (engine or HFEngine(model)).generate(
        prompts, group_size=group_size, sampling=sampling_of(tokenizer, temperature), seed=3
    )
    members = torch.arange(group_size)
    rewards = torch.cat([(members < correct).float() for correct in num_correct])
    groups = group_advantages(rewards, group_size=group_size)
    return make_batch(prompts, rollouts, groups, pad_token_id=tokenizer.pad_token_id)
