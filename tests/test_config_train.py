"""The settings of a run: files, command line, and what a person is told when something is wrong."""

from pathlib import Path

import pytest
import yaml

from fgrpo_kernels import PolicyLossConfig
from fgrpo_train.command_line import field_docs, parse_command, parser
from fgrpo_train.config import (
    SECTIONS,
    build,
    config_yaml,
    deepspeed_config,
    find_config,
    find_policy,
    read_yaml,
    setting_names,
)
from fgrpo_train.settings import ConfigError, TrainConfig


def test_the_default_file_and_the_defaults_in_code_agree():
    """--help shows the defaults in code and the no-option run reads the file: one truth."""
    assert build(read_yaml(find_config("tiny-cpu"))) == TrainConfig()
    assert parse_command([]).config == TrainConfig()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("loss: {focal_gamma: 1, clip_eps_high: 0.28}\nrun: {steps: 7}\n")
    command = parse_command(["--config", str(path), "--loss.focal_gamma=0", "--steps", "9"])
    assert command.default_name == "mine"
    assert command.config.loss.focal_gamma == 0.0
    assert command.config.loss.clip_eps_high == 0.28
    assert command.config.run.steps == 9
    assert command.config.loss.clip_eps_low == PolicyLossConfig().clip_eps_low


def test_a_float_may_be_written_as_people_write_it(tmp_path):
    """YAML 1.1 reads 5e-4 as text."""
    path = tmp_path / "mine.yaml"
    path.write_text("optimisation: {learning_rate: 5e-4}\n")
    assert parse_command(["--config", str(path)]).config.optimisation.learning_rate == 5e-4


def test_short_and_long_form_of_run_settings_and_the_launchers_option():
    argv = ["--local_rank=0", "--run.steps", "3", "--seed", "4", "--name", "12"]
    run = parse_command(argv).config.run
    assert (run.steps, run.seed, run.name) == (3, 4, "12")


def test_the_written_config_reads_back(tmp_path):
    config = build({"loss.dual_clip": 3, "sampling.temperature": 0.7, "run.name": "none"})
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(config))
    assert build(read_yaml(path)) == config


def test_the_loss_has_the_samplers_temperature():
    assert build({"sampling.temperature": "0.7"}).loss.temperature == 0.7


def test_a_file_may_extend_another(tmp_path):
    """What the child leaves out is its parent's; what it says wins; a parent lies beside it."""
    (tmp_path / "base.yaml").write_text("loss: {focal_gamma: 1, dual_clip: 3}\nrun: {steps: 7}\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\nloss: {focal_gamma: 0}\n")
    config = build(read_yaml(child))
    assert (config.loss.focal_gamma, config.loss.dual_clip, config.run.steps) == (0.0, 3.0, 7)
    child.write_text("extends: tiny-cpu\n")
    assert build(read_yaml(child)) == TrainConfig()
    (tmp_path / "base.yaml").write_text("extends: child.yaml\n")
    child.write_text("extends: base.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        read_yaml(child)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loss.focal_gama", "1"], "did you mean --loss.focal_gamma?"),
        (["--loss.focal-gamma", "1"], "did you mean --loss.focal_gamma?"),
        (["--stepz=3"], "unknown option --stepz; did you mean --steps?"),
        (["surplus"], "unknown option surplus"),
        (["--steps"], "expected one argument"),
        (["--steps", "many"], "run.steps: expected a valid integer, got 'many'"),
        (["--steps", "0"], "run.steps: expected >= 1, got 0"),
        (["--steps", "none"], "run.steps: expected a valid integer, got 'none'"),
        (["--seed", "-1"], "run.seed: expected >= 0, got -1"),
        (["--name", "a/b"], "run.name: expected a folder name without '/', got 'a/b'"),
        (["--loss.clip_eps_low", "1.5"], "loss.clip_eps_low must be in [0, 1), got 1.5"),
        (["--loss.surrogate", "ppo"], "loss.surrogate must be one of ['clip', 'cispo', 'sapo'"),
        (["--loss.temperature", "2"], "loss.temperature is not a setting: set sampling.temp"),
        (["--policy.dtype", "fp8"], "policy.dtype: expected 'float32' or 'bfloat16', got 'fp8'"),
        (["--policy.dtype", "bfloat16"], "bfloat16 needs deepspeed.zero_stage >= 1"),
        (["--deepspeed.zero_stage", "4"], "deepspeed.zero_stage: expected 0, 1, 2 or 3, got 4"),
        (["--deepspeed.offload=disk"], "expected 'none', 'optimizer' or 'all', got 'disk'"),
        (["--deepspeed.offload", "optimizer"], "needs deepspeed.zero_stage >= 1, got 0"),
        (["--deepspeed.offload=all", "--deepspeed.zero_stage=2"], "zero_stage >= 3, got 2"),
        (["--optimisation.tokens_per_micro_batch", "0"], "expected none or >= 1, got 0"),
        (["--sampling.group_size", "1"], "sampling.group_size: expected >= 2, got 1"),
        (["--data.prompts_per_step", "7"], "(7) must be a multiple of optimisation.mini_batches"),
        (["--config", "nowhere.yaml"], "no config file nowhere.yaml; shipped: tiny-cpu"),
        (["--resume", "nowhere"], "--resume: no run in nowhere (it has no config.yaml)"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line_that_names_the_fix(argv, message):
    with pytest.raises(ConfigError) as error:
        parse_command(argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: {focal_gama: 1}", "unknown key loss.focal_gama; did you mean loss.focal_gamma?"),
        ("lost: {focal_gamma: 1}", "unknown section lost; did you mean loss?"),
        ("loss: 3", "loss: expected keys with values, got 3"),
        ("loss: {focal_gamma: [1]}", "loss.focal_gamma: expected a valid number, got [1]"),
        ("loss: {focal_gamma: 1", "is not valid YAML"),
        ("- 1", "expected keys with values"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line_that_names_the_fix(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_command(["--config", str(path)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_policy_is_named_with_the_shipped_ones():
    with pytest.raises(ConfigError, match="no transformers model in nowhere.*tiny-countdown"):
        find_policy("nowhere")


def test_resume_takes_the_settings_of_the_run_and_only_steps_may_change(tmp_path):
    (tmp_path / "config.yaml").write_text(config_yaml(build({"loss.focal_gamma": 1.0})))
    command = parse_command(["--resume", str(tmp_path), "--steps", "200"])
    assert command.resume == tmp_path
    assert command.config.loss.focal_gamma == 1.0
    assert command.config.run.steps == 200
    with pytest.raises(ConfigError, match="only --steps may change: remove --loss.focal_gamma"):
        parse_command(["--resume", str(tmp_path), "--loss.focal_gamma", "0"])


def test_help_explains_every_setting_with_its_default():
    text = " ".join(parser().format_help().split())
    for section, cls in SECTIONS.items():
        docs = field_docs(cls)
        for name in setting_names():
            if name.startswith(f"{section}."):
                doc = docs[name.split(".")[1]]
                assert f"--{name}" in text
                assert doc.split(". ")[0][:40] in text, name
    assert "[0.5]" in text and "[0.0005]" in text
    assert "deepspeed fgrpo_train/run.py --resume" in text


def test_deepspeed_gets_fp32_torch_adamw_and_no_scaling_of_its_own():
    config = build({"optimisation.max_grad_norm": 0.5, "optimisation.learning_rate": 1e-3})
    settings = deepspeed_config(config)
    assert settings["gradient_clipping"] == 0.5
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["optimizer"]["params"] == {
        "lr": 1e-3, "weight_decay": 0.0, "torch_adam": True, "fused": True,
    }  # fmt: skip
    assert settings["zero_optimization"] == {"stage": 0}
    assert not {"fp16", "bf16"} & set(settings)


def test_deepspeed_gets_bf16_with_fp32_sums_and_the_offloads_of_the_settings():
    host = {"device": "cpu", "pin_memory": True}
    values = {"policy.dtype": "bfloat16", "deepspeed.zero_stage": 3}
    for offload, moved in {
        "none": {},
        "optimizer": {"offload_optimizer": host},
        "all": {"offload_optimizer": host, "offload_param": host},
    }.items():
        settings = deepspeed_config(build(values | {"deepspeed.offload": offload}))
        assert settings["bf16"] == {"enabled": True}
        assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
        assert settings["zero_optimization"] == {"stage": 3} | moved


def test_pass_at_k_is_asked_for_at_the_powers_of_two():
    assert build({"evaluation.samples_per_prompt": 24}).evaluation.ks == [1, 2, 4, 8, 16]
    assert build({"evaluation.samples_per_prompt": 1}).evaluation.ks == [1]


def test_the_default_file_is_plain_yaml_with_a_comment_on_every_section():
    text = (Path(find_config("tiny-cpu"))).read_text()
    assert set(yaml.safe_load(text)) == set(SECTIONS)
    assert text.count("#") >= len(SECTIONS)
