"""The learner: its log-probs, its files, its counts; the ways of spreading it: test_sharding.py."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from train_parts import random_policy, sampled_batch
from transformers import AutoModelForCausalLM

from fgrpo_train.config import build
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.learner import Learner
from fgrpo_train.policy_with_loss import Denominators, prepare_policy
from fgrpo_train.settings import ConfigError, PolicySettings
from fgrpo_train.weight_files import open_tensors, write_tensors

COUNTS = Denominators(valid_tokens=150.0, sequences=24.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_samplers_log_probs_are_the_learners(temperature):
    """Off by one token, one position or one temperature, the ratio would leave 1."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6, temperature=temperature)
    learner = Learner(model, build({"sampling.temperature": temperature}))
    ratio = torch.exp(learner.logps(batch) - batch.rollout_logps)[batch.completion_mask]
    assert batch.rollout_logps[batch.completion_mask].std() > 0.3, "the log-probs do differ"
    # fp32 over a few dozen additions, and logits of some units: 1e-5.
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    update = learner.update(batch, COUNTS)
    assert update.sampler_gap[0] / update.sampler_gap[1] < 1e-5
    assert update.metric_sums["ratio_max"] == (1.0, 1.0)


def test_the_sampler_follows_the_learner_only_when_told():
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6)
    learner = Learner(model, build({"optimisation.learning_rate": 0.1}))
    engine = HFEngine(learner.model)
    learner.update(batch, COUNTS)
    name, before = next(iter(engine.model.named_parameters()))
    after = learner.model.get_parameter(name)
    assert not torch.equal(before, after)
    engine.load_weights(learner.weights())
    assert torch.equal(before, after)


def test_the_saved_files_are_tensors_and_json_and_transformers_reads_them(tmp_path):
    learner = Learner(random_policy()[0], build({}))
    learner.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tied = {"lm_head.weight", "model.embed_tokens.weight"}
        assert len(tied & set(file.keys())) == 1, "a tied weight is written once"
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = learner.model.state_dict()
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(read.state_dict()[name], expected[name]) for name in expected)
    assert read.config.dtype == torch.float32
    assert read.generation_config.eos_token_id == learner.model.generation_config.eos_token_id


def test_files_of_bounded_size_are_read_by_transformers_and_by_us(tmp_path):
    model = random_policy()[0]
    tensors = dict(model.named_parameters())
    sizes = {name: tensor.numel() * 4 for name, tensor in tensors.items()}
    bound = max(sizes.values())
    write_tensors(tmp_path, "model", sizes, tensors.items(), max_file_bytes=bound)
    model.config.save_pretrained(tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1 and files[-1].name.endswith(f"-of-{len(files):05d}.safetensors")
    assert all(file.stat().st_size < bound + 10_000 for file in files), "and a header"
    weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    read = open_tensors(tmp_path, "model", torch.device("cpu"))
    for name, tensor in tensors.items():
        assert torch.equal(weights[name], tensor) and torch.equal(read(name), tensor)


def test_packed_log_probs_are_the_padded_ones():
    """A sequence that saw its neighbour in the row would be off by far more than fp32 rounding."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6)
    expected = Learner(model, build({})).logps(batch)
    for tokens in (None, 50):
        values = {"policy.packing": True, "optimisation.tokens_per_micro_batch": tokens}
        packed = Learner(random_policy()[0], build(values)).logps(batch)
        torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
        assert not packed[~batch.completion_mask].any()


def test_padding_is_counted_and_packing_has_none():
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6).trimmed()
    real = int(batch.attention_mask.sum())
    for packing, columns in ((False, batch.attention_mask.numel()), (True, real)):
        learner = Learner(random_policy()[0], build({"policy.packing": packing}))
        update = learner.update(batch, COUNTS)
        assert (update.num_tokens, update.num_columns) == (real, columns)
        assert real < batch.attention_mask.numel()


def test_the_metrics_of_micro_batches_are_those_of_the_whole():
    """Sums are summed, the largest ratio is the largest: fp32 rounding of some hundred terms."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1, 2, 3, 0, 1, 3])
    noise = torch.linspace(-0.5, 0.5, batch.rollout_logps.numel()).view_as(batch.rollout_logps)
    batch = replace(batch, old_logps=batch.rollout_logps + noise)
    whole = Learner(model, build({})).update(batch, COUNTS)
    parts = Learner(random_policy()[0], build({"optimisation.tokens_per_micro_batch": 60}))
    split = parts.update(batch, COUNTS)
    assert split.num_micro_batches > 3 and whole.num_micro_batches == 1
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert split.sampler_gap == pytest.approx(whole.sampler_gap, rel=1e-5)
    assert whole.metric_sums["ratio_max"][0] > 1.5
    for name in whole.metric_sums.keys() - {"grad_error_bound"}:  # counted by calls
        assert split.metric_sums[name] == pytest.approx(whole.metric_sums[name], rel=1e-5), name


def test_a_gpu_without_liger_or_a_model_that_it_does_not_know_is_told_what_to_do(monkeypatch):
    """On a CPU liger is not asked for; the module stands for an installed one."""
    model = random_policy()[0]
    settings = PolicySettings()
    prepare_policy(model, settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install 'fgrpo.liger.', or set policy"):
        prepare_policy(model, settings)
    prepare_policy(model, replace(settings, liger_kernels=False))

    asked = []
    liger = types.ModuleType("liger_kernel.transformers.monkey_patch")
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}
    liger._apply_liger_kernel_to_instance = lambda **given: asked.append(given)
    package = types.ModuleType("liger_kernel.transformers")
    package.monkey_patch = liger
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    prepare_policy(model, settings)
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == [{"model": model} | losses]
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN = {}
    with pytest.raises(ConfigError, match="does not know qwen2 models; set policy.liger_kernels"):
        prepare_policy(model, settings)


def test_an_attention_that_this_machine_lacks_is_named():
    with pytest.raises(ConfigError, match="^policy.attention flash_attention_2: "):
        prepare_policy(random_policy()[0], PolicySettings(attention="flash_attention_2"))


def test_a_reference_is_kept_only_for_a_kl_term():
    learner = Learner(random_policy()[0], build({}))
    with pytest.raises(ValueError, match="expected loss.kl_coef > 0"):
        learner.reference_logps(None)
