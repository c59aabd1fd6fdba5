"""The settings of a run: typed records, YAML files, and DeepSpeed's dict.

A setting is named `section.key` everywhere: `loss: {focal_gamma: 1.0}` in a YAML file is
`--loss.focal_gamma 1.0` on the command line. The command line wins over the file, the file over the
defaults below.

Every mistake is a `ConfigError` whose text is one line that names the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from fgrpo_kernels.config import PolicyLossConfig

PACKAGE = Path(__file__).parent
_OF_THE_MODEL = "it belongs to the policy's architecture, which this trainer reads as it is"
_NO_REFERENCE = "this trainer keeps no reference policy, so there is no KL term"
NOT_A_SETTING = {
    "loss.temperature": "set sampling.temperature, which the loss uses too",
    "loss.logit_scale": _OF_THE_MODEL,
    "loss.logit_softcap": _OF_THE_MODEL,
    "loss.kl_coef": _NO_REFERENCE,
    "loss.kl_estimator": _NO_REFERENCE,
}
"""Fields of PolicyLossConfig that are not settings of a run, and why."""


class ConfigError(ValueError):
    """What a person got wrong, in one line that names the fix."""


def _require(name: str, ok: bool, expected: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The policy that training starts from."""

    path: str = "tiny-countdown"
    """A folder with a transformers model and its tokenizer, or the name of a shipped policy."""


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

    def __post_init__(self) -> None:
        _require("optimisation.learning_rate", self.learning_rate > 0, "> 0", self.learning_rate)
        _require(
            "optimisation.warmup_updates", self.warmup_updates >= 0, ">= 0", self.warmup_updates
        )
        _require("optimisation.weight_decay", self.weight_decay >= 0, ">= 0", self.weight_decay)
        _require("optimisation.max_grad_norm", self.max_grad_norm >= 0, ">= 0", self.max_grad_norm)
        _require("optimisation.mini_batches", self.mini_batches >= 1, ">= 1", self.mini_batches)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The held-out prompts, before and after training, with the same seed in every run."""

    samples_per_prompt: int = 32
    """Completions of each held-out prompt; pass@k is estimated for k = 1, 2, 4, ... up to it."""

    max_prompts: int | None = None
    """Evaluate the first so many held-out prompts only; none: all."""

    def __post_init__(self) -> None:
        samples = self.samples_per_prompt
        _require("evaluation.samples_per_prompt", samples >= 1, ">= 1", samples)
        limit = self.max_prompts
        _require("evaluation.max_prompts", limit is None or limit >= 1, "none or >= 1", limit)

    @property
    def ks(self) -> list[int]:
        """1, 2, 4, ... up to samples_per_prompt."""
        return [2**n for n in range(self.samples_per_prompt.bit_length())]


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
    optimisation: OptimisationSettings = field(default_factory=OptimisationSettings)
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
        # One temperature: a loss at another one than the sampler's would see ratios away from 1.
        loss = replace(self.loss, temperature=self.sampling.temperature)
        object.__setattr__(self, "loss", loss)


SECTIONS: dict[str, type] = get_type_hints(TrainConfig)


def setting_names() -> list[str]:
    """All `section.key` names."""
    names = [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in fields(cls)]
    return [name for name in names if name not in NOT_A_SETTING]


def build(values: Mapping[str, Any]) -> TrainConfig:
    """The config with the given settings, `values` being {"section.key": value or its text}."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        if name in NOT_A_SETTING:
            raise ConfigError(f"{name} is not a setting: {NOT_A_SETTING[name]}")
        if name not in setting_names():
            raise ConfigError(f"unknown key {name}{did_you_mean(name, setting_names())}")
        section, key = name.split(".", 1)
        sections[section][key] = _typed(name, get_type_hints(SECTIONS[section])[key], value)
    return TrainConfig(**{name: _section(name, kwargs) for name, kwargs in sections.items()})


def _typed(name: str, annotation: Any, value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("none", "null"):
        value = None
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Input should be ").split(",")[0]
        raise ConfigError(f"{name}: expected {problem}, got {value!r}") from None


def _section(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        return SECTIONS[name](**kwargs)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; --help lists all of them"


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a YAML file as {"section.key": value}."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first_line = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {first_line}") from None
    values: dict[str, Any] = {}
    for section, content in _mapping(document, f"{path}").items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{path}: unknown section {section}{did_you_mean(str(section), list(SECTIONS))}"
            )
        for key, value in _mapping(content, f"{path}: {section}").items():
            values[f"{section}.{key}"] = value
    return values


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected keys with values, got {value!r}")
    return value


def find_config(name: str) -> Path:
    """A YAML file by its path, or a shipped one by its name."""
    shipped = {path.stem: path for path in sorted((PACKAGE / "configs").glob("*.yaml"))}
    if name in shipped:
        return shipped[name]
    if not Path(name).is_file():
        raise ConfigError(f"no config file {name}; shipped: {', '.join(shipped)}")
    return Path(name)


def find_policy(name: str) -> Path:
    """A policy's folder by its path, or a shipped one by its name."""
    for folder in (Path(name), PACKAGE / "assets" / name):
        if (folder / "config.json").is_file():
            return folder
    shipped = sorted(path.parent.name for path in (PACKAGE / "assets").glob("*/config.json"))
    raise ConfigError(
        f"policy.path: no transformers model in {name} (no config.json); "
        f"shipped: {', '.join(shipped)}"
    )


def config_yaml(config: TrainConfig) -> str:
    """All settings as YAML, so that a run can be repeated by `--config runs/<name>/config.yaml`."""
    document = asdict(config)
    for name in NOT_A_SETTING:
        section, key = name.split(".")
        del document[section][key]
    return yaml.safe_dump(document, sort_keys=False)


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`: fp32, AdamW of torch, clipping, no sharding.

    One backward per update. The batch size only labels DeepSpeed's own counters: the loss is
    already divided by the global denominators, so the learner asks for no scaling.
    """
    optimisation = config.optimisation
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimisation.max_grad_norm,
        "zero_optimization": {"stage": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimisation.learning_rate,
                "weight_decay": optimisation.weight_decay,
                "torch_adam": True,
            },
        },
    }
