"""The files of an evaluation of one policy, and what survives a stop.

fingerprint.json   what was sampled, how, and by which weights
samples.jsonl      one line for each prompt of each finished chunk
result.json        pass@k with intervals        (at the end)
passk.svg          the same as a curve          (at the end)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fgrpo_train.evaluation import Chunk, Counts
from fgrpo_train.prompts import Prompt
from fgrpo_train.run_folder import write_whole
from fgrpo_train.settings import ConfigError

Fingerprint = dict[str, Any]
"""Everything that the counts depend on; settings under their own names."""


@dataclass(frozen=True)
class EvaluationFolder:
    """Paths of an evaluation, and its record of finished chunks."""

    path: Path

    @property
    def label(self) -> str:
        """run/step of a run's evaluation, else the folder's name."""
        run = self.path.resolve().parent.parent
        of_run = (run / "config.yaml").is_file()
        return f"{run.name}/{self.path.name}" if of_run else self.path.resolve().name

    @property
    def fingerprint(self) -> Path:
        return self.path / "fingerprint.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def plot(self) -> Path:
        return self.path / "passk.svg"

    def check(self, fingerprint: Fingerprint) -> None:
        """Raises: ConfigError if the folder holds samples of something else than these entries."""
        if not self.fingerprint.exists():
            return
        held = self.read_fingerprint()
        held = {name: held.get(name) for name in fingerprint}
        for name, (old, new) in differences(held, fingerprint).items():
            raise ConfigError(
                f"{self.path} holds samples with {name} = {old}, now it is {new}: "
                f"{_way_back(name, old)}, or move that folder away to begin again"
            )

    def open(self, fingerprint: Fingerprint, chunks: Sequence[Chunk]) -> int:
        """Make the folder, or take up where it stopped; returns how many chunks it holds.

        Kept are the lines of the first chunks of the plan, up to one that is not whole: half a
        line, or half of its prompts.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.path}: {error.strerror}") from None
        self.check(fingerprint)
        write_whole(self.fingerprint, json.dumps(fingerprint, indent=2) + "\n")
        recorded, kept, finished = self.read_counts(), 0, 0
        for chunk in chunks:
            part = recorded[kept : kept + len(chunk.prompts)]
            planned = [(prompt.id, chunk.samples, (chunk.seed,)) for prompt in chunk.prompts]
            if [(c.prompt_id, c.samples, c.seeds) for c in part] != planned:
                break
            kept, finished = kept + len(part), finished + 1
        write_whole(self.samples, "".join(map(_line, recorded[:kept])))
        return finished

    def append(self, counts: Sequence[Counts]) -> None:
        """Add the lines of one finished chunk."""
        with self.samples.open("a") as file:
            file.write("".join(map(_line, counts)))
            file.flush()
            os.fsync(file.fileno())

    def read_fingerprint(self) -> Fingerprint:
        """Raises: ConfigError if this is no evaluation."""
        try:
            return json.loads(self.fingerprint.read_text())
        except (OSError, ValueError):
            raise ConfigError(
                f"no evaluation in {self.path} (cannot read its fingerprint.json)"
            ) from None

    def read_counts(self) -> list[Counts]:
        """The whole lines from the first on."""
        counts: list[Counts] = []
        if self.samples.exists():
            for line in self.samples.read_text(errors="replace").splitlines(keepends=True):
                try:
                    record = json.loads(line)
                except ValueError:
                    break
                if not line.endswith("\n"):
                    break
                counts.append(
                    Counts(
                        record["prompt"],
                        record["samples"],
                        record["correct"],
                        tuple(record["distinct"]),
                        tuple(record["seeds"]),
                    )
                )
        return counts


def differences(first: Fingerprint, second: Fingerprint) -> dict[str, tuple[Any, Any]]:
    """What differs, with both values."""
    values = {name: (first.get(name), second.get(name)) for name in first | second}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """The ids, texts and verifier's data of the prompts, in order."""
    rows = [[p.id, p.text, p.metadata] for p in prompts]
    text = json.dumps(rows, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_digest(model: torch.nn.Module) -> str:
    """The names, dtypes, shapes and values of the model's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _way_back(name: str, old: Any) -> str:
    if name == "weights":
        return "evaluate the policy that it belongs to"
    return f"go on with --{name} {old}" if "." in name else "go back to what it was"


def _line(counts: Counts) -> str:
    record = {"prompt": counts.prompt_id} | asdict(counts)
    del record["prompt_id"]
    return json.dumps(record) + "\n"
