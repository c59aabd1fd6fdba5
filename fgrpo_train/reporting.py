"""What a person sees of a run: progress bar, TensorBoard, the summary at the end."""

from __future__ import annotations

import json
import math
import resource
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from fgrpo_train.report_cards import duration
from fgrpo_train.report_html import write_report
from fgrpo_train.run_folder import RunFolder, write_whole
from fgrpo_train.settings import TrainConfig


class Reporter:
    """Takes the record of each step to the progress bar, metrics.jsonl and TensorBoard."""

    def __init__(self, folder: RunFolder, *, steps: int, finished: int) -> None:
        """`finished` steps are in the checkpoint that the run goes on from."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        folder.keep_steps(finished)
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=finished + 1)
        self._bar = progress_bar("training", steps, unit="step", initial=finished)

    def step(self, record: dict[str, Any]) -> None:
        """Record one step; its `completions` go to a file of their own."""
        record, samples = dict(record), record["completions"]
        del record["completions"]
        self.folder.append_completions([{"step": record["step"]} | sample for sample in samples])
        self.folder.append_metrics(record)
        self._board.add_text("completions", _as_markdown(samples), record["step"])
        for name, value in scalars(record):
            self._board.add_scalar(name, value, record["step"])
        self._bar.set_postfix_str(
            f"reward {_number(record['reward'])}  success {_number(record['success_rate'])}  "
            f"acr {_number(record['acr'])}  "
            f"{record['tokens_per_second']:.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
        self._board.close()


def progress_bar(
    title: str, total: int, *, unit: str, initial: int = 0, shown: bool = True
) -> tqdm:
    """A bar on the terminal; in a log file, at most twenty updates, ten seconds apart.

    One within another goes when it is done.
    """
    pace: dict[str, Any] = {"mininterval": 0.2}
    if not sys.stderr.isatty():
        pace = {"mininterval": 10.0, "miniters": max(1, total // 20), "maxinterval": math.inf}
    return tqdm(
        total=total,
        initial=initial,
        disable=not shown,
        leave=None,
        desc=f"{title:<18}",
        unit=unit,
        **pace,
        bar_format="{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} {unit}s "
        "[{elapsed} < {remaining}{postfix}]",
    )


def scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record with their names; nested names are joined by a slash."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", value


def _as_markdown(samples: list[dict[str, Any]]) -> str:
    """For TensorBoard; an indented block is shown as it is, whatever a completion contains."""
    parts = []
    for sample in samples:
        lines = f"{sample['prompt']}{sample['completion']}".splitlines()
        block = "".join(f"    {line}\n" for line in lines)
        parts.append(f"{sample['prompt_id']}, reward {_number(sample['reward'])}:\n\n{block}")
    return "\n".join(parts)


def _number(value: float | None) -> str:
    return "  -  " if value is None else f"{value:.3f}"


def peak_memory_bytes() -> int:
    """The most memory this process held: of its GPU if it uses one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def make_summary(
    start: dict[str, Any], end: dict[str, Any], *, steps: int, wall_seconds: float
) -> dict[str, Any]:
    """The content of summary.json; `start` and `end` are the evaluations, pass@k by str(k)."""
    return {
        "success_start": start["success"],
        "success_end": end["success"],
        "pass_at_k_start": start["pass_at_k"],
        "pass_at_k_end": end["pass_at_k"],
        "distinct_correct_start": start["distinct_correct"],
        "distinct_correct_end": end["distinct_correct"],
        "held_out_prompts": end["num_prompts"],
        "samples_per_prompt": end["samples_per_prompt"],
        "steps": steps,
        "wall_seconds": round(wall_seconds, 1),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def finish(folder: RunFolder, config: TrainConfig, summary: dict[str, Any]) -> str:
    """Write summary.json and report.html; returns the summary for the terminal."""
    write_whole(folder.summary, json.dumps(summary, indent=2) + "\n")
    write_report([folder.path], out=None)
    return terminal_summary(folder, config, summary)


def terminal_summary(folder: RunFolder, config: TrainConfig, summary: dict[str, Any]) -> str:
    """What rose, where the files are, what to try next."""
    start, end = summary["success_start"], summary["success_end"]
    verb = "rose" if end > start else "fell" if end < start else "stayed"
    run = shlex.quote(str(folder.path))
    rows = [
        f"  pass@{k:<4} {before:8.1%} {summary['pass_at_k_end'][k]:8.1%}"
        for k, before in summary["pass_at_k_start"].items()
    ]
    gamma = config.loss.focal_gamma
    compare = (
        ("plain GRPO, to compare pass@k", "--loss.focal_gamma 0")
        if gamma > 0
        else ("with the focal weight", "--loss.focal_gamma 0.5")
    )
    following = [
        ("train it longer", f"--resume {run} --steps {2 * summary['steps']}"),
        compare,
        ("compare runs on one page", f"--report {shlex.quote(str(folder.path.parent))}/*"),
        ("another order of prompts", f"--seed {config.run.seed + 1}"),
        ("every setting", "--help"),
    ]
    lines = [
        "",
        f"Success on {summary['held_out_prompts']} held-out prompts {verb} from {start:.1%} to "
        f"{end:.1%} in {summary['steps']} steps and {duration(summary['wall_seconds'])}.",
        "",
        f"  {'':9} {'before':>8} {'after':>8}",
        *rows,
        f"  {'answers':9} {summary['distinct_correct_start']:8.1f} "
        f"{summary['distinct_correct_end']:8.1f}   different right answers per prompt",
        "",
        f"Files in {folder.path}/",
        "  report.html     curves: open it in a browser",
        "  summary.json    the numbers above",
        "  metrics.jsonl   one line a step; completions.jsonl: what was written",
        f"  tensorboard/    tensorboard --logdir {shlex.quote(str(folder.path.parent))}",
        "  policy/         the trained policy, for transformers or --policy.path",
        "",
        "Next: deepspeed fgrpo_train/run.py ...",
        *(f"  {options:<{max(len(o) for _, o in following)}}   {what}"
          for what, options in following),
    ]  # fmt: skip
    return "\n".join(lines)
