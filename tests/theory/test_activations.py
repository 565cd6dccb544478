"""Activations of a layer: the paper's closed forms and figure, and what autograd really keeps, to the byte."""

import csv
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtlib.ranks import model as course
from dtlib.theory import activations, models
from dtlib.theory.units import GiB

DATA = Path(__file__).parents[2] / "chapters" / "data"
RECOMPUTE = ("none", "selective", "full")

size = st.integers(1, 12)


def gpt(hidden, heads, seq):
    return models.gpt("any", num_layers=1, hidden=hidden, num_heads=heads, vocab=8, seq=seq)


# --- closed forms ----------------------------------------------------------------------------------------------


def test_the_terms_of_the_paper_on_one_rank():
    s, b, h, a = 2048, 4, 6144, 64
    parts = activations.layer_activations(gpt(h, a, s), b)
    attention = [
        "attention_input", "queries", "keys", "values", "softmax_output", "softmax_mask", "softmax_dropped",
        "projection_input", "projection_mask",
    ]  # fmt: skip
    assert sum(parts.parts[name] for name in attention) == 11 * s * b * h + 5 * a * s * s * b
    mlp = ["mlp_input", "mlp_hidden", "mlp_activation", "mlp_mask"]
    assert sum(parts.parts[name] for name in mlp) == 19 * s * b * h
    assert parts.attention_norm_input + parts.mlp_norm_input == 4 * s * b * h
    assert parts.core == 5 * a * s * s * b
    assert parts.total == s * b * h * 34 + 5 * a * s * s * b
    assert activations.layer_bytes(s, b, h, a) == pytest.approx(parts.total, rel=1e-12)


@given(
    b=size, s=size, heads=st.sampled_from([4, 8, 12]), head_dim=size, tp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(), recompute=st.sampled_from(RECOMPUTE),
)  # fmt: skip
def test_the_closed_form_is_the_sum_of_the_tensors(b, s, heads, head_dim, tp, sequence_parallel, recompute):
    h = heads * head_dim
    options = {"tp": tp, "sequence_parallel": sequence_parallel, "recompute": recompute}
    parts = activations.layer_activations(gpt(h, heads, s), b, **options)
    closed = activations.layer_bytes(s, b, h, heads, **options)
    assert parts.total == pytest.approx(closed, rel=1e-12)


def test_the_rows_of_the_papers_table_2():
    s, b, h, a, t = 2048, 1, 12288, 96, 8
    sbh = s * b * h

    def bytes_of(**options):
        return activations.layer_bytes(s, b, h, a, **options)

    assert bytes_of() == sbh * (34 + 5 * a * s / h)
    assert bytes_of(tp=t) == sbh * (10 + 24 / t + 5 * a * s / (h * t))
    assert bytes_of(tp=t, sequence_parallel=True) == sbh / t * (34 + 5 * a * s / h)
    assert bytes_of(tp=t, recompute="selective") == sbh * (10 + 24 / t)
    assert bytes_of(tp=t, sequence_parallel=True, recompute="selective") == sbh * 34 / t
    assert bytes_of(tp=t, recompute="full") == 2 * sbh
    assert bytes_of(tp=t, recompute="full", sequence_parallel=True) == 2 * sbh / t


# tensor-parallel degree, stages, chunks, micro-batch: Tables 3 and 4 of the paper
FIGURE_1 = {"22B": (8, 1, 1, 4), "175B": (8, 8, 3, 1)}


def figure1():
    with (DATA / "korthikanti_fig1_memory_GiB.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", figure1(), ids=lambda row: row["model"])
def test_korthikantis_figure_1_to_the_digits_printed(row):
    m, (tp, stages, chunks, b) = models.model(f"korthikanti-{row['model']}"), FIGURE_1[row["model"]]
    params = 12 * m.num_layers * m.hidden**2  # the figure leaves out embeddings, biases and norms
    assert 18 * params / (tp * stages) / GiB == float(row["param_opt_GiB"])
    layers = m.num_layers * activations.first_stage_layers(stages, chunks)
    baseline = layers * activations.layer_activations(m, b, tp=tp).total
    assert baseline / GiB == pytest.approx(float(row["act_tp_baseline_GiB"]), rel=1e-12)
    both = activations.layer_activations(m, b, tp=tp, sequence_parallel=True, recompute="selective").total
    assert layers * both / GiB == pytest.approx(float(row["act_tp_sp_selective_GiB"]), rel=1e-12)


# --- what autograd keeps ---------------------------------------------------------------------------------------


def saved_bytes(run, parameters):
    """Bytes of all storages that autograd keeps while `run` runs, parameters aside, each counted once."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept, sizes = [], {}

    def pack(tensor):
        kept.append(tensor)  # a storage that is freed could come back under the same address
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(count for address, count in sizes.items() if address not in known)


SIZES = [(2, 16, 32, 4), (3, 24, 64, 8), (2, 64, 48, 3)]
IN_ONE_ROW = [(1, 16, 32, 4), (2, 1, 32, 4), (2, 16, 32, 1), (1, 1, 1, 1)]
LAYERS = [
    *(("flash", 0.0, sizes) for sizes in [(1, 16, 32, 4), *SIZES]),
    # one sequence, one token or one head alone need no copies for the product of matrices, which then keeps views
    *(("matrix", dropout, sizes) for dropout in (0.0, 0.1) for sizes in [*SIZES, *IN_ONE_ROW]),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("attention", "dropout", "sizes"), LAYERS, ids=str)
def test_a_real_gpt_layer_to_the_byte(attention, dropout, sizes, dtype):
    b, s, h, a = sizes
    config = course.GPTConfig(num_layers=1, hidden=h, num_heads=a, seq=s, dtype=dtype, dropout=dropout)
    block = course.GPT(config).blocks[0]
    x_bsh = torch.zeros(b, s, h, dtype=dtype, requires_grad=True)
    backend = SDPBackend.FLASH_ATTENTION if attention == "flash" else SDPBackend.MATH
    with sdpa_kernel([backend]):
        measured = saved_bytes(lambda: block(x_bsh), block.parameters())
    widths = activations.torch_cpu_widths(dtype.itemsize, attention=attention, in_one_row=1 in (b, s, a))
    predicted = activations.layer_activations(gpt(h, a, s), b, attention=attention, dropout=dropout > 0, widths=widths)
    assert predicted.total == measured
    assert isinstance(predicted.total, int)


def test_a_real_gpt_layer_without_dropout_is_32_sbh_and_a_little():
    """34 less the two masks; with the attention matrix once, 2 a s² b."""
    s, b, h, a = 64, 2, 48, 3
    exact = activations.torch_cpu_widths(2)
    flash = activations.layer_activations(gpt(h, a, s), b, attention="flash", dropout=False, widths=exact)
    little = 4 * 2 * s * b + 4 * a * s * b  # two means and two deviations, and the log-sum-exp
    assert flash.total == 32 * s * b * h + little


class FusedRMSNorm(torch.autograd.Function):
    """Keeps what a fused kernel keeps: its input, the weight, and one number a token."""

    @staticmethod
    def forward(context, x_bsh, weight_h):
        scale_bs1 = x_bsh.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
        context.save_for_backward(x_bsh, weight_h, scale_bs1)
        return x_bsh * scale_bs1 * weight_h


class LlamaBlock(nn.Module):
    """A Llama layer, rotary positions left out (they keep nothing of their own)."""

    def __init__(self, m, dtype):
        super().__init__()
        self.m, h = m, m.hidden
        self.norms = nn.ModuleList(nn.RMSNorm(h, dtype=dtype) for _ in range(2))
        self.qkv = nn.Linear(h, m.query_width + 2 * m.kv_width, bias=False, dtype=dtype)
        self.o = nn.Linear(m.query_width, h, bias=False, dtype=dtype)
        self.gate, self.up = (nn.Linear(h, m.ffn_hidden, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(m.ffn_hidden, h, bias=False, dtype=dtype)

    def forward(self, x_bsh):
        m, heads = self.m, (self.m.num_heads, self.m.num_kv_heads, self.m.num_kv_heads)
        y_bshd = self.qkv(FusedRMSNorm.apply(x_bsh, self.norms[0].weight)).unflatten(-1, (-1, m.head_dim))
        q, k, v = (part.transpose(1, 2) for part in y_bshd.split(heads, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_bsh = x_bsh + self.o(y.transpose(1, 2).flatten(2))
        z_bsh = FusedRMSNorm.apply(x_bsh, self.norms[1].weight)
        return x_bsh + self.down(nn.functional.silu(self.gate(z_bsh)) * self.up(z_bsh))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_real_llama_layer_to_the_byte(dtype, kv_heads):
    m = models.llama("any", num_layers=1, hidden=32, num_heads=4, num_kv_heads=kv_heads, ffn_hidden=80, vocab=8, seq=16)
    block, x_bsh = LlamaBlock(m, dtype), torch.zeros(2, 16, 32, dtype=dtype, requires_grad=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        measured = saved_bytes(lambda: block(x_bsh), block.parameters())
    widths = activations.torch_cpu_widths(dtype.itemsize)
    predicted = activations.layer_activations(m, 2, attention="flash", dropout=False, widths=widths)
    assert predicted.total == measured


def test_a_gated_layer_with_grouped_heads():
    m = models.model("llama3-70b")
    b, s, h, f, k = 1, 8192, 8192, 28672, 1024
    whole = activations.layer_activations(m, b, attention="flash", dropout=False)
    assert whole.total == b * s * 2 * (2 * h + h + 2 * k + 2 * h + h + 4 * f)  # norms, q, k and v, inputs, MLP
    split = activations.layer_activations(m, b, tp=8, sequence_parallel=True, attention="flash", dropout=False)
    assert split.total == whole.total / 8
    kept_twice = activations.layer_activations(m, b, tp=16, sequence_parallel=True, attention="flash", dropout=False)
    assert kept_twice.keys == split.keys  # 8 key heads on 16 ranks: each on two of them


# --- recompute and checkpoints ---------------------------------------------------------------------------------


def test_interleaving_keeps_more():
    assert activations.first_stage_layers(1) == activations.first_stage_layers(8) == 1
    assert activations.first_stage_layers(8, 3) == 1 + 7 / 24


@given(l=st.integers(1, 64), units=st.integers(1, 30), data=st.data())
def test_checkpoints_against_a_walk_through_the_layers(l, units, data):
    """Count at every moment of the backward pass what is alive: checkpoints, and the segment computed again."""
    k = data.draw(st.integers(1, l))
    starts = list(range(0, l, k))
    peak = 0
    for start in reversed(starts):
        alive = sum(1 for other in starts if other <= start)  # inputs of this and of earlier segments
        layers = min(k, l - start)
        peak = max(peak, alive + layers * units - 1)
    closed = activations.checkpointed_bytes(l, k, units, 1)
    assert closed == peak  # the last segment may be shorter than k, and the peak in the one before it
    assert closed == max(moment.kept_bytes for moment in activations.checkpoint_walk(l, k, units, 1))


@given(l=st.integers(1, 200), ratio=st.floats(1, 40))
def test_the_best_distance_is_near_the_square_root(l, ratio):
    best = activations.optimal_every(l, ratio, 1.0)
    peak = activations.checkpointed_bytes(l, best, ratio, 1.0)
    assert all(peak <= activations.checkpointed_bytes(l, k, ratio, 1.0) for k in range(1, l + 1))
    # where k divides l, the sum of l/k and k·A is at least 2√(l·A); a shorter last segment spares one input more
    assert peak + 2 >= 2 * math.sqrt(l * ratio) - 1e-9
    near = min(l, max(1, round(math.sqrt(l / ratio))))
    assert activations.checkpointed_bytes(l, near, ratio, 1.0) <= peak + ratio + 1


def test_a_walk_without_checkpoints_goes_up_and_down():
    kept = [moment.kept_bytes for moment in activations.checkpoint_walk(3, None, 10, 1)]
    assert kept == [10, 20, 30, 20, 10, 0]
    walk = activations.checkpoint_walk(3, 2, 10, 1)
    assert [(moment.phase[0], moment.layer, moment.kept_bytes) for moment in walk] == [
        ("f", 0, 1), ("f", 1, 1), ("f", 2, 2), ("r", 2, 11), ("b", 2, 1),
        ("r", 0, 10), ("r", 1, 20), ("b", 1, 10), ("b", 0, 0),
    ]  # fmt: skip


def test_what_is_computed_again():
    assert activations.recompute_factor(2048, 6144, "none") == 1
    assert activations.recompute_factor(2048, 6144) == activations.recompute_factor(7, 5) == pytest.approx(4 / 3)
    assert activations.recompute_factor(6, 1, "selective") == pytest.approx(1 + 6 / (18 + 18))


def test_the_square_root_rule():
    assert [activations.optimal_every(l, 1, 1) for l in (16, 64, 100)] == [4, 8, 10]
    assert activations.checkpointed_bytes(64, 8, 1, 1) == 15
    assert activations.checkpointed_bytes(64, 1, 17, 1) == 64 + 17 - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activations.layer_bytes(0, 1, 1, 1), "seq must be at least 1, not 0"),
        (lambda: activations.layer_bytes(1, 1, 1, 1, recompute="some"), "recompute must be one of none, selective"),
        (lambda: activations.layer_activations(models.model("llama3-8b"), 0), "micro_batch must be at least 1, not 0"),
        (
            lambda: activations.layer_activations(models.model("llama3-8b"), 1, tp=3),
            "tp of llama3-8b must be one of 1, 2, 4, 8, 16, 32, .* not 3",
        ),
        (
            lambda: activations.layer_activations(models.model("tiny"), 1, attention="sparse"),
            "attention must be one of matrix, flash, not 'sparse'",
        ),
        (lambda: activations.Widths(mask=-1), "mask must be finite and zero or more, not -1"),
        (lambda: activations.checkpointed_bytes(4, 5, 1, 1), "every must be at most num_layers=4, not 5"),
        (lambda: activations.optimal_every(4, 0, 1), "layer_bytes must be finite and positive, not 0"),
        (lambda: activations.Widths(values=-1), "values must be finite and zero or more, not -1"),
        (lambda: activations.checkpoint_walk(4, 5, 1, 1), "every must be at most num_layers=4, not 5"),
        (lambda: activations.recompute_factor(0, 8), "seq must be at least 1, not 0"),
        (lambda: activations.recompute_factor(8, 8, "some"), "recompute must be one of none, selective, full"),
        (lambda: activations.first_stage_layers(0), "stages must be at least 1, not 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_degrees_of_tensor_parallelism():
    assert models.tp_degrees(models.model("llama3-70b")) == (1, 2, 4, 8, 16, 32, 64)
    assert models.tp_degrees(models.model("gpt3")) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
    odd = dataclasses.replace(models.model("llama3-8b"), num_heads=24, num_kv_heads=6, ffn_hidden=24 * 64)
    assert models.tp_degrees(odd) == (1, 2, 3, 6, 12, 24)
