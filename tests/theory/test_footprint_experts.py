"""The memory of a rank with experts: every expert on as many ranks as there are copies, and what a layer keeps."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtlib import lab
from dtlib.theory import activations, footprint, models, threed, zero
from dtlib.theory.activations import Widths, layer_activations
from dtlib.theory.footprint import Setup
from dtlib.theory.models import Experts

V3 = models.model("deepseek-v3")
SMALL = dataclasses.replace(
    models.llama("small", num_layers=5, hidden=24, num_heads=4, ffn_hidden=40, vocab=60, seq=12, num_kv_heads=2),
    experts=Experts(num_experts=12, top_k=3, hidden=16, shared_hidden=8, first_dense=1, every=2),
)  # fmt: skip


# --- states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("modules", [0, 2])
def test_all_ranks_together_hold_every_weight_as_often_as_its_group_says(ep, pp, modules):
    """Weights of one rank of each kind, times how many differ: the experts ep times, all else once."""
    made = dataclasses.replace(SMALL, mtp_modules=modules)
    setup = Setup(dp=12, ep=ep, pp=pp, zero=0, recipe="16-byte")
    whole = models.model_parameters(made)
    modules_experts = modules * models.mtp_parameters(made).experts if models.last_has_experts(made) else 0
    experts = whole.experts + modules_experts
    held = sum(footprint.rank_memory(made, setup, stage).weights for stage in range(pp)) / 2
    assert held == whole.total - experts + experts // ep


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize(("dp", "cp", "ep"), [(12, 1, 4), (4, 1, 4), (4, 3, 4), (12, 1, 1)])
def test_zero_shards_an_expert_over_the_ranks_that_hold_it(stage, dp, cp, ep):
    setup = Setup(dp=dp, cp=cp, ep=ep, zero=stage, seq=12)
    whole = models.model_parameters(SMALL)
    found = footprint.rank_memory(SMALL, setup)
    rest, mine = whole.total - whole.experts, whole.experts // ep
    weights = 2 * (rest / (dp * cp) + mine / (dp * cp // ep)) if stage == 3 else 2 * (rest + mine)
    assert found.weights == pytest.approx(weights)
    first = 4 * (rest / (dp * cp) + mine / (dp * cp // ep)) if stage else 4 * (rest + mine)
    assert found.first_moment == pytest.approx(first)
    assert threed.state_bytes(SMALL, setup).total == pytest.approx(found.states)
    if stage and 1 < ep < dp * cp:  # the mutant that shards experts over all ranks keeps less
        assert first > 4 * (rest + mine) / (dp * cp)


def test_the_stages_have_the_layers_with_experts_that_lie_on_them():
    kinds = [i >= 1 and (i - 1) % 2 == 0 for i in range(5)]
    for pp, chunks in ((1, 1), (2, 1), (3, 1), (2, 2), (5, 1)):
        pieces = footprint.piece_layers(5, pp, chunks)
        order = [(stage, piece) for piece in range(chunks) for stage in range(pp)]
        start = 0
        for stage, piece in order:
            size = pieces[stage][piece]
            assert footprint.expert_layers(SMALL, pp, stage, chunks)[piece] == sum(kinds[start : start + size])
            start += size


def test_experts_that_one_rank_alone_holds_are_not_gathered():
    alone, shared = (footprint.rank_memory(SMALL, Setup(dp=dp, ep=4, zero=3, prefetched=0)) for dp in (4, 8))
    layer = models.layer_of_rank(SMALL, 1, 4, with_experts=True)
    assert shared.gathered_weights == 2 * layer.total
    assert alone.gathered_weights == 2 * max(
        layer.total - layer.experts, models.layer_parameters(SMALL, with_experts=False).total, 60 * 24 + 24
    )


# --- activations -----------------------------------------------------------------------------------------------


class ExpertLayer(nn.Module):
    """The part behind attention, written out: each expert is handed its tokens, none is dropped."""

    def __init__(self, m):
        super().__init__()
        h, e = m.hidden, m.experts
        self.top_k, self.router = e.top_k, nn.Linear(h, e.num_experts, bias=False)
        gated = lambda width: nn.ParameterDict(  # noqa: E731
            {"gate": torch.randn(h, width), "up": torch.randn(h, width), "down": torch.randn(width, h)}
        )
        self.experts = nn.ModuleList(gated(e.hidden) for _ in range(e.num_experts))
        self.shared = gated(e.shared_hidden)

    def through(self, mlp, x):
        return (F.silu(x @ mlp["gate"]) * (x @ mlp["up"])) @ mlp["down"]

    def forward(self, x):
        scores = F.softmax(self.router(x), -1)
        weights, chosen = scores.topk(self.top_k)
        copies = chosen.flatten().argsort(stable=True)  # of all copies of tokens, those of the first expert first
        sizes = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        tokens = copies.div(self.top_k, rounding_mode="floor").split(sizes)
        back = torch.cat([self.through(expert, x[mine]) for expert, mine in zip(self.experts, tokens, strict=True)])
        back = back[copies.argsort()].view(len(x), self.top_k, -1)
        return self.through(self.shared, x) + (back * weights[:, :, None]).sum(1)


@pytest.mark.parametrize("top_k", [1, 3, 12])
def test_what_an_expert_layer_keeps_is_what_autograd_keeps(top_k):
    """In fp32, but for indices of tokens and their weights: neither has h entries. Copies and outputs are counted."""
    m = dataclasses.replace(SMALL, experts=dataclasses.replace(SMALL.experts, top_k=top_k))
    torch.manual_seed(top_k)
    x = torch.randn(50, m.hidden, requires_grad=True)
    saved = lab.saved_bytes(ExpertLayer(m), x)
    widths = Widths(element=4, core=4)
    kept = layer_activations(m, 1, seq=50, attention="flash", dropout=False, widths=widths, with_experts=True)
    names = ("mlp_input", "mlp_hidden", "mlp_activation", "mlp_product", "router_scores", "expert_inputs",
             "expert_hidden", "expert_activation", "expert_product", "expert_outputs")  # fmt: skip
    expected = sum(kept.parts[name] for name in names)
    small = 50 * top_k * (4 + 3 * 8)  # of each copy its weight, and where it came from, goes to, and whom it chose
    assert expected <= saved.total <= expected + small
    assert expected == 4 * (50 * (24 + 4 * 8 + 12) + 50 * top_k * (24 + 4 * 16 + 24))


def test_tp_splits_the_widths_and_sequence_parallelism_the_rest():
    m = SMALL
    one, two = (layer_activations(m, 1, tp=t, with_experts=True) for t in (1, 2))
    assert two.expert_hidden == one.expert_hidden / 2
    assert (two.expert_inputs, two.router_scores) == (one.expert_inputs, one.router_scores)
    split = layer_activations(m, 1, tp=2, sequence_parallel=True, with_experts=True)
    assert split.expert_inputs == one.expert_inputs / 2
    assert layer_activations(m, 1, with_experts=True, recompute="full").total == 2 * m.seq * m.hidden


def test_latent_attention_keeps_its_vectors_and_heads_of_two_widths():
    found = layer_activations(V3, 1, seq=100, attention="flash", dropout=False, with_experts=False)
    assert (found.queries, found.keys, found.values) == (2 * 100 * 128 * 192, 2 * 100 * 128 * 192, 2 * 100 * 128 * 128)
    assert found.projection_input == found.values
    assert found.latents == 2 * 2 * 100 * (1536 + 512)
    lite = models.model("deepseek-v2-lite")
    assert layer_activations(lite, 1, seq=100, with_experts=True).latents == 2 * 2 * 100 * 512


@pytest.mark.parametrize(("ep", "imbalance"), [(1, 1), (4, 1), (4, 2.5)])
def test_the_busiest_rank_keeps_more_copies_and_the_exchange_has_its_buffers(ep, imbalance):
    setup = Setup(dp=4, ep=ep, imbalance=imbalance, seq=12)
    found = footprint.rank_memory(SMALL, setup)
    layers = [
        layer_activations(SMALL, 1, attention="flash", dropout=False, with_experts=kind) for kind in (False, True)
    ]
    copies = 2 * 12 * 3 * (24 + 4 * 16)  # of each copy its input, gate, up, activation, product
    assert found.layer_activations == pytest.approx(
        3 * layers[0].total + 2 * (layers[1].total + (imbalance - 1) * copies)
    )
    assert found.all_to_all == (2 * 12 * 3 * 24 * (1 + imbalance) if ep > 1 else 0)
    assert found.total == pytest.approx(found.states + found.activations + found.transient)


def test_modules_of_further_tokens_lie_on_the_last_stage_with_logits_of_their_own():
    plain, more = (dataclasses.replace(V3, mtp_modules=n) for n in (0, 1))
    setup = Setup(dp=8, ep=8, pp=4, seq=512)
    before, after = (footprint.memory_by_stage(m, setup) for m in (plain, more))
    assert before[:-1] == after[:-1]
    assert after[-1].logits == 2 * before[-1].logits
    assert after[-1].logits_gradient == before[-1].logits_gradient
    layer = layer_activations(V3, 1, seq=512, attention="flash", dropout=False, with_experts=True).total
    assert after[-1].layer_activations - before[-1].layer_activations == layer + 2 * 4 * 512 * V3.hidden
    added = models.mtp_parameters(V3, 1, 8).total
    assert after[-1].weights - before[-1].weights == 2 * added


def test_deepseek_v3_on_2048_cards():
    """arXiv 2412.19437, 3.2: pp 16, ep 64 over 8 nodes, ZeRO 1, no tensor parallelism on 2,048 cards of 80 GB: the
    report recomputes norms and up-projections, which lies between no recompute and a full one."""
    setup = Setup(dp=128, pp=16, ep=64, zero=1, seq=4096)
    assert (setup.world_size, setup.expert_copies) == (2048, 2)
    assert models.checked_ep(V3, 64) == 4  # experts a rank
    stages = footprint.memory_by_stage(V3, setup)
    # three or four of 61 layers a stage: 187 M of attention, 44 M shared, 4 · 44 M of experts, each in 2 bytes
    assert stages[5].weights / 2 == pytest.approx(4 * (187.1e6 + 44e6 + 4 * 44.04e6 + 1.8e6), rel=1e-3)
    assert max(each.states for each in stages) < 20e9
    full = footprint.rank_memory(V3, dataclasses.replace(setup, recompute="full"))
    none = footprint.rank_memory(V3, setup)
    assert full.total < 80e9 < none.total


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"ep": 0}, "ep must be at least 1, not 0"),
        ({"dp": 6, "ep": 4}, "ep must divide dp=6, whose ranks share the experts; 4 does not"),
        ({"dp": 4, "ep": 2, "imbalance": 0.5}, "imbalance must be 1 or more, not 0.5"),
        ({"dp": 4, "ep": 2, "imbalance": 3}, "imbalance must be from 1 to ep=2, all tokens on one rank, not 3"),
        ({"dp": 4, "ep": 2, "imbalance": float("nan")}, "imbalance must be finite"),
    ],
)
def test_setups_with_experts_out_of_range_are_refused(setup, message):
    with pytest.raises(ValueError, match=message):
        Setup(**setup)


def test_a_model_that_ep_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="ep of small must divide its 12 experts; 5 does not"):
        footprint.rank_memory(SMALL, Setup(dp=5, ep=5))
    with pytest.raises(ValueError, match="ep of llama3-8b must be 1, since it has no experts, not 2"):
        footprint.rank_memory("llama3-8b", Setup(dp=2, ep=2))
    with pytest.raises(ValueError, match="with_experts must be given for small, of whose 5 layers 2 have experts"):
        activations.layer_activations(SMALL, 1)
    with pytest.raises(ValueError, match="with_experts must be False for llama3-8b, which has none"):
        activations.layer_activations("llama3-8b", 1, with_experts=True)
