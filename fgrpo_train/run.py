"""Train a policy, or evaluate one: `deepspeed fgrpo_train/run.py`. `--help` explains it all."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

# Before torch is loaded: threads that wait by spinning make a step of this small model twenty times
# slower as soon as another program wants one of the cores; threads that sleep hardly lose.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from fgrpo_train.command_line import Command, ReportCommand, parse_command  # noqa: E402
from fgrpo_train.config import find_policy  # noqa: E402
from fgrpo_train.rollout import EngineError  # noqa: E402
from fgrpo_train.run_folder import RunFolder  # noqa: E402
from fgrpo_train.settings import ConfigError, TrainConfig  # noqa: E402

if TYPE_CHECKING:
    from fgrpo_train.trainer import Trainer


def main(argv: list[str]) -> int:
    """Do what the command line asks for; returns the exit code."""
    started = time.monotonic()
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    folder, command = None, None
    try:
        command = parse_command(argv)
        if isinstance(command, ReportCommand):
            return report(command)
        if command.evaluations or command.compare:
            evaluate(command)
            return 0
        find_policy(command.config.policy.path)
        folder = (
            RunFolder(command.resume, new=False)
            if command.resume
            else RunFolder.choose(command.config.run, command.default_name)
        )
        from fgrpo_train.trainer import train  # after the checks: it takes seconds to import

        trainer = build_trainer(command.config)
        try:
            train(trainer, folder, started=started)
        finally:
            trainer.engine.close()
    except ConfigError as error:
        _say(f"run.py: error: {error}")
        return 2
    except EngineError as error:
        # Of any process: it is the only one that knows.
        print(f"\nrun.py: error: {error}\n{_how_to_go_on(folder)}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        if isinstance(command, Command) and command.evaluations:
            _say("\nStopped; finished samples are kept. The same command goes on.")
        else:
            _say(f"\n{_how_to_go_on(folder)}")
        return 130
    return 0


def evaluate(command: Command) -> None:
    """Evaluate one or two policies, or compare what is there."""
    from fgrpo_train.evaluation_command import compare_folders, evaluate_policies
    from fgrpo_train.evaluation_folder import EvaluationFolder

    if command.compare:
        first, second = map(EvaluationFolder, command.compare)
        print(compare_folders(first, second))
    else:
        evaluate_policies(command.evaluations)


def report(command: ReportCommand) -> int:
    """Write the page, once, and say where it lies."""
    from fgrpo_train.report_html import write_report

    if os.environ.get("RANK", "0") == "0":
        print(write_report(command.runs, command.out))
    return 0


def _how_to_go_on(folder: RunFolder | None) -> str:
    if folder is None or not folder.path.exists():
        return "Stopped before the run began."
    return (
        f"Stopped; finished steps are saved. Go on with:\n"
        f"  deepspeed fgrpo_train/run.py --resume {shlex.quote(str(folder.path))}"
    )


def build_trainer(config: TrainConfig) -> Trainer:
    """Load the policy, start DeepSpeed, and put the parts of the run together."""
    import transformers

    from fgrpo_train.base_policy import load_policy
    from fgrpo_train.engine_choice import make_engine
    from fgrpo_train.learner import Learner
    from fgrpo_train.prompts import CountdownTask
    from fgrpo_train.rewards import CountdownVerifier
    from fgrpo_train.trainer import Trainer

    transformers.utils.logging.disable_progress_bar()  # the bars are those of the run's phases
    policy = find_policy(config.policy.path)
    model, tokenizer = load_policy(policy, config.policy.dtype)
    task = CountdownTask()
    train, held_out = task.train_prompts(tokenizer), task.held_out_prompts(tokenizer)
    engine = make_engine(config, policy, model, [*train, *held_out])  # before ZeRO shares it out
    learner = Learner(model, config)
    engine.load_weights(learner.weights())
    return Trainer(
        config=config,
        learner=learner,
        engine=engine,
        tokenizer=tokenizer,
        verifier=CountdownVerifier(),
        train_prompts=train,
        held_out_prompts=held_out,
    )


def _say(text: str) -> None:
    """One process speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def _stop(signum: int, frame: FrameType | None) -> None:
    # The launcher follows Ctrl-C with SIGTERM: one stop is enough.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if exit_code == 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # All is written and closed. At the interpreter's end a thread of gloo's aborts one process
        # in ten, and the launcher would call the run a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(exit_code)
