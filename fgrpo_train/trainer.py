"""The training loop: one step is a line of stages, each in its own file.

prompts -> rollout -> rewards -> advantages -> selection -> loss -> step
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fgrpo_kernels import GroupAdvantages, group_advantages
from fgrpo_train.batching import Batch, make_batch, mini_batches
from fgrpo_train.checkpoint import latest_checkpoint, save_checkpoint
from fgrpo_train.evaluation import EVALUATION_SEED, Ranks, evaluate
from fgrpo_train.group_metrics import abs_advantage_sum, success_histogram
from fgrpo_train.learner import Learner, Update
from fgrpo_train.policy_with_loss import Denominators
from fgrpo_train.prompts import Prompt, prompt_batch
from fgrpo_train.reporting import (
    Reporter,
    finish,
    make_summary,
    peak_memory_bytes,
    progress_bar,
)
from fgrpo_train.rewards import Verifier, score
from fgrpo_train.rollout import RolloutEngine, Rollouts, Sampling
from fgrpo_train.rollout_metrics import RatioSums, effective_sample_share
from fgrpo_train.run_folder import RunFolder
from fgrpo_train.sample_completions import sample_completions
from fgrpo_train.selection import drop_inactive
from fgrpo_train.settings import ConfigError, TrainConfig


@dataclass
class Clock:
    """Seconds spent in each phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The parts of a run, and what a step does with them."""

    config: TrainConfig
    learner: Learner
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    verifier: Verifier
    train_prompts: list[Prompt]
    held_out_prompts: list[Prompt]

    def __post_init__(self) -> None:
        prompts, parts = self.config.data.prompts_per_step, self.config.optimisation.mini_batches
        if prompts % (parts * self.learner.world_size):
            raise ConfigError(
                f"data.prompts_per_step ({prompts}) must be a multiple of optimisation.mini_batches"
                f" ({parts}) x processes ({self.learner.world_size})"
            )

    @property
    def sampling(self) -> Sampling:
        """The same in training and in evaluation."""
        return Sampling(
            temperature=self.config.sampling.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            eos_token_ids=(self.tokenizer.eos_token_id,),
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def step(self, step: int) -> dict[str, Any]:
        """One training step, counted from 0; returns its record, over all processes.

        Under `completions` are some of this process's, for people to read.
        """
        clock = Clock()
        start = time.perf_counter()
        with clock.phase("rollout"):
            prompts = self.draw_prompts(step)
            rollouts = self.sample(prompts, step)
        with clock.phase("rewards"):
            rewards = score(self.verifier, prompts, rollouts, self.tokenizer)
        with clock.phase("advantages"):
            groups = group_advantages(rewards, group_size=self.config.sampling.group_size)
            batch = make_batch(prompts, rollouts, groups, pad_token_id=self.sampling.pad_token_id)
        with clock.phase("sleep"):
            self.engine.sleep()
        with clock.phase("update"):
            updates = self.update(batch.to(self.learner.device), clock)
        with clock.phase("wake"):
            self.engine.wake()
        with clock.phase("sync"):
            self.engine.load_weights(self.learner.weights())
        clock.seconds["total"] = time.perf_counter() - start
        for name in updates[0].seconds:
            clock.seconds[name] = sum(update.seconds[name] for update in updates)
        record = self.record(step, rewards, rollouts, groups, updates, clock)
        seed = f"{self.config.run.seed}/{step}"
        samples = sample_completions(prompts, rollouts, rewards, groups, self.tokenizer, seed=seed)
        return record | {"completions": samples}

    def draw_prompts(self, step: int) -> list[Prompt]:
        """This process's prompts; the stride gives each process its part of every mini-batch."""
        prompts = prompt_batch(
            self.train_prompts,
            step=step,
            batch_size=self.config.data.prompts_per_step,
            seed=self.config.run.seed,
        )
        return prompts[self.learner.rank :: self.learner.world_size]

    def sample(self, prompts: list[Prompt], step: int) -> Rollouts:
        """A group of completions for each prompt; drawn from run, step and process alone."""
        seed = random.Random(f"{self.config.run.seed}/{step}/{self.learner.rank}").getrandbits(63)
        return self.engine.generate(
            prompts, group_size=self.config.sampling.group_size, sampling=self.sampling, seed=seed
        )

    def update(self, batch: Batch, clock: Clock) -> list[Update]:
        """One optimizer update for each mini-batch.

        The first is on-policy: its old log-probs are its own (None), the ratio is 1. Those of the
        others belong to the policy that sampled, so they are taken before the first update.
        """
        parts = mini_batches(
            batch,
            count=self.config.optimisation.mini_batches,
            group_size=self.config.sampling.group_size,
        )
        denominators = [self.denominators(part) for part in parts]
        parts = [drop_inactive(part, self.config.loss) for part in parts]
        with clock.phase("old_logps"):
            parts[1:] = [replace(part, old_logps=self.learner.logps(part)) for part in parts[1:]]
        with clock.phase("reference"):
            if self.config.loss.kl_coef > 0:
                parts = [replace(p, ref_logps=self.learner.reference_logps(p)) for p in parts]
        return [
            self.learner.update(part, counts)
            for part, counts in zip(parts, denominators, strict=True)
        ]

    def denominators(self, part: Batch) -> Denominators:
        """Counted before selection, so that dropping sequences leaves the gradient as it is."""
        mask = part.completion_mask
        counts = self.learner.sum_over_ranks(
            {"tokens": float(mask.sum()), "sequences": float(mask.any(1).sum())}
        )
        return Denominators(valid_tokens=counts["tokens"], sequences=counts["sequences"])

    def record(
        self,
        step: int,
        rewards: torch.Tensor,
        rollouts: Rollouts,
        groups: GroupAdvantages,
        updates: list[Update],
        clock: Clock,
    ) -> dict[str, Any]:
        """The step as one flat record; a mean of nothing is None.

        The metrics of the loss are over the sequences that were trained on, `trained_share` of all.
        """
        loss_sums = {
            name: [u.metric_sums[name] for u in updates] for name in updates[0].metric_sums
        }
        ratio_max = max(numerator for numerator, _ in loss_sums.pop("ratio_max"))
        sampler = RatioSums.total([update.sampler_ratio for update in updates])
        num_tokens = float(sum(u.num_tokens for u in updates))
        num_columns = float(sum(u.num_columns for u in updates))
        means = {
            "reward": _sum_and_count(rewards[rewards.isfinite()]),
            "success_rate": _sum_and_count(groups.success_rate),
            "acr": _sum_and_count(groups.degenerate),
            "truncated_share": _sum_and_count(rollouts.truncated),
            "completion_length": _sum_and_count(rollouts.completion_mask.sum(1)),
            "trained_share": (float(sum(u.num_sequences for u in updates)), float(len(rewards))),
            "grad_norm": (sum(u.grad_norm for u in updates), float(len(updates))),
            "sampler_gap": _total([u.sampler_gap for u in updates]),
            "sampler_ratio_mean": (sampler.ratio, sampler.tokens),
            "padding_share": (num_columns - num_tokens, num_columns),
            "micro_batches": (float(sum(u.num_micro_batches for u in updates)), len(updates)),
        } | {name: _total(pairs) for name, pairs in loss_sums.items()}
        # A process's loss is its part of the global sum, so the processes' losses add up.
        sums = self.learner.sum_over_ranks(
            {
                "tokens": means["completion_length"][0],
                "loss": sum(u.loss for u in updates),
                "trained_tokens": num_tokens,
                "abs_advantage": abs_advantage_sum(groups, self.config.loss.focal_gamma),
                "sampler_tokens": sampler.tokens,
                "sampler_ratio": sampler.ratio,
                "sampler_ratio_squared": sampler.ratio_squared,
            }
        )
        histogram = success_histogram(rewards, groups, self.config.sampling.group_size)
        return {
            "step": step + 1,
            "loss": sums["loss"] / len(updates),
            **self.learner.mean_over_ranks(means),
            "abs_advantage_sum": sums["abs_advantage"],
            "success_histogram": [int(n) for n in self.learner.sum_over_ranks(histogram).values()],
            **self.learner.max_over_ranks(
                {
                    "ratio_max": ratio_max,
                    "sampler_ratio_max": sampler.largest,
                    "peak_memory_bytes": peak_memory_bytes(),
                }
            ),
            "sampler_effective_share": effective_sample_share(
                sums["sampler_tokens"], sums["sampler_ratio"], sums["sampler_ratio_squared"]
            ),
            "trained_tokens": sums["trained_tokens"],
            "learning_rate": updates[-1].learning_rate,
            "tokens_per_second": sums["tokens"] / clock.seconds["total"],
            "seconds": clock.seconds,
        }

    def evaluate(self, title: str) -> dict[str, Any]:
        """Success rate and pass@k on the held-out prompts, shared among the processes."""
        settings, learner = self.config.evaluation, self.learner
        prompts = self.held_out_prompts[: settings.max_prompts]
        completions = len(prompts) * settings.samples_per_prompt
        with progress_bar(title, completions, unit="completion", shown=learner.rank == 0) as bar:

            def show(done: int, _: int) -> None:
                bar.update(done - bar.n)

            result = evaluate(
                self.engine,
                prompts,
                self.verifier,
                self.tokenizer,
                samples_per_prompt=settings.samples_per_prompt,
                sampling=self.sampling,
                seed=EVALUATION_SEED,
                ks=settings.ks,
                ranks=Ranks(learner.rank, learner.world_size),
                progress=show,
            )
        return asdict(result) | {"pass_at_k": {str(k): p for k, p in result.pass_at_k.items()}}

    def held_out(self, step: int) -> dict[str, Any]:
        """What a step's record says of the held-out prompts: nothing unless their turn has come.

        After the last step the run is evaluated anyway.
        """
        every, finished = self.config.evaluation.every, step + 1
        if every is None or finished % every or finished == self.config.run.steps:
            return {}
        found = self.evaluate(f"held out, step {finished}")
        numbers = {f"pass_at_{k}": value for k, value in found["pass_at_k"].items()}
        return {"held_out": numbers | {"distinct_correct": found["distinct_correct"]}}


def train(trainer: Trainer, folder: RunFolder, *, started: float) -> None:
    """Evaluate, take the steps that are left, evaluate, and write the summary.

    Every step is saved, so that a stop loses at most the step under way. All processes train and
    evaluate; the first one writes what all of them know.

    Args:
        folder: where to write; one that holds a checkpoint is continued.
        started: `time.monotonic()` at the start of the process.
    """
    config, learner = trainer.config, trainer.learner
    finished, saved = restore(trainer, folder)
    reporter = None
    if learner.rank == 0:
        folder.open(config)
        print(
            f"{folder.path}/: {config.run.steps} steps of {config.data.prompts_per_step} prompts x "
            f"{config.sampling.group_size} completions. Stop it with Ctrl-C at any time."
        )
    saved = saved or {"before": trainer.evaluate("held out, before"), "wall_seconds": 0.0}
    if learner.rank == 0:
        started -= saved["wall_seconds"]
        reporter = Reporter(folder, steps=config.run.steps, finished=finished)
    try:
        for step in range(finished, config.run.steps):
            record = trainer.step(step) | trainer.held_out(step)
            if reporter:
                reporter.step(record)
                saved["wall_seconds"] = time.monotonic() - started
            progress = saved if reporter else None
            save_checkpoint(folder.checkpoints, step + 1, learner.save, progress)
    finally:
        if reporter:
            reporter.close()
    after = trainer.evaluate("held out, after")
    if reporter:
        folder.policy.mkdir(exist_ok=True)
    learner.export(folder.policy if reporter else None)
    if reporter:
        trainer.tokenizer.save_pretrained(folder.policy)
        wall_seconds = time.monotonic() - started
        summary = make_summary(
            saved["before"], after, steps=config.run.steps, wall_seconds=wall_seconds
        )
        print(finish(folder, config, summary))
    learner.wait_for_all()


def restore(trainer: Trainer, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    """The number of finished steps and what else was saved with them; (0, {}) for a new run.

    Raises: ConfigError if there is nothing left to do.
    """
    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        return 0, {}
    state, saved = checkpoint
    finished, steps = saved.pop("step"), trainer.config.run.steps
    if finished > steps or (finished == steps and folder.summary.exists()):
        raise ConfigError(
            f"{folder.path} has finished {finished} steps: --steps {2 * finished} trains it longer"
        )
    trainer.learner.load(state)
    trainer.engine.load_weights(trainer.learner.weights())
    return finished, saved


def _sum_and_count(values: torch.Tensor) -> tuple[float, float]:
    return float(values.double().sum()), float(values.numel())


def _total(pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    sums, counts = zip(*pairs, strict=True)
    return float(sum(sums)), float(sum(counts))
