"""What a LoRA adapter on the head costs in each plan, and what its plans refuse."""

from dataclasses import replace

import pytest
import torch
from test_lora_head import PLANS, adapter
from test_plans import LargestTensor
from torch.utils.flop_counter import FlopCounterMode

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, token_logps
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.low_rank import LowRankUpdate
from fgrpo_kernels.testing import make_inputs
from fgrpo_kernels.triton_linear_stats import fused_statistics

N, V, D, R = 24, 40, 8, 2  # 4 sequences of 6 tokens
CHUNK = 5 * V * 4  # five rows: five chunks


def flops(config, trained, *, function="loss", chunk=CHUNK):
    """Counted FLOPs / 2; of h(idden), W(eight), A and B those in `trained` need a gradient."""
    inputs = replace(
        make_inputs(4, 6, D, V, group_size=2, zero_advantage=0.0), completion_mask=None
    )
    a, b, scale = adapter(D, V, torch.float32, rank=R)
    for name, tensor in zip("hWAB", (inputs.hidden, inputs.lm_head_weight, a, b), strict=True):
        tensor.requires_grad_(name in trained)
    with FlopCounterMode(display=False) as counter:
        if function == "loss":
            loss = focal_policy_loss(
                **inputs.arguments(),
                lm_head_lora=(a, b, scale),
                config=replace(config, max_chunk_bytes=chunk),
            ).loss
        else:
            logps, _ = token_logps(
                inputs.hidden, inputs.lm_head_weight, inputs.completion_ids,
                lm_head_lora=(a, b, scale), max_chunk_bytes=chunk,
            )  # fmt: skip
            loss = logps.sum()
        if trained:
            loss.backward()
    return counter.get_total_flops() / 2


LOGITS = N * D * V + N * D * R + N * R * V  # X W^T; X A^T; times B^T
HIDDEN = N * D * V + N * R * V + N * D * R  # E W; E B; times A
OF_A = N * D * R  # (g E B)^T X
OF_B = N * D * R + N * R * V  # X A^T again; E^T times it
OF_W = N * D * V


def test_cost_of_each_plan():
    gspo, row_local = PLANS["not-row-local"], PolicyLossConfig(surrogate="cispo")
    assert flops(row_local, "") == LOGITS
    for config in (row_local, PLANS["row-local-entropy"]):
        assert flops(config, "hAB") == LOGITS + HIDDEN + OF_A + OF_B  # 4 N V D and little
        assert flops(config, "hWAB") == LOGITS + HIDDEN + OF_A + OF_B + OF_W
        assert flops(config, "h") == LOGITS + HIDDEN
        assert flops(config, "B") == LOGITS + OF_B  # 2 N V D: nothing flows through W
        assert flops(config, "A") == LOGITS + N * R * V + OF_A
    assert flops(gspo, "h") == LOGITS + HIDDEN
    assert flops(gspo, "hAB", chunk=None) == LOGITS + HIDDEN + OF_A + OF_B
    assert flops(gspo, "hAB") == 2 * LOGITS + HIDDEN + OF_A + OF_B
    assert flops(None, "h", function="logps") == LOGITS + HIDDEN
    assert flops(None, "hAB", function="logps") == 2 * LOGITS + HIDDEN + OF_A + OF_B


def test_the_fused_log_probs_leave_an_adapter_to_the_row_path():
    update = LowRankUpdate(torch.ones(1, 16), torch.ones(21, 1), 1.0, torch.float32)
    head = LinearHead(torch.zeros(21, 16), None, torch.float32)
    assert fused_statistics(head) is not None
    assert fused_statistics(replace(head, lora=update)) is None


def test_the_extra_cost_at_full_size_is_under_one_percent():
    """The same sums with the sizes of Qwen2.5-7B's head and rank 16."""
    n, v, d, r = 8192, 152064, 3584, 16
    extra = 3 * n * r * v + 4 * n * d * r + n * d * r  # LOGITS + HIDDEN + OF_A + OF_B less W's
    assert extra < 0.01 * 2 * n * d * v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_of_n_times_v_elements_is_ever_made(plan, dtype):
    # N V = 32 * 60 elements; the weight has 60 * 8, the chunk 4 rows
    inputs = replace(make_inputs(4, 8, 8, 60, group_size=2, dtype=dtype), completion_mask=None)
    for frozen in (False, True):
        inputs.lm_head_weight.requires_grad_(not frozen)
        config = replace(PLANS[plan], max_chunk_bytes=4 * 60 * 4)
        with LargestTensor() as largest:
            out = focal_policy_loss(
                **inputs.arguments(), lm_head_lora=adapter(8, 60, dtype), config=config
            )
            out.loss.backward()
        assert largest.elements == 60 * 8


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("wanted", ["h", "A", "B"])
def test_a_second_derivative_and_a_second_backward_raise(plan, wanted):
    inputs = make_inputs(4, 5, 6, 11)
    a, b, scale = adapter(6, 11, torch.float32)
    leaf = {"h": inputs.hidden, "A": a, "B": b}[wanted]

    def loss():
        return focal_policy_loss(
            **inputs.arguments(), lm_head_lora=(a, b, scale), config=PLANS[plan]
        ).loss

    (gradient,) = torch.autograd.grad(loss(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()
    value = loss()
    value.backward()
    with pytest.raises(RuntimeError, match="already differentiated|second time"):
        value.backward()


def test_an_adapter_written_to_before_the_backward_raises():
    inputs = make_inputs(4, 5, 6, 11)
    config = PolicyLossConfig.gspo(max_chunk_bytes=1)
    for index in (0, 1):
        lora = adapter(6, 11, torch.float32)
        loss = focal_policy_loss(**inputs.arguments(), lm_head_lora=lora, config=config).loss
        with torch.no_grad():
            lora[index].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
