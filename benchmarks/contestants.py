"""The contestants: one objective, the same tensors, each through another head.

Objective: token-level clip with bounds 0.2 / 0.28 (DAPO), token mean, focal weight (gamma 0.5), no
KL, fp32, the head trained. Every token is valid, so that all contestants score the same rows.

B sequences, T completion tokens, N = B T rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, focal_weight, token_logps
from fgrpo_kernels.testing import LossInputs, lm_like_inputs, make_inputs

CONFIG = PolicyLossConfig.dapo(focal_gamma=0.5)
GRAD_TOL = 1e-3
"""Of the sparse backward."""
TRL_VOCABULARY_CHUNK = 32768
"""What TRL's trainers pass to its kernel."""


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    hidden: int
    vocab: int
    chunk_bytes: int
    """Budget of a chunk of logits, for ours and for the floor."""

    @property
    def rows(self) -> int:
        return self.batch * self.length

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk when the budget is split evenly."""
        return -(-self.rows // self.chunks)

    @property
    def chunks(self) -> int:
        return -(-4 * self.rows * self.vocab // self.chunk_bytes)

    @property
    def gradient_bytes(self) -> int:
        """dW and dhidden in fp32: what every contestant leaves behind."""
        return 4 * self.hidden * (self.vocab + self.rows)


SIZES = {
    # Four chunks, as many seconds as a CI run can spare.
    "smoke": Size(batch=8, length=64, hidden=256, vocab=32768, chunk_bytes=16 * 2**20),
    # The head of Qwen2.5-0.5B.
    "full": Size(batch=8, length=128, hidden=896, vocab=151936, chunk_bytes=256 * 2**20),
}


def make_problem(size: Size) -> LossInputs:
    """All tokens valid, every advantage non-zero."""
    inputs = make_inputs(
        size.batch, size.length, size.hidden, size.vocab, zero_advantage=0, drift=0.1
    )
    return replace(inputs, completion_mask=None, ref_logps=None, rollout_logps=None)


def make_peaked_problem(size: Size) -> LossInputs:
    """The same with next-token distributions as under RLVR: four of five rows below 0.01 nats."""
    inputs = lm_like_inputs(
        size.batch, size.length, size.hidden, size.vocab, zero_advantage=0, drift=0.1
    )
    return replace(inputs, completion_mask=None, ref_logps=None, rollout_logps=None)


def half_inactive(inputs: LossInputs) -> LossInputs:
    """The same with zero advantage in every other sequence."""
    advantages = inputs.advantages.clone()
    advantages[::2] = 0
    return replace(inputs, advantages=advantages)


def weighted_advantages(inputs: LossInputs) -> Tensor:
    """(B,): the focal weight, which peers do not know, folded into their advantages."""
    return inputs.advantages * focal_weight(inputs.success_rate, CONFIG.focal_gamma)


def clip_loss(logps: Tensor, inputs: LossInputs) -> Tensor:
    """The torch objective on top of a peer's log-probs (B, T)."""
    assert inputs.old_logps is not None
    advantages = weighted_advantages(inputs)[:, None]
    ratio = (logps - inputs.old_logps).exp()
    clipped = ratio.clamp(1 - CONFIG.clip_eps_low, 1 + CONFIG.clip_eps_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def plain_logps(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def plain(inputs: LossInputs, size: Size) -> Tensor:
    logps = plain_logps(inputs.hidden, inputs.lm_head_weight, inputs.completion_ids)
    return clip_loss(logps, inputs)


def linear_cross_entropy(inputs: LossInputs, size: Size) -> Tensor:
    from torch.nn import LinearCrossEntropyOptions

    nll = torch.nn.functional.linear_cross_entropy(
        inputs.hidden.flatten(0, 1),
        inputs.lm_head_weight,
        inputs.completion_ids.flatten(),
        reduction="none",
        # Our chunks; its own default takes far smaller ones and is several times slower here.
        options=LinearCrossEntropyOptions(batch_chunk_size=size.chunk_rows, chunking_method=None),
    )
    return clip_loss(-nll.view_as(inputs.completion_ids), inputs)


def trl_chunked(inputs: LossInputs, size: Size) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logps, *_ = ChunkedLogProbFunction.apply(
        inputs.hidden.flatten(0, 1),
        inputs.lm_head_weight,
        None,
        inputs.completion_ids.flatten(),
        1.0,
        TRL_VOCABULARY_CHUNK,
        None,
        1.0,
        (),  # no entropy
    )
    return clip_loss(logps.view_as(inputs.completion_ids), inputs)


def liger_grpo(inputs: LossInputs, size: Size, *, compiled: bool = False) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=compiled,
        use_ref_model=False,
        epsilon_low=CONFIG.clip_eps_low,
        epsilon_high=CONFIG.clip_eps_high,
        loss_type="dapo",
        temperature=1.0,
    )
    loss, _ = fused(
        inputs.hidden,
        inputs.lm_head_weight,
        inputs.completion_ids,
        torch.ones_like(inputs.completion_ids, dtype=torch.float32),
        weighted_advantages(inputs),
        old_per_token_logps=inputs.old_logps,
    )
    return loss


def ours(inputs: LossInputs, size: Size) -> Tensor:
    return _ours(inputs, size, "torch", return_logps=True)


def ours_half(inputs: LossInputs, size: Size) -> Tensor:
    return _ours(half_inactive(inputs), size, "torch", return_logps=True)


def ours_half_unscored(inputs: LossInputs, size: Size) -> Tensor:
    return _ours(half_inactive(inputs), size, "torch", return_logps=False)


def ours_sparse(inputs: LossInputs, size: Size) -> Tensor:
    return _ours(inputs, size, "torch", return_logps=True, grad_tol=GRAD_TOL)


def reference(inputs: LossInputs, size: Size) -> Tensor:
    return _ours(inputs, size, "reference", return_logps=True)


def _ours(
    inputs: LossInputs, size: Size, impl: str, *, return_logps: bool, grad_tol: float = 0
) -> Tensor:
    config = replace(CONFIG, max_chunk_bytes=size.chunk_bytes, grad_tol=grad_tol)
    return focal_policy_loss(
        **inputs.arguments(), config=config, impl=impl, return_logps=return_logps
    ).loss


@torch.no_grad()
def plain_scores(inputs: LossInputs, size: Size) -> Tensor:
    return plain_logps(inputs.hidden, inputs.lm_head_weight, inputs.completion_ids)


@torch.no_grad()
def our_scores(inputs: LossInputs, size: Size) -> Tensor:
    logps, _ = token_logps(
        inputs.hidden,
        inputs.lm_head_weight,
        inputs.completion_ids,
        impl="torch",
        max_chunk_bytes=size.chunk_bytes,
    )
    return logps


class BareProducts:
    """The floor: the matrix products alone, in chunks, into buffers that are there already.

    Three for a training step (Z = X W^T, dX = Z W, dW += Z^T X), one for scoring.
    """

    def __init__(self, inputs: LossInputs, size: Size, *, training: bool) -> None:
        self._x = inputs.hidden.detach().flatten(0, 1)
        self._weight = inputs.lm_head_weight.detach()
        self._logits = torch.zeros(size.chunk_rows, size.vocab)
        self._training = training
        if training:
            self._dx = torch.zeros_like(self._x)
            self._dweight = torch.zeros_like(self._weight)

    def __call__(self) -> None:
        rows = len(self._logits)
        for start in range(0, len(self._x), rows):
            x = self._x[start : start + rows]
            logits = self._logits[: len(x)]
            torch.mm(x, self._weight.t(), out=logits)
            if self._training:
                torch.mm(logits, self._weight, out=self._dx[start : start + len(x)])
                beta = 0 if start == 0 else 1
                torch.addmm(self._dweight, logits.t(), x, beta=beta, out=self._dweight)


Loss = Callable[[LossInputs, Size], Tensor]

TRAINED: dict[str, Loss] = {
    "plain PyTorch": plain,
    "F.linear_cross_entropy": linear_cross_entropy,
    "TRL ChunkedLogProb": trl_chunked,
    "Liger fused GRPO": liger_grpo,
    "ours": ours,
    "ours, half inactive": ours_half,
    "ours, half inactive, no logps": ours_half_unscored,
}
SPARSE_FLAT, SPARSE_PEAKED = "ours, grad_tol, flat rows", "ours, grad_tol, peaked rows"
"""`ours_sparse` on `make_problem` and on `make_peaked_problem`."""
SCORED: dict[str, Loss] = {"plain PyTorch, no grad": plain_scores, "ours, no grad": our_scores}
FLOOR, ONE_PRODUCT = "three bare products (floor)", "one bare product"


def training_step(loss: Loss, inputs: LossInputs, size: Size) -> Tensor:
    """The loss; gradients are left in `inputs.hidden.grad` and `inputs.lm_head_weight.grad`."""
    value = loss(inputs, size)
    value.backward()
    return value.detach()


def drop_gradients(inputs: LossInputs) -> None:
    for leaf in inputs.leaves().values():
        leaf.grad = None


def check(inputs: LossInputs, peaked: LossInputs, size: Size) -> Iterator[str]:
    """Run every contestant once and compare it with `reference`; yields each name that passed."""
    for half in (False, True):
        problem = half_inactive(inputs) if half else inputs
        exact_loss = training_step(reference, problem, size)
        exact = {name: leaf.grad for name, leaf in problem.leaves().items()}
        drop_gradients(problem)
        for name, loss in TRAINED.items():
            if (loss in (ours_half, ours_half_unscored)) != half:
                continue
            value = training_step(loss, inputs, size)
            # The loss is a sum of terms of either sign, as large as the advantages.
            _assert_close(f"{name}: loss", value, exact_loss, weighted_advantages(problem))
            for leaf_name, leaf in inputs.leaves().items():
                gradient = exact[leaf_name]
                assert leaf.grad is not None and gradient is not None
                _assert_close(f"{name}: d{leaf_name}", leaf.grad, gradient, gradient)
            drop_gradients(inputs)
            yield name
    exact_logps = plain_scores(inputs, size)
    _assert_close("ours, no grad", our_scores(inputs, size), exact_logps, exact_logps)
    yield "ours, no grad"
    for name, problem in ((SPARSE_FLAT, inputs), (SPARSE_PEAKED, peaked)):
        exact_loss = training_step(ours, problem, size)
        exact = {leaf_name: leaf.grad for leaf_name, leaf in problem.leaves().items()}
        drop_gradients(problem)
        value = training_step(ours_sparse, problem, size)
        _assert_close(f"{name}: loss", value, exact_loss, weighted_advantages(problem))
        for leaf_name, leaf in problem.leaves().items():
            gradient = exact[leaf_name]
            assert leaf.grad is not None and gradient is not None
            _assert_close(f"{name}: d{leaf_name}", leaf.grad, gradient, gradient, GRAD_TOL)
        drop_gradients(problem)
        yield name


def _assert_close(
    what: str, actual: Tensor, exact: Tensor, terms: Tensor, tolerance: float = 1e-5
) -> None:
    """Largest error at most `tolerance` of the largest term. 1e-5: fp32 sums of up to V terms in
    another order stay within about 100 roundings."""
    error = float((actual - exact).abs().max() / terms.abs().max())
    if not error <= tolerance:
        raise AssertionError(
            f"{what}: expected a relative error <= {tolerance:g}, received {error:.3g}"
        )
