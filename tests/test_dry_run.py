"""The plan before a run: counts by hand for Qwen2.5-7B, what fits, what does not, what helps."""

import pytest

from fgrpo_train.config import build, find_config, read_yaml
from fgrpo_train.dry_run import GPUS, dry_run, make_plan, parse_gpus, training_state
from fgrpo_train.model_shape import ModelShape
from fgrpo_train.settings import ConfigError

QWEN = "Qwen/Qwen2.5-7B"
PARAMETERS = 7_615_616_512
"""As the model's card and its safetensors index give it."""


@pytest.fixture(scope="module")
def qwen() -> ModelShape:
    return ModelShape.of(QWEN)


def seven_billion(**changes):
    values = read_yaml(find_config("qwen2.5-7b-f-grpo"))
    return build(values | {name.replace("__", "."): value for name, value in changes.items()})


def test_the_shape_has_the_published_counts(qwen):
    """28 layers, 4 key heads of 128: 2 x 28 x 512 x 2 bytes of cache a token."""
    assert qwen.num_parameters == PARAMETERS
    assert qwen.cache_bytes() == 57_344
    assert qwen.head_parameters == 152_064 * 3584
    # 2 FLOPs a weight without the looked-up embedding, and 4 x 28 x 3584 an attended token.
    expected = 2 * (PARAMETERS - 152_064 * 3584) + 4 * 28 * 3584 * 100
    assert qwen.forward_flops(context=100) == expected


def test_a_local_model_needs_no_list(tmp_path):
    assert ModelShape.of("fgrpo_train/assets/tiny-countdown").num_parameters == 149_504
    with pytest.raises(ConfigError, match="policy.path: no configuration of"):
        ModelShape.of(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("stage", "bytes_a_parameter"), [(0, 16), (1, 5.5), (2, 3.75), (3, 2)])
def test_state_is_sharded_as_the_zero_paper_counts_it(qwen, stage, bytes_a_parameter):
    """2 + 2 + 12 bytes a parameter; 8 ranks: 4 + 12/8, 2 + 14/8, 16/8."""
    config = seven_billion(deepspeed__zero_stage=stage)
    on_gpu, on_host = training_state(config, qwen, trainers=8)
    assert sum(on_gpu.values()) == pytest.approx(bytes_a_parameter * PARAMETERS, rel=1e-12)
    assert on_host == {"sleeping sampler's weights": 2.0 * PARAMETERS}


def test_offload_moves_the_state_to_the_host(qwen):
    """The optimizer's 12 bytes and the gradients' 2, of an eighth of the parameters."""
    config = seven_billion(deepspeed__offload="optimizer")
    on_gpu, on_host = training_state(config, qwen, trainers=8)
    assert sum(on_gpu.values()) == pytest.approx(2 * PARAMETERS / 8)
    assert sum(on_host.values()) == pytest.approx((14 / 8 + 2) * PARAMETERS)


def test_a_reference_policy_costs_its_weights(qwen):
    without, _ = training_state(seven_billion(), qwen, trainers=8)
    with_kl, _ = training_state(seven_billion(loss__kl_coef=0.001), qwen, trainers=8)
    assert sum(with_kl.values()) - sum(without.values()) == pytest.approx(2 * PARAMETERS / 8)


def test_the_shipped_configuration_fits_where_it_says(qwen):
    for num_gpus, name in ((8, "H100"), (16, "H100"), (8, "H200")):
        plan = make_plan(seven_billion(), qwen, num_gpus=num_gpus, gpu=GPUS[name])
        assert plan.problems == []


def test_what_does_not_fit_is_named_with_what_helps(qwen):
    """16 bytes a parameter are 113 GiB: no single H100 holds the state without sharding."""
    config = seven_billion(deepspeed__zero_stage=0)
    plan = make_plan(config, qwen, num_gpus=1, gpu=GPUS["H100"])
    assert "update: needs" in plan.problems[0] and "of 80 GiB" in plan.problems[0]
    assert "--deepspeed.zero_stage 3" in plan.problems[0]
    assert "--deepspeed.offload optimizer" in plan.problems[0]


def test_a_sampler_without_room_for_one_sequence_is_named(qwen):
    """0.2 of 80 GiB are 17.2 GB, the weights 15.2: 2 GB / 57344 bytes, 34 thousand tokens fit."""
    config = seven_billion(engine__memory_share=0.2, sampling__max_new_tokens=40_000)
    plan = make_plan(config, qwen, num_gpus=8, gpu=GPUS["H100"])
    assert any("one sequence has up to 41024" in problem for problem in plan.problems)


def test_the_text_says_that_it_estimates_and_what_it_assumes():
    text, fits = dry_run(seven_billion(), "8xH200")
    assert fits and text.endswith("It fits.")
    assert "Estimates, not measurements" in text
    assert '"stage": 3' in text
    assert "Assumed" in text


@pytest.mark.parametrize(("text", "expected"), [("16xH100", (16, "H100")), ("1xA100", (1, "A100"))])
def test_gpus_are_read(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["H100", "0xH100", "8xV100", "8 H100"])
def test_other_gpus_are_refused_with_the_known_ones(text):
    with pytest.raises(ConfigError, match="expected NxGPU with one of A100, H100"):
        parse_gpus(text)
