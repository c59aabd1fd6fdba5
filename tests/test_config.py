"""PolicyLossConfig: defaults, presets, and bad values refused with the name of the field."""

import dataclasses
import math

import pytest

from fgrpo_kernels import PolicyLossConfig

DEFAULTS = {
    "surrogate": "clip",
    "ratio_level": "token",
    "reduction": "token_mean",
    "fixed_length": None,
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.2,
    "dual_clip": None,
    "sapo_tau_pos": 1,
    "sapo_tau_neg": 1.05,
    "vespo_k_pos": 2,
    "vespo_lambda_pos": 3,
    "vespo_k_neg": 3,
    "vespo_lambda_neg": 2,
    "focal_gamma": 0.5,
    "kl_coef": 0,
    "kl_estimator": "k3",
    "entropy_coef": 0,
    "rollout_correction": None,
    "rollout_level": "token",
    "rollout_min": None,
    "rollout_max": 2.0,
    "temperature": 1,
    "logit_scale": 1,
    "logit_softcap": None,
    "grad_tol": 0,
    "skip_inactive": True,
    "max_chunk_bytes": None,
}


def differences(config):
    return {k: getattr(config, k) for k, v in DEFAULTS.items() if getattr(config, k) != v}


def test_defaults():
    assert differences(PolicyLossConfig()) == {}


OFF = {"focal_gamma": 0}
PRESETS = {
    "grpo": ({}, {"reduction": "sequence_mean", **OFF}),
    "dr_grpo": ({"fixed_length": 9}, {"reduction": "fixed_length", "fixed_length": 9, **OFF}),
    "dapo": ({}, {"clip_eps_high": 0.28, **OFF}),
    "cispo": ({}, {"surrogate": "cispo", "clip_eps_low": 1.0, "clip_eps_high": 5.0, **OFF}),
    "gspo": (
        {},
        {
            "ratio_level": "sequence",
            "reduction": "sequence_mean",
            "clip_eps_low": 3e-4,
            "clip_eps_high": 4e-4,
            **OFF,
        },
    ),
    "ngrpo": ({}, {"clip_eps_low": 0.16, "clip_eps_high": 0.24, **OFF}),
    "gmpo": (
        {},
        {
            "ratio_level": "geometric_mean",
            "reduction": "sequence_mean",
            "clip_eps_low": 0.4,
            "clip_eps_high": 0.4,
            **OFF,
        },
    ),
    "sapo": ({}, {"surrogate": "sapo", **OFF}),
    "vespo": ({}, {"surrogate": "vespo", **OFF}),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    overrides, expected = PRESETS[preset]
    assert differences(getattr(PolicyLossConfig, preset)(**overrides)) == expected


def test_presets_take_overrides():
    config = PolicyLossConfig.grpo(reduction="token_mean", focal_gamma=0.5)  # F-GRPO's runs
    assert config == PolicyLossConfig()
    assert differences(PolicyLossConfig.dapo(focal_gamma=0.5)) == {"clip_eps_high": 0.28}
    assert PolicyLossConfig.cispo(focal_gamma=1.0).focal_gamma == 1.0


def test_dr_grpo_needs_its_length():
    with pytest.raises(ValueError, match="fixed_length"):
        PolicyLossConfig.dr_grpo()


def test_it_is_frozen():
    config = PolicyLossConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.surrogate = "cispo"


def test_explicit_zeros_stay_zeros():
    names = ("clip_eps_low", "clip_eps_high", "focal_gamma", "kl_coef", "entropy_coef", "grad_tol")
    config = PolicyLossConfig(**dict.fromkeys(names, 0))
    assert all(getattr(config, name) == 0 for name in names)
    assert PolicyLossConfig(rollout_correction="mask", rollout_min=0.0).rollout_min == 0.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"surrogate": "reinforce", "dual_clip": 3.0, "clip_eps_low": 0.5},
        {"rollout_max": 5.0},
        {"rollout_min": 0.5},
        {"fixed_length": 10},
        {"surrogate": "cispo", "clip_eps_low": 7.0},
        {"ratio_level": "geometric_mean", "clip_eps_low": 1.0},
        {"surrogate": "dppo_kl", "clip_eps_low": 1.0, "dual_clip": 3.0},
        {"surrogate": "sapo", "vespo_k_pos": 1.0},
        {"sapo_tau_neg": 2.0},
        {"kl_estimator": "k1"},
        {"entropy_coef": -0.1},
    ],
)
def test_numbers_that_the_path_does_not_use_are_accepted(kwargs):
    assert PolicyLossConfig(**kwargs) == dataclasses.replace(PolicyLossConfig(), **kwargs)


NAN, INF = math.nan, math.inf
BAD = [
    ("surrogate", "ppo", {}),
    ("surrogate", None, {}),
    ("ratio_level", "group", {}),
    ("reduction", "mean", {}),
    ("kl_estimator", "k4", {}),
    ("rollout_correction", "clip", {}),
    ("rollout_level", "geometric", {}),
    ("clip_eps_low", 1.0, {}),
    ("clip_eps_low", -0.1, {}),
    ("clip_eps_low", -0.1, {"surrogate": "cispo"}),
    ("clip_eps_low", NAN, {}),
    ("clip_eps_high", -0.1, {}),
    ("clip_eps_high", NAN, {}),
    ("dual_clip", 1.0, {}),
    ("dual_clip", -3.0, {}),
    ("focal_gamma", -0.5, {}),
    ("focal_gamma", INF, {}),
    ("kl_coef", -1.0, {}),
    ("kl_coef", NAN, {}),
    ("entropy_coef", NAN, {}),
    ("rollout_max", 0.0, {}),
    ("rollout_max", -1.0, {}),
    ("rollout_min", 0.5, {"rollout_correction": "truncate"}),
    ("rollout_min", -0.5, {"rollout_correction": "mask"}),
    ("rollout_min", 3.0, {"rollout_correction": "mask"}),
    ("temperature", 0.0, {}),
    ("temperature", -1.0, {}),
    ("temperature", INF, {}),
    ("logit_scale", NAN, {}),
    ("logit_softcap", 0.0, {}),
    ("logit_softcap", -30.0, {}),
    ("grad_tol", -1e-3, {}),
    ("max_chunk_bytes", 0, {}),
    ("fixed_length", 0, {"reduction": "fixed_length"}),
    ("fixed_length", None, {"reduction": "fixed_length"}),
    ("skip_inactive", "no", {}),
    ("clip_eps_low", -0.1, {"ratio_level": "geometric_mean"}),
    ("sapo_tau_pos", 0.0, {"surrogate": "sapo"}),
    ("sapo_tau_neg", -1.0, {}),
    ("vespo_k_pos", 0, {}),
    ("vespo_lambda_pos", INF, {}),
    ("vespo_k_neg", NAN, {}),
    ("vespo_lambda_neg", -2.0, {"surrogate": "vespo"}),
    # refused by name
    ("ratio_level", "sequence", {"surrogate": "vespo"}),
    ("ratio_level", "geometric_mean", {"surrogate": "vespo"}),
    ("ratio_level", "geometric_mean", {"surrogate": "cispo"}),
    ("ratio_level", "geometric_mean", {"surrogate": "dppo_tv"}),
    ("dual_clip", 3.0, {"ratio_level": "geometric_mean"}),
    ("grad_tol", 1.0, {}),
    ("grad_tol", 1e-3, {"entropy_coef": 0.01}),
]


@pytest.mark.parametrize("field,value,others", BAD, ids=lambda v: str(v))
def test_bad_values_name_the_field_and_what_was_received(field, value, others):
    with pytest.raises(ValueError) as error:
        PolicyLossConfig(**{field: value}, **others)
    message = str(error.value)
    assert message.startswith(field) and str(value) in message


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="clip_ratio"):
        PolicyLossConfig(clip_ratio=0.2)
