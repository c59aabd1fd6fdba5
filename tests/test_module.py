"""FocalPolicyLoss: the function with a head of its own."""

import pytest
import torch
from torch import nn

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig, focal_policy_loss
from fgrpo_kernels.testing import make_inputs

CONFIG = PolicyLossConfig.dapo(focal_gamma=1.0, kl_coef=0.1)


def split(inputs):
    """(positional arguments, keyword arguments) of the module's call."""
    arguments = inputs.arguments()
    names = ("hidden", "completion_ids", "advantages", "success_rate")
    positional = [arguments.pop(name) for name in names]
    del arguments["lm_head_weight"], arguments["lm_head_bias"]
    return positional, arguments


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_it_is_the_function_with_this_head(bias, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    head = nn.Linear(6, 11, bias=bias)
    module = FocalPolicyLoss(head, CONFIG)
    positional, keywords = split(inputs)
    out = module(*positional, **keywords, impl=impl)
    out.loss.backward()
    actual = [inputs.hidden.grad, *(p.grad for p in head.parameters())]
    inputs.hidden.grad = None
    head.zero_grad()
    expected = focal_policy_loss(
        positional[0], head.weight, *positional[1:], **keywords, lm_head_bias=head.bias,
        config=CONFIG, impl=impl,
    )  # fmt: skip
    expected.loss.backward()
    assert torch.equal(out.loss, expected.loss)
    for grad, parameter in zip(actual, (inputs.hidden, *head.parameters()), strict=True):
        assert torch.equal(grad, parameter.grad) and grad.abs().max() > 0


def test_its_parameters_are_the_heads_own():
    head = nn.Linear(6, 11)
    module = FocalPolicyLoss(head, CONFIG)
    assert {id(p) for p in module.parameters()} == {id(p) for p in head.parameters()}
    assert module.config is CONFIG
    assert FocalPolicyLoss(head).config == PolicyLossConfig()


def test_a_tied_embedding_stays_tied():
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    positional, keywords = split(inputs)

    def backward(head):
        model = nn.ModuleDict({"embedding": embedding, "loss": FocalPolicyLoss(head, CONFIG)})
        positional[0] = torch.tanh(embedding(inputs.completion_ids))
        model["loss"](*positional, **keywords).loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return grads

    embedding_part, head_part = backward(head)
    head.weight = embedding.weight
    (tied,) = backward(head)
    # one float32 sum of two numbers of size 0.1
    torch.testing.assert_close(tied, embedding_part + head_part, rtol=1e-6, atol=1e-7)
    assert embedding_part.abs().max() > 1e-3 and head_part.abs().max() > 1e-3


def test_hooks_run_around_the_loss():
    """Engines that shard parameters gather a module's own ones in its hooks."""
    module = FocalPolicyLoss(nn.Linear(6, 11, bias=False), CONFIG)
    weight = module.weight.detach().clone()
    module.weight.data = torch.empty(0)  # sharded away

    def gather(module, args):
        module.weight.data = weight

    module.register_forward_pre_hook(gather)
    positional, keywords = split(make_inputs(4, 5, 6, 11, group_size=2))
    out = module(*positional, **keywords)
    expected = focal_policy_loss(positional[0], weight, *positional[1:], **keywords, config=CONFIG)
    assert torch.equal(out.loss, expected.loss)


def test_it_follows_a_dtype_change():
    module = FocalPolicyLoss(nn.Linear(6, 11, bias=False), CONFIG).double()
    positional, keywords = split(make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64))
    assert module(*positional, **keywords).loss.dtype == torch.float64


@pytest.mark.parametrize("head", [nn.Identity(), nn.Conv1d(6, 11, 1)], ids=["none", "conv"])
def test_what_is_no_linear_head_is_refused(head):
    with pytest.raises(ValueError, match=rf"lm_head: expected.*\(V, D\).*{type(head).__name__}"):
        FocalPolicyLoss(head)
