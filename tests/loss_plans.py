"""One objective for each plan of the driver, for the tests of what every plan must do."""

from loss_cases import gradients

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss

CONFIGS = {
    "row-local": PolicyLossConfig(kl_coef=0.1),
    "row-local-entropy": PolicyLossConfig(surrogate="cispo", entropy_coef=0.1),
    "not-row-local": PolicyLossConfig.gspo(focal_gamma=0.5, kl_coef=0.1),
    "not-row-local-entropy": PolicyLossConfig.gspo(focal_gamma=0.5, entropy_coef=0.1),
    "sapo": PolicyLossConfig.sapo(focal_gamma=0.5),
    "dppo": PolicyLossConfig(surrogate="dppo_kl", clip_eps_low=0.002, clip_eps_high=0.004),
    "gmpo": PolicyLossConfig.gmpo(focal_gamma=0.5, kl_coef=0.1),
    "vespo": PolicyLossConfig.vespo(focal_gamma=0.5, entropy_coef=0.1),
}
IMPLS = ["reference", "torch"]
ROW_BYTES = 11 * 8  # one row of the float64 logits in `cases`


def evaluate(inputs, *, upstream=1.0, **kwargs):
    out = focal_policy_loss(**inputs.arguments(), **kwargs)
    return out, gradients(upstream * out.loss, inputs)
