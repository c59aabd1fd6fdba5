"""What a run left in its folder, for a report: whole, still going, or stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from fgrpo_train.checkpoint import latest_checkpoint
from fgrpo_train.run_folder import RunFolder
from fgrpo_train.settings import ConfigError

PassAtK = dict[int, float]


@dataclass(frozen=True)
class Evaluation:
    """pass@k of one evaluation, with the confidence intervals it came with."""

    pass_at_k: PassAtK
    intervals: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class RunRecord:
    """A run as a report sees it; whatever is missing is empty or None."""

    name: str
    settings: dict[str, Any]
    """{"section.key": value} of its config.yaml."""
    records: list[dict[str, Any]]
    completions: list[dict[str, Any]]
    summary: dict[str, Any]
    before: PassAtK
    after: PassAtK
    evaluations: dict[str, Evaluation]
    """By the name of their folder under evaluation/."""
    last_change: str
    """When metrics.jsonl was written last, UTC."""

    @property
    def steps_done(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    @property
    def steps_planned(self) -> int | None:
        return self.settings.get("run.steps")

    @property
    def finished(self) -> bool:
        """It has its summary, and was not continued after it."""
        return bool(self.summary) and self.summary["steps"] >= (self.steps_planned or 0)


def load_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, with names that tell them apart.

    Raises: ConfigError if a folder is no run, is given twice, or a file in it cannot be read.
    """
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if resolved.count(path.resolve()) > 1:
            raise ConfigError(f"--report: {path} is given twice")
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        shared = os.path.commonpath(resolved)
        runs = [
            replace(run, name=os.path.relpath(path, shared))
            for run, path in zip(runs, resolved, strict=True)
        ]
    return runs


def load_run(path: Path) -> RunRecord:
    """The run in this folder.

    Raises: ConfigError if it is no run, or a file in it cannot be read.
    """
    folder = RunFolder(path, new=False)
    if not folder.config.is_file():
        raise ConfigError(f"--report: no run in {path} (it has no config.yaml)")
    try:
        summary = json.loads(folder.summary.read_text()) if folder.summary.exists() else {}
        before = summary.get("pass_at_k_start") or _before_of_checkpoint(folder)
        return RunRecord(
            name=path.resolve().name,
            settings=_settings(folder.config),
            records=folder.read_metrics(),
            completions=folder.read_completions(),
            summary=summary,
            before=_by_k(before),
            after=_by_k(summary.get("pass_at_k_end")),
            evaluations=_evaluations(path / "evaluation"),
            last_change=_last_change(folder.metrics),
        )
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--report: cannot read the run in {path}: {reason}") from None


def _settings(path: Path) -> dict[str, Any]:
    """As they stand: a run of an older version may have settings that are none today."""
    document = yaml.safe_load(path.read_text()) or {}
    return {
        f"{section}.{key}": value
        for section, content in document.items()
        for key, value in (content or {}).items()
    }


def _before_of_checkpoint(folder: RunFolder) -> dict[str, float]:
    """The evaluation before training, from a run that has no summary yet."""
    try:
        checkpoint = latest_checkpoint(folder.checkpoints)
    except FileNotFoundError:  # the run is going on and just replaced it
        return {}
    return checkpoint[1].get("before", {}).get("pass_at_k", {}) if checkpoint else {}


def _by_k(pass_at_k: dict[str, float] | None) -> PassAtK:
    return {int(k): float(value) for k, value in (pass_at_k or {}).items() if value is not None}


def _evaluations(folder: Path) -> dict[str, Evaluation]:
    evaluations = {}
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text())
        pass_at_k = _by_k(result.get("pass_at_k"))
        if pass_at_k:
            intervals = _intervals(result.get("interval"), min(pass_at_k))
            evaluations[path.parent.name] = Evaluation(pass_at_k, intervals)
    return evaluations


def _intervals(value: Any, smallest_k: int) -> dict[int, tuple[float, float]]:
    """{k: [low, high]}, or one [low, high] that is of the smallest k."""
    if isinstance(value, list) and len(value) == 2:
        value = {smallest_k: value}
    if not isinstance(value, dict):
        return {}
    return {int(k): (float(low), float(high)) for k, (low, high) in value.items()}


def _last_change(path: Path) -> str:
    if not path.exists():
        return ""
    changed = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return f"{changed:%Y-%m-%d %H:%M} UTC"
