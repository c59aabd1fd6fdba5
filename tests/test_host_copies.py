"""One call waits for its device once: for the counts and checks that `HostFacts` reads.

The calls run on the meta device, whose tensors have no data: whatever needs a value (item, tolist,
bool, a copy to the CPU, nonzero, a boolean index, unique, equal) raises there, and the package
takes its branches for devices that are not a CPU. The one read gets the numbers that the same call
has on the CPU. Triton's kernels, which cannot wait for the host, are left out.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fgrpo_kernels import (
    PolicyLossConfig,
    focal_policy_loss,
    head,
    token_logps,
    triton_linear_stats,
    triton_rows,
)
from fgrpo_kernels.inputs import HostFacts
from fgrpo_kernels.testing import make_inputs

BATCH, LENGTH, WIDTH, VOCAB = 4, 6, 16, 40
KERNELS = [
    (module, name)
    for module in (triton_rows, triton_linear_stats)
    for name in vars(module)
    if name.endswith("_kernel")
]
IMPLS = ["torch", "triton"]


@dataclass
class Waits:
    reads: int = 0
    blocking_uploads: int = 0


class Uploads(TorchDispatchMode):
    """Counts copies from the CPU to the device for which the host waits."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            non_blocking = kwargs.get("non_blocking", name == "copy_" and args[2:3] == (True,))
            if source.device.type == "cpu" and result.is_meta and not non_blocking:
                self._waits.blocking_uploads += 1
        return result


@contextmanager
def without_data(facts: dict[str, int]):
    """Counts the reads, answered with `facts`, and the blocking uploads."""
    waits = Waits()

    def read(values: Tensor) -> list[int]:
        assert values.is_meta and values.shape == (len(facts),)
        waits.reads += 1
        return list(facts.values())

    patches = [
        mock.patch.object(Tensor, "tolist", read),
        # Autocast knows no meta device.
        mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
        mock.patch.object(torch, "is_autocast_enabled", lambda *_: False),
        *(mock.patch.object(module, name, mock.MagicMock()) for module, name in KERNELS),
    ]
    with Uploads(waits):
        for patch in patches:
            patch.start()
        try:
            yield waits
        finally:
            mock.patch.stopall()


def on_meta(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(on_meta, value))
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("meta").requires_grad_(value.requires_grad)


def facts_of(call: Any) -> dict[str, int]:
    """What the call reads on the CPU."""
    found = []
    read = HostFacts.read

    def recorded(facts: HostFacts) -> dict[str, int]:
        found.append(read(facts))
        return found[-1]

    with mock.patch.object(HostFacts, "read", recorded):
        call()
    (facts,) = found
    return facts


def waits_of_loss(arguments: dict[str, Any], stay: tuple[str, ...] = (), **kwargs: Any) -> Waits:
    """Of one call and its backward; what `stay` names is left on the CPU."""
    facts = facts_of(lambda: focal_policy_loss(**arguments, **kwargs | {"impl": "torch"}))
    moved = {name: v if name in stay else on_meta(v) for name, v in arguments.items()}
    with without_data(facts) as waits:
        out = focal_policy_loss(**moved, **kwargs)
        (0.5 * out.loss).backward()
    assert any(isinstance(v, Tensor) and v.is_meta and v.grad is not None for v in moved.values())
    return waits


def inputs(**changes: Any) -> dict[str, Any]:
    made = make_inputs(BATCH, LENGTH, WIDTH, VOCAB, group_size=2, zero_advantage=0.5)
    return made.arguments() | changes


def packed() -> dict[str, Any]:
    given = {
        name: value.flatten(0, 1) if value is not None and value.dim() > 1 else value
        for name, value in inputs(lm_head_weight=None).items()
    }
    bounds = torch.arange(BATCH + 1) * LENGTH
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    hidden = given["hidden"].detach().requires_grad_()
    return given | {"cu_seqlens": bounds, "lm_head_weight": weight, "hidden": hidden}


def lora() -> tuple[Tensor, Tensor, float]:
    return torch.randn(2, WIDTH, requires_grad=True), torch.randn(VOCAB, 2, requires_grad=True), 0.5


def own_objective(logps: Tensor, rows: Any) -> Tensor:
    return -rows.advantages * (logps - rows.old_logps).exp()


def own_sequence_objective(logps: Tensor, rows: Any) -> Tensor:
    return own_objective(logps, rows)


own_sequence_objective.row_local = False

ROW_LOCAL = PolicyLossConfig()
CHUNKED = PolicyLossConfig(max_chunk_bytes=5 * VOCAB * 4)
GSPO = PolicyLossConfig.gspo(focal_gamma=0.5)
REJECT = PolicyLossConfig(rollout_correction="mask", rollout_min=0.97, rollout_max=1.02)
FROZEN = torch.randn(VOCAB, WIDTH)

LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "row-local": (inputs(), {"config": ROW_LOCAL}),
    "every row": (
        inputs(completion_mask=None),
        {"config": replace(ROW_LOCAL, skip_inactive=False)},
    ),
    "chunks": (inputs(), {"config": CHUNKED}),
    "no logps": (inputs(), {"config": ROW_LOCAL, "return_logps": False}),
    "on-policy": (inputs(old_logps=None), {"config": ROW_LOCAL}),
    "frozen head": (inputs(lm_head_weight=FROZEN), {"config": ROW_LOCAL}),
    "kl and dual clip": (inputs(), {"config": replace(ROW_LOCAL, kl_coef=0.1, dual_clip=3.0)}),
    "entropy": (inputs(), {"config": replace(ROW_LOCAL, entropy_coef=0.1)}),
    "soft-cap and bias": (
        inputs(lm_head_bias=torch.randn(VOCAB, requires_grad=True)),
        {"config": replace(ROW_LOCAL, logit_softcap=30.0, temperature=0.7)},
    ),
    "sequence level": (inputs(), {"config": GSPO}),
    "sequence level, chunks": (inputs(), {"config": replace(GSPO, max_chunk_bytes=1)}),
    "sequence level, entropy": (inputs(), {"config": replace(GSPO, entropy_coef=0.1)}),
    "sequence level, frozen": (inputs(lm_head_weight=FROZEN), {"config": GSPO}),
    "rollout mask": (inputs(), {"config": REJECT}),
    "rollout mask of sequences": (
        inputs(),
        {"config": replace(REJECT, rollout_level="sequence", reduction="sequence_mean")},
    ),
    "rollout mask, on-policy": (inputs(old_logps=None), {"config": REJECT}),
    "token weights": (
        inputs(token_weights=torch.rand(BATCH, LENGTH, requires_grad=True)),
        {"config": PolicyLossConfig.dr_grpo(fixed_length=7)},
    ),
    "global denominators": (
        inputs(global_valid_tokens=torch.tensor(31.0)),
        {"config": ROW_LOCAL},
    ),
    "packed": (packed(), {"config": GSPO}),
    "packed, row-local": (packed(), {"config": ROW_LOCAL}),
    "own objective": (inputs(), {"config": ROW_LOCAL, "objective": own_objective}),
    "own sequence objective": (
        inputs(),
        {"config": ROW_LOCAL, "objective": own_sequence_objective},
    ),
    "adapter": (inputs(lm_head_lora=lora()), {"config": ROW_LOCAL}),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_backward_wait_once(name, impl):
    arguments, kwargs = LOSSES[name]
    assert waits_of_loss(arguments, impl=impl, **kwargs) == Waits(reads=1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gradient", ["head", "hidden", "none"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_token_logps_wait_once(impl, gradient, with_entropy):
    given = inputs()
    names = ("hidden", "lm_head_weight", "completion_ids", "completion_mask")
    arguments = {name: given[name] for name in names}
    kwargs = {"with_entropy": with_entropy, "max_chunk_bytes": 5 * VOCAB * 4}
    facts = facts_of(lambda: token_logps(**arguments, **kwargs))
    moved = {name: on_meta(value) for name, value in arguments.items()}
    moved["lm_head_weight"].requires_grad_(gradient == "head")
    moved["hidden"].requires_grad_(gradient != "none")
    with without_data(facts) as waits:
        logps, entropy = token_logps(**moved, **kwargs, impl=impl)
        if gradient != "none":
            (logps.sum() + (entropy.sum() if with_entropy else 0)).backward()
    assert waits == Waits(reads=1)


def test_products_of_narrow_operands_wait_once():
    """The branch of GPUs: bf16 operands into fp32, E in bf16."""
    made = make_inputs(BATCH, LENGTH, WIDTH, VOCAB, group_size=2, dtype=torch.bfloat16)
    with mock.patch.object(head, "multiplies_narrow", lambda weight: weight.is_meta):
        found = waits_of_loss(made.arguments(), impl="triton", config=CHUNKED)
    assert found == Waits(reads=1)


@pytest.mark.parametrize(
    "name,given",
    [
        ("cu_seqlens", packed()),
        ("global_valid_tokens", inputs(global_valid_tokens=torch.tensor(31.0))),
        ("global_sequences", inputs(global_sequences=torch.tensor(4.0))),
    ],
)
def test_what_may_come_from_the_cpu_is_not_waited_for(name, given):
    found = waits_of_loss(given, stay=(name,), config=PolicyLossConfig.grpo(), impl="torch")
    assert found == Waits(reads=1)


def peek(logps: Tensor, how: str) -> Tensor:
    likely = logps > -1
    if how == "item":
        return logps * logps.sum().item()
    if how == "if":
        return logps if likely.any() else -logps
    if how == "boolean index":
        return logps + logps[likely].sum()
    if how == "nonzero":
        return logps + len(likely.nonzero())
    if how == "unique":
        return logps + len(logps.unique())
    if how == "masked_select":
        return logps.masked_select(likely)
    if how == "repeat_interleave":
        return logps.repeat_interleave(likely.long())
    return logps + logps.detach().cpu().sum()


@pytest.mark.parametrize(
    "how",
    ["item", "if", "boolean index", "nonzero", "unique", "masked_select", "repeat_interleave"]
    + ["cpu"],
)
def test_whoever_looks_at_data_is_noticed(how):
    given = inputs()
    facts = facts_of(lambda: focal_policy_loss(**given, config=ROW_LOCAL))
    moved = {name: on_meta(value) for name, value in given.items()}
    with without_data(facts), pytest.raises((RuntimeError, NotImplementedError), match="meta|Meta"):
        focal_policy_loss(
            **moved, config=ROW_LOCAL, impl="torch", objective=lambda logps, _: peek(logps, how)
        )


def test_a_second_read_and_an_upload_are_counted():
    with without_data({"a": 1, "b": 2}) as waits:
        for _ in range(2):
            torch.empty(2, device="meta").tolist()
        torch.empty(2, device="meta").copy_(torch.ones(2), non_blocking=True)
        torch.empty(2, device="meta").copy_(torch.ones(2))
        torch.ones(2).to("meta")
    assert waits == Waits(reads=2, blocking_uploads=2)
