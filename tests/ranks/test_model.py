"""The tiny GPT: sizes counted, weights from the seed alone, causal, and able to learn."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import activations
from dtlib.ranks.model import (
    GPT,
    IGNORED,
    PRESETS,
    GPTConfig,
    RMSNorm,
    batches,
    load_text,
    next_token_loss,
    preset,
    rotate,
)
from dtlib.theory import activations as kept
from dtlib.theory import models

LLAMA = GPTConfig(
    hidden=32, num_heads=4, num_kv_heads=2, seq=16, tied=False, rms_norm=True, swiglu=True, rotary=True, biases=False
)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(),
        GPTConfig(num_layers=3, hidden=48, num_heads=3, seq=17, vocab=101, tied=False),
        GPTConfig(num_layers=1, hidden=8, num_heads=1, seq=4, vocab=5, mlp_ratio=2),
        PRESETS["25m"],
        LLAMA,
        replace(LLAMA, biases=True, rotary=False),
        GPTConfig(num_kv_heads=1, mlp_ratio=3),
        GPTConfig(swiglu=True),
        GPTConfig(rms_norm=True, biases=False),
    ],
)
def test_number_of_parameters_is_the_formula(config):
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    if config == GPTConfig() or config == PRESETS["25m"]:
        l, h, v, s = config.num_layers, config.hidden, config.vocab, config.seq
        assert config.num_params == 12 * l * h**2 + 13 * l * h + 2 * h + (v + s) * h


def test_the_benchmark_preset_has_25_million_parameters():
    assert round(PRESETS["25m"].num_params / 1e6) == 25


def test_weights_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(1)
    first = GPT(GPTConfig(), seed=3).state_dict()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert_close(after, torch.rand(1), rtol=0, atol=0)  # building a model left the global generator alone
    torch.manual_seed(2)
    second, other = GPT(GPTConfig(), seed=3).state_dict(), GPT(GPTConfig(), seed=4).state_dict()
    assert_close(first, second, rtol=0, atol=0)
    assert (first["blocks.0.mlp.up.weight"] != other["blocks.0.mlp.up.weight"]).any()


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = GPT(GPTConfig()), GPT(GPTConfig(tied=False))
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight


def test_no_position_sees_the_future():
    config = GPTConfig(seq=12)
    model, tokens = GPT(config), torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] != after[:, 7:]).any()


def test_rows_of_qkv_are_grouped_by_head():
    # Half of the heads, cut out as a slice of rows of qkv and of columns of out, must give half of the sum:
    # this is what the tensor-parallel chapter relies on.
    config = GPTConfig(hidden=32, num_heads=4)
    attention, x_bsh = GPT(config).blocks[0].attention, torch.randn(2, 5, 32)
    torch.nn.init.normal_(attention.qkv.bias)
    whole, parts = attention(x_bsh), torch.zeros(2, 5, 32)
    for half in range(2):
        part = GPT(GPTConfig(hidden=32, num_heads=2)).blocks[0].attention
        rows, columns = slice(48 * half, 48 * (half + 1)), slice(16 * half, 16 * (half + 1))
        part.qkv.weight = torch.nn.Parameter(attention.qkv.weight[rows].detach())
        part.qkv.bias = torch.nn.Parameter(attention.qkv.bias[rows].detach())
        part.out.weight = torch.nn.Parameter(attention.out.weight[:, columns].detach())
        part.out.bias = torch.nn.Parameter(torch.zeros(32))
        parts += part(x_bsh).detach()
    # float32 sums of 32 products in two different orders: a few units of 2⁻²⁴ on values below 1
    assert_close(parts + attention.out.bias, whole, rtol=1e-5, atol=1e-6)


def test_the_llama_is_theorys():
    sizes = {"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden": 128, "vocab": 256}
    assert LLAMA.num_params == models.model_parameters(models.llama("any", seq=16, **sizes)).total


def test_a_config_can_change_its_heads():
    assert replace(preset("tiny"), num_heads=2).kv_heads == 2
    assert replace(LLAMA, num_heads=8).kv_heads == 2


def test_the_root_mean_square_norm_is_torchs():
    ours, torchs = (make(12, dtype=torch.float64) for make in (RMSNorm, nn.RMSNorm))
    torchs.eps = 1e-5
    gradients = []
    for norm in (ours, torchs):
        torch.manual_seed(0)
        x_bsh = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
        norm.weight.data.copy_(torch.rand(12))
        y_bsh = norm(x_bsh)
        gradients.append((y_bsh, *torch.autograd.grad(y_bsh.sin().sum(), [x_bsh, norm.weight])))
    assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [(rotate(q, at) * rotate(k, at - 3)).sum() for at in (3, 50, 1000)]
    assert_close(scores, [scores[0]] * 3, rtol=1e-9, atol=1e-12)
    assert abs(scores[0] - (rotate(q, 5) * rotate(k, 1)).sum()) > 1e-6
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 7), x)
    assert_close(rotate(rotate(x, 3), -3 - 2 * torch.arange(5)), x)  # turned back: position j + 3, then −(j + 3)
    assert lab.saved_bytes(rotate, x).total == 0


@pytest.mark.parametrize("written_out", [False, True])
def test_heads_that_share_keys_are_heads_with_equal_keys(written_out):
    config = GPTConfig(hidden=32, num_heads=4, num_kv_heads=2, written_out=written_out)
    shared = GPT(config).blocks[0].attention
    separate = GPT(replace(config, num_kv_heads=4)).blocks[0].attention
    rows = torch.arange(2 * 4 * 8).view(2, 4, 8)  # each group: two queries, a key, a value
    order = torch.cat([rows[g, [head, 2, 3]].flatten() for g in range(2) for head in range(2)])
    separate.load_state_dict(
        shared.state_dict() | {n: shared.get_parameter(n)[order] for n in ("qkv.weight", "qkv.bias")}
    )
    x_bsh = torch.randn(2, 5, 32)
    # float32 sums of 32 and of 5 products in other orders: a few units of 2⁻²⁴ on values below 1
    assert_close(shared(x_bsh), separate(x_bsh), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [GPTConfig(hidden=32, seq=16), LLAMA], ids=["learned", "rotary"])
def test_positions_may_begin_elsewhere(config):
    model = GPT(replace(config, dtype=torch.float64))
    tokens = torch.randint(256, (2, 6))
    first, later, each = model(tokens), model(tokens, offset=7), model(tokens, offset=torch.full((6,), 7))
    assert_close(later, each, rtol=0, atol=0)
    if config.rotary:  # distances are what they were: only rounding differs
        assert_close(first, later, rtol=1e-9, atol=1e-9)
        assert (model(tokens, offset=torch.arange(6)) - first).abs().max() > 1e-6
        again = activations.recompute(model, "full")(tokens, offset=torch.arange(6))
        assert_close(again, activations.recompute(model, "none")(tokens, offset=torch.arange(6)), rtol=0, atol=0)
    else:
        assert (first - later).abs().max() > 1e-3


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("written_out", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.1)])
def test_a_llama_layer_keeps_what_theory_says_to_the_byte(b, kv_heads, written_out, dropout):
    options = {"num_kv_heads": kv_heads, "written_out": written_out, "dropout": dropout, "dtype": torch.bfloat16}
    config = replace(LLAMA, num_layers=1, **options)
    m = models.llama(
        "any", num_layers=1, hidden=32, num_heads=4, num_kv_heads=kv_heads, ffn_hidden=128, vocab=8, seq=16
    )
    measured = lab.saved_bytes(GPT(config).run_blocks, torch.zeros(b, 16, 32, dtype=torch.bfloat16, requires_grad=True))
    widths = kept.written_out_widths(2) if written_out else kept.torch_cpu_widths(2)
    attention = "matrix" if written_out else "flash"
    predicted = kept.layer_activations(m, b, attention=attention, dropout=dropout > 0, widths=widths)
    assert measured.total == predicted.total


def test_batches_of_the_ranks_stack_to_the_batch_of_one_process():
    text = load_text()
    whole = batches(text, batch=6, seq=16, seed=5)
    parts = [batches(text, batch=6, seq=16, seed=5, rank=r, world_size=3) for r in range(3)]
    for _ in range(3):
        tokens, targets = next(whole)
        assert tokens.shape == targets.shape == (6, 16)
        assert_close(targets[:, :-1], tokens[:, 1:], rtol=0, atol=0)
        shares = [next(part) for part in parts]
        assert_close(torch.cat([t for t, _ in shares]), tokens, rtol=0, atol=0)
        assert_close(torch.cat([t for _, t in shares]), targets, rtol=0, atol=0)


def test_tokens_and_targets_share_no_memory():
    tokens, targets = next(batches(load_text(), batch=1, seq=4))
    before = tokens.clone()
    targets.fill_(IGNORED)
    assert_close(tokens, before, rtol=0, atol=0)


def test_ignored_targets_count_for_nothing():
    logits, targets = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    targets[0, 1] = IGNORED
    kept = targets != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[kept], targets[kept])
    assert_close(next_token_loss(logits, targets), expected)
    assert_close(next_token_loss(logits, targets, reduction="sum") / 5, expected)


def test_it_learns_the_text():
    torch.manual_seed(0)
    config = GPTConfig(hidden=32, seq=32)
    model, data = GPT(config), batches(load_text(), batch=8, seq=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(80):
        tokens, targets = next(data)
        loss = next_token_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing known
    assert sum(losses[-10:]) / 10 < 3.2  # the letters' frequencies alone are worth more than 2 nats


def test_other_dtypes():
    model = GPT(preset("tiny", dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert next_token_loss(model(torch.randint(256, (1, 8))), torch.randint(256, (1, 8))).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GPTConfig(hidden=10, num_heads=4), "hidden must be a multiple of num_heads=4, not 10"),
        (lambda: GPTConfig(num_layers=0), "num_layers must be"),
        (lambda: GPTConfig(seq=1.5), "seq must be"),
        (lambda: GPTConfig(dropout=1.0), "dropout must be"),
        (lambda: GPTConfig(num_kv_heads=3), "num_kv_heads must divide num_heads=4, and 3 does not"),
        (lambda: GPTConfig(num_kv_heads=0), "num_kv_heads must be at least 1, not 0"),
        (lambda: GPTConfig(hidden=12, num_heads=4, rotary=True), "rotary must be False, or hidden / num_heads even"),
        (lambda: GPT(GPTConfig(seq=4))(torch.zeros(1, 3, dtype=torch.long), offset=2), "columns, offset=2, not 3"),
        (lambda: GPT(GPTConfig(seq=4))(torch.zeros(1, 3, dtype=torch.long), offset=-1), "offset must be at least 0"),
        (
            lambda: GPT(LLAMA)(torch.zeros(1, 3, dtype=torch.long), offset=torch.zeros(2)),
            r"offset must be a number, or one for each of 3 columns, not of shape \(2,\)",
        ),
        (lambda: preset("huge"), "name must be one of tiny, 25m"),
        (lambda: batches(load_text(), batch=4, seq=8, world_size=3), "batch must be a positive multiple"),
        (lambda: batches(load_text(), batch=4, seq=8, rank=2, world_size=2), "rank must be from 0"),
        (lambda: batches(load_text()[:8], batch=4, seq=8), "seq must be from 1"),
        (lambda: GPT(GPTConfig(seq=4))(torch.zeros(1, 5, dtype=torch.long)), "at most seq=4 columns, not 5"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
