"""The one tiny GPT that every chapter trains, and the text it reads.

Shapes are written as suffixes: ``b`` sequences in the batch, ``s`` positions, ``h`` hidden, ``a`` heads, ``g`` heads
of keys and values, ``d`` = h/a entries of one head, ``f`` width of the MLP, ``v`` vocabulary. ``x_bsh`` has shape
(b, s, h).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import PRESETS as PRESETS
from .config import GPTConfig as GPTConfig
from .config import preset as preset
from .experts import MoE


class ByteDropout(nn.Module):
    """Dropout that keeps one byte an entry for its backward pass, on every device.

    ``nn.Dropout`` does so on a GPU; on a CPU it keeps a mask of the input's own dtype.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero with probability p, else 1/(1 − p) of the entry; `x` itself in evaluation."""
        return torch.native_dropout(x, self.p, True)[0] if self.p and self.training else x


class RMSNorm(nn.Module):
    """x / √(mean of x² + ε) · weight, over the last dimension: a norm without a mean and without a bias.

    It keeps its input and one number a token, in its own dtype, as a fused kernel does; ``nn.RMSNorm`` on a CPU keeps
    more. Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype))

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Each token scaled to a root mean square of 1, then by the weight; the same shape."""
        return _RMSNorm.apply(x_bsh, self.weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_bsh: Tensor, weight_h: Tensor) -> Tensor:
        scale_bs1 = _RMSNorm.scale(x_bsh)
        context.save_for_backward(x_bsh, weight_h, scale_bs1)
        return (x_bsh * scale_bs1).mul_(weight_h)

    @staticmethod
    def backward(context: Any, gradient_bsh: Tensor) -> Any:
        x_bsh, weight_h, scale_bs1 = context.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative, which goes through the scale too
            scale_bs1 = _RMSNorm.scale(x_bsh)
        normed_bsh = x_bsh * scale_bs1
        along_bsh = gradient_bsh * weight_h
        # The scale grows as the entries shrink: what lies along the normed input has no effect.
        back_bsh = along_bsh - normed_bsh * (along_bsh * normed_bsh).mean(-1, keepdim=True)
        return back_bsh.mul_(scale_bs1), (gradient_bsh * normed_bsh).flatten(0, -2).sum(0)

    @staticmethod
    def scale(x_bsh: Tensor) -> Tensor:
        return x_bsh.square().mean(-1, keepdim=True).add_(1e-5).rsqrt_()


def rotate(x_bsnd: Tensor, offset: int | Tensor = 0) -> Tensor:
    """Turn each pair of entries (i, i + d/2) by (position · 10000^(−2i/d)) radians; the position of column j is j +
    `offset`, a number or one for each column. The scores of two positions then depend on their distance alone.

    Keeps nothing of its own for the backward pass, which turns back. Source: Su et al. 2021, arXiv 2104.09864.
    """
    return _Rotation.apply(x_bsnd, offset)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_bsnd: Tensor, offset: int | Tensor) -> Tensor:
        context.offset = offset
        return _turned(x_bsnd, offset, 1)

    @staticmethod
    def backward(context: Any, gradient_bsnd: Tensor) -> Any:
        return _turned(gradient_bsnd, context.offset, -1), None


def _turned(x_bsnd: Tensor, offset: int | Tensor, sign: int) -> Tensor:
    _, s, _, d = x_bsnd.shape
    positions_s = (torch.arange(s, device=x_bsnd.device) + offset).double()
    frequencies_d = 10000 ** -(torch.arange(0, d, 2, dtype=torch.float64, device=x_bsnd.device) / d)
    angles_s1d = positions_s[:, None, None] * frequencies_d
    cos_s1d, sin_s1d = angles_s1d.cos().to(x_bsnd.dtype), angles_s1d.sin().mul(sign).to(x_bsnd.dtype)
    first_bsnd, second_bsnd = x_bsnd.chunk(2, -1)
    turned = (first_bsnd * cos_s1d - second_bsnd * sin_s1d, first_bsnd * sin_s1d + second_bsnd * cos_s1d)
    return torch.cat(turned, -1)


class Core(nn.Module):
    """All of attention that has no weights: each query's mean of the values, weighted by how its keys fit."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.p, self.written_out = config.dropout, config.written_out

    def forward(self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        """Queries, keys and values to weighted values (b, a, s, d)."""
        dropout, shared = self.p if self.training else 0.0, q_basd.shape[1] // k_bgsd.shape[1]
        if not self.written_out:
            return F.scaled_dot_product_attention(
                q_basd, k_bgsd, v_bgsd, dropout_p=dropout, is_causal=True, enable_gqa=shared > 1
            )
        if shared == 1:
            return attention_matrix(q_basd, k_bgsd, dropout) @ v_bgsd
        # The queries that share a key are rows of one product; no key and no value is repeated.
        q_bgnd = q_basd.unflatten(1, (-1, shared)).flatten(2, 3)
        k_bgsd, v_bgsd = k_bgsd.contiguous(), v_bgsd.contiguous()
        y_bgnd = attention_matrix(q_bgnd, k_bgsd, dropout) @ v_bgsd
        return y_bgnd.unflatten(2, (shared, -1)).flatten(1, 2)


class Attention(nn.Module):
    """Causal self-attention of three parts, `qkv`, `core` and `out`.

    `qkv` lies group by group (g, a/g + 2, d): the heads of queries that share a head of keys and values, that key, that
    value. Without sharing that is head by head (a, 3, d): a slice of rows is a slice of heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.rotary = config.num_heads, config.kv_heads, config.rotary
        linear = partial(nn.Linear, bias=config.biases, dtype=config.dtype)
        self.qkv = linear(config.hidden, config.hidden + 2 * config.hidden // config.num_heads * config.kv_heads)
        self.core = Core(config)
        self.out = linear(config.hidden, config.hidden)

    def forward(self, x_bsh: Tensor, offset: int | Tensor = 0, **where: Any) -> Tensor:
        """Mix the positions of `x_bsh`, each seeing itself and what came before; returns the same shape. Rotary
        positions begin at `offset`; what else is said of them is for `core`."""
        shared = self.num_heads // self.num_kv_heads
        qkv_bsgnd = self.qkv(x_bsh).unflatten(-1, (self.num_kv_heads, shared + 2, -1))
        q_bsgnd, k_bsgd, v_bsgd = qkv_bsgnd[..., :shared, :], qkv_bsgnd[..., shared, :], qkv_bsgnd[..., shared + 1, :]
        q_bsad = q_bsgnd.flatten(2, 3)
        if self.rotary:
            q_bsad, k_bsgd = rotate(q_bsad, offset), rotate(k_bsgd, offset)
            v_bsgd = v_bsgd.clone(memory_format=torch.contiguous_format)  # a view would keep what was turned, too
        y_basd = self.core(q_bsad.transpose(1, 2), k_bsgd.transpose(1, 2), v_bsgd.transpose(1, 2), **where)
        return self.out(y_basd.transpose(1, 2).flatten(2))


def attention_matrix(q_bgnd: Tensor, k_bgsd: Tensor, dropout: float = 0.0) -> Tensor:
    """How much each position looks at itself and at those before: (b, g, n, s), rows that add up to 1 before dropout.
    The n rows are the s positions, once for each head of queries that shares the keys.

    The scores are scaled and masked in place, so for the backward pass it keeps queries and keys, its own result and,
    with `dropout`, a mask of one byte an entry and the result before dropout.
    """
    s = k_bgsd.shape[2]
    future_ss = torch.full((s, s), -torch.inf, dtype=q_bgnd.dtype, device=q_bgnd.device).triu_(1)
    future_ns = future_ss.repeat(q_bgnd.shape[2] // s, 1)
    scores_bgns = q_bgnd @ k_bgsd.transpose(2, 3)
    matrix_bgns = scores_bgns.mul_(q_bgnd.shape[3] ** -0.5).add_(future_ns).softmax(-1)
    return torch.native_dropout(matrix_bgns, dropout, True)[0] if dropout else matrix_bgns


class MLP(nn.Module):
    """Two matrices with a GELU between them, on each position alone.

    With `swiglu` the first gives twice the width, and the SiLU of one half (the gate: its first rows) multiplies the
    other. Source: Shazeer 2020, arXiv 2002.05202.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.swiglu = config.mlp_ratio * config.hidden, config.swiglu
        linear = partial(nn.Linear, bias=config.biases, dtype=config.dtype)
        self.up = linear(config.hidden, (2 if config.swiglu else 1) * width)
        self.down = linear(width, config.hidden)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Widen, bend, narrow: (b, s, h) to (b, s, h)."""
        if self.swiglu:
            gate_bsf, up_bsf = self.up(x_bsh).chunk(2, -1)
            return self.down(F.silu(gate_bsf) * up_bsf)
        return self.down(F.gelu(self.up(x_bsh), approximate="tanh"))


class Block(nn.Module):
    """One layer: attention and MLP, or experts in its place, each behind a norm and beside a residual path."""

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        norm = RMSNorm if config.rms_norm else nn.LayerNorm
        self.attention_norm = norm(config.hidden, dtype=config.dtype)
        self.attention = Attention(config)
        self.mlp_norm = norm(config.hidden, dtype=config.dtype)
        self.mlp: nn.Module = MoE(config) if config.has_experts(layer) else MLP(config)
        self.drop = ByteDropout(config.dropout) if config.written_out else nn.Dropout(config.dropout)

    def forward(self, x_bsh: Tensor, offset: int | Tensor = 0, **where: Any) -> Tensor:
        """Add what attention and then the MLP have to say; returns the same shape. Rotary positions begin at
        `offset`; what else is said of them goes to `Attention`."""
        x_bsh = x_bsh + self.drop(self.attention(self.attention_norm(x_bsh), offset, **where))
        return x_bsh + self.drop(self.mlp(self.mlp_norm(x_bsh)))


class Stack(nn.Module):
    """Layers of a GPT, and what stands before and behind them: a whole one has both, a stage of a pipeline may not."""

    config: GPTConfig
    token_embedding: nn.Embedding
    position_embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def embed(self, tokens_bs: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Tokens (b, s), int64, to activations (b, s, h); learned positions begin at `offset`, as in `forward`."""
        x_bsh = self.token_embedding(tokens_bs)
        if self.config.rotary:
            return x_bsh
        return x_bsh + self.position_embedding(torch.arange(tokens_bs.shape[1], device=tokens_bs.device) + offset)

    def run_blocks(self, x_bsh: Tensor, **where: Any) -> Tensor:
        """All layers, one after another; returns the same shape. Rotary ones may be told ``offset=``."""
        for block in self.blocks:
            x_bsh = block(x_bsh, **where)
        return x_bsh

    def logits(self, x_bsh: Tensor) -> Tensor:
        """The last norm and the head: activations (b, s, h) to scores (b, s, v)."""
        return self.head(self.norm(x_bsh))


class GPT(Stack):
    """A pre-norm GPT whose weights depend on `config` and `seed` alone, whatever the global random state.

    Built inside ``with torch.device("meta")`` it has shapes and no memory. ``forward`` is ``embed``, the
    blocks (``run_blocks``), then ``logits``, so that a chapter can cut the model wherever it likes.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # the modules' own initialisation is drawn and then replaced
            self.token_embedding = nn.Embedding(config.vocab, config.hidden, dtype=config.dtype)
            if not config.rotary:
                self.position_embedding = nn.Embedding(config.seq, config.hidden, dtype=config.dtype)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
            self.norm = (RMSNorm if config.rms_norm else nn.LayerNorm)(config.hidden, dtype=config.dtype)
            self.head = nn.Linear(config.hidden, config.vocab, bias=False, dtype=config.dtype)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        if not self.norm.weight.is_meta:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights anew from `seed`: normal, deviation 0.02 (residual outputs less), biases 0."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deviation = residual if name.endswith(("attention.out.weight", "down.weight", "down_efh")) else 0.02
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.copy_(drawn.mul_(deviation))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def forward(self, tokens_bs: Tensor, *, offset: int | Tensor = 0, **where: Any) -> Tensor:
        """Scores (b, s, v) of the token after each position. Column j stands at position j + `offset`, which may be a
        tensor (s,) with one offset a column; what else is said of positions goes to the blocks. ``ValueError`` if a
        sequence is too long."""
        refuse_positions(tokens_bs.shape[1], offset, self.config.seq)
        where |= {"offset": offset} if self.config.rotary else {}
        return self.logits(self.run_blocks(self.embed(tokens_bs, offset), **where))


def refuse_positions(s: int, offset: int | Tensor, seq: int) -> None:
    """``ValueError`` unless the positions of `s` columns, j + `offset`, are among the `seq` of a model. Of a tensor on
    a GPU the values are not looked at: that would be to wait for them."""
    if not isinstance(offset, Tensor):
        if offset < 0:
            raise ValueError(f"offset must be at least 0, not {offset}")
        if s + offset > seq:
            place = f", offset={offset}" if offset else ""
            raise ValueError(f"tokens_bs must have at most seq={seq} columns{place}, not {s}")
        return
    if offset.shape != (s,):
        raise ValueError(f"offset must be a number, or one for each of {s} columns, not of shape {tuple(offset.shape)}")
    if type(offset) is Tensor and offset.device.type == "cpu" and s:  # a fake tensor has no values
        low, high = (int(each) for each in (offset + torch.arange(s)).aminmax())
        if low < 0 or high >= seq:
            worst = low if low < 0 else high
            raise ValueError(f"offset must leave columns at positions 0 to seq-1={seq - 1}, and one is at {worst}")


IGNORED = -100  # a target that counts for nothing: padding


def next_token_loss(logits_bsv: Tensor, targets_bs: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of `targets_bs` (b, s), leaving out those equal to ``IGNORED``.

    ``reduction="mean"`` averages over the tokens that count and ``"sum"`` adds them up. The softmax is taken in
    float32 at least.
    """
    logits = logits_bsv.flatten(0, 1).to(torch.promote_types(logits_bsv.dtype, torch.float32))
    return F.cross_entropy(logits, targets_bs.flatten(), ignore_index=IGNORED, reduction=reduction)


def load_text() -> Tensor:
    """The shipped text (36 sonnets, public domain) as bytes: uint8, one dimension, so vocabulary 256."""
    data = resources.files(__package__).joinpath("data/sonnets.txt").read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(
    text: Tensor, *, batch: int, seq: int, seed: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), each (batch / world_size, seq) int64: this rank's rows of one global batch.

    The global batch of `batch` sequences depends on `seed` and the step alone. Rank r takes the r-th slice of
    equal length, so the ranks' rows stacked in rank order are what a single process (rank 0 of 1) gets.
    Targets are the tokens one position on. ``ValueError`` where `batch` does not divide, or the text is
    shorter than seq + 1.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size-1={world_size - 1}, not {rank}")
    if batch < 1 or batch % world_size:
        raise ValueError(f"batch must be a positive multiple of world_size={world_size}, not {batch}")
    if not 1 <= seq < len(text):
        raise ValueError(f"seq must be from 1 to len(text)-1={len(text) - 1}, not {seq}")
    return _batches(text.long(), batch, seq, seed, rank, batch // world_size)


def _batches(text: Tensor, batch: int, seq: int, seed: int, rank: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    offsets_s = torch.arange(seq + 1)
    while True:
        starts_b = torch.randint(len(text) - seq, (batch,), generator=generator)[rank * rows : (rank + 1) * rows]
        window = text[starts_b[:, None] + offsets_s]
        yield window[:, :-1].clone(), window[:, 1:].clone()
