"""lab.saved_bytes counts what autograd keeps to the byte, as counted by hand."""

import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtlib import lab
from dtlib.ranks.model import GPT, MLP, Block, GPTConfig, preset

WIDTH = {torch.float32: 4, torch.bfloat16: 2}
B, S, H = 3, 5, 8
X = 4 * B * S * H  # bytes of one (b, s, h) in float32


def _x(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (B, S, H)), dtype=dtype, requires_grad=True)


def test_a_linear_layer_keeps_its_input_and_its_weight():
    saved = lab.saved_bytes(nn.Linear(H, 2 * H), _x())
    assert (saved.input_bytes, saved.activation_bytes, saved.parameter_bytes) == (X, 0, 4 * 2 * H * H)
    assert saved.total == X
    assert {(tensor.kind, tensor.by) for tensor in saved.tensors} == {
        ("input", "Linear linear"),
        ("parameter", "Linear linear"),
    }


def test_inputs_can_be_left_out_of_the_total():
    saved = lab.saved_bytes(nn.Linear(H, 2 * H), _x(), inputs=False)
    assert (saved.total, saved.input_bytes) == (0, X)


@pytest.mark.parametrize(
    ("fn", "num_bytes"),
    [
        (F.gelu, X),  # its input
        (torch.relu, X),  # its result
        (lambda x: F.softmax(x, dim=-1), X),  # its result
        (lambda x: F.layer_norm(x, (H,)), X + 2 * 4 * B * S),  # its input, mean and 1/deviation of each row
        (lambda x: F.dropout(x, 0.5), X),  # on a CPU the mask is of x's own type
        (lambda x: F.dropout(x, 0.0), 0),
        (lambda x: x + 1, 0),
        (lambda x: x * x, X),  # the same storage twice
        (lambda x: (x.sum(), 2 * x), 0),
        (lambda x: x.exp().exp(), 2 * X),  # results of both
        (lambda x: x.exp().transpose(0, 1) * x.view(S, B, H), 2 * X),  # the product keeps views: exp's result, x
        (lambda x: x.exp()[0] * 2, X),  # the result of exp, all of it
        (lambda x: x.exp().detach(), 0),
        (lambda x: None, 0),
    ],
)
def test_operations_by_hand(fn, num_bytes):
    assert lab.saved_bytes(fn, _x()).total == num_bytes


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        assert lab.saved_bytes(nn.Linear(H, H), _x()).tensors == ()
    frozen = nn.Linear(H, H).requires_grad_(False)
    saved = lab.saved_bytes(frozen, _x())  # the weight, for the gradient of the input
    assert (saved.total, saved.parameter_bytes) == (0, 4 * H * H)


def test_leaves_that_are_no_arguments_are_parameters():
    weight = torch.randn(H, H, requires_grad=True)
    saved = lab.saved_bytes(lambda x: x @ weight, _x())
    assert (saved.total, saved.parameter_bytes) == (X, 4 * H * H)
    assert lab.saved_bytes(lambda x, w: x @ w, _x(), weight).total == X + 4 * H * H


@pytest.mark.parametrize("dtype", WIDTH)
def test_a_view_keeps_its_whole_storage(dtype):
    w = WIDTH[dtype]
    saved = lab.saved_bytes(lambda x: x.exp().chunk(2, dim=-1)[0].sin(), _x(dtype=dtype))
    # exp keeps its result, sin its input: a half of the same storage
    assert saved.total == w * B * S * H
    assert saved.tensors[0].others == ("sin",)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[1] * grad


def test_custom_functions():
    saved = lab.saved_bytes(Cube.apply, _x())
    assert saved.total == 2 * X
    assert {tensor.op for tensor in saved.tensors} == {"autograd.Function"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_its_input(reentrant):
    mlp = MLP(GPTConfig(hidden=H, num_heads=1))
    assert lab.saved_bytes(mlp, _x()).total == X + 4 * X + 4 * X
    assert lab.saved_bytes(lambda x: checkpoint(mlp, x, use_reentrant=reentrant), _x()).total == X


def test_a_chain_of_checkpoints_keeps_one_activation_each():
    blocks = [Block(GPTConfig(hidden=H, num_heads=2)) for _ in range(3)]

    def run(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    saved = lab.saved_bytes(run, _x(), inputs=False)
    assert (saved.total, saved.input_bytes) == (2 * X, X)


def _layer_by_hand(b, s, h, a, w, *, flash, dropout):
    """Term by term what one layer of ranks.model keeps on a CPU, in bytes; w is the width of its type."""
    sbh, bs, bass = s * b * h, b * s, b * a * s * s
    terms = {
        "attention_norm": w * sbh + 2 * w * bs,  # its input; mean and 1/deviation of each position
        "attention.qkv": w * sbh,  # the norm's result
        "mlp_norm": w * sbh + 2 * w * bs,
        "mlp.up": w * sbh,
        "mlp": w * 4 * sbh,  # what goes into the GELU
        "mlp.down": w * 4 * sbh,  # and what comes out
    }
    if flash:  # q, k and v in one storage, the result, and one float32 a row for the softmax
        terms["attention.core"] = w * 3 * sbh + w * sbh + 4 * b * a * s
        # The result is also what attention.out keeps: the same storage, nothing more.
    else:  # the plain form computes in float32: q and k scaled, v, and the softmax
        # A copy of v, except where one head's v is evenly spaced in qkv: then that view, and so all of qkv.
        v = 3 if w == 4 and 1 in (b, a) else 1
        terms["attention.core"] = 4 * (2 + v) * sbh + 4 * bass
        terms["attention.out"] = w * sbh
        if dropout:
            terms["attention.core"] += 4 * 2 * bass  # the mask, and the softmax after it
    if dropout:
        terms["drop"] = 2 * w * sbh  # a mask on each of the two residual branches
    return terms


SIZES = [(2, 16, 32, 4), (3, 5, 8, 2), (1, 64, 64, 4), (4, 32, 48, 3), (2, 7, 16, 1), (1, 1, 8, 2)]


def by_module(saved):
    """Bytes by the innermost module that kept them first, without parameters."""
    sizes = Counter()
    for each in saved.tensors:
        if each.kind != "parameter":
            sizes[each.module] += each.num_bytes
    return sizes


@pytest.mark.parametrize("dtype", WIDTH)
@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_a_layer_without_the_attention_matrix(b, s, h, a, dtype):
    layer = Block(GPTConfig(hidden=h, num_heads=a, dtype=dtype))
    saved = lab.saved_bytes(layer, _x(b, s, h, dtype=dtype))
    w = WIDTH[dtype]
    by_hand = _layer_by_hand(b, s, h, a, w, flash=True, dropout=False)
    assert by_module(saved) == by_hand
    assert saved.total == w * (16 * s * b * h + 4 * b * s) + 4 * b * a * s
    assert saved.input_bytes == w * s * b * h


@pytest.mark.parametrize("dtype", WIDTH)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_a_layer_with_the_attention_matrix(b, s, h, a, dropout, dtype):
    layer = Block(GPTConfig(hidden=h, num_heads=a, dtype=dtype, dropout=dropout))
    with sdpa_kernel(SDPBackend.MATH):
        saved = lab.saved_bytes(layer, _x(b, s, h, dtype=dtype))
    w = WIDTH[dtype]
    assert by_module(saved) == _layer_by_hand(b, s, h, a, w, flash=False, dropout=dropout > 0)


def test_the_whole_model():
    config = preset("tiny")
    b, s, h, a, v = 2, config.seq, config.hidden, config.num_heads, config.vocab
    tokens_bs = torch.randint(v, (b, s))
    saved = lab.saved_bytes(GPT(config), tokens_bs)
    layers = config.num_layers * sum(_layer_by_hand(b, s, h, a, 4, flash=True, dropout=False).values())
    indices = 8 * b * s + 8 * s  # the tokens and the positions
    assert saved.total == layers + indices + 4 * (b * s * h + 2 * b * s) + 4 * b * s * h  # the last norm, the head
    assert saved.input_bytes == 8 * b * s


def test_the_block_of_lab_memory_agrees():
    layer, x = Block(GPTConfig(hidden=H, num_heads=2)), _x()
    saved = lab.saved_bytes(layer, x)
    with lab.memory(layer, x) as memory:
        y = layer(x)
        assert memory.now.activations == saved.total
    assert y.shape == x.shape


def test_a_result_is_plain_data_and_reads_well():
    saved = lab.saved_bytes(MLP(GPTConfig(hidden=H, num_heads=1)), _x())
    assert pickle.loads(pickle.dumps(saved)) == saved
    assert "mlp" not in saved.table
    assert "down linear" in saved.table
    assert saved.table.splitlines()[-1].split()[0] == f"{saved.total:,}"
    assert "<td" in saved._repr_html_()
    kept = {(each.op, each.num_bytes) for each in saved.tensors if each.kind != "parameter"}
    assert kept == {("linear", X), ("linear", 4 * X), ("gelu", 4 * X)}


def test_wrong_input_is_named():
    with pytest.raises(TypeError, match="fn must be callable, not 3"):
        lab.saved_bytes(3)
    with lab.memory(), pytest.raises(RuntimeError, match=r"lab\.saved_bytes inside a block"):
        lab.saved_bytes(F.gelu, _x())


def test_all_is_as_before_after_an_error():
    def fail(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lab.saved_bytes(fail, _x())
    assert lab.saved_bytes(F.gelu, _x()).total == X
