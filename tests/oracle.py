"""The whole loss, sequence by sequence, straight from its formulas: the check of `reference`.

It shares no code with the package. It is naive on purpose: full log-softmax, one sequence at a
time, masked positions dropped before anything is computed, gradients by autograd. With a lower
`dtype` it is also "plain torch at the same dtype": logits in that dtype, the rest in float32, as
trainers do it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class OracleOutput:
    loss: Tensor  # ()
    per_token_loss: Tensor  # shape of completion_ids, as logps and entropy
    logps: Tensor
    entropy: Tensor
    metrics: dict[str, float]


def bounded_exp(x: Tensor) -> Tensor:
    """exp with value and derivative taken at clamp(x, -20, 20)."""
    return torch.exp(x + (x.clamp(-20, 20) - x).detach())


def score(hidden, lm_head_weight, lm_head_bias, ids, config):
    """(n,) log-probs and entropies of one sequence's rows."""
    z = hidden @ lm_head_weight.T
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    if lm_head_bias is not None:
        z = z + lm_head_bias
    z = z * config.logit_scale
    if config.logit_softcap is not None:
        z = config.logit_softcap * torch.tanh(z / config.logit_softcap)
    logp = torch.log_softmax(z / config.temperature, dim=-1)
    # p log p is 0 where p is 0
    plogp = logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)
    return logp[torch.arange(len(ids)), ids], -plogp.sum(-1)


def of_sign(advantage, positive, other):
    values = torch.full_like(advantage, other)
    values[advantage > 0] = positive
    return values.detach()


def divergence(config, logp, old):
    if config.surrogate == "dppo_tv":
        return (logp.exp() - old.exp()).abs()
    assert config.surrogate == "dppo_kl"
    p, q = old.exp(), logp.exp()
    # p log p is 0 where p is 0
    return torch.xlogy(p, p / q) + torch.xlogy(1 - p, (1 - p) / (1 - q))


def bound_crossings(config, ratio, logp, old):
    """Which tokens are beyond the upper and the lower bound."""
    low, high = config.clip_eps_low, config.clip_eps_high
    if config.surrogate in ("dppo_tv", "dppo_kl"):
        d = divergence(config, logp, old)
        return (logp > old) & (d > high), (logp < old) & (d > low)
    if config.ratio_level == "geometric_mean":
        return logp - old > high, logp - old < -low
    return ratio > 1 + high, ratio < 1 - low


def geometric_mean(config, log_ratio, advantage, survives):
    """-s A' of a whole sequence."""
    x = log_ratio.clone()
    x[advantage > 0] = log_ratio[advantage > 0].clamp(max=config.clip_eps_high)
    x[advantage <= 0] = log_ratio[advantage <= 0].clamp(min=-config.clip_eps_low)
    mean = x[survives].mean() if survives.any() else x.sum() * 0
    return -bounded_exp(mean) * advantage


def vespo(config, log_weight, logp, advantage):
    """-phi(w) A' logp; log_weight is the sequence's, ()."""
    w = bounded_exp(log_weight).detach()
    k = of_sign(advantage, config.vespo_k_pos, config.vespo_k_neg)
    rate = of_sign(advantage, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return -(rate.exp() * w**k * (-rate * w).exp()) * advantage * logp


def surrogate(config, ratio, logp, old, advantage):
    low, high = 1 - config.clip_eps_low, 1 + config.clip_eps_high
    if config.surrogate == "clip":
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if config.dual_clip is not None:
            capped = torch.minimum(loss, -config.dual_clip * advantage)
            loss = torch.where(advantage < 0, capped, loss)
        return loss
    if config.surrogate == "cispo":
        return -ratio.clamp(low, high).detach() * advantage * logp
    if config.surrogate == "sapo":
        tau = of_sign(advantage, config.sapo_tau_pos, config.sapo_tau_neg)
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if config.surrogate in ("dppo_tv", "dppo_kl"):
        above, below = bound_crossings(config, ratio, logp, old)
        kept = ~((above & (advantage > 0)) | (below & (advantage < 0)))
        return -(kept * ratio.clamp(max=20).detach() * advantage * logp)
    assert config.surrogate == "reinforce"
    return -advantage * logp


def kl_term(estimator, logp, ref):
    if estimator == "k1":
        return logp - ref
    if estimator == "k2":
        return (logp - ref) ** 2 / 2
    assert estimator == "k3"
    return bounded_exp(ref - logp) - (ref - logp) - 1


def spans_of(completion_ids, cu_seqlens):
    """Index of each sequence's positions into completion_ids."""
    if completion_ids.dim() == 2:
        return [(i, slice(None)) for i in range(len(completion_ids))]
    if cu_seqlens is None:
        return [(slice(None),)]
    bounds = cu_seqlens.tolist()
    return [(slice(a, b),) for a, b in zip(bounds, bounds[1:], strict=False)]


def policy_loss_oracle(
    hidden,
    lm_head_weight,
    completion_ids,
    advantages,
    success_rate=None,
    *,
    completion_mask=None,
    old_logps=None,
    ref_logps=None,
    rollout_logps=None,
    token_weights=None,
    cu_seqlens=None,
    lm_head_bias=None,
    global_valid_tokens=None,
    global_sequences=None,
    config,
    dtype=torch.float64,
) -> OracleOutput:
    def cast(tensor):
        return None if tensor is None else tensor.to(dtype)

    side = torch.float64 if dtype == torch.float64 else torch.float32
    hidden, weight, bias = cast(hidden), cast(lm_head_weight), cast(lm_head_bias)
    if completion_mask is None:
        completion_mask = torch.ones(completion_ids.shape, dtype=torch.bool)
    spans = spans_of(completion_ids, cu_seqlens)
    per_sequence = advantages.shape == (len(spans),)

    outputs = [torch.zeros(completion_ids.shape, dtype=side) for _ in range(3)]
    losses, metric_rows, focal_weights, input_counts = [], [], [], []
    for i, span in enumerate(spans):
        keep = completion_mask[span].nonzero().squeeze(-1)
        if len(keep) == 0:
            continue
        input_counts.append(len(keep))

        def rows(tensor, keep=keep, span=span):
            return None if tensor is None else tensor[span][keep].to(side)

        h = hidden[span][keep]
        logp, entropy = score(h, weight, bias, completion_ids[span][keep], config)
        old = logp.detach() if old_logps is None else rows(old_logps)

        focal = torch.ones((), dtype=side)
        if config.focal_gamma > 0:
            focal = (1 - success_rate[i].to(side)).clamp(0, 1) ** config.focal_gamma
        focal_weights.append(focal)
        advantage = advantages[i].to(side).expand(len(keep)) if per_sequence else rows(advantages)
        advantage = focal * advantage
        if token_weights is not None:
            advantage = advantage * rows(token_weights)

        weight_t = torch.ones(len(keep), dtype=side)
        survives = torch.ones(len(keep), dtype=torch.bool)
        d = torch.zeros(len(keep), dtype=side)
        if config.rollout_correction is not None:
            d = old - rows(rollout_logps)
            if config.rollout_level == "sequence":
                d = d.mean().expand(len(keep))
            weight_t = bounded_exp(d).detach()
            if config.rollout_correction == "truncate":
                weight_t = weight_t.clamp(max=config.rollout_max)
            else:
                survives = (weight_t >= (config.rollout_min or 0)) & (
                    weight_t <= config.rollout_max
                )

        log_ratio = logp - old
        ratio = bounded_exp(log_ratio)
        if config.ratio_level == "sequence":
            mean = log_ratio[survives].mean() if survives.any() else torch.zeros((), dtype=side)
            ratio = bounded_exp(mean).detach() * torch.exp(logp - logp.detach())

        if config.ratio_level == "geometric_mean":
            loss = weight_t * geometric_mean(config, log_ratio, advantage, survives)
        elif config.surrogate == "vespo":
            loss = vespo(config, (log_ratio + d)[survives].sum(), logp, advantage)
        else:
            loss = weight_t * surrogate(config, ratio, logp, old, advantage)
        kl = torch.zeros_like(logp)
        if config.kl_coef:
            kl = kl_term(config.kl_estimator, logp, rows(ref_logps))
            loss = loss + config.kl_coef * kl
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy
        losses.append(loss[survives])

        for output, values in zip(outputs, (loss, logp, entropy), strict=True):
            output[span][keep] = values.detach()
        known = (advantage != 0) | bool(config.kl_coef) | bool(config.entropy_coef)
        above, below = bound_crossings(config, ratio, logp, old)
        columns = {
            "clip_fraction_high": above,
            "clip_fraction_low": below,
            "clip_binding_fraction": (above & (advantage > 0)) | (below & (advantage < 0)),
            "ratio_mean": ratio,
            "approx_kl": bounded_exp(-log_ratio) - 1 + log_ratio,
            "kl": kl,
            "entropy": entropy,
            "active_fraction": known,
            "rollout_weight_mean": weight_t,
        }
        metric_rows.append({k: v.detach().to(side)[survives] for k, v in columns.items()})

    loss = weight.sum().to(side) * 0.0
    total = sum((part.sum() for part in losses), loss)
    tokens = sum(len(part) for part in losses)
    scored = sum(len(part) > 0 for part in losses)
    if config.reduction == "token_mean":
        loss = total / (global_valid_tokens or max(tokens, 1))
    elif config.reduction == "sequence_mean":
        means = sum((part.sum() / max(len(part), 1) for part in losses), loss)
        loss = means / (global_sequences or max(scored, 1))
    else:
        loss = total / (config.fixed_length * (global_sequences or max(len(input_counts), 1)))

    metrics = {}
    if metric_rows:
        for name in metric_rows[0]:
            column = torch.cat([row[name] for row in metric_rows])
            metrics[name] = column.mean().item() if len(column) else 0.0
        ratios = torch.cat([row["ratio_mean"] for row in metric_rows])
        metrics["ratio_max"] = ratios.max().item() if len(ratios) else 0.0
        metrics["focal_weight_mean"] = torch.stack(focal_weights).mean().item()
        metrics["rejected_fraction"] = 1 - tokens / sum(input_counts)
    return OracleOutput(loss, *outputs, metrics)
