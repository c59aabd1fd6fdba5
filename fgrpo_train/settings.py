"""The settings of a run as typed records, a class for each section.

The string under a field is its entry in `--help`; a wrong value is a `ConfigError` whose text is
one line that names the fix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fgrpo_kernels.config import PolicyLossConfig


class ConfigError(ValueError):
    """What a person got wrong, in one line that names the fix."""


def _require(name: str, ok: bool, expected: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The policy that training starts from, and how it is computed."""

    path: str = "tiny-countdown"
    """A folder with a transformers model and its tokenizer, or the name of a shipped policy."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations. With bfloat16 the optimizer keeps its own weights in float32."""

    attention: str = "sdpa"
    """Attention of the model as transformers names it: sdpa, flash_attention_2, eager, ..."""

    packing: bool = False
    """Lay the sequences of a micro-batch end to end in one row, without padding. Pays off with
    flash_attention_2; sdpa computes the whole row's square of attention scores."""

    activation_checkpointing: bool = False
    """Keep one tensor per layer from the forward and compute the rest again in the backward: much
    less memory, a third more time."""

    liger_kernels: bool = True
    """On GPUs, Liger's RMSNorm, RoPE and SwiGLU in the model; on CPUs it changes nothing."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The prompts."""

    prompts_per_step: int = 32
    """Prompts in a training step, over all processes."""

    def __post_init__(self) -> None:
        _require("data.prompts_per_step", self.prompts_per_step >= 1, ">= 1", self.prompts_per_step)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How completions are drawn, in training and in evaluation."""

    group_size: int = 8
    """Completions of each prompt: the group that an advantage and a success rate refer to."""

    temperature: float = 1.0
    """Logits are divided by it, in the sampler and in the loss."""

    max_new_tokens: int = 16
    """A completion is cut after so many tokens, and judged as it stands."""

    def __post_init__(self) -> None:
        _require("sampling.group_size", self.group_size >= 2, ">= 2", self.group_size)
        _require("sampling.temperature", self.temperature > 0, "> 0", self.temperature)
        _require("sampling.max_new_tokens", self.max_new_tokens >= 1, ">= 1", self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What samples the completions."""

    kind: str = "hf"
    """hf: transformers, in the training process. vllm: a vLLM process for each training process;
    the loss then corrects for what its log-probs differ from the trainer's:
    loss.rollout_correction is truncate unless it is set."""

    placement: str = "colocated"
    """vllm on GPUs. colocated: on the training process's GPU; the engine sleeps during the update.
    separate: on a GPU of its own; start half as many processes as there are GPUs."""

    memory_share: float = 0.4
    """vllm on GPUs: share of the GPU's memory for its weights and key-value cache."""

    enforce_eager: bool = False
    """vllm on GPUs: no CUDA graphs; it starts faster, needs less memory and samples slower."""

    timeout_seconds: float = 600.0
    """vllm: without a sign of life for so long, the engine counts as stuck and the run stops."""

    def __post_init__(self) -> None:
        _require("engine.kind", self.kind in ("hf", "vllm"), "hf or vllm", self.kind)
        known = self.placement in ("colocated", "separate")
        _require("engine.placement", known, "colocated or separate", self.placement)
        share = self.memory_share
        _require("engine.memory_share", 0 < share <= 1, "> 0 and <= 1", share)
        _require("engine.timeout_seconds", self.timeout_seconds > 0, "> 0", self.timeout_seconds)


@dataclass(frozen=True, kw_only=True)
class OptimisationSettings:
    """AdamW, run by DeepSpeed."""

    learning_rate: float = 5e-4
    """Reached at the end of the warm-up and kept."""

    warmup_updates: int = 5
    """Optimizer updates over which the learning rate rises linearly."""

    weight_decay: float = 0.0
    """Decoupled weight decay."""

    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm if it is longer; 0: never."""

    mini_batches: int = 2
    """Optimizer updates per step, each on its share of the prompts. The second and later ones
    are off-policy: there the clipping starts to matter."""

    tokens_per_micro_batch: int | None = None
    """Sequences go through the model together while their tokens, padding included, are at most so
    many; a longer one goes alone. It bounds memory and leaves the gradient as it is. none: each
    mini-batch at once."""

    def __post_init__(self) -> None:
        _require("optimisation.learning_rate", self.learning_rate > 0, "> 0", self.learning_rate)
        _require(
            "optimisation.warmup_updates", self.warmup_updates >= 0, ">= 0", self.warmup_updates
        )
        _require("optimisation.weight_decay", self.weight_decay >= 0, ">= 0", self.weight_decay)
        _require("optimisation.max_grad_norm", self.max_grad_norm >= 0, ">= 0", self.max_grad_norm)
        _require("optimisation.mini_batches", self.mini_batches >= 1, ">= 1", self.mini_batches)
        tokens = self.tokens_per_micro_batch
        _require(
            "optimisation.tokens_per_micro_batch",
            tokens is None or tokens >= 1,
            "none or >= 1",
            tokens,
        )


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """How the training state is spread over processes and memories."""

    zero_stage: int = 0
    """ZeRO: each process holds only its part of nothing (0), of the optimizer state (1), of the
    gradients too (2), of the weights too (3)."""

    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory: nothing, the optimizer state (from stage 1 on), or the
    weights as well (stage 3)."""

    def __post_init__(self) -> None:
        stage, offload = self.zero_stage, self.offload
        _require("deepspeed.zero_stage", 0 <= stage <= 3, "0, 1, 2 or 3", stage)
        needed = {"none": 0, "optimizer": 1, "all": 3}[offload]
        if stage < needed:
            raise ConfigError(
                f"deepspeed.offload {offload} needs deepspeed.zero_stage >= {needed}, got {stage}"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Held-out prompts: before, in and after training, and by --evaluate; one seed for all runs."""

    samples_per_prompt: int = 32
    """In a training run: completions of each held-out prompt; pass@k is estimated for k = 1, 2,
    4, ... up to it."""

    every: int | None = None
    """In a training run: evaluate after every so many steps too; none: only before and after."""

    samples: int = 1024
    """With --evaluate: completions of each held-out prompt; k goes up to it, and to 256."""

    max_prompts: int | None = None
    """Evaluate the first so many held-out prompts only; none: all."""

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "samples"):
            value = getattr(self, name)
            _require(f"evaluation.{name}", value >= 1, ">= 1", value)
        for name in ("every", "max_prompts"):
            value = getattr(self, name)
            _require(f"evaluation.{name}", value is None or value >= 1, "none or >= 1", value)

    @property
    def ks(self) -> list[int]:
        """1, 2, 4, ... up to samples_per_prompt."""
        return powers_of_two(self.samples_per_prompt)


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [2**n for n in range(largest.bit_length())]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run as a whole."""

    steps: int = 100
    """Training steps: each draws prompts, samples, scores and updates."""

    seed: int = 0
    """Seed of the prompts' order and of the sampling; evaluation does not depend on it."""

    name: str | None = None
    """Folder under output_dir; none: the config's name, with a number if that is taken."""

    output_dir: str = "runs"
    """Where the folders of runs are made."""

    def __post_init__(self) -> None:
        _require("run.steps", self.steps >= 1, ">= 1", self.steps)
        _require("run.seed", self.seed >= 0, ">= 0", self.seed)
        plain = self.name is None or (self.name not in ("", ".", "..") and "/" not in self.name)
        _require("run.name", plain, "a folder name without '/'", self.name)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a run, by section."""

    policy: PolicySettings = field(default_factory=PolicySettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    optimisation: OptimisationSettings = field(default_factory=OptimisationSettings)
    deepspeed: DeepSpeedSettings = field(default_factory=DeepSpeedSettings)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        prompts, parts = self.data.prompts_per_step, self.optimisation.mini_batches
        if prompts % parts:
            raise ConfigError(
                f"data.prompts_per_step ({prompts}) must be a multiple of "
                f"optimisation.mini_batches ({parts})"
            )
        if self.policy.dtype == "bfloat16" and self.deepspeed.zero_stage == 0:
            raise ConfigError(
                "policy.dtype bfloat16 needs deepspeed.zero_stage >= 1, where DeepSpeed keeps the "
                "weights and sums the gradients in float32"
            )
        # One temperature: a loss at another one than the sampler's would see ratios away from 1.
        loss = replace(self.loss, temperature=self.sampling.temperature)
        object.__setattr__(self, "loss", loss)
