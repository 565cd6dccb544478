"""Bytes by recipe, operations and utilisation: against real optimizers, torch's counter and published rows."""

import csv
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtlib.ranks import model as course
from dtlib.theory import hardware, memory, models
from dtlib.theory.units import GB, TB

DATA = Path(__file__).parents[2] / "chapters" / "data"
A100 = hardware.accelerator("A100").half_flop_per_s


def rows(name):
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


# --- recipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "optimizer", "total"),
    [
        ("12-byte", 2, 2, 8, 12),
        ("16-byte", 2, 2, 12, 16),
        ("18-byte", 2, 4, 12, 18),
        ("20-byte", 2, 2, 16, 20),
        ("fp32", 4, 4, 8, 16),
        ("adam-8bit", 2, 2, 6 + 8 / 2048, 10 + 8 / 2048),
    ],
)
def test_recipes_by_group(name, weights, gradients, optimizer, total):
    recipe = memory.recipe(name)
    per_param = recipe.per_param
    assert (per_param.weights, per_param.gradients, per_param.optimizer) == (weights, gradients, optimizer)
    assert recipe.bytes_per_param == total
    assert recipe.source
    assert set(memory.OPTIMIZER_PARTS) == set(per_param.parts) - {"weights", "gradients"}


@pytest.mark.parametrize(("said", "name"), [("16", "16-byte"), ("FP32", "fp32"), ("8bit", "adam-8bit")])
def test_recipes_are_found_by_what_people_say(said, name):
    assert memory.recipe(said).name == name


def test_unknown_recipes_list_what_there_is():
    with pytest.raises(ValueError, match="'14' of recipe is unknown; there are 12-byte, 16-byte, 18-byte"):
        memory.recipe("14")


def test_a_recipe_of_ones_own():
    lion = memory.Recipe("lion", memory.ModelStates(2, 2, 4, 0, 4), "Chen et al. 2023")
    assert memory.recipe(lion) is lion
    assert memory.model_states(10, lion).total == 120


def stored(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_optimizers_state_is_the_recipes(dtype):
    """fp32 with torch's AdamW is `fp32`; bf16 weights with an fp32 master copy in AdamW is `16-byte`."""
    net = course.GPT(course.preset("tiny", dtype=dtype))
    parameters = list(net.parameters())
    masters = [p.detach().float() for p in parameters] if dtype != torch.float32 else parameters
    course.next_token_loss(net(torch.zeros(1, 8, dtype=torch.long)), torch.zeros(1, 8, dtype=torch.long)).backward()
    gradients = [p.grad for p in parameters]
    if masters is not parameters:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    states = memory.model_states(net.config.num_params, "fp32" if dtype == torch.float32 else "16-byte")
    assert stored(parameters) == states.weights
    assert stored(gradients) == states.gradients
    assert stored(optimizer.state[p]["exp_avg"] for p in masters) == states.first_moment
    assert stored(optimizer.state[p]["exp_avg_sq"] for p in masters) == states.second_moment
    assert (stored(masters) if masters is not parameters else 0) == states.master_weights


def test_states_of_a_model_are_exact_and_add_up():
    psi = models.model_parameters(models.model("llama3-70b")).total
    states = memory.model_states(psi)
    assert states.total == 16 * psi == memory.model_state_bytes(psi)
    assert isinstance(states.total, int)
    assert [row.name for row in states.table()] == [
        "weights", "gradients", "master weights", "first moment", "second moment",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "computed", "value"),
    [
        ("e-01: 7B, weights and Adam", 7e9 * (2 + 8), 70 * GB),
        ("e-02: GPT-3, weights and Adam", 175e9 * (2 + 8), 1.75 * TB),
        ("e-03: 405B, weights and Adam", 405e9 * (2 + 8), 4.05 * TB),
        ("c-01: 7B at 16 bytes", memory.model_state_bytes(7e9), 112 * GB),
        ("t-01: 70B in fp32", memory.model_states(70e9, "fp32").weights, 280 * GB),
        ("l-01: 70B in bf16", memory.model_states(70e9).weights, 140 * GB),
    ],
)
def test_claims_that_the_formulas_confirm(claim, computed, value):
    assert computed == pytest.approx(value, rel=1e-12), claim


# --- operations ------------------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """A Llama layer as a plain module, to be counted."""

    def __init__(self, m):
        super().__init__()
        self.m, h = m, m.hidden
        self.q, self.k, self.v = (nn.Linear(h, w, bias=False) for w in (m.query_width, m.kv_width, m.kv_width))
        self.o = nn.Linear(m.query_width, h, bias=False)
        self.gate, self.up = (nn.Linear(h, m.ffn_hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(m.ffn_hidden, h, bias=False)

    def forward(self, x_bsh):
        def heads(y_bsw):
            y_bngd = y_bsw.unflatten(-1, (-1, self.m.head_dim)).transpose(1, 2)
            return y_bngd.repeat_interleave(self.m.num_heads // y_bngd.shape[1], dim=1)

        y = nn.functional.scaled_dot_product_attention(heads(self.q(x_bsh)), heads(self.k(x_bsh)), heads(self.v(x_bsh)))
        x_bsh = x_bsh + self.o(y.transpose(1, 2).flatten(2))
        return x_bsh + self.down(nn.functional.silu(self.gate(x_bsh)) * self.up(x_bsh))


def counted_flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_a_gpts_forward_pass_is_what_torch_counts():
    with torch.device("meta"):
        net = course.GPT(course.preset("25m"))
        tokens = torch.zeros(2, 64, dtype=torch.long)
    flops = memory.forward_flops_per_token(models.model("25m"))
    assert counted_flops(lambda: net(tokens)) == 2 * 64 * flops.total


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-7b", "llama3-70b"])
def test_a_llama_layers_forward_pass_is_what_torch_counts(name):
    m = models.model(name)
    with torch.device("meta"):
        block, x_bsh = LlamaBlock(m), torch.zeros(1, 128, m.hidden)
    flops = memory.forward_flops_per_token(m, seq=128)
    assert counted_flops(lambda: block(x_bsh)) == 128 * (flops.total - flops.head) / m.num_layers


def test_training_costs_three_forward_passes():
    with torch.device("meta"):
        net = course.GPT(course.preset("25m"))
        tokens = torch.zeros(2, 64, dtype=torch.long)
    forward = memory.forward_flops_per_token(models.model("25m"))
    assert counted_flops(lambda: net(tokens).sum().backward()) == 2 * 64 * 3 * forward.total


def test_six_operations_a_parameter_and_attention():
    flops = memory.training_flops_per_token(7e9, 32, 4096, 2048)
    assert flops.dense == 6 * 7e9
    assert flops.attention == 12 * 32 * 4096 * 2048
    assert flops.total == flops.model
    halved = memory.training_flops_per_token(7e9, 32, 4096, 2048, causal=True)
    assert halved.attention == flops.attention / 2
    full = memory.training_flops_per_token(7e9, 32, 4096, 2048, recompute="full")
    assert full.total == 8 * 7e9 + 16 * 32 * 4096 * 2048 == pytest.approx(4 / 3 * flops.total)
    assert full.model == flops.model
    selective = memory.training_flops_per_token(7e9, 32, 4096, 2048, recompute="selective")
    assert selective.total - selective.model == 4 * 32 * 4096 * 2048


@pytest.mark.parametrize("name", ["gpt3", "llama3-8b", "llama3-405b", "mpt-7b"])
def test_the_short_cut_and_the_products_one_by_one(name):
    m = models.model(name)
    parts = models.model_parameters(m)
    short = memory.training_flops_per_token(parts.total, m.num_layers, m.hidden, m.seq)
    exact = memory.forward_flops_per_token(m).scaled(3)
    assert exact.scores + exact.weighted_values == short.attention
    # what 6Ψ counts and no product has: norms, biases, positions, and the embedding where the head is another matrix
    idle = parts.norms + parts.positions + (0 if m.tied else parts.embedding)
    idle += m.num_layers * (5 * m.hidden + m.ffn_hidden) if m.biases else 0
    assert short.dense - (exact.projections + exact.mlp + exact.head) == 6 * idle


def test_a_causal_mask_leaves_half_and_the_diagonal():
    m = models.model("tiny")
    pairs = sum(position + 1 for position in range(m.seq))  # each token sees itself and those before
    causal = memory.forward_flops_per_token(m, causal=True)
    assert causal.scores * m.seq == m.num_layers * 2 * m.hidden * pairs
    assert causal.mlp == memory.forward_flops_per_token(m).mlp


def test_the_papers_formula_is_the_products_one_by_one():
    for name in ("korthikanti-22b", "sc21-1008b"):
        m = models.model(name)
        exact = memory.forward_flops_per_token(m)
        assert memory.paper_flops_per_step(7, m.num_layers, m.hidden, m.seq, m.vocab) == 7 * m.seq * 3 * exact.total
        h, l, s, v = m.hidden, m.num_layers, m.seq, m.vocab
        again = memory.paper_flops_per_step(7, l, h, s, v, full_recompute=True)
        assert again == pytest.approx(96 * 7 * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h)), rel=1e-12)


# --- utilisation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("llmfoundry_mpt_a100.csv"), ids=lambda row: f"{row['model']}-{row['seq']}")
def test_every_row_of_llm_foundry_within_fifteen_hundredths(row):
    m = dataclasses.replace(models.model(f"mpt-{row['model']}"), seq=int(row["seq"]))
    flops = memory.training_flops_per_token(
        models.model_parameters(m).total,
        m.num_layers,
        m.hidden,
        m.seq,
        recompute="full" if row["act_ckpt"] == "True" else "none",
    )
    tokens_per_s = float(row["tok_s_gpu"])
    assert 100 * memory.mfu(tokens_per_s, flops, A100) == pytest.approx(float(row["mfu_pct"]), abs=0.15)
    assert 100 * memory.hfu(tokens_per_s, flops, A100) == pytest.approx(float(row["hfu_pct"]), abs=0.2)


def test_korthikantis_utilisation_and_the_equation_that_contradicts_its_text():
    (row,) = rows("korthikanti_table3_5.csv")
    m = models.model("korthikanti-22b")
    assert (m.num_layers, m.hidden, m.num_heads) == (int(row["layers"]), int(row["hidden"]), int(row["heads"]))
    sequences, devices = int(row["gbs"]), int(row["gpus"])
    per_step = memory.paper_flops_per_step(sequences, m.num_layers, m.hidden, m.seq, m.vocab)
    seconds = float(row["iter_sp_selective_s"])
    rate = sequences * m.seq / seconds / devices
    used = 100 * memory.utilisation(rate, per_step / (sequences * m.seq), A100)
    assert used == pytest.approx(float(row["mfu_pct"]), rel=0.005)  # the time is printed as 1.10 s: half a percent
    # "hardware FLOPs" there are 72…(1 + s/(3h) + …): attention doubled, though only its forward pass is done again
    attention = 3 * memory.forward_flops_per_token(m).scores * 2
    doubled = used * (per_step + sequences * m.seq * attention) / per_step
    once_more = used * (per_step + sequences * m.seq * attention / 3) / per_step
    assert doubled == pytest.approx(float(row["hfu_pct"]), rel=0.005)
    assert once_more < float(row["hfu_pct"]) - 1


# --- roofline --------------------------------------------------------------------------------------------------


def test_roofline():
    assert memory.matmul_intensity(4096, 4096, 4096) == pytest.approx(4096 / 3)
    assert memory.matmul_intensity(1, 4096, 4096) == pytest.approx(1, rel=1e-3)
    assert memory.matmul_intensity(8, 8, 8, element_bytes=4) == pytest.approx(8 / 6)
    ridge = memory.ridge_intensity(989e12, 3.35e12)
    assert memory.roofline_flop_per_s(ridge, 989e12, 3.35e12) == pytest.approx(989e12)
    assert memory.roofline_flop_per_s(ridge / 2, 989e12, 3.35e12) == pytest.approx(989e12 / 2)
    assert memory.roofline_flop_per_s(1e9, 989e12, 3.35e12) == 989e12


# --- what fits, and bad input ----------------------------------------------------------------------------------


def test_the_largest_model_whose_states_fit():
    assert memory.largest_num_params(32 * GB, 16) == 2e9
    assert memory.largest_num_params(80 * GB, 16) == 5e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.model_states(-1), "num_params must be finite and zero or more, not -1"),
        (lambda: memory.model_state_bytes(1, float("nan")), "bytes_per_param must be finite"),
        (lambda: memory.adam_8bit(block=0), "block must be at least 1, not 0"),
        (lambda: memory.largest_num_params(1, 0), "bytes_per_param must be finite and positive, not 0"),
        (lambda: memory.training_flops_per_token(1, 1, 1, 0), "seq must be at least 1, not 0"),
        (lambda: memory.forward_flops_per_token(models.model("tiny"), seq=0), "seq must be at least 1, not 0"),
        (lambda: memory.matmul_intensity(0, 1, 1), "rows must be at least 1, not 0"),
        (lambda: memory.ridge_intensity(1, 0), "memory_bytes_per_s must be finite and positive, not 0"),
        (lambda: memory.roofline_flop_per_s(-1, 1, 1), "intensity must be finite and zero or more, not -1"),
        (lambda: memory.utilisation(1, 1, 0), "peak_flop_per_s must be finite and positive, not 0"),
        (
            lambda: memory.training_flops_per_token(1, 1, 1, 1, recompute="half"),
            "recompute must be one of none, selective, full, not 'half'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_master_copy_costs_four_bytes():
    with_copy, without = memory.adam_8bit(block=256), memory.adam_8bit(block=256, master_weights=False)
    assert with_copy.bytes_per_param - without.bytes_per_param == 4
    assert with_copy.bytes_per_param == 10 + 1 / 32
    for one, other in itertools.pairwise(["12-byte", "16-byte", "20-byte"]):
        assert memory.recipe(other).bytes_per_param - memory.recipe(one).bytes_per_param == 4
