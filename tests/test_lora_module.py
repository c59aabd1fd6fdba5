"""FocalPolicyLoss with a LoRA layer for a head, by a stand-in with the attributes of PEFT's."""

import copy

import pytest
import torch
from loss_cases import assert_same
from test_lora_head import PLANS, RANK
from torch import nn

from fgrpo_kernels import FocalPolicyLoss, focal_policy_loss
from fgrpo_kernels.testing import make_inputs


class AdaptedLinear(nn.Module):
    """The attributes of peft.tuners.lora.Linear (0.21) and its forward without variants."""

    def __init__(self, base_layer, names=("default",), dropout=0.0, bias=False):
        super().__init__()
        self.base_layer = base_layer
        vocab, width = base_layer.weight.shape
        self.lora_A = nn.ModuleDict({n: nn.Linear(width, RANK, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(RANK, vocab, bias=bias) for n in names})
        drop = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.lora_dropout = nn.ModuleDict({n: drop for n in names})
        self.scaling = {n: 1.5 for n in names}
        self.use_dora = {n: False for n in names}
        self.lora_variant = {}
        self.merged_adapters, self.disable_adapters = [], False
        self.active_adapters = [names[0]]

    @property
    def merged(self):
        return bool(self.merged_adapters)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        result = self.base_layer(x)
        for name in self.active_adapters:
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_module_takes_a_lora_layer(plan, bias):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(6, 11, bias=bias).requires_grad_(False)).double()
    module = FocalPolicyLoss(layer, PLANS[plan])
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert module.lora_A is a and module.lora_B is b and module.weight is layer.base_layer.weight
    assert {id(p) for p in module.parameters()} == {id(p) for p in layer.parameters()}
    given = inputs.arguments()
    del given["lm_head_weight"], given["lm_head_bias"]
    for layer.scaling["default"] in (1.5, 0.5):  # read at each call
        out = module(**given)
        expected = focal_policy_loss(
            lm_head_weight=layer.weight + layer.scaling["default"] * b @ a,
            lm_head_bias=layer.base_layer.bias, **given, config=PLANS[plan], impl="reference",
        )  # fmt: skip
        full = layer(inputs.hidden).log_softmax(-1)
        full = full.gather(-1, inputs.completion_ids[..., None]).squeeze(-1)
        assert_same("logps", out.logps, full.detach() * inputs.completion_mask)
        leaves = (inputs.hidden, a, b)
        for grad, value in zip(
            torch.autograd.grad(out.loss, leaves),
            torch.autograd.grad(expected.loss, leaves),
            strict=True,
        ):
            assert_same("gradient", grad, value)


def test_the_module_keeps_to_its_adapter_through_copies():
    layer = AdaptedLinear(nn.Linear(6, 11), names=("one", "two"))
    module = FocalPolicyLoss(layer)
    pair = copy.deepcopy(nn.ModuleDict({"head": layer, "loss": module}))
    assert pair["loss"].lora_B is pair["head"].lora_B["one"].weight
    inputs = make_inputs(2, 3, 6, 11, group_size=2)
    call = (inputs.hidden, inputs.completion_ids, inputs.advantages, inputs.success_rate)
    layer.active_adapters = ["two"]
    with pytest.raises(ValueError, match=r"'one' as at construction, received 'two'.*set_adapter"):
        module(*call)
    pair["loss"](*call).loss.backward()  # the copy's head still has "one"
    assert pair["head"].lora_B["one"].weight.grad.abs().max() > 0
    assert pair["head"].lora_B["two"].weight.grad is None


def changed(**attributes):
    layer = AdaptedLinear(nn.Linear(6, 11), names=("one", "two"))
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class SomeVariant:
    pass


REFUSED = {
    "two": (changed(active_adapters=["one", "two"]), r"active adapters \['one', 'two'\].*set_adap"),
    "none": (changed(active_adapters=["three"]), r"active adapters \[\].*set_adapter"),
    "dropout": (AdaptedLinear(nn.Linear(6, 11), dropout=0.1), r"p=0.1.*lora_dropout=0"),
    "bias": (AdaptedLinear(nn.Linear(6, 11), bias=True), "with a bias.*lora_bias=False"),
    "dora": (changed(use_dora={"one": True}), "DoRA.*merge"),
    "variant": (changed(lora_variant={"one": SomeVariant()}), "SomeVariant.*merge"),
    "merged": (changed(merged_adapters=["one"]), r"merged adapters \['one'\].*unmerge"),
    "disabled": (changed(disable_adapters=True), "disabled adapters.*enable"),
    "nested": (AdaptedLinear(changed()), "AdaptedLinear around .*AdaptedLinear.*merge"),
    "parameters": (
        changed(lora_A=nn.ParameterDict({"one": nn.Parameter(torch.ones(2, 6))})),
        "A of type Parameter and B of type Linear",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_single_plain_adapter_is_refused_by_name(case):
    layer, message = REFUSED[case]
    with pytest.raises(ValueError, match="lm_head: expected one active LoRA adapter.*" + message):
        FocalPolicyLoss(layer)


def test_another_kind_of_adapter_is_refused_by_name():
    layer = nn.Linear(6, 11)
    layer.base_layer = nn.Linear(6, 11)
    with pytest.raises(ValueError, match="Linear around .*Linear.*merge_and_unload"):
        FocalPolicyLoss(layer)


def test_a_dropout_of_zero_and_unknown_active_names_are_no_matter():
    layer = changed(active_adapters=["elsewhere", "two"])
    layer.lora_dropout["two"] = nn.Dropout(0.0)
    assert FocalPolicyLoss(layer).lora_A is layer.lora_A["two"].weight
