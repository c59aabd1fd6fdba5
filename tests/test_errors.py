"""Bad input is refused at the front door, with what was expected and what was received."""

import re

import pytest
import torch

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, token_logps
from fgrpo_kernels.testing import make_inputs

B, T, D, V = 4, 5, 6, 11


def arguments(**changes):
    inputs = make_inputs(B, T, D, V, group_size=2)
    return {**inputs.arguments(), **changes}


def packed(**changes):
    flat = {
        name: value.flatten(0, 1) if value.dim() > 1 and name != "lm_head_weight" else value
        for name, value in arguments().items()
        if value is not None
    }
    flat["advantages"] = torch.ones(B * T)
    flat["success_rate"] = None
    return {**flat, "config": PolicyLossConfig(focal_gamma=0.0), **changes}


# name of the case: (changed arguments, words of the message in order)
SHAPES = {
    "hidden-1d": ({"hidden": torch.zeros(D)}, ["hidden", "(B, T, D)", "(6,)"]),
    "hidden-4d": ({"hidden": torch.zeros(1, B, T, D)}, ["hidden", "(B, T, D)", "(1, 4, 5, 6)"]),
    "weight-transposed": (
        {"lm_head_weight": torch.zeros(D, V)},
        ["lm_head_weight", "(V, D)", "6", "(6, 11)"],
    ),
    "weight-3d": ({"lm_head_weight": torch.zeros(1, V, D)}, ["lm_head_weight", "(1, 11, 6)"]),
    "ids-shifted": (
        {"completion_ids": torch.zeros(B, T + 1, dtype=torch.int64)},
        ["completion_ids", "(4, 5)", "(4, 6)"],
    ),
    "ids-flat": (
        {"completion_ids": torch.zeros(B * T, dtype=torch.int64)},
        ["completion_ids", "(4, 5)", "(20,)"],
    ),
    "mask": (
        {"completion_mask": torch.ones(B, T + 1, dtype=torch.bool)},
        ["completion_mask", "(4, 5)", "(4, 6)"],
    ),
    "old": ({"old_logps": torch.zeros(B, T + 1)}, ["old_logps", "(4, 5)", "(4, 6)"]),
    "ref": ({"ref_logps": torch.zeros(B)}, ["ref_logps", "(4, 5)", "(4,)"]),
    "rollout": ({"rollout_logps": torch.zeros(B, 1)}, ["rollout_logps", "(4, 5)", "(4, 1)"]),
    "token-weights": ({"token_weights": torch.ones(B)}, ["token_weights", "(4, 5)", "(4,)"]),
    "advantages": ({"advantages": torch.ones(B + 1)}, ["advantages", "(4,)", "(4, 5)", "(5,)"]),
    "advantages-column": ({"advantages": torch.ones(B, 1)}, ["advantages", "(4,)", "(4, 1)"]),
    "success-rate": ({"success_rate": torch.ones(B, T)}, ["success_rate", "(4,)", "(4, 5)"]),
    "bias": ({"lm_head_bias": torch.zeros(D)}, ["lm_head_bias", "(11,)", "(6,)"]),
    "cu_seqlens-with-padded": (
        {"cu_seqlens": torch.tensor([0, 5, 10, 15, 20])},
        ["cu_seqlens", "packed", "(4, 5)"],
    ),
    "global-tokens": (
        {"global_valid_tokens": torch.ones(2)},
        ["global_valid_tokens", "0-dim", "(2,)"],
    ),
}
DTYPES = {
    "hidden": ({"hidden": torch.zeros(B, T, D, dtype=torch.int64)}, ["hidden", "float", "int64"]),
    "weight": (
        {"lm_head_weight": torch.zeros(V, D, dtype=torch.complex64)},
        ["lm_head_weight", "float", "complex64"],
    ),
    "ids-int32": (
        {"completion_ids": torch.zeros(B, T, dtype=torch.int32)},
        ["completion_ids", "int64", "int32"],
    ),
    "mask-int": (
        {"completion_mask": torch.ones(B, T, dtype=torch.int64)},
        ["completion_mask", "bool", "int64"],
    ),
    "mask-float": ({"completion_mask": torch.ones(B, T)}, ["completion_mask", "bool", "float32"]),
    "old-int": ({"old_logps": torch.zeros(B, T, dtype=torch.int64)}, ["old_logps", "int64"]),
    "advantages-int": (
        {"advantages": torch.ones(B, dtype=torch.int64)},
        ["advantages", "float", "int64"],
    ),
    "advantages-list": ({"advantages": [1.0] * B}, ["advantages", "(4,)", "list"]),
    "hidden-list": ({"hidden": [[0.0]]}, ["hidden", "tensor", "list"]),
    "old-list": ({"old_logps": [[0.0]]}, ["old_logps", "tensor", "list"]),
}
DEVICES = {
    name: ({name: torch.zeros(shape, dtype=dtype, device="meta")}, [name, "cpu", "meta"])
    for name, shape, dtype in (
        ("lm_head_weight", (V, D), torch.float32),
        ("completion_ids", (B, T), torch.int64),
        ("completion_mask", (B, T), torch.bool),
        ("old_logps", (B, T), torch.float32),
        ("advantages", (B,), torch.float32),
        ("success_rate", (B,), torch.float32),
    )
}
MISSING = {
    "success-rate": ({"success_rate": None}, ["success_rate", "focal_gamma", "0.5", "None"]),
    "ref": (
        {"ref_logps": None, "config": PolicyLossConfig(kl_coef=0.25)},
        ["ref_logps", "kl_coef", "0.25", "None"],
    ),
    "rollout": (
        {"rollout_logps": None, "config": PolicyLossConfig(rollout_correction="mask")},
        ["rollout_logps", "rollout_correction", "mask", "None"],
    ),
}
RANGES = {
    "tokens-zero": ({"global_valid_tokens": 0}, ["global_valid_tokens", "> 0", "0"]),
    "tokens-negative": ({"global_valid_tokens": -3.0}, ["global_valid_tokens", "> 0", "-3.0"]),
    "tokens-nan": ({"global_valid_tokens": float("nan")}, ["global_valid_tokens", "> 0", "nan"]),
    "tokens-tensor": ({"global_valid_tokens": torch.tensor(0)}, ["global_valid_tokens", "> 0"]),
    "sequences": ({"global_sequences": torch.tensor(-1.0)}, ["global_sequences", "> 0"]),
    "rate": ({"success_rate": torch.tensor([0.1, 0.2, 1.5, 0.0])}, ["success_rate", "[0, 1]", "1"]),
    "rate-nan": (
        {"success_rate": torch.tensor([0.1, 0.2, float("nan"), 0.0])},
        ["success_rate", "[0, 1]"],
    ),
}
NOT_YET = {
    "impl": ({"impl": "cuda"}, ["impl", "reference", "'cuda'"]),
    "objective": ({"objective": "clip"}, ["objective", "callable", "str"]),
    "config": ({"config": {"surrogate": "clip"}}, ["config", "PolicyLossConfig", "dict"]),
}
CASES = {
    f"{kind}-{name}": case
    for kind, cases in (
        ("shape", SHAPES),
        ("dtype", DTYPES),
        ("device", DEVICES),
        ("missing", MISSING),
        ("range", RANGES),
        ("option", NOT_YET),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES)
def test_message_names_expected_and_received(case):
    changes, words = CASES[case]
    pattern = ".*".join(re.escape(word) for word in words)
    with pytest.raises(ValueError, match=pattern):
        focal_policy_loss(**arguments(**changes))


TOKEN_LOGPS = ("hidden", "lm_head_weight", "completion_ids", "completion_mask", "lm_head_bias")


@pytest.mark.parametrize(
    "case", [case for case, (changes, _) in CASES.items() if set(changes) <= set(TOKEN_LOGPS)]
)
def test_token_logps_has_the_same_messages(case):
    changes, words = CASES[case]
    kept = {name: value for name, value in arguments(**changes).items() if name in TOKEN_LOGPS}
    with pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words)):
        token_logps(**kept)


PACKED = {
    "no-bounds-focal": (
        {"config": PolicyLossConfig(), "success_rate": torch.ones(B)},
        ["cu_seqlens", "(B+1,)", "None", "focal_gamma"],
    ),
    "no-bounds-reduction": (
        {"config": PolicyLossConfig.grpo()},
        ["cu_seqlens", "None", "sequence_mean"],
    ),
    "no-bounds-ratio": (
        {"config": PolicyLossConfig(ratio_level="sequence", focal_gamma=0.0)},
        ["cu_seqlens", "None", "ratio_level"],
    ),
    "no-bounds-rollout": (
        {
            "config": PolicyLossConfig(
                focal_gamma=0.0, rollout_correction="truncate", rollout_level="sequence"
            )
        },
        ["cu_seqlens", "None", "rollout_level"],
    ),
    "no-bounds-advantages": ({"advantages": torch.ones(B)}, ["advantages", "(20,)", "(4,)"]),
    "bounds-end": ({"cu_seqlens": torch.tensor([0, 5, 19])}, ["cu_seqlens", "N", "19"]),
    "bounds-start": ({"cu_seqlens": torch.tensor([1, 5, 20])}, ["cu_seqlens", "0", "1"]),
    "bounds-decrease": ({"cu_seqlens": torch.tensor([0, 9, 5, 20])}, ["cu_seqlens", "decrease"]),
    "bounds-2d": ({"cu_seqlens": torch.tensor([[0, 20]])}, ["cu_seqlens", "(B+1,)", "(1, 2)"]),
    "bounds-float": ({"cu_seqlens": torch.tensor([0.0, 20.0])}, ["cu_seqlens", "int", "float32"]),
    "advantages": (
        {"cu_seqlens": torch.tensor([0, 5, 20]), "advantages": torch.ones(3)},
        ["advantages", "(2,)", "(20,)", "(3,)"],
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_input_messages(case):
    changes, words = PACKED[case]
    with pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words)):
        focal_policy_loss(**packed(**changes))


def test_packed_input_as_such_is_fine():
    assert focal_policy_loss(**packed()).loss.isfinite()


def test_errors_of_data_come_before_any_work():
    """A bad id would index outside the weight: nothing may have run before the check."""
    ids = torch.full((B, T), V)
    with pytest.raises(ValueError, match=r"\[0, 11\).*11 at \[0, 0\].*\(20 such ids\)"):
        focal_policy_loss(
            **arguments(completion_ids=ids, completion_mask=None), config=PolicyLossConfig()
        )


def test_triton_without_a_device_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for call in (
        lambda: focal_policy_loss(**arguments(), impl="triton"),
        lambda: token_logps(
            **{k: v for k, v in arguments().items() if k in TOKEN_LOGPS}, impl="triton"
        ),
    ):
        with pytest.raises(RuntimeError, match="triton.*GPU"):
            call()
