"""The settings of a run from YAML files and the command line, and DeepSpeed's dict.

A setting is named `section.key` everywhere: `loss: {focal_gamma: 1.0}` in a YAML file is
`--loss.focal_gamma 1.0` on the command line. The command line wins over the file, the file over the
defaults below.

Every mistake is a `ConfigError` whose text is one line that names the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from fgrpo_train.settings import ConfigError, TrainConfig

PACKAGE = Path(__file__).parent
_OF_THE_MODEL = "it belongs to the policy's architecture, which this trainer reads as it is"
NOT_A_SETTING = {
    "loss.temperature": "set sampling.temperature, which the loss uses too",
    "loss.logit_scale": _OF_THE_MODEL,
    "loss.logit_softcap": _OF_THE_MODEL,
}
"""Fields of PolicyLossConfig that are not settings of a run, and why."""


SECTIONS: dict[str, type] = get_type_hints(TrainConfig)


def setting_names() -> list[str]:
    """All `section.key` names."""
    names = [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in fields(cls)]
    return [name for name in names if name not in NOT_A_SETTING]


def build(values: Mapping[str, Any]) -> TrainConfig:
    """The config with the given settings, `values` being {"section.key": value or its text}.

    With vLLM, whose log-probs are never quite the trainer's, the rollout correction is on.
    """
    if values.get("engine.kind") == "vllm":
        values = {"loss.rollout_correction": "truncate"} | dict(values)
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
        value = None if type(None) in get_args(annotation) else value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Input should be ")
        problem = problem.split(", unable to")[0]
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


def read_yaml(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings of a YAML file as {"section.key": value}.

    `extends: NAME` takes those of another file first, a path or a shipped name; `children` are the
    files that extend this one.
    """
    if path.resolve() in children:
        raise ConfigError(f"{path}: extends itself")
    document = _mapping(_load_yaml(path), f"{path}")
    parent = document.pop("extends", None)
    values: dict[str, Any] = {}
    if parent is not None:
        values = read_yaml(_find_parent(path, str(parent)), (*children, path.resolve()))
    for section, content in document.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{path}: unknown section {section}{did_you_mean(str(section), list(SECTIONS))}"
            )
        for key, value in _mapping(content, f"{path}: {section}").items():
            values[f"{section}.{key}"] = value
    return values


def _find_parent(path: Path, parent: str) -> Path:
    """A relative path is looked for beside the file that names it."""
    beside = path.parent / parent
    return beside if beside.is_file() else find_config(parent)


def _load_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first_line = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {first_line}") from None


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
    """The dict for `deepspeed.initialize`: dtype, ZeRO, offload, torch's AdamW, clipping.

    The learner tells the engine which backward is the last of an update. The batch size only labels
    DeepSpeed's own counters: the loss is already divided by the global denominators, so the learner
    asks for no scaling. torch's fused AdamW runs on GPUs and, for offloaded states, on CPUs, where
    DeepSpeed's own would be compiled first.
    """
    optimisation = config.optimisation
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimisation.max_grad_norm,
        "zero_optimization": {"stage": config.deepspeed.zero_stage},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimisation.learning_rate,
                "weight_decay": optimisation.weight_decay,
                "torch_adam": True,
                "fused": True,
            },
        },
    }
    if config.policy.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    host = {"device": "cpu", "pin_memory": True}
    if config.deepspeed.offload != "none":
        settings["zero_optimization"]["offload_optimizer"] = host
    if config.deepspeed.offload == "all":
        settings["zero_optimization"]["offload_param"] = host
    return settings
