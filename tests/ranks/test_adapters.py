"""Low-rank adapters on a small model: what autograd keeps, what has gradients, and operations, against the law."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory import activations as kept
from dtlib.theory import footprint, models, planner
from dtlib.theory.models import MODULES, Adapters

B, R, S, H, F, V = 2, 3, 16, 32, 128, 256
LLAMA = GPTConfig(
    num_layers=1, hidden=H, num_heads=4, num_kv_heads=2, seq=S, rms_norm=True, swiglu=True, rotary=True, biases=False,
    tied=False, dtype=torch.bfloat16,
)  # fmt: skip
GPT2 = GPTConfig(num_layers=1, hidden=H, num_heads=4, seq=S, tied=False, dtype=torch.bfloat16)
SETS = [chosen for number in range(1, 5) for chosen in combinations(MODULES, number)]


class Adapted(nn.Module):
    """x·W + x·A·B with W as it is."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(base.in_features, rank, dtype=base.weight.dtype))
        self.b = nn.Parameter(torch.zeros(rank, base.out_features, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def adapted(config, adapters):
    model = GPT(config).requires_grad_(False)
    for block in model.blocks:
        for name in adapters.modules:
            parent = block.attention if hasattr(block.attention, name) else block.mlp
            setattr(parent, name, Adapted(getattr(parent, name), adapters.rank))
    return model


def shape_of(config):
    sizes = {"num_layers": config.num_layers, "hidden": H, "num_heads": 4, "vocab": V, "seq": S}
    if not config.swiglu:
        return models.gpt("small", **sizes, tied=False)
    return models.llama("small", **sizes, num_kv_heads=2, ffn_hidden=F)


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt"])
def test_autograd_keeps_what_the_law_says_to_the_byte(config, written_out):
    config = replace(config, written_out=written_out)
    widths = kept.written_out_widths(2) if written_out else kept.torch_cpu_widths(2)
    law = partial(kept.layer_activations, shape_of(config), B, attention="matrix" if written_out else "flash",
                  dropout=False, widths=widths)  # fmt: skip
    for chosen in SETS:
        adapters = Adapters(R, chosen)
        x = torch.zeros(B, S, H, dtype=torch.bfloat16, requires_grad=True)
        measured = lab.saved_bytes(adapted(config, adapters).run_blocks, x).total
        assert measured == law(adapters=adapters).total, chosen
        assert measured != law().total  # as if all were trained
        if len(chosen) < 4:
            assert measured != law(adapters=Adapters(R)).total  # as if all inputs were kept


def test_gradients_and_states_are_of_adapters_alone():
    config = replace(LLAMA, num_layers=3, dtype=torch.float32)
    for chosen in (("qkv",), ("out", "down"), MODULES):
        adapters = Adapters(R, chosen)
        model = adapted(config, adapters)
        tokens = torch.randint(V, (B, S))
        next_token_loss(model(tokens), tokens).backward()
        optimizer = torch.optim.Adam(each for each in model.parameters() if each.requires_grad)
        optimizer.step()
        gradients = sum(each.grad.numel() for each in model.parameters() if each.grad is not None)
        assert gradients == 3 * adapters.layer_parameters(shape_of(config))
        moments = sum(each["exp_avg"].numel() for each in optimizer.state.values())
        # 12 bytes: everything in fp32 on this machine but no master copy; weights of the model and of adapters alike
        setup = footprint.Setup(adapters=adapters, recipe="fp32")
        found = footprint.rank_states(shape_of(config), setup, 0)
        held = sum(each.numel() for each in model.parameters())
        assert (found.weights, found.gradients, found.first_moment) == (4 * held, 4 * gradients, 4 * moments)
        everything = footprint.rank_states(shape_of(config), footprint.Setup(recipe="fp32"), 0)
        assert everything.gradients > 10 * found.gradients


def products(model, x):
    """Operations of the linear layers of a step, scores apart, by a counter that sees each product."""
    with FlopCounterMode(display=False) as counter:
        model.run_blocks(x).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(number for op, number in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def test_a_step_has_two_products_of_each_matrix_and_three_of_each_adapter():
    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    matrices = sum(inputs * outputs for inputs, outputs in Adapters(1).matrices(shape_of(LLAMA)))
    assert products(GPT(LLAMA), x) == 6 * matrices * B * S
    for chosen in (("qkv",), ("up", "down"), MODULES):
        adapters = Adapters(R, chosen)
        found = products(adapted(LLAMA, adapters), x)
        plan = planner.Plan(adapters=adapters)
        own = adapters.layer_parameters(shape_of(LLAMA))
        assert found == (2 * plan.passes * matrices + 6 * own) * B * S
        assert found < (6 * matrices + 6 * own) * B * S


def test_a_head_that_is_not_trained_keeps_the_norms_input_alone():
    model = adapted(LLAMA, Adapters(R)).requires_grad_(False)
    x = torch.zeros(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    measured = lab.saved_bytes(lambda x: model.head(model.norm(x)), x).total
    found = footprint.rank_memory(shape_of(LLAMA), footprint.Setup(micro_batch=B, adapters=Adapters(R)))
    assert measured - 2 * B * S == found.head_activations  # but for the norm's scale of each token
