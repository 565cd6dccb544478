"""What layers keep on a card, by its allocator, beside `theory.activations`; and that recomputing changes no bit."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtlib import lab, theory
from dtlib.ranks import activations
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from tests.gpu import allocator

L, SEQ, ROWS = 3, 512, 2
GPT_SIZES = GPTConfig(num_layers=L, hidden=512, num_heads=8, seq=SEQ, vocab=512, dtype=torch.bfloat16)
LLAMA = replace(
    GPT_SIZES, num_kv_heads=2, rms_norm=True, swiglu=True, rotary=True, biases=False, mlp_ratio=3, tied=False
)
# A layer norm keeps mean and inverse deviation in fp32 on a card, the course's RMS norm one number in its own dtype;
# masks have one byte.
LAYER_NORM = replace(theory.activations.PAPER, statistic=4, log_sum_exp=4)
RMS_NORM = replace(LAYER_NORM, statistic=2)
KINDS = {
    "flash": (GPT_SIZES, "flash", LAYER_NORM),
    "flash, dropout": (replace(GPT_SIZES, dropout=0.1), "flash", LAYER_NORM),
    "written out": (replace(GPT_SIZES, dropout=0.1, written_out=True), "matrix", LAYER_NORM),
    "Llama": (LLAMA, "flash", RMS_NORM),
}
DICE = 64
"""Bytes a layer for the place of flash attention's dice, two numbers of 8 bytes, which no formula counts."""


@pytest.fixture(autouse=True)
def _flash():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


def built(config):
    model = GPT(config).cuda()
    x_bsh = torch.randn(ROWS, SEQ, config.hidden, device="cuda", dtype=config.dtype, requires_grad=True)
    model.run_blocks(x_bsh).sum().backward()  # the libraries take their workspace
    model.zero_grad()
    x_bsh.grad = None
    return model, x_bsh


def per_layer(kind, recompute):
    config, attention, widths = KINDS[kind]
    return theory.activations.layer_activations(
        config.architecture, ROWS, attention=attention, dropout=config.dropout > 0, widths=widths, recompute=recompute
    ).total


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_what_theory_says_by_the_allocator_and_by_saved_bytes(kind, recompute):
    model, x_bsh = built(KINDS[kind][0])
    activations.recompute(model, recompute)
    before = allocator.begin()
    y_bsh = model.run_blocks(x_bsh)
    kept = allocator.now() - before - y_bsh.nbytes + x_bsh.nbytes  # the input, which was there, is kept too
    assert kept == pytest.approx(L * per_layer(kind, recompute), abs=L * DICE)
    y_bsh = None
    saved = lab.saved_bytes(model.run_blocks, x_bsh)
    assert saved.total == pytest.approx(L * per_layer(kind, recompute), abs=L * DICE)
    assert allocator.now() == before


def test_a_formula_that_forgets_the_log_sum_exp_is_found_out():
    config, attention, _ = KINDS["flash"]
    model, x_bsh = built(config)
    kept = lab.saved_bytes(model.run_blocks, x_bsh).total
    wrong = theory.activations.layer_activations(config.architecture, ROWS, attention=attention, dropout=False).total
    assert kept - L * wrong > 100 * L * DICE


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_peak_of_a_backward_pass(recompute):
    model, x_bsh = built(GPT_SIZES)
    activations.recompute(model, recompute)
    before = allocator.begin()
    y_bsh = model.run_blocks(x_bsh)
    y_bsh.backward(torch.randn_like(y_bsh))
    peak = allocator.peak() - before + x_bsh.nbytes
    layer, one = per_layer("flash", recompute), per_layer("flash", "none")
    law = L * layer
    if recompute == "full":
        law = theory.activations.checkpointed_bytes(L, 1, one, layer)
    # Beside what is kept: the output, its gradient, gradients of weights (24 h² bytes a layer), and of activations.
    weights = 2 * sum(parameter.numel() for parameter in model.blocks.parameters())
    assert law < peak < law + weights + one


@pytest.mark.parametrize("kind", ["flash, dropout", "written out"])
def test_recomputing_changes_no_bit_on_a_card(kind, deterministic):
    def trained(what, **options):
        model = activations.recompute(GPT(KINDS[kind][0]).cuda(), what, **options)
        tokens = torch.randint(512, (ROWS, SEQ), generator=torch.Generator().manual_seed(1)).cuda()
        torch.manual_seed(5)
        next_token_loss(model(tokens), tokens).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), torch.rand(3, device="cuda")

    gradient, dice = trained("none")
    for what in ("selective", "full"):
        again = trained(what)
        assert torch.equal(again[0], gradient), what
        assert torch.equal(again[1], dice), what
    wrong, _ = trained("full", restore_rng=False)  # the mutant: dice thrown anew
    assert torch.nn.functional.cosine_similarity(wrong.float(), gradient.float(), dim=0) < 0.99


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
