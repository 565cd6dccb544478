"""The one tiny GPT that every chapter trains, and the text it reads.

Shapes are written as suffixes: ``b`` sequences in the batch, ``s`` positions, ``h`` hidden, ``a`` heads,
``d`` = h/a entries of one head, ``v`` vocabulary. ``x_bsh`` has shape (b, s, h).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: `num_layers` blocks of width `hidden` with `num_heads` heads, reading `seq` tokens of
    `vocab`.

    `tied` shares one matrix between the embedding and the head. `dropout` is a probability (0 by default,
    because a parallel run can only equal a single process where no dice are thrown). With `written_out` attention and
    dropout are written out instead of left to torch: the attention matrix is in memory, in the model's own dtype, and
    a dropout mask has one byte an entry, as papers count them. ``ValueError`` for sizes that do not fit.
    """

    num_layers: int = 2
    hidden: int = 64
    num_heads: int = 4
    seq: int = 64
    vocab: int = 256
    mlp_ratio: int = 4
    tied: bool = True
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    written_out: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a whole number of at least 1, not {value!r}")
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden must be a multiple of num_heads={self.num_heads}, not {self.hidden}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")

    @property
    def num_params(self) -> int:
        """Ψ, counted from the sizes: 12 l h² + 13 l h + 2 h + (V + s) h for a tied head and `mlp_ratio` 4."""
        h, m = self.hidden, self.mlp_ratio
        block = (4 + 2 * m) * h * h + (9 + m) * h
        embeddings = ((1 if self.tied else 2) * self.vocab + self.seq) * h
        return self.num_layers * block + 2 * h + embeddings


#: `tiny` trains in seconds on one core; `25m` (25.3 million parameters) is what the benchmarks time.
PRESETS = {
    "tiny": GPTConfig(),
    "25m": GPTConfig(num_layers=8, hidden=512, num_heads=8, seq=64),
}


def preset(name: str, **changes: Any) -> GPTConfig:
    """The configuration called `name` (see ``PRESETS``), some sizes changed; ``ValueError`` for another."""
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}, not {name!r}")
    return replace(PRESETS[name], **changes)


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


class Attention(nn.Module):
    """Causal self-attention. `qkv` lies head by head (a, 3, d): a slice of rows is a slice of heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.written_out = config.num_heads, config.dropout, config.written_out
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, dtype=config.dtype)
        self.out = nn.Linear(config.hidden, config.hidden, dtype=config.dtype)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Mix the positions of `x_bsh`, each seeing itself and what came before; returns the same shape."""
        qkv_bsa3d = self.qkv(x_bsh).unflatten(-1, (self.num_heads, 3, -1))
        y_basd = self.core(*qkv_bsa3d.permute(3, 0, 2, 1, 4))
        return self.out(y_basd.transpose(1, 2).flatten(2))

    def core(self, q_basd: Tensor, k_basd: Tensor, v_basd: Tensor) -> Tensor:
        """Queries, keys and values to weighted values (b, a, s, d): all of attention that has no weights."""
        dropout = self.dropout if self.training else 0.0
        if self.written_out:
            return attention_matrix(q_basd, k_basd, dropout) @ v_basd
        return F.scaled_dot_product_attention(q_basd, k_basd, v_basd, dropout_p=dropout, is_causal=True)


def attention_matrix(q_basd: Tensor, k_basd: Tensor, dropout: float = 0.0) -> Tensor:
    """How much each position looks at itself and at those before: (b, a, s, s), rows that add up to 1 before dropout.

    The scores are scaled and masked in place, so for the backward pass it keeps queries and keys, its own result and,
    with `dropout`, a mask of one byte an entry and the result before dropout.
    """
    future_ss = torch.full((q_basd.shape[2],) * 2, -torch.inf, dtype=q_basd.dtype, device=q_basd.device).triu_(1)
    scores_bass = q_basd @ k_basd.transpose(2, 3)
    matrix_bass = scores_bass.mul_(q_basd.shape[3] ** -0.5).add_(future_ss).softmax(-1)
    return torch.native_dropout(matrix_bass, dropout, True)[0] if dropout else matrix_bass


class MLP(nn.Module):
    """Two matrices with a GELU between them, on each position alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.mlp_ratio * config.hidden, dtype=config.dtype)
        self.down = nn.Linear(config.mlp_ratio * config.hidden, config.hidden, dtype=config.dtype)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Widen, bend, narrow: (b, s, h) to (b, s, h)."""
        return self.down(F.gelu(self.up(x_bsh), approximate="tanh"))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, dtype=config.dtype)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, dtype=config.dtype)
        self.mlp = MLP(config)
        self.drop = ByteDropout(config.dropout) if config.written_out else nn.Dropout(config.dropout)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Add what attention and then the MLP have to say; returns the same shape."""
        x_bsh = x_bsh + self.drop(self.attention(self.attention_norm(x_bsh)))
        return x_bsh + self.drop(self.mlp(self.mlp_norm(x_bsh)))


class GPT(nn.Module):
    """A pre-norm GPT whose weights depend on `config` and `seed` alone, whatever the global random state.

    Built inside ``with torch.device("meta")`` it has shapes and no memory. ``forward`` is ``embed``, the
    blocks (``run_blocks``), then ``logits``, so that a chapter can cut the model wherever it likes.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # the modules' own initialisation is drawn and then replaced
            self.token_embedding = nn.Embedding(config.vocab, config.hidden, dtype=config.dtype)
            self.position_embedding = nn.Embedding(config.seq, config.hidden, dtype=config.dtype)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.norm = nn.LayerNorm(config.hidden, dtype=config.dtype)
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
            if parameter.dim() == 2:
                deviation = residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.copy_(drawn.mul_(deviation))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def embed(self, tokens_bs: Tensor) -> Tensor:
        """Tokens (b, s), int64, to activations (b, s, h)."""
        positions_s = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)
        return self.token_embedding(tokens_bs) + self.position_embedding(positions_s)

    def run_blocks(self, x_bsh: Tensor) -> Tensor:
        """All layers, one after another; returns the same shape."""
        for block in self.blocks:
            x_bsh = block(x_bsh)
        return x_bsh

    def logits(self, x_bsh: Tensor) -> Tensor:
        """The last norm and the head: activations (b, s, h) to scores (b, s, v)."""
        return self.head(self.norm(x_bsh))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Scores (b, s, v) of the token after each position; ``ValueError`` if a sequence is too long."""
        if tokens_bs.shape[1] > self.config.seq:
            raise ValueError(f"tokens_bs must have at most seq={self.config.seq} columns, not {tokens_bs.shape[1]}")
        return self.logits(self.run_blocks(self.embed(tokens_bs)))


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
