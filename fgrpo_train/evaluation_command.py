"""`run.py --evaluate` and `run.py --compare`: sample, count, take stock, write it down."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from fgrpo_train.engine_choice import make_engine
from fgrpo_train.evaluation import (
    EVALUATION_SEED,
    MAX_SEQUENCES_PER_CALL,
    Chunk,
    Ranks,
    add_up,
    plan_chunks,
    sample_chunks,
)
from fgrpo_train.evaluation_folder import (
    EvaluationFolder,
    Fingerprint,
    differences,
    prompts_digest,
    weights_digest,
)
from fgrpo_train.evaluation_report import (
    Comparison,
    Result,
    comparison_plot,
    comparison_table,
    files_text,
    result_plot,
    result_table,
)
from fgrpo_train.evaluation_statistics import (
    bootstrap,
    compare,
    pass_at_ks,
)
from fgrpo_train.evaluation_target import Evaluation
from fgrpo_train.prompts import CountdownTask, Prompt
from fgrpo_train.reporting import progress_bar
from fgrpo_train.rewards import CountdownVerifier
from fgrpo_train.rollout import Sampling
from fgrpo_train.run_folder import write_whole
from fgrpo_train.settings import ConfigError, TrainConfig, powers_of_two

SHARED = ("task", "prompts", "evaluation.samples", "evaluation.max_prompts", "evaluation seed")
"""What two evaluations must have in common to be compared prompt by prompt."""
LARGEST_K = 256


def evaluate_policies(evaluations: Sequence[Evaluation]) -> None:
    """Evaluate one policy or two, and compare two. What their folders hold is not drawn again.

    Raises: ConfigError if a folder holds samples of something else, or the two cannot be compared.
    """
    settings = [settings_that_count(evaluation.config) for evaluation in evaluations]
    check_comparable(*settings)
    for evaluation, entries in zip(evaluations, settings, strict=True):
        folder_of(evaluation).check(entries)  # before the first is sampled, which may take long
    first, last = evaluations[0], evaluations[-1]
    if folder_of(first) == folder_of(last) and first.target != last.target:
        raise ConfigError(
            f"cannot compare: {first.target.policy} and {last.target.policy} have the same name, "
            f"so both would be kept in {folder_of(first).path}: rename one of them"
        )
    ranks = join_processes()
    transformers.utils.logging.disable_progress_bar()
    folders = [sample_policy(evaluation, ranks) for evaluation in evaluations]
    if ranks.rank > 0:
        return
    if len(folders) == 2:
        print(compare_folders(*folders))
    else:
        print(report(folders[0]))


def folder_of(evaluation: Evaluation) -> EvaluationFolder:
    """Where an evaluation lies."""
    return EvaluationFolder(evaluation.target.folder(evaluation.config.run.output_dir))


def join_processes() -> Ranks:
    """The launcher's processes, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # some counts after each chunk need no GPU network
    return Ranks(dist.get_rank(), dist.get_world_size())


def sample_policy(evaluation: Evaluation, ranks: Ranks) -> EvaluationFolder:
    """Draw what is not in the policy's folder yet, a chunk at a time."""
    config = evaluation.config
    model, tokenizer = evaluation.target.load(config.policy.dtype)
    prompts = CountdownTask().held_out_prompts(tokenizer)[: config.evaluation.max_prompts]
    fingerprint = fingerprint_of(config, prompts, model)
    chunks = plan_chunks(
        prompts, samples_per_prompt=config.evaluation.samples, seed=EVALUATION_SEED
    )
    folder = folder_of(evaluation)
    folder.check(fingerprint)  # by every process, so that all of them stop
    [finished, *_] = ranks.gather(folder.open(fingerprint, chunks) if ranks.rank == 0 else None)
    engine = make_engine(config, evaluation.target.policy, model, prompts)
    engine.load_weights(model.named_parameters())
    drawn = sample_chunks(
        engine,
        chunks[finished:],
        CountdownVerifier(),
        tokenizer,
        sampling=Sampling(
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            eos_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.pad_token_id,
        ),
        ranks=ranks,
    )
    with progress_bar(
        folder.label,
        completions(chunks),
        unit="completion",
        initial=completions(chunks[:finished]),
        shown=ranks.rank == 0,
    ) as bar:
        for counts in drawn:
            if ranks.rank == 0:
                folder.append(counts)
                bar.update(sum(c.samples for c in counts))
    engine.close()
    return folder


def completions(chunks: Sequence[Chunk]) -> int:
    """How many the chunks have in all."""
    return sum(chunk.samples * len(chunk.prompts) for chunk in chunks)


def settings_that_count(config: TrainConfig) -> Fingerprint:
    """The settings that an evaluation's numbers depend on."""
    sampling = {f"sampling.{name}": value for name, value in asdict(config.sampling).items()}
    del sampling["sampling.group_size"]
    return {
        "evaluation.samples": config.evaluation.samples,
        "evaluation.max_prompts": config.evaluation.max_prompts,
        "evaluation seed": EVALUATION_SEED,
        "engine.kind": config.engine.kind,
        **sampling,
    }


def fingerprint_of(
    config: TrainConfig, prompts: Sequence[Prompt], model: torch.nn.Module
) -> Fingerprint:
    """Everything that an evaluation's numbers depend on."""
    return settings_that_count(config) | {
        "task": "countdown",
        "num_prompts": len(prompts),
        "prompts": prompts_digest(prompts),
        "completions per call": MAX_SEQUENCES_PER_CALL,
        "weights": weights_digest(model),
    }


def check_comparable(first: Fingerprint, *others: Fingerprint) -> None:
    """Raises: ConfigError if they are not about the same prompts and number of completions."""
    for other in others:
        for name, (a, b) in differences(first, other).items():
            if name in SHARED:
                way = f": give --{name} for both" if name.startswith("evaluation.") else ""
                raise ConfigError(f"cannot compare: {name} is {a} and {b}{way}")


def read_result(folder: EvaluationFolder) -> Result:
    """What the folder's samples say; prompts that are not finished are left out and counted.

    Raises: ConfigError if it holds no evaluation, or no finished prompt.
    """
    fingerprint = folder.read_fingerprint()
    samples = fingerprint["evaluation.samples"]
    whole = [t for t in add_up(folder.read_counts()).values() if t.samples == samples]
    if not whole:
        raise ConfigError(f"{folder.path} holds no prompt with all of its {samples} completions")
    ks = powers_of_two(min(LARGEST_K, samples))
    correct = np.array([total.correct for total in whole])
    distinct = np.array([[float(len(total.distinct))] for total in whole])
    return Result(
        label=folder.label,
        fingerprint=fingerprint,
        num_samples=samples,
        correct={total.prompt_id: total.correct for total in whole},
        num_excluded=fingerprint["num_prompts"] - len(whole),
        pass_at_k=dict(zip(ks, bootstrap(pass_at_ks(samples, correct, ks)), strict=True)),
        distinct_correct=bootstrap(distinct)[0],
    )


def report(folder: EvaluationFolder) -> str:
    """Write result.json and the plot; returns the table for the terminal."""
    result = read_result(folder)
    _write(folder.result, folder.plot, result.as_json(), result_plot(result))
    return result_table(result) + files_text(folder.path, [folder.result, folder.plot])


def compare_folders(first: EvaluationFolder, second: EvaluationFolder) -> str:
    """Write both results, and the comparison into the second folder; returns the table.

    Raises: ConfigError if a folder holds no evaluation, or they are not about the same prompts.
    """
    results = [read_result(folder) for folder in (first, second)]
    check_comparable(*(result.fingerprint for result in results))
    common = [prompt for prompt in results[0].correct if prompt in results[1].correct]
    if not common:
        raise ConfigError(f"cannot compare: {first.path} and {second.path} share no whole prompt")
    counts = [np.array([result.correct[prompt] for prompt in common]) for result in results]
    samples, ks = results[0].num_samples, list(results[0].pass_at_k)
    comparison = Comparison(
        first=results[0],
        second=results[1],
        num_prompts=len(common),
        differences=dict(zip(ks, compare(samples, counts[0], counts[1], ks), strict=True)),
    )
    report(first)
    report(second)
    name = f"versus-{results[0].label.replace('/', '-')}"
    record, plot = second.path / f"{name}.json", second.path / f"{name}.svg"
    _write(record, plot, comparison.as_json(), comparison_plot(comparison))
    return comparison_table(comparison) + files_text(second.path, [record, plot])


def _write(record: Path, plot: Path, content: dict[str, Any], svg: str) -> None:
    write_whole(record, json.dumps(content, indent=2) + "\n")
    write_whole(plot, svg + "\n")
