"""Run by test_zero3.py on each rank: FocalPolicyLoss under DeepSpeed ZeRO-3 against one process.

Prints one line a config: its name, the largest error of a gradient relative to its bound, and how
often the head was gathered.
"""

import copy
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from test_lora_module import AdaptedLinear
from torch import nn
from worker_end import end_of_work

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig
from fgrpo_kernels.testing import make_inputs

CONFIGS = {
    "row-local": PolicyLossConfig.dapo(focal_gamma=0.5),
    "kept chunk": PolicyLossConfig.gspo(),
    "recompute": PolicyLossConfig.gspo(max_chunk_bytes=1),
    "adapter": PolicyLossConfig.gspo(max_chunk_bytes=1),
}


class Policy(nn.Module):
    def __init__(self, config, adapted):
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        if adapted:
            self.head = AdaptedLinear(self.head.requires_grad_(False))
        self.loss = FocalPolicyLoss(self.head, config)

    def forward(self, hidden, *args, **kwargs):
        return self.loss(torch.tanh(self.trunk(hidden)), *args, **kwargs)


def compare(config, dtype, adapted):
    """(largest error of a gradient relative to its bound, gathers of the head in the forward and in
    the backward). The bound: twice the error of one process at this dtype, and one rounding."""
    torch.manual_seed(0)
    sharded = Policy(config, adapted).to(dtype)
    arguments = {k: v for k, v in make_inputs(8, 12, 16, 50).arguments().items() if v is not None}
    del arguments["lm_head_weight"]
    hidden = arguments.pop("hidden").detach().to(dtype)
    counts = {"global_valid_tokens": arguments["completion_mask"].sum(), "global_sequences": 8}

    def gradients_of_one_process(dtype):
        whole = copy.deepcopy(sharded).to(dtype)
        whole(hidden.to(dtype), **counts, **arguments).loss.backward()
        return [p.grad.double() for p in whole.parameters() if p.requires_grad]

    exact, alone = gradients_of_one_process(torch.float64), gradients_of_one_process(dtype)

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # nothing stays gathered
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "zero_optimization": zero}
    settings["bf16"] = {"enabled": dtype == torch.bfloat16}
    engine, *_ = deepspeed.initialize(model=sharded, config=settings)
    gathers = count_gathers(sharded)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    output = engine(hidden[mine], **counts, **{k: v[mine] for k, v in arguments.items()})
    in_forward = len(gathers)
    engine.backward(output.loss * ranks)  # the engine averages over ranks
    worst = 0.0
    trained = [parameter for parameter in sharded.parameters() if parameter.requires_grad]
    for parameter, truth, one in zip(trained, exact, alone, strict=True):
        error = (safe_get_full_grad(parameter) - truth).abs().max()
        rounding = torch.finfo(dtype).eps * truth.abs().max()
        worst = max(worst, float(error / (2 * (one - truth).abs().max() + rounding)))
    return worst, in_forward, len(gathers) - in_forward


def count_gathers(policy):
    """A list that grows by one whenever the engine gathers the head."""
    seen, head = [], policy.head.weight
    gather = head.all_gather_coalesced

    def counted(parameters, **kwargs):
        seen.extend(p for p in parameters if p is head)
        return gather(parameters, **kwargs)

    for parameter in policy.parameters():  # the engine asks the first of those that it gathers
        parameter.all_gather_coalesced = counted
    return seen


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__ = {}  # a shared-memory collective would be compiled otherwise
    deepspeed.init_distributed("gloo")
    for name, config in CONFIGS.items():
        for dtype in (torch.float32, torch.bfloat16):
            results = compare(config, dtype, adapted=name == "adapter")
            if dist.get_rank() == 0:
                print(f"result: {name} {dtype}:", *results, flush=True)
    end_of_work()
