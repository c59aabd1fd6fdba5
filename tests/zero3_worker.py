"""Run by test_zero3.py on each rank: FocalPolicyLoss under DeepSpeed ZeRO-3 against one process.

Prints one line a config: its name and the largest difference of a gradient.
"""

import copy
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig
from fgrpo_kernels.testing import make_inputs

CONFIGS = {
    "row-local": PolicyLossConfig.dapo(focal_gamma=0.5),
    "kept chunk": PolicyLossConfig.gspo(),
    "recompute": PolicyLossConfig.gspo(max_chunk_bytes=1),
}


class Policy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.loss = FocalPolicyLoss(self.head, config)

    def forward(self, hidden, *args, **kwargs):
        return self.loss(torch.tanh(self.trunk(hidden)), *args, **kwargs)


def largest_difference(config):
    torch.manual_seed(0)
    sharded = Policy(config)
    whole = copy.deepcopy(sharded)
    arguments = {k: v for k, v in make_inputs(8, 12, 16, 50).arguments().items() if v is not None}
    del arguments["lm_head_weight"]
    hidden = arguments.pop("hidden").detach()
    counts = {"global_valid_tokens": arguments["completion_mask"].sum(), "global_sequences": 8}
    whole(hidden, **counts, **arguments).loss.backward()

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # nothing stays gathered
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=sharded, config=settings)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    output = engine(hidden[mine], **counts, **{k: v[mine] for k, v in arguments.items()})
    engine.backward(output.loss * ranks)  # the engine averages over ranks
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    return max((safe_get_full_grad(p) - q.grad).abs().max().item() for p, q in pairs)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__ = {}  # a shared-memory collective would be compiled otherwise
    deepspeed.init_distributed("gloo")
    for name, config in CONFIGS.items():
        difference = largest_difference(config)
        if dist.get_rank() == 0:
            print(f"result: {name}: {difference:.3e}", flush=True)
