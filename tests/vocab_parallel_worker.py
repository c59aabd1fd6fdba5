"""Run by test_vocab_parallel.py on each rank: a head in shards against the whole head.

Prints one line a case: its name and the largest difference, and a last line with what was counted.
"""

import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from loss_cases import poisoned_memory
from worker_end import end_of_work

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig, focal_policy_loss, token_logps
from fgrpo_kernels.testing import make_inputs

VOCAB, WIDTH = 13, 6
SHARDS = {2: (9, 7), 3: (6, 7, 4)}
"""Rows of each rank, 13 tokens and padding; of three ranks the last has padding only."""
SEQUENCE = PolicyLossConfig.gspo(focal_gamma=0.5)
CONFIGS = {
    "clip": PolicyLossConfig(kl_coef=0.1, dual_clip=3.0),
    "cispo with entropy": PolicyLossConfig(surrogate="cispo", entropy_coef=0.1),
    "soft-cap and temperature": PolicyLossConfig(logit_softcap=3.0, temperature=0.7),
    "soft-cap with entropy": PolicyLossConfig(logit_softcap=3.0, entropy_coef=0.1),
    "small chunks": PolicyLossConfig(max_chunk_bytes=4 * 9 * 8),
    "sequence ratio, kept chunk": SEQUENCE,
    "sequence ratio, recomputed": replace(SEQUENCE, max_chunk_bytes=4 * 9 * 8, entropy_coef=0.1),
    "nothing skipped": PolicyLossConfig(skip_inactive=False),
    "rejected": PolicyLossConfig(rollout_correction="mask", rollout_min=0.9, rollout_max=1.1),
}


def row_local_objective(logps, rows):
    return -torch.minimum((logps - rows.old_logps).exp(), torch.tensor(1.2)) * rows.advantages


def whole_batch_objective(logps, rows):
    return -(logps - logps.mean()) * rows.advantages


whole_batch_objective.row_local = False


def problem(*, spread=0.0, dtype=torch.float64):
    inputs = make_inputs(4, 5, WIDTH, VOCAB, group_size=2, dtype=dtype)
    inputs.lm_head_weight.requires_grad_(False)
    rows = sum(SHARDS[dist.get_world_size()])
    weight = torch.full((rows, WIDTH), torch.nan, dtype=dtype)  # padding takes no part
    weight[:VOCAB] = inputs.lm_head_weight
    hidden = inputs.hidden.detach().clone()
    hidden[..., 0] = 1
    bias = torch.randn(rows, dtype=dtype, generator=torch.Generator().manual_seed(1))
    bias[:7] += spread
    return replace(inputs, hidden=hidden, lm_head_weight=weight, lm_head_bias=bias)


def results(call, inputs, *, frozen):
    """[outputs, gradients] of one call, of leaves of its own."""
    leaves = {
        "hidden": inputs.hidden,
        "lm_head_weight": inputs.lm_head_weight,
        "lm_head_bias": inputs.lm_head_bias,
    }
    leaves = {name: value.detach().clone() for name, value in leaves.items()}
    wanted = ["hidden"] if frozen else list(leaves)
    for name in wanted:
        leaves[name].requires_grad_()
    total, outputs = call({**inputs.arguments(), **leaves})
    total.backward()
    return outputs, {name: leaves[name].grad for name in wanted}


def difference(call, inputs, mine, *, frozen=False):
    outputs, gradients = results(lambda arguments: call(arguments, None), inputs, frozen=frozen)
    shard = replace(
        inputs,
        lm_head_weight=inputs.lm_head_weight[mine],
        lm_head_bias=inputs.lm_head_bias[mine],
    )
    group = dist.group.WORLD
    ours, our_gradients = results(lambda arguments: call(arguments, group), shard, frozen=frozen)
    pairs = list(zip(ours, outputs, strict=True))
    for name, gradient in gradients.items():
        pairs.append((our_gradients[name], gradient if name == "hidden" else gradient[mine]))
    # The same bits on every rank.
    copies = [torch.empty_like(ours[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, ours[0].detach())
    assert all(torch.equal(copies[0], other) for other in copies)
    return float(torch.stack([largest(a.detach() - b.detach()) for a, b in pairs]).max())


def largest(values):
    """NaN if there is one."""
    return values.abs().max().double() if values.numel() else torch.zeros((), dtype=torch.float64)


def loss_call(config, impl, **kwargs):
    def call(arguments, group):
        out = focal_policy_loss(
            **arguments, config=config, impl=impl, tp_group=group, vocab_size=VOCAB, **kwargs
        )
        values = [out.loss, out.per_token_loss, *out.metrics.values()]
        values += [] if out.logps is None else [out.logps, out.entropy]
        return 3 * out.loss, values

    return call


def logps_call(impl):
    def call(arguments, group):
        logps, entropy = token_logps(
            *(arguments[name] for name in ("hidden", "lm_head_weight", "completion_ids")),
            completion_mask=arguments["completion_mask"],
            lm_head_bias=arguments["lm_head_bias"],
            with_entropy=True,
            impl=impl,
            tp_group=group,
            vocab_size=VOCAB,
        )
        upstream = torch.linspace(-1, 1, logps.numel()).view_as(logps)
        return (upstream * logps + upstream.square() * entropy).sum(), [logps, entropy]

    return call


def cases(impl):
    inputs = problem()
    for name, config in CONFIGS.items():
        yield name, loss_call(config, impl), inputs, {}
    for name in ("clip", "sequence ratio, kept chunk"):
        yield f"{name}, head frozen", loss_call(CONFIGS[name], impl), inputs, {"frozen": True}
    clip = PolicyLossConfig()
    yield "without logps", loss_call(clip, impl, return_logps=False), inputs, {}
    for objective in (row_local_objective, whole_batch_objective):
        yield objective.__name__, loss_call(clip, impl, objective=objective), inputs, {}
    yield "log-probs", logps_call(impl), inputs, {}
    yield "log-probs, head frozen", logps_call(impl), inputs, {"frozen": True}
    bonus = PolicyLossConfig(entropy_coef=0.1)
    # One rank's logits far below the other's: its E would overflow or vanish in its own units.
    for spread in (-1000.0, 1000.0):
        far = problem(spread=spread)
        yield f"bias {spread}", loss_call(clip, impl), far, {}
        yield f"bias {spread} with entropy", loss_call(bonus, impl), far, {}
    forbidden = problem()
    forbidden.lm_head_bias[torch.tensor([0, 1, 2, 8, 12])] = -torch.inf
    forbidden.completion_ids.fill_(3)
    forbidden.completion_ids[:, 1::2] = 9
    yield "forbidden tokens", loss_call(clip, impl), forbidden, {}
    yield "forbidden, with entropy", loss_call(bonus, impl), forbidden, {}
    empty = replace(inputs, completion_mask=torch.zeros(4, 5, dtype=torch.bool))
    yield "nothing valid", loss_call(clip, impl), empty, {}


def reductions_of_hidden(mine):
    """How many of a call's all-reduces are as large as hidden's gradient."""
    inputs, shapes, all_reduce = problem(), [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        shapes.append(tuple(tensor.shape))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    difference(loss_call(CONFIGS["small chunks"], "torch"), inputs, mine)
    dist.all_reduce = all_reduce
    return shapes.count((4 * 5, WIDTH))


def module_difference(mine):
    """FocalPolicyLoss in float32 hands the group on; relative to the largest value."""
    inputs = problem(dtype=torch.float32)
    head = torch.nn.Linear(WIDTH, 1)
    head.weight = torch.nn.Parameter(inputs.lm_head_weight[mine].clone())
    head.bias = torch.nn.Parameter(inputs.lm_head_bias[mine].clone())
    arguments = {k: v for k, v in inputs.arguments().items() if not k.startswith("lm_head")}
    out = FocalPolicyLoss(head)(**arguments, tp_group=dist.group.WORLD, vocab_size=VOCAB)
    whole = focal_policy_loss(**inputs.arguments(), vocab_size=VOCAB)
    return float((out.logps - whole.logps).abs().max())


def gathers_of_sizes(mine):
    """How often two heads, one of them used twice, ask for the ranks' rows. They differ on the last
    rank alone: the first must not take the second for one that it knows."""
    count, all_gather = 0, dist.all_gather

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return all_gather(*args, **kwargs)

    inputs, heads = problem(), []
    for rows in (sum(SHARDS[dist.get_world_size()]), sum(SHARDS[dist.get_world_size()]) - 1):
        generator = torch.Generator().manual_seed(rows)
        whole = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
        heads.append((whole, whole[mine]))
    dist.all_gather = counted
    for whole, shard in (*heads, heads[0]):
        ours, expected = (
            token_logps(inputs.hidden, weight, inputs.completion_ids, tp_group=group)[0]
            for weight, group in ((shard, dist.group.WORLD), (whole, None))
        )
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    dist.all_gather = all_gather
    return count


def narrow_difference(mine):
    """bfloat16 on CPU multiplies block by block, of which a shard that is all padding has none."""
    with poisoned_memory():
        return difference(
            loss_call(PolicyLossConfig(), "torch"), problem(dtype=torch.bfloat16), mine
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    sizes, rank = SHARDS[dist.get_world_size()], dist.get_rank()
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for impl in ("torch", "triton"):
        for name, call, inputs, options in cases(impl):
            worst = torch.tensor(difference(call, inputs, mine, **options), dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if rank == 0:
                print(f"result: {impl}: {name}: {worst.item():.3e}", flush=True)
    count, module = reductions_of_hidden(mine), module_difference(mine)
    gathers, narrow = gathers_of_sizes(mine), narrow_difference(mine)
    if rank == 0:
        print(f"hidden reduced: {count}; sizes gathered: {gathers}", flush=True)
        print(f"module: {module:.3e}", f"bfloat16: {narrow:.3e}", sep="\n", flush=True)
    end_of_work()
