"""Rollout: where a completion ends, what its log-probs are, and what the draws depend on."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fgrpo_train.base_policy import TINY_COUNTDOWN, load_policy
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.prompts import CountdownTask, Prompt
from fgrpo_train.rollout import Sampling, completion_mask_from_ids

EOS, PAD = 1, 0


def sampling(**changes):
    return Sampling(**(dict(eos_token_ids=(EOS,), pad_token_id=PAD) | changes))


@pytest.fixture(scope="module")
def policy():
    return load_policy(TINY_COUNTDOWN)[0]


@pytest.fixture(scope="module")
def prompts():
    """Prompts of several lengths, so that the batch is padded."""
    held_out = CountdownTask().held_out_prompts(load_policy(TINY_COUNTDOWN)[1])[:12]
    assert len({len(prompt.token_ids) for prompt in held_out}) >= 3
    return held_out


def random_model(dtype, seed=0):
    """Untrained, with weights large enough to make some tokens unlikely; it seldom samples EOS."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=19,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def full_forward_logps(model, prompts, rollouts, temperature=1.0):
    """Log-probs of the sampled tokens, each row alone and unpadded through the whole model."""
    logps = torch.zeros(rollouts.completion_ids.shape, dtype=torch.float64)
    for row, index in enumerate(rollouts.prompt_index.tolist()):
        prompt = prompts[index].token_ids
        completion = rollouts.completion_ids[row][rollouts.completion_mask[row]]
        ids = torch.cat([torch.tensor(prompt), completion]).unsqueeze(0)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        distribution = (logits.double() / temperature).log_softmax(-1)
        logps[row, : len(completion)] = distribution[range(len(completion)), completion]
    return logps


class Scripted(torch.nn.Module):
    """A stand-in for a causal LM whose logits at completion position t are `logits_at[t]`."""

    def __init__(self, logits_at, prompt_length):
        super().__init__()
        self.logits_at, self.prompt_length = logits_at, prompt_length
        self.config, self.device = Qwen2Config(num_hidden_layers=1), torch.device("cpu")

    def forward(self, input_ids, attention_mask, past_key_values, **_):
        keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
        past_key_values.update(keys, keys, 0)
        logits = self.logits_at[attention_mask.shape[1] - self.prompt_length]
        return SimpleNamespace(logits=logits.expand(len(input_ids), 1, -1))


def scripted_ids(ids):
    """A model that samples exactly these ids."""
    logits = torch.full((len(ids), 10), -torch.inf)
    logits[range(len(ids)), ids] = 0.0
    return Scripted(logits, prompt_length=2)


PROMPT = Prompt("p", "", (3, 4), {})


@pytest.mark.parametrize(
    ("ids", "eos", "mask"),
    [
        ([5, 6, 9, 0, 0], [9, 8], [1, 1, 1, 0, 0]),
        ([5, 8, 0, 0, 0], [9, 8], [1, 1, 0, 0, 0]),
        ([5, 6, 7, 5, 6], [9, 8], [1, 1, 1, 1, 1]),
        ([9, 9, 9, 9, 9], [9, 8], [1, 0, 0, 0, 0]),
        ([5, 6, 9, 9, 9], [9], [1, 1, 1, 0, 0]),  # pad == EOS
        ([5, 0, 6, 9, 0], [9], [1, 1, 1, 1, 0]),  # a sampled pad token is a token
        ([5, 8, 7, 9, 0], [9, 8], [1, 1, 0, 0, 0]),
    ],
)
def test_the_mask_ends_with_the_first_eos(ids, eos, mask):
    expected = torch.tensor([mask], dtype=torch.bool)
    assert completion_mask_from_ids(torch.tensor([ids]), eos).equal(expected)


@pytest.mark.parametrize(
    ("script", "eos", "pad", "ids", "length", "truncated"),
    [
        ([5, 6, 9, 3, 3], (9, 8), 0, [5, 6, 9], 3, False),
        ([5, 8, 9, 3, 3], (9, 8), 0, [5, 8], 2, False),
        ([5, 6, 7, 5, 6], (9, 8), 0, [5, 6, 7, 5, 6], 5, True),
        ([5, 6, 7, 5, 9], (9, 8), 0, [5, 6, 7, 5, 9], 5, False),  # EOS on the last position
        ([9, 9, 9, 9, 9], (9, 8), 0, [9], 1, False),
        ([5, 6, 9, 9, 9], (9,), 9, [5, 6, 9], 3, False),  # pad == EOS
        ([5, 6, 7, 5, 6], (9,), 9, [5, 6, 7, 5, 6], 5, True),  # pad == EOS, never ended
        ([5, 0, 0, 9, 3], (9,), 0, [5, 0, 0, 9], 4, False),  # a sampled pad token is a token
    ],
)
def test_generation_ends_with_the_first_eos(script, eos, pad, ids, length, truncated):
    settings = sampling(eos_token_ids=eos, pad_token_id=pad, max_new_tokens=5)
    rollouts = HFEngine(scripted_ids(script)).generate(
        [PROMPT], group_size=2, sampling=settings, seed=0
    )
    assert rollouts.completion_ids.tolist() == [ids, ids]
    assert rollouts.completion_mask.sum(1).tolist() == [length, length]
    assert rollouts.truncated.tolist() == [truncated, truncated]
    assert rollouts.logps.tolist() == [[0.0] * length] * 2


def test_finished_rows_are_padded_and_their_log_probs_zero(policy, prompts):
    rollouts = HFEngine(policy).generate(prompts, group_size=8, sampling=sampling(), seed=0)
    mask = rollouts.completion_mask
    assert mask.sum(1).unique().numel() >= 3, "the case needs rows of several lengths"
    assert (rollouts.completion_ids[~mask] == PAD).all()
    assert (rollouts.logps[~mask] == 0).all()
    assert mask.equal(completion_mask_from_ids(rollouts.completion_ids, [EOS]))
    ends = rollouts.completion_ids[range(len(mask)), mask.sum(1) - 1]
    assert rollouts.truncated.equal(ends != EOS)
    assert mask[:, -1].any(), "T is the longest completion"
    assert rollouts.prompt_index.tolist() == [i for i in range(len(prompts)) for _ in range(8)]


def test_pad_equal_to_eos_changes_the_padding_alone(policy, prompts):
    engine = HFEngine(policy)
    plain = engine.generate(prompts, group_size=4, sampling=sampling(), seed=0)
    same = engine.generate(prompts, group_size=4, sampling=sampling(pad_token_id=EOS), seed=0)
    assert same.completion_mask.equal(plain.completion_mask)
    assert same.logps.equal(plain.logps)
    assert same.truncated.equal(plain.truncated)
    mask = plain.completion_mask
    assert same.completion_ids[mask].equal(plain.completion_ids[mask])
    assert (same.completion_ids[~mask] == EOS).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_equal_a_full_forward_pass_in_float64(prompts, temperature):
    # The model's RMSNorm and rotary angles are float32 by construction (6e-8 relative each), and
    # Rollouts.logps is stored in float32: together below 1e-6 of log-probs of order ten.
    model = random_model(torch.float64)
    settings = sampling(temperature=temperature, max_new_tokens=12)
    rollouts = HFEngine(model).generate(prompts, group_size=4, sampling=settings, seed=1)
    expected = full_forward_logps(model, prompts, rollouts, temperature)
    assert expected.min() < -3, "the case needs unlikely tokens"
    torch.testing.assert_close(rollouts.logps.double(), expected, rtol=1e-6, atol=1e-6)


def test_log_probs_of_the_shipped_policy_equal_a_full_forward_pass(policy, prompts):
    # float32 matmuls summed in another order: some eps (1.2e-7) of logits of order ten.
    rollouts = HFEngine(policy).generate(prompts, group_size=8, sampling=sampling(), seed=1)
    expected = full_forward_logps(policy, prompts, rollouts)
    torch.testing.assert_close(rollouts.logps.double(), expected, rtol=0, atol=2e-5)


def test_draws_follow_the_tempered_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]])
    settings = sampling(eos_token_ids=(3,), temperature=0.6, max_new_tokens=1)
    rollouts = HFEngine(Scripted(logits, 2)).generate(
        [PROMPT], group_size=20_000, sampling=settings, seed=0
    )
    drawn = rollouts.completion_ids[:, 0]
    assert rollouts.logps[drawn == 0, 0].unique().item() == pytest.approx(-0.2080604, abs=1e-6)
    probs = (logits[0] / 0.6).softmax(0)
    shares = drawn.bincount(minlength=4) / len(drawn)
    # Five standard deviations of a binomial share.
    bound = 5 * (probs * (1 - probs) / len(drawn)).sqrt()
    assert ((shares - probs).abs() < bound).all()


def test_the_seed_alone_decides_the_draws(policy, prompts):
    engine = HFEngine(policy)

    def generate(seed):
        return engine.generate(prompts, group_size=4, sampling=sampling(), seed=seed)

    torch.manual_seed(0)
    first, state = generate(5), torch.get_rng_state()
    torch.manual_seed(1)
    second = generate(5)
    assert second.completion_ids.equal(first.completion_ids)
    assert second.logps.equal(first.logps)
    torch.manual_seed(0)
    assert torch.get_rng_state().equal(state), "the global generator must stay untouched"
    assert not torch.equal(generate(6).completion_ids, first.completion_ids)


def test_samples_of_a_group_differ(policy, prompts):
    rollouts = HFEngine(policy).generate(prompts, group_size=8, sampling=sampling(), seed=0)
    for group in rollouts.completion_ids.view(len(prompts), 8, -1):
        assert len(group.unique(dim=0)) > 1


def test_weights_change_only_when_they_are_loaded(policy, prompts):
    model = random_model(torch.float32)
    engine = HFEngine(model)

    def generate():
        return engine.generate(prompts, group_size=2, sampling=sampling(), seed=3)

    before = generate()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    assert generate().logps.equal(before.logps), "training the original must not reach the engine"
    for _ in range(2):  # a second load must not bring anything older back
        engine.load_weights(model.named_parameters())
        after = generate()
        assert not torch.equal(after.logps, before.logps)
        expected = full_forward_logps(model, prompts, after)
        torch.testing.assert_close(after.logps.double(), expected, rtol=0, atol=2e-5)
    assert model.training and all(p.requires_grad for p in model.parameters())


def test_weights_of_another_model_are_refused(policy):
    weights = dict(policy.named_parameters())
    name = "model.norm.weight"
    for wrong, message in (
        (random_model(torch.float32).named_parameters(), r"embed_tokens.*expected \(19, 64\)"),
        ({"other": weights[name]}.items(), "other: expected no such parameter"),
        ({n: w for n, w in weights.items() if n != name}.items(), rf"none for \['{name}'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            HFEngine(policy).load_weights(wrong)


def test_a_model_with_dropout_samples_without_it(prompts):
    model = random_model(torch.float32)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    rollouts = HFEngine(model).generate(prompts, group_size=2, sampling=sampling(), seed=0)
    expected = full_forward_logps(model.eval(), prompts, rollouts)
    torch.testing.assert_close(rollouts.logps.double(), expected, rtol=0, atol=2e-5)


def test_rollouts_can_enter_a_graph(policy, prompts):
    rollouts = HFEngine(policy).generate(prompts, group_size=2, sampling=sampling(), seed=0)
    factor = torch.ones((), requires_grad=True)
    (factor * rollouts.logps).sum().backward()
    assert factor.grad == rollouts.logps.sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected > 0, received 0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected >= 1, received 0"),
        ({"eos_token_ids": ()}, "eos_token_ids: expected at least one"),
    ],
)
def test_bad_sampling_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sampling(**changes)


@pytest.mark.parametrize(
    ("prompts", "group_size"),
    [([], 2), ([PROMPT], 0), ([PROMPT, Prompt("empty", "", (), {})], 2)],
    ids=["no prompts", "no samples", "empty prompt"],
)
def test_bad_requests_are_refused(policy, prompts, group_size):
    with pytest.raises(ValueError, match="expected prompts with tokens and group_size >= 1"):
        HFEngine(policy).generate(prompts, group_size=group_size, sampling=sampling(), seed=0)
