"""The command line: an option for every setting, and `--help` that teaches them.

Every setting is `--section.key VALUE`; those of the `run` section also have a short form
(`--steps 50`).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from fgrpo_train.config import (
    NOT_A_SETTING,
    SECTIONS,
    build,
    did_you_mean,
    find_config,
    read_yaml,
)
from fgrpo_train.evaluation_target import Evaluation, find_target
from fgrpo_train.settings import ConfigError, TrainConfig

DEFAULT_CONFIG = "tiny-cpu"

DESCRIPTION = """\
Train a policy with F-GRPO on tasks whose answers a program can check.

One step: draw prompts, sample a group of completions for each, score them right or wrong,
turn a group's scores into advantages, weight every prompt by (1 - success rate)^gamma, and
update the policy. Without options a small policy learns the countdown game on the CPU: reach
a target with three numbers, + and -. Everything it writes lies in runs/<name>/.
"""

EXAMPLES = """\
examples:
  deepspeed fgrpo_train/run.py                            the default job
  deepspeed fgrpo_train/run.py --steps 50 --seed 1        shorter, other prompts
  deepspeed fgrpo_train/run.py --loss.focal_gamma 0       plain GRPO, to compare pass@k
  deepspeed fgrpo_train/run.py --config my.yaml           settings from a file
  deepspeed fgrpo_train/run.py --resume runs/tiny-cpu     go on after a stop
  deepspeed fgrpo_train/run.py --resume runs/tiny-cpu --steps 240      train it longer
  python fgrpo_train/run.py                               one process, without the launcher
  python fgrpo_train/run.py --evaluate runs/tiny-cpu      pass@1 ... pass@256 with intervals
  python fgrpo_train/run.py --evaluate tiny-countdown runs/tiny-cpu    two policies compared
  python fgrpo_train/run.py --report runs/a runs/b        one page that compares runs

Stop a run or an evaluation with Ctrl-C at any time: what is finished is kept.
"""


@dataclass(frozen=True)
class Command:
    """What the command line asked for."""

    config: TrainConfig
    default_name: str
    resume: Path | None
    evaluations: tuple[Evaluation, ...] = ()
    """Policies to evaluate instead of training."""
    compare: tuple[Path, ...] = ()
    """Folders of two evaluations to compare instead of training."""


@dataclass(frozen=True)
class ReportCommand:
    """A page about these runs instead of a run."""

    runs: list[Path]
    out: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """An option for every setting, with its meaning and default."""
    root = _Parser(
        prog="run.py",
        usage="run.py [--config FILE | --resume RUN | --evaluate PATH [PATH] | "
        "--compare FOLDER FOLDER] [--section.key VALUE ...]\n"
        "       run.py --report RUN [RUN ...] [--out FILE]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    root.add_argument("--config", metavar="FILE", help=f"YAML file, or a shipped one's name "
                      f"[{DEFAULT_CONFIG}: fgrpo_train/configs/{DEFAULT_CONFIG}.yaml]")  # fmt: skip
    root.add_argument("--resume", metavar="RUN", help="go on with the run in this folder, with its "
                      "own settings; only --steps may be given besides")  # fmt: skip
    root.add_argument("--evaluate", metavar="PATH", nargs="+", help="estimate pass@k of a run, a "
                      "checkpoint (runs/x/checkpoints/step-000012) or a policy, or of two and "
                      "compare them, with their run's settings; goes on after a stop")  # fmt: skip
    root.add_argument("--compare", metavar="FOLDER", nargs=2, help="compare two evaluations that "
                      "are there already (runs/x/evaluation/step-000100)")  # fmt: skip
    root.add_argument("--report", metavar="RUN", nargs="+", help="write a page about the runs in "
                      "these folders, also unfinished ones, and train nothing")  # fmt: skip
    root.add_argument("--out", metavar="FILE", help="where --report writes [RUN/report.html; of "
                      "several runs comparison.html in the first]")  # fmt: skip
    root.add_argument("--local_rank", help=argparse.SUPPRESS)  # added by the deepspeed launcher
    for section, cls in SECTIONS.items():
        summary = inspect.getdoc(cls) or ""
        group = root.add_argument_group(section, summary.splitlines()[0])
        docs, hints = field_docs(cls), get_type_hints(cls)
        for f in fields(cls):
            name = f"{section}.{f.name}"
            if name in NOT_A_SETTING:
                continue
            flags = [f"--{f.name}", f"--{name}"] if section == "run" else [f"--{name}"]
            metavar = {int: "N", float: "X", bool: "true|false"}.get(hints[f.name], "VALUE")
            default = "none" if f.default is None else f.default
            text = f"{docs.get(f.name, '')} [{default}]".replace("%", "%%")
            group.add_argument(*flags, dest=name, metavar=metavar, help=text)
    return root


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        item.target.id: " ".join(ast.literal_eval(doc.value).split())
        for item, doc in zip(body, body[1:], strict=False)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
    }


def parse_command(argv: Sequence[str]) -> Command | ReportCommand:
    """Read the command line.

    Raises: ConfigError for an unknown option or key, a wrong value, a missing file.
    """
    root = parser()
    namespace, unknown = root.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        if name.removeprefix("--") in NOT_A_SETTING:
            build({name.removeprefix("--"): None})
        known = [flag for action in root._actions for flag in action.option_strings]
        raise ConfigError(f"unknown option {name}{did_you_mean(name, known)}")
    options = vars(namespace)
    options.pop("local_rank", None)
    if "report" in options or "out" in options:
        return _report_command(options)
    config_name, resume = options.pop("config", None), options.pop("resume", None)
    evaluate, compare = options.pop("evaluate", None), options.pop("compare", None)
    if sum(mode is not None for mode in (resume, evaluate, compare)) > 1:
        raise ConfigError("expected only one of --resume, --evaluate and --compare")
    if evaluate is not None:
        return _evaluate_command(evaluate, config_name, options)
    if compare is not None:
        if options or config_name:
            raise ConfigError("--compare reads what is there: no settings may be given besides")
        return Command(build({}), "", None, compare=tuple(map(Path, compare)))
    if resume is not None:
        return _resume_command(Path(resume), config_name, options)
    path = find_config(config_name or DEFAULT_CONFIG)
    return Command(build(read_yaml(path) | options), default_name=path.stem, resume=None)


def _report_command(options: dict[str, Any]) -> ReportCommand:
    if "report" not in options:
        raise ConfigError("--out FILE is where --report writes: add --report RUN")
    refused = sorted(set(options) - {"report", "out"})
    if refused:
        raise ConfigError(f"--report trains nothing: remove --{refused[0]}")
    out = options.get("out")
    return ReportCommand([Path(run) for run in options["report"]], Path(out) if out else None)


def _resume_command(folder: Path, config_name: str | None, options: dict[str, Any]) -> Command:
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"--resume: no run in {folder} (it has no config.yaml)")
    refused = ["config"] * (config_name is not None) + sorted(set(options) - {"run.steps"})
    if refused:
        raise ConfigError(
            f"--resume goes on with {saved}; only --steps may change: remove --{refused[0]}"
        )
    return Command(build(read_yaml(saved) | options), default_name=folder.name, resume=folder)


def _evaluate_command(
    paths: list[str], config_name: str | None, options: dict[str, Any]
) -> Command:
    """Each policy with the settings of its run, or of the other's, or the default ones."""
    if len(paths) > 2:
        raise ConfigError(f"--evaluate: expected one policy or two, got {len(paths)}")
    if "policy.path" in options:
        raise ConfigError("--evaluate names the policy: remove --policy.path")
    targets = [find_target(path) for path in paths]
    if config_name:
        file = read_yaml(find_config(config_name))
        values = [file for _ in targets]
    else:
        own = [target.settings() for target in targets]
        known = [settings for settings in own if settings is not None]
        shared = known[0] if known else read_yaml(find_config(DEFAULT_CONFIG))
        values = [shared if settings is None else settings for settings in own]
    evaluations = [
        Evaluation(target, build(settings | options))
        for target, settings in zip(targets, values, strict=True)
    ]
    return Command(evaluations[0].config, "", None, evaluations=tuple(evaluations))
