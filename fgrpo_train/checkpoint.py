"""Checkpoints on disk: written aside, flushed, then renamed, so that one is either whole or absent.

    runs/<name>/checkpoints/step-000012/   config.json, model.safetensors      for transformers
                                           optimizer.safetensors, learner.json  to go on
                                           trainer.json                         of the loop

Large files come in numbered parts. All of it is tensors and JSON: nothing is unpickled.

A process may be killed at any moment: what is on disk is then the state after the last finished
step, and at most half a folder whose name starts with a dot, which the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEEP = 2


def save_checkpoint(
    folder: Path,
    step: int,
    write_state: Callable[[Path | None], None],
    progress: dict[str, Any] | None,
) -> None:
    """Save the state after `step` steps, and keep the last two; every process calls it.

    Args:
        folder: the run's `checkpoints` folder; made if missing.
        step: number of finished steps.
        write_state: writes the learner's files into the folder it is given; None: only take part.
        progress: what the trainer needs besides, as JSON; None for the processes that do not write.
    """
    if progress is None:
        write_state(None)
        return
    aside = folder / ".aside"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_state(aside)
    (aside / "trainer.json").write_text(json.dumps({"step": step} | progress))
    for path in [*aside.iterdir(), aside]:
        _flush(path)
    aside.rename(folder / f"step-{step:06d}")
    _flush(folder)
    for old in _finished(folder)[:-KEEP]:
        shutil.rmtree(old)


def latest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and its progress record, or None if no step was finished."""
    finished = _finished(folder)
    if not finished:
        return None
    return finished[-1], json.loads((finished[-1] / "trainer.json").read_text())


def _finished(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
