"""Run by test_fsdp2.py on each rank: a head sharded by FSDP2 against one process.

Prints one line a case: its name and the largest error of a gradient relative to its bound.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from worker_end import end_of_work

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig, focal_policy_loss
from fgrpo_kernels.testing import make_inputs

CONFIGS = {
    "row-local": PolicyLossConfig.dapo(focal_gamma=0.5),
    "sequence": PolicyLossConfig.gspo(),
}


class Policy(nn.Module):
    def __init__(self, config, *, tied):
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.head = nn.Linear(16, 51, bias=not tied)
        if tied:
            self.embedding = nn.Embedding(51, 16)
            self.embedding.weight = self.head.weight
        self.loss = FocalPolicyLoss(self.head, config)

    def forward(self, hidden, completion_ids, *args, **kwargs):
        if hasattr(self, "embedding"):
            hidden = hidden + self.embedding(completion_ids.roll(1, 1)).to(hidden.dtype)
        return self.loss(torch.tanh(self.trunk(hidden)), completion_ids, *args, **kwargs)


class ByFunction(Policy):
    """The loss as a function, called on parameters that no hook has gathered."""

    def __init__(self, config):
        super().__init__(config, tied=False)
        self.config = config
        del self.loss

    def forward(self, hidden, completion_ids, advantages, success_rate, **kwargs):
        weight, bias = self.head.weight, self.head.bias
        assert isinstance(weight, DTensor) == (dist.get_world_size() > 1 and self.sharded)
        arguments = (torch.tanh(self.trunk(hidden)), weight, completion_ids, advantages)
        return focal_policy_loss(
            *arguments, success_rate, lm_head_bias=bias, config=self.config, **kwargs
        )


def shard(policy, dtype):
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if isinstance(policy, ByFunction):
        policy.sharded = True
        fully_shard(policy.trunk, mp_policy=mixed)
        fully_shard(policy.head, mp_policy=mixed)
    else:
        fully_shard(policy, mp_policy=mixed)


def worst_error(make, dtype):
    torch.manual_seed(0)
    sharded = make()
    sharded.sharded = False
    arguments = {k: v for k, v in make_inputs(8, 12, 16, 51).arguments().items() if v is not None}
    del arguments["lm_head_weight"]
    hidden = arguments.pop("hidden").detach().to(dtype)
    counts = {"global_valid_tokens": arguments["completion_mask"].sum(), "global_sequences": 8}

    def gradients_of_one_process(dtype):
        whole = copy.deepcopy(sharded).to(dtype)
        whole(hidden.to(dtype), **counts, **arguments).loss.backward()
        return [p.grad.double() for p in whole.parameters()]

    exact, alone = gradients_of_one_process(torch.float64), gradients_of_one_process(dtype)
    shard(sharded, dtype)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    output = sharded(hidden[mine], **counts, **{k: v[mine] for k, v in arguments.items()})
    (output.loss * ranks).backward()  # FSDP averages over ranks
    worst = 0.0
    for parameter, truth, one in zip(sharded.parameters(), exact, alone, strict=True):
        assert isinstance(parameter.grad, DTensor)
        error = (parameter.grad.full_tensor() - truth).abs().max()
        rounding = torch.finfo(dtype).eps * truth.abs().max()
        worst = max(worst, float(error / (2 * (one - truth).abs().max() + rounding)))
    return worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, config in CONFIGS.items():
        makes = {
            "module": lambda c=config: Policy(c, tied=False),
            "tied module": lambda c=config: Policy(c, tied=True),
            "function": lambda c=config: ByFunction(c),
        }
        for kind, make in makes.items():
            for dtype in (torch.float32, torch.bfloat16):
                worst = worst_error(make, dtype)
                if dist.get_rank() == 0:
                    print(f"result: {name} {kind} {dtype}: {worst:.3f}", flush=True)
    end_of_work()
