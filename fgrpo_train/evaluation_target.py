"""What `--evaluate PATH` may name, and the settings that belong to it.

runs/x                            its policy as it is now: policy/, or the newest checkpoint
runs/x/checkpoints/step-000012    one of its checkpoints
a folder with config.json         a policy in the transformers format
tiny-countdown                    a shipped policy
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgrpo_train.checkpoint import latest_checkpoint
from fgrpo_train.config import find_policy, read_yaml
from fgrpo_train.run_folder import RunFolder
from fgrpo_train.settings import ConfigError, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Target:
    """A policy to evaluate.

    name: of its evaluation's folder.
    policy: folder with architecture and tokenizer, and the weights if checkpoint is None.
    checkpoint: folder with the weights of a run under way.
    run: folder of the run it belongs to.
    """

    name: str
    policy: Path
    checkpoint: Path | None = None
    run: Path | None = None

    @property
    def label(self) -> str:
        return f"{self.run.resolve().name}/{self.name}" if self.run else self.name

    def settings(self) -> dict[str, Any] | None:
        """Those of its run; None if it belongs to none."""
        return read_yaml(RunFolder(self.run, new=False).config) if self.run else None

    def folder(self, output_dir: str) -> Path:
        """Where its evaluation lies."""
        return (self.run or Path(output_dir)) / "evaluation" / self.name

    def load(self, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model, in the precision that it is trained in (policy.dtype), and tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        weights = self.checkpoint or self.policy
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(self.policy)


@dataclass(frozen=True)
class Evaluation:
    """A policy, and the settings to evaluate it with."""

    target: Target
    config: TrainConfig


def find_target(name: str) -> Target:
    """The policy that a path or a name stands for.

    Raises: ConfigError if there is none.
    """
    path = Path(name)
    if (path / "trainer.json").is_file():
        return _checkpoint(path, path.resolve().parent.parent)
    if path.resolve().name == "policy" and (path.resolve().parent / "config.yaml").is_file():
        return _trained(path.resolve().parent)
    if (path / "config.yaml").is_file():
        return _of_run(path)
    try:
        folder = find_policy(name)
    except ConfigError as error:
        raise ConfigError(
            f"--evaluate: {name} is no run (config.yaml), no checkpoint (trainer.json) and no "
            f"policy (config.json); {str(error).rpartition('; ')[2]}"
        ) from None
    return Target(folder.resolve().name, folder)


def _of_run(run: Path) -> Target:
    """The trained policy unless the run has gone on since."""
    folder = RunFolder(run, new=False)
    newest = latest_checkpoint(folder.checkpoints)
    if folder.summary.is_file() and (folder.policy / "config.json").is_file():
        trained = _trained(run)
        if newest is None or trained.name == newest[0].name:
            return trained
    if newest is None:
        raise ConfigError(f"--evaluate: {run} has no finished step yet, so no policy of its own")
    return _checkpoint(newest[0], run)


def _trained(run: Path) -> Target:
    """policy/ of a finished run, named after its last step as the checkpoint of that step is."""
    folder = RunFolder(run, new=False)
    if not folder.summary.is_file():
        raise ConfigError(f"--evaluate: {run} is not finished (no summary.json): give {run} itself")
    steps = json.loads(folder.summary.read_text())["steps"]
    return Target(f"step-{steps:06d}", folder.policy, run=run)


def _checkpoint(path: Path, run: Path) -> Target:
    folder = RunFolder(run, new=False)
    if not folder.config.is_file():
        raise ConfigError(
            f"--evaluate: {path} does not lie in a run ({folder.config} is missing), so its "
            f"architecture is not known"
        )
    base = find_policy(read_yaml(folder.config)["policy.path"])
    return Target(path.resolve().name, base, checkpoint=path, run=run)
