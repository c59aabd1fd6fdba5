"""How far the sampler's distribution is from the trainer's, before any correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# exp(20) squared, times any number of tokens, is far from the end of float64.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Sums over tokens of the raw ratio w = exp(old_logps - rollout_logps).

    Those of micro-batches and of processes add up; `largest` is their maximum.
    """

    tokens: float
    ratio: float
    ratio_squared: float
    largest: float

    @classmethod
    def total(cls, parts: Sequence[RatioSums]) -> RatioSums:
        """Of all parts together; at least one."""
        return cls(
            tokens=sum(part.tokens for part in parts),
            ratio=sum(part.ratio for part in parts),
            ratio_squared=sum(part.ratio_squared for part in parts),
            largest=max(part.largest for part in parts),
        )


def ratio_sums(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> RatioSums:
    """Of one batch, in float64.

        w_t = exp(clamp(old_logps_t - rollout_logps_t, -20, 20))

    Args:
        old_logps: (B, T), the trainer's log-probs at rollout time.
        rollout_logps: (B, T), as reported by the sampler.
        mask: (B, T) bool; the rest is ignored.
    """
    difference = (old_logps.detach().double() - rollout_logps.double())[mask]
    ratio = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    return RatioSums(
        tokens=float(ratio.numel()),
        ratio=float(ratio.sum()),
        ratio_squared=float(ratio.square().sum()),
        largest=float(ratio.max()) if ratio.numel() else 0.0,
    )


def effective_sample_share(tokens: float, ratio: float, ratio_squared: float) -> float | None:
    """(sum w)^2 / (n sum w^2): 1 if sampler and trainer agree, 1/n if one token has all the weight.

    None without tokens. Source: Kish 1965; as a diagnostic of importance weights, Kong 1992.
    """
    return ratio**2 / (tokens * ratio_squared) if tokens else None
