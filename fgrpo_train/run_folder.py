"""The folder of a run: its name, its files, and what survives a stop.

runs/<name>/   config.yaml  metrics.jsonl  completions.jsonl  checkpoints/  tensorboard/
               summary.json  report.html  policy/          (at the end)
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fgrpo_train.config import config_yaml
from fgrpo_train.settings import ConfigError, RunSettings, TrainConfig


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, and its line-a-step record."""

    path: Path
    new: bool
    """The folder does not exist yet and must not when it is opened."""

    @classmethod
    def choose(cls, run: RunSettings, default_name: str) -> RunFolder:
        """The folder for a new run: never one that exists.

        Raises: ConfigError if a name was given and is taken.
        """
        base = Path(run.output_dir)
        if run.name is None:
            names = (f"{default_name}-{n}" if n > 1 else default_name for n in count(1))
            free = next(path for path in map(base.joinpath, names) if not path.exists())
            return cls(free, new=True)
        path = base / run.name
        if path.exists():
            raise ConfigError(
                f"{path} exists: choose another --name, or go on with it by --resume {path}"
            )
        return cls(path, new=True)

    def open(self, config: TrainConfig) -> None:
        """Make a new folder, and record the settings; `--config` reads them again.

        Raises: ConfigError if the folder cannot be made, also if somebody else just made it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=not self.new)
        except OSError as error:
            problem = f"cannot make {self.path}: {error.strerror}"
            raise ConfigError(f"{problem}; set another --name or --output_dir") from None
        write_whole(self.config, config_yaml(config))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def comparison(self) -> Path:
        return self.path / "comparison.html"

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line; what is not a finite number becomes null."""
        _append(self.metrics, [record])

    def append_completions(self, samples: list[dict[str, Any]]) -> None:
        """Add a line for each."""
        _append(self.completions, samples)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of all whole lines."""
        return _read(self.metrics)

    def read_completions(self) -> list[dict[str, Any]]:
        """The records of all whole lines."""
        return _read(self.completions)

    def keep_steps(self, steps: int) -> None:
        """Drop lines of steps that are not in the checkpoint, and half a line if there is one."""
        for path in (self.metrics, self.completions):
            kept = [json.dumps(record) for record in _read(path) if record["step"] <= steps]
            write_whole(path, "".join(line + "\n" for line in kept))


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(_finite(record), allow_nan=False) for record in records]
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # Not splitlines(): a line ends with a newline here, and only there.
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one go: a reader sees the old text or the new, never a part."""
    aside = path.with_name(f".{path.name}.aside")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        aside.replace(path)
    except OSError:
        aside.unlink()
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
