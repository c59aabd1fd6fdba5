"""A vocabulary-parallel head on 2 and 3 ranks equals one whole head; what is refused is named."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, token_logps
from fgrpo_kernels.testing import make_inputs

WORKER = Path(__file__).with_name("vocab_parallel_worker.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_equal_the_whole_head(ranks):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launch, f"--nproc_per_node={ranks}", str(WORKER)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.split(": ") for line in run.stdout.splitlines() if line.startswith("result: ")]
    assert len(lines) == 2 * 23, run.stdout
    for _, impl, name, difference in lines:
        # Values up to 40 in float64, whose sums the ranks add in another order.
        assert float(difference) < 1e-13, (impl, name, difference)
    printed = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert printed["hidden reduced"] == "1; sizes gathered: 2"
    assert float(printed["module"]) < 2e-6  # log-probs of a few nats in float32
    assert float(printed["bfloat16"]) < 2**-8  # one rounding of gradients below 1


@pytest.fixture
def group():
    """Of this process alone, which other tests may have initialised already."""
    initialised = dist.is_initialized()
    if not initialised:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    if not initialised:
        dist.destroy_process_group()


def test_one_rank_is_a_whole_head(group):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    whole, alone = (focal_policy_loss(**inputs.arguments(), tp_group=g) for g in (None, group))
    torch.testing.assert_close(alone.loss, whole.loss, rtol=1e-14, atol=0)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_padding_rows_take_no_part(impl):
    """Without a group too: ids of padding are out of range, its gradient is 0."""
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    padded = torch.full((14, 6), torch.nan, dtype=torch.float64)
    padded[:11] = inputs.lm_head_weight.detach()
    padded.requires_grad_()
    arguments = {**inputs.arguments(), "lm_head_weight": padded}
    out = focal_policy_loss(**arguments, vocab_size=11, impl=impl)
    expected = focal_policy_loss(**inputs.arguments(), impl="reference")
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-13, atol=1e-15)
    (grad,) = torch.autograd.grad(out.loss, padded)
    (exact,) = torch.autograd.grad(expected.loss, inputs.lm_head_weight)
    torch.testing.assert_close(grad[:11], exact, rtol=1e-11, atol=1e-13)
    assert (grad[11:] == 0).all()
    with pytest.raises(ValueError, match=r"expected ids in \[0, 11\).*received 12"):
        bad = {**arguments, "completion_ids": torch.full((4, 5), 12)}
        focal_policy_loss(**bad, vocab_size=11, impl=impl)


def test_what_is_refused_is_named(group):
    inputs = make_inputs(2, 3, 6, 11, group_size=2)

    def refused(message, **kwargs):
        with pytest.raises(ValueError, match=message):
            focal_policy_loss(**inputs.arguments(), **kwargs)

    refused("tp_group: expected a torch.*ProcessGroup.*received object", tp_group=object())
    refused("tp_group: not with impl='reference'", tp_group=group, impl="reference")
    lora = (torch.zeros(2, 6), torch.zeros(11, 2), 1.0)
    refused("tp_group: not with lm_head_lora", tp_group=group, lm_head_lora=lora)
    tolerance = PolicyLossConfig(grad_tol=1e-3)
    refused("grad_tol > 0.*received tp_group; use grad_tol=0", tp_group=group, config=tolerance)
    for g in (None, group):
        refused("vocab_size: expected 1 <= vocab_size <= 11.*received 0", tp_group=g, vocab_size=0)
        refused("vocab_size: .*received 12", tp_group=g, vocab_size=12)
        refused("vocab_size: expected an integer or None, received 3.5", tp_group=g, vocab_size=3.5)
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(inputs.lm_head_weight.detach(), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="tp_group: .*plain tensor, received DTensor.*to_local"):
        focal_policy_loss(**{**inputs.arguments(), "lm_head_weight": sharded}, tp_group=group)
    bad = {**inputs.arguments(), "completion_ids": torch.full((2, 3), 11)}
    with pytest.raises(ValueError, match=r"expected ids in \[0, 11\).*received 11"):
        focal_policy_loss(**bad, tp_group=group)


def test_a_group_without_torch_distributed_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    inputs = make_inputs(2, 3, 6, 11, group_size=2)
    with pytest.raises(ValueError, match="tp_group: torch.distributed is not initialised"):
        token_logps(inputs.hidden, inputs.lm_head_weight, inputs.completion_ids, tp_group=object())
