"""PolicyLossConfig: which objective, with which constants.

Formulas are written in the argument names of `focal_policy_loss`, with
rho = exp(logps - old_logps) and A' = focal_weight * token_weights * advantages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

_CHOICES = {
    "surrogate": ("clip", "cispo", "sapo", "vespo", "reinforce", "dppo_tv", "dppo_kl"),
    "ratio_level": ("token", "sequence", "geometric_mean"),
    "reduction": ("token_mean", "sequence_mean", "fixed_length"),
    "kl_estimator": ("k1", "k2", "k3"),
    "rollout_correction": (None, "truncate", "mask"),
    "rollout_level": ("token", "sequence"),
}
_CONSTANTS = (
    "sapo_tau_pos",
    "sapo_tau_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
"""Of single surrogates; finite and > 0."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """The objective of `focal_policy_loss`: frozen, checked at construction.

    Numeric fields that the chosen objective does not use are accepted; an option that would change
    the result but is not implemented is refused by name.

    Raises: ValueError naming the field, what it accepts and what it got.
    """

    surrogate: str = "clip"
    """"clip": -min(rho A', clamp(rho, 1-lo, 1+hi) A') (PPO, 1707.06347 eq. 7).
    "cispo": -sg(clamp(rho, 1-lo, 1+hi)) A' logp (MiniMax-M1, 2506.13585).
    "sapo": -(4 / tau) sigmoid(tau (rho - 1)) A' (2511.20347).
    "vespo": -sg(phi(w_i)) A' logp, phi(w) = exp(lambda) w^k exp(-lambda w), w_i = exp(sum over the
    sequence of logp - old), times the rollout weights exp(old - rollout) with a rollout_correction:
    they are then not applied again, and "truncate" bounds none of them (2602.10693).
    "reinforce": -A' logp.
    "dppo_tv", "dppo_kl": -sg(min(rho, 20)) A' logp, and 0 for a token that has gone too far the way
    A' pushes it: up with A' > 0 and a divergence over hi, or down with A' < 0 and one over lo; the
    divergence is |p - p_old| or KL(Bern(p_old) || Bern(p)) (divergence PPO, 2602.04879)."""

    ratio_level: str = "token"
    """"token": rho_t. "sequence": sg(s_i) exp(logp_t - sg(logp_t)), s_i = exp(mean over the
    sequence of logp - old) (GSPO-token, 2507.18071); not for "vespo". "geometric_mean": with "clip"
    and no dual_clip, -s_i A', s_i = exp(mean over the sequence of x_t), x_t = min(logp - old, hi)
    for A' > 0, else max(logp - old, -lo) (GMPO, 2507.20673)."""

    reduction: str = "token_mean"
    """"token_mean": sum / valid tokens (DAPO). "sequence_mean": mean of the sequences' token means
    (GRPO). "fixed_length": sum / (fixed_length * sequences) (Dr. GRPO)."""

    fixed_length: int | None = None
    """The constant length of reduction="fixed_length", in tokens; required there."""

    clip_eps_low: float = 0.2
    """lo: the ratio's lower bound is 1 - lo; below 1 for "clip", any value >= 0 for the others.
    With "geometric_mean" the log-ratio's is -lo; for "dppo_tv" and "dppo_kl" see there."""

    clip_eps_high: float = 0.2
    """hi: the ratio's upper bound is 1 + hi: a distance from 1, in CISPO too (some trainers take
    the bound itself there). With "geometric_mean" the log-ratio's is hi; for dppo see there."""

    dual_clip: float | None = None
    """c > 1: for A' < 0 the clip loss is at most -c A' (dual-clip PPO, 1912.09729)."""

    sapo_tau_pos: float = 1.0
    """tau of "sapo" for A' > 0: the larger, the less a ratio away from 1 counts."""

    sapo_tau_neg: float = 1.05
    """tau of "sapo" for the others."""

    vespo_k_pos: float = 2.0
    """k of "vespo" for A' > 0: the larger, the less a sequence counts that became unlikely."""

    vespo_lambda_pos: float = 3.0
    """lambda of "vespo" for A' > 0: the larger, the less a sequence counts that became likely. phi
    is largest at w = k / lambda."""

    vespo_k_neg: float = 3.0
    """k of "vespo" for the others."""

    vespo_lambda_neg: float = 2.0
    """lambda of "vespo" for the others."""

    focal_gamma: float = 0.5
    """gamma >= 0 of the focal weight (1 - success_rate)^gamma (F-GRPO, 2602.06717 eq. 12);
    0 switches it off."""

    kl_coef: float = 0.0
    """Weight of the KL term to `ref_logps`; >= 0."""

    kl_estimator: str = "k3"
    """k1 = logp - ref, k2 = (logp - ref)^2 / 2, k3 = exp(ref - logp) - (ref - logp) - 1,
    differentiated as written (Schulman, "Approximating KL divergence", 2020)."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus: - entropy_coef * entropy is added to the token's loss."""

    rollout_correction: str | None = None
    """Weight of the mismatch between sampler and trainer, w = sg(exp(old_logps - rollout_logps)).
    "truncate": min(w, rollout_max) (TIS). "mask": tokens with w outside [rollout_min, rollout_max]
    leave the loss, the others keep w (IcePop / MIS)."""

    rollout_level: str = "token"
    """"sequence": the mean of old_logps - rollout_logps over the sequence replaces the token's."""

    rollout_min: float | None = None
    """Lower bound of "mask" (None: 0); must be None for "truncate"."""

    rollout_max: float = 2.0
    """Upper bound of the rollout weight."""

    temperature: float = 1.0
    """The sampler's temperature: logits are divided by it."""

    logit_scale: float = 1.0
    """The model's own factor on its logits (Cohere, Granite)."""

    logit_softcap: float | None = None
    """cap * tanh(logits / cap) before the temperature (Gemma)."""

    grad_tol: float = 0.0
    """Probability mass, below 1, that the backward may drop per row (`sparse_backward.py`); 0:
    exact. On CPU, for row-local objectives without entropy bonus. The metric grad_error_bound is of
    the whole gradient: optimizers that normalise each weight's update see the relative errors of
    rare tokens' weights, which have no bound."""

    skip_inactive: bool = True
    """Leave rows out of the backward GEMMs whose coefficient is known to be zero; False computes
    them all (the gradients are equal)."""

    max_chunk_bytes: int | None = None
    """Budget of one chunk of logits; None: 256 MiB on CPU, 2 GiB elsewhere. At least one row."""

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(f"{field} must be one of {list(choices)}, got {value!r}")
        self._check_ratio_level()
        clips_ratio = self.surrogate == "clip" and self.ratio_level != "geometric_mean"
        self._check_number(
            "clip_eps_low",
            0 <= _real(self.clip_eps_low) < (1.0 if clips_ratio else math.inf),
            "in [0, 1)" if clips_ratio else ">= 0 and finite",
        )
        self._check_number("clip_eps_high", _finite(self.clip_eps_high) >= 0, ">= 0 and finite")
        if self.dual_clip is not None:
            self._check_number("dual_clip", _finite(self.dual_clip) > 1, "None or > 1")
        for field in _CONSTANTS:
            self._check_number(field, _finite(getattr(self, field)) > 0, "> 0 and finite")
        self._check_number("focal_gamma", _finite(self.focal_gamma) >= 0, ">= 0 and finite")
        self._check_number("kl_coef", _finite(self.kl_coef) >= 0, ">= 0 and finite")
        self._check_number("entropy_coef", not math.isnan(_finite(self.entropy_coef)), "finite")
        self._check_number("rollout_max", _finite(self.rollout_max) > 0, "> 0 and finite")
        if self.rollout_correction is not None and self.rollout_min is not None:
            self._check_rollout_min()
        self._check_number("temperature", _finite(self.temperature) > 0, "> 0 and finite")
        self._check_number("logit_scale", _finite(self.logit_scale) > 0, "> 0 and finite")
        slope = self.logit_scale / self.temperature
        if not 1e-30 < slope < 1e30:
            raise ValueError(
                "logit_scale / temperature must be in (1e-30, 1e30), which float32 holds, "
                f"got {slope}"
            )
        if self.logit_softcap is not None:
            self._check_number("logit_softcap", _finite(self.logit_softcap) > 0, "None or > 0")
        self._check_number("grad_tol", 0 <= _finite(self.grad_tol) < 1, "in [0, 1)")
        if self.grad_tol > 0 and self.entropy_coef != 0:
            raise ValueError(
                "grad_tol > 0 (sparse backward) is not implemented with an entropy bonus; use "
                f"grad_tol=0 or entropy_coef=0, got {self.grad_tol!r} and {self.entropy_coef!r}"
            )
        self._check_number("skip_inactive", isinstance(self.skip_inactive, bool), "True or False")
        if self.max_chunk_bytes is not None:
            self._check_number(
                "max_chunk_bytes", _count(self.max_chunk_bytes), "None or an int > 0"
            )
        if self.fixed_length is not None:
            self._check_number("fixed_length", _count(self.fixed_length), "None or an int > 0")
        elif self.reduction == "fixed_length":
            raise ValueError("fixed_length is required for reduction='fixed_length', got None")

    def _check_ratio_level(self) -> None:
        if self.surrogate == "vespo" and self.ratio_level != "token":
            raise ValueError(
                "ratio_level must be 'token' for surrogate='vespo', which weighs whole sequences "
                f"itself, got {self.ratio_level!r}"
            )
        if self.ratio_level != "geometric_mean":
            return
        if self.surrogate != "clip":
            raise ValueError(
                f"ratio_level='geometric_mean' needs surrogate='clip', got {self.surrogate!r}"
            )
        if self.dual_clip is not None:
            raise ValueError(
                f"dual_clip must be None for ratio_level='geometric_mean', got {self.dual_clip!r}"
            )

    def _check_rollout_min(self) -> None:
        if self.rollout_correction == "truncate":
            raise ValueError(
                "rollout_min must be None for rollout_correction='truncate', "
                f"got {self.rollout_min!r}"
            )
        in_range = 0 <= _finite(self.rollout_min) <= self.rollout_max
        self._check_number("rollout_min", in_range, f"None or in [0, {self.rollout_max}]")

    def _check_number(self, field: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"{field} must be {expected}, got {getattr(self, field)!r}")

    @classmethod
    def _preset(cls, overrides: dict[str, Any], **preset: Any) -> PolicyLossConfig:
        return cls(**{"focal_gamma": 0.0, **preset, **overrides})

    @classmethod
    def grpo(cls, **overrides: Any) -> PolicyLossConfig:
        """GRPO (2402.03300): sequence mean, clip 0.2 / 0.2."""
        return cls._preset(overrides, reduction="sequence_mean")

    @classmethod
    def dr_grpo(cls, **overrides: Any) -> PolicyLossConfig:
        """Dr. GRPO (2503.20783): sum over a constant `fixed_length`, which must be given."""
        return cls._preset(overrides, reduction="fixed_length")

    @classmethod
    def dapo(cls, **overrides: Any) -> PolicyLossConfig:
        """DAPO (2503.14476): token mean, clip 0.2 / 0.28."""
        return cls._preset(overrides, clip_eps_high=0.28)

    @classmethod
    def cispo(cls, **overrides: Any) -> PolicyLossConfig:
        """CISPO (2506.13585) with the bounds [0, 6] of the F-GRPO paper."""
        return cls._preset(overrides, surrogate="cispo", clip_eps_low=1.0, clip_eps_high=5.0)

    @classmethod
    def gspo(cls, **overrides: Any) -> PolicyLossConfig:
        """GSPO (2507.18071): sequence-level ratio, sequence mean, clip 3e-4 / 4e-4."""
        bounds = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
        return cls._preset(overrides, ratio_level="sequence", reduction="sequence_mean", **bounds)

    @classmethod
    def ngrpo(cls, **overrides: Any) -> PolicyLossConfig:
        """NGRPO's asymmetric clip 0.16 / 0.24 (2509.18851)."""
        return cls._preset(overrides, clip_eps_low=0.16, clip_eps_high=0.24)

    @classmethod
    def gmpo(cls, **overrides: Any) -> PolicyLossConfig:
        """GMPO (2507.20673): geometric mean of clipped ratios, sequence mean, 0.4 / 0.4 of the
        log-ratio."""
        bounds = {"clip_eps_low": 0.4, "clip_eps_high": 0.4}
        level = {"ratio_level": "geometric_mean", "reduction": "sequence_mean"}
        return cls._preset(overrides, **level, **bounds)

    @classmethod
    def sapo(cls, **overrides: Any) -> PolicyLossConfig:
        """SAPO (2511.20347): tau 1 / 1.05, token mean; the paper's runs take
        reduction="sequence_mean"."""
        return cls._preset(overrides, surrogate="sapo")

    @classmethod
    def vespo(cls, **overrides: Any) -> PolicyLossConfig:
        """VESPO (2602.10693): k, lambda of 2, 3 for A' > 0 and 3, 2 for the others, token mean."""
        return cls._preset(overrides, surrogate="vespo")


def _real(value: object) -> float:
    """The number, or NaN (which fails every comparison) for what is not one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range
        return math.inf


def _finite(value: object) -> float:
    number = _real(value)
    return number if math.isfinite(number) else math.nan


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
