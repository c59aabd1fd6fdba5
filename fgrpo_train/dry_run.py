"""`--dry-run`: what a run would need of memory and time, before anything is loaded.

Every figure is an estimate from the model's configuration, the settings and the assumptions that
are printed with it. It is there to find what cannot fit, and which phase will dominate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fgrpo_kernels.linear_head import DEVICE_CHUNK_BYTES
from fgrpo_train.config import deepspeed_config
from fgrpo_train.model_shape import ModelShape
from fgrpo_train.settings import ConfigError, TrainConfig

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes; dense bf16 FLOP/s and memory bytes/s as in the vendor's data sheet."""

    memory: float
    flops: float
    bandwidth: float


GPUS = {
    "A100": Gpu(80 * GIB, 312e12, 2.0e12),
    "H100": Gpu(80 * GIB, 989e12, 3.35e12),
    "H200": Gpu(141e9, 989e12, 4.8e12),
    "B200": Gpu(180e9, 2250e12, 8.0e12),
    "MI300X": Gpu(192e9, 1307e12, 5.3e12),
}
UPDATE_EFFICIENCY = 0.4
DECODE_EFFICIENCY = 0.6
LENGTH_SHARE = 0.4
OVERHEAD = 4 * GIB
FETCHED_PARAMETERS = 1e9
SYNC_BANDWIDTH = 50e9
ASSUMPTIONS = (
    f"completions are {LENGTH_SHARE:.0%} of sampling.max_new_tokens long on average, one is as "
    "long as allowed; prompts half of data.max_prompt_tokens",
    f"forward and backward run at {UPDATE_EFFICIENCY:.0%} of the GPU's bf16 peak, decoding at "
    f"{DECODE_EFFICIENCY:.0%} of its bandwidth",
    f"{OVERHEAD / GIB:.0f} GiB a GPU for CUDA, NCCL, the allocator's losses and vLLM's graphs",
    f"ZeRO-3 holds up to {FETCHED_PARAMETERS:.0e} gathered parameters (DeepSpeed's default)",
    f"weights travel at {SYNC_BANDWIDTH / 1e9:.0f} GB/s to the sampler and from host memory",
    "attention keeps nothing quadratic in the length (flash or memory-efficient kernels)",
    "every sequence is trained on; those without advantage are skipped, so it is an upper bound",
)


@dataclass(frozen=True)
class Plan:
    """Bytes of one GPU by part and phase, bytes of a host, and seconds of a step by phase."""

    update: dict[str, float]
    rollout: dict[str, float]
    host: dict[str, float]
    seconds: dict[str, float]
    problems: list[str]


def parse_gpus(text: str) -> tuple[int, str]:
    """`8xH100` -> (8, "H100"); "auto" -> this machine's GPUs, or 8xH100 on a machine without.

    Raises: ConfigError for another form or an unknown GPU.
    """
    if text == "auto":
        if not torch.cuda.is_available():
            return 8, "H100"
        name = torch.cuda.get_device_name()
        known = next((gpu for gpu in GPUS if gpu in name), None)
        if known is None:
            raise ConfigError(f"--dry-run: {name} is not known: give NxGPU, e.g. 8xH100")
        return torch.cuda.device_count(), known
    match = re.fullmatch(r"(\d+)x(\w+)", text)
    if match is None or int(match[1]) < 1 or match[2] not in GPUS:
        raise ConfigError(f"--dry-run: expected NxGPU with one of {', '.join(GPUS)}, got {text!r}")
    return int(match[1]), match[2]


def make_plan(config: TrainConfig, shape: ModelShape, *, num_gpus: int, gpu: Gpu) -> Plan:
    """The estimate for a run on `num_gpus` GPUs in all."""
    separate = config.engine.kind == "vllm" and config.engine.placement == "separate"
    if separate and num_gpus < 2:
        raise ConfigError("engine.placement separate needs at least 2 GPUs: one of them samples")
    trainers = num_gpus // 2 if separate else num_gpus
    state, host = training_state(config, shape, trainers)
    update = state | working_memory(config, shape, trainers)
    rollout = sampling_memory(config, shape, gpu) | ({} if separate else state)
    seconds = step_seconds(config, shape, trainers=trainers, gpu=gpu)
    plan = Plan(update, rollout, host, seconds, problems=[])
    plan.problems.extend(problems(config, plan, gpu, cache_tokens(config, shape, gpu)))
    return plan


def training_state(
    config: TrainConfig, shape: ModelShape, trainers: int
) -> tuple[dict[str, float], dict[str, float]]:
    """What DeepSpeed holds all the time: bytes of each GPU, and of the host for each GPU.

    Sharded over the GPUs: optimizer states from stage 1 on, gradients from 2, weights in 3
    (Rajbhandari et al. 2020, 1910.02054, section 5).
    """
    parameters, stage = shape.num_parameters, config.deepspeed.zero_stage
    half = config.policy.dtype == "bfloat16"
    weights = parameters * (2 if half else 4) / (trainers if stage == 3 else 1)
    gradients = parameters * (2 if half else 4) / (trainers if stage >= 2 else 1)
    optimizer = parameters * (12 if half else 8) / (trainers if stage >= 1 else 1)
    parts = {"weights": weights, "gradients": gradients, "optimizer (AdamW)": optimizer}
    if config.loss.kl_coef > 0:
        parts["reference policy"] = weights
    offloaded = {"none": (), "optimizer": ("optimizer (AdamW)", "gradients"), "all": tuple(parts)}
    moved = offloaded[config.deepspeed.offload]
    host = {name: parts.pop(name) for name in moved}
    if config.engine.kind == "vllm" and config.engine.placement == "colocated":
        host["sleeping sampler's weights"] = parameters * 2.0
    return parts, host


def working_memory(config: TrainConfig, shape: ModelShape, trainers: int) -> dict[str, float]:
    """What an update needs on top: activations of one micro-batch, the head, gathered weights."""
    element = 2 if config.policy.dtype == "bfloat16" else 4
    tokens = micro_batch_tokens(config, trainers)
    kept_layers = 1 if config.policy.activation_checkpointing else shape.num_layers
    activations = tokens * element * shape.activation_elements * kept_layers
    if config.policy.activation_checkpointing:
        activations += tokens * element * shape.hidden_size * shape.num_layers
    chunk = config.loss.max_chunk_bytes or DEVICE_CHUNK_BYTES
    # The head's gradient is summed in fp32; hidden states and their gradient besides.
    head = chunk + 4.0 * shape.head_parameters + 2 * tokens * element * shape.hidden_size
    parts = {"activations": float(activations), "loss head": head}
    if config.deepspeed.zero_stage == 3:
        parts["gathered weights"] = min(shape.num_parameters, FETCHED_PARAMETERS) * element
    return parts


def micro_batch_tokens(config: TrainConfig, trainers: int) -> float:
    """Tokens that one forward sees at most."""
    longest = prompt_tokens(config) + config.sampling.max_new_tokens
    sequences = config.data.prompts_per_step * config.sampling.group_size
    whole = longest * sequences / (config.optimisation.mini_batches * trainers)
    budget = config.optimisation.tokens_per_micro_batch
    return whole if budget is None else min(whole, max(budget, longest))


def prompt_tokens(config: TrainConfig) -> int:
    """The longest prompt; a short one where there is no limit."""
    return config.data.max_prompt_tokens or 64


def sampling_memory(config: TrainConfig, shape: ModelShape, gpu: Gpu) -> dict[str, float]:
    """What the sampler holds while it samples."""
    if config.engine.kind == "vllm":
        return {"sampler (engine.memory_share)": config.engine.memory_share * gpu.memory}
    element = 2 if config.policy.dtype == "bfloat16" else 4
    return {"sampler's copy of the policy": float(shape.num_parameters * element)}


def cache_tokens(config: TrainConfig, shape: ModelShape, gpu: Gpu) -> float:
    """Tokens whose keys and values fit beside the sampler's weights."""
    if config.engine.kind != "vllm":
        return float("inf")
    room = config.engine.memory_share * gpu.memory - 2.0 * shape.num_parameters
    return max(room, 0.0) / shape.cache_bytes()


def step_seconds(
    config: TrainConfig, shape: ModelShape, *, trainers: int, gpu: Gpu
) -> dict[str, float]:
    """A step by phase; the sampler has as many GPUs as the trainer."""
    prompt, longest = prompt_tokens(config) / 2, config.sampling.max_new_tokens
    length = LENGTH_SHARE * longest
    sequences = config.data.prompts_per_step * config.sampling.group_size
    tokens = sequences * (prompt + length) / trainers
    running = min(sequences / trainers, cache_tokens(config, shape, gpu) / (prompt + length))
    waves = sequences / trainers / max(running, 1.0)
    bandwidth = gpu.bandwidth * DECODE_EFFICIENCY
    # Each decoding step reads the weights once, and every sequence its own cache.
    reads = waves * longest * 2.0 * shape.num_parameters
    reads += sequences / trainers * length * (prompt + length / 2) * shape.cache_bytes()
    forward = tokens * shape.forward_flops(context=(prompt + length) / 2)
    rate = gpu.flops * UPDATE_EFFICIENCY
    parts = config.optimisation.mini_batches
    seconds = {
        "rollout": reads / bandwidth + forward / rate,
        "old log-probs": forward * (parts - 1) / parts / rate,
        "forward and backward": forward * (3 + config.policy.activation_checkpointing) / rate,
        "weights to the sampler": 2.0 * shape.num_parameters / SYNC_BANDWIDTH,
    }
    if config.loss.kl_coef > 0:
        seconds["reference log-probs"] = forward / rate
    if config.deepspeed.offload != "none":
        seconds["optimizer on the host"] = (
            parts * 4.0 * shape.num_parameters / trainers / SYNC_BANDWIDTH
        )
    return seconds


def problems(config: TrainConfig, plan: Plan, gpu: Gpu, room: float) -> list[str]:
    """What will not fit, each with what helps."""
    found = []
    helps = _what_helps(config)
    for phase, parts in (("update", plan.update), ("rollout", plan.rollout)):
        need = sum(parts.values()) + OVERHEAD
        if need > gpu.memory:
            found.append(
                f"{phase}: needs {need / GIB:.0f} of {gpu.memory / GIB:.0f} GiB a GPU; "
                f"{helps[phase]}"
            )
    longest = prompt_tokens(config) + config.sampling.max_new_tokens
    if room < longest:
        found.append(
            f"rollout: room for {room:.0f} tokens beside the sampler's weights, one sequence has "
            f"up to {longest}; raise engine.memory_share"
        )
    return found


def _what_helps(config: TrainConfig) -> dict[str, str]:
    options = []
    if config.policy.dtype == "float32":
        options.append("--policy.dtype bfloat16")
    if not config.policy.activation_checkpointing:
        options.append("--policy.activation_checkpointing true")
    if config.deepspeed.zero_stage < 3:
        options.append("--deepspeed.zero_stage 3")
    options.append("a smaller --optimisation.tokens_per_micro_batch")
    if config.deepspeed.offload == "none":
        options.append("--deepspeed.offload optimizer")
    update = "try " + ", ".join(options) + ", or more GPUs"
    if config.engine.kind == "vllm":
        return {"update": update, "rollout": "try a smaller --engine.memory_share, or " + update}
    return {"update": update, "rollout": update}


def render_plan(config: TrainConfig, plan: Plan, *, num_gpus: int, name: str) -> str:
    """The plan as text: DeepSpeed's dict, memory, time, assumptions, verdict."""
    sequences = config.data.prompts_per_step * config.sampling.group_size
    total = sum(plan.seconds.values())
    lines = [
        f"{config.policy.path} on {num_gpus}x{name}: a step is {sequences} completions of up to "
        f"{config.sampling.max_new_tokens} tokens. Estimates, not measurements.",
        "",
        f"GiB of each GPU, of {GPUS[name].memory / GIB:.0f}",
        *_memory_rows("update", plan.update),
        *_memory_rows("rollout", plan.rollout),
        "",
        "GiB of host memory for each GPU",
        *_rows(plan.host, GIB),
        "",
        f"Seconds of a step, about {total:.0f}; {config.run.steps} steps in about "
        f"{total * config.run.steps / 3600:.1f} hours",
        *_rows(plan.seconds, 1.0),
        "",
        "Assumed",
        *(f"  {text}" for text in ASSUMPTIONS),
        "",
        "DeepSpeed's settings",
        json.dumps(deepspeed_config(config), indent=2),
        "",
        *([f"Will not fit. {problem}" for problem in plan.problems] or ["It fits."]),
    ]
    return "\n".join(lines)


def _memory_rows(phase: str, parts: dict[str, float]) -> Sequence[str]:
    need = sum(parts.values()) + OVERHEAD
    return [f"  {phase:<34} {need / GIB:8.1f}", *(f"  {row}" for row in _rows(parts, GIB))]


def _rows(parts: dict[str, float], unit: float) -> list[str]:
    rows = [f"  {name:<32} {value / unit:8.1f}" for name, value in parts.items()]
    return rows or ["  none"]


def dry_run(config: TrainConfig, gpus: str) -> tuple[str, bool]:
    """The text to print, and whether everything fits."""
    num_gpus, name = parse_gpus(gpus)
    plan = make_plan(config, ModelShape.of(config.policy.path), num_gpus=num_gpus, gpu=GPUS[name])
    return render_plan(config, plan, num_gpus=num_gpus, name=name), not plan.problems
