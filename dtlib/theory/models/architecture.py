"""The sizes of a decoder-only transformer: everything that its parameters, bytes and operations follow from.

Letters: l layers (`num_layers`), h width (`hidden`), a heads (`num_heads`), V vocabulary (`vocab`), s positions
(`seq`). Two families cover the models of the book: `gpt` (learned positions, layer norms, biases, an MLP of two
matrices) and `llama` (rotary positions, RMS norms, no biases, grouped heads, a gated MLP of three matrices).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from dtlib.theory.valid import amount, flag, whole

from .experts import Experts, LatentAttention

Norm = Literal["layer", "rms"]
_NORMS = ("layer", "rms")
_MOST = {"num_heads": 10**4, "num_kv_heads": 10**4, "mtp_modules": 100}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer by its sizes; ``dataclasses.replace`` changes some of them.

    Attention has `num_heads` query heads and `num_kv_heads` key and value heads of `head_dim` entries each. The MLP
    is `ffn_hidden` wide; `gated` means three matrices (gate, up, down) instead of two. `tied` shares one matrix
    between the embedding and the head. With `biases` every matrix of a layer has one; `qkv_biases`, `output_bias` and
    `mlp_biases` give one to those of queries, keys and values, to that of attention's output, and to those of the MLP.
    The head has one with `head_bias`. A layer has `norms_per_layer` norms over its width; a ``"layer"`` norm has a
    weight and a bias, an ``"rms"`` norm a weight. `qk_norms` adds one over the entries of each query head and one over
    those of each key head, or with `wide_qk_norms` one over those of all query heads and one over those of all key
    heads; `embedding_norm` adds one behind the embedding. `learned_positions` is a table of `seq` rows; without it,
    positions cost nothing. In `windowed_share` of the layers a token sees the last `window` tokens alone, itself among
    them, or with `window_chunks` those of its own chunk of so many tokens. `attention_sinks` is one weight a head in
    the softmax.

    `experts` stand in place of the MLP in the layers that they name, and are gated as it. `latent`
    attention stands in place of heads with matrices of their own: `head_dim` is then what a query has. `mtp_modules`
    predict further tokens: each is a layer as the last one, two norms, a matrix from 2h to h, and a norm before the
    head, which it shares like the embedding.
    `source` says where the sizes were published.

    ``ValueError`` for a size below 1, heads that the key and value heads do not divide, a share that is not between 0
    and 1, an unknown norm, or latent attention whose heads do not fit.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    seq: int
    tied: bool
    biases: bool
    norm: Norm
    gated: bool
    learned_positions: bool
    qkv_biases: bool = False
    output_bias: bool = False
    mlp_biases: bool = False
    norms_per_layer: int = 2
    qk_norms: bool = False
    wide_qk_norms: bool = False
    embedding_norm: bool = False
    window: int | None = None
    windowed_share: float = 1.0
    window_chunks: bool = False
    head_bias: bool = False
    attention_sinks: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    mtp_modules: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                least = 0 if field.name == "mtp_modules" else 1
                object.__setattr__(self, field.name, _size(field.name, value, least))
            elif field.type == "bool":
                flag(field.name, value)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}; {self.num_kv_heads} does not")
        if self.norm not in _NORMS:
            raise ValueError(f"norm must be one of {', '.join(_NORMS)}, not {self.norm!r}")
        if self.window is not None:
            object.__setattr__(self, "window", _size("window", self.window))
        if not amount("windowed_share", self.windowed_share) <= 1:
            raise ValueError(f"windowed_share must be from 0 to 1, not {self.windowed_share!r}")
        for name, kind in (("experts", Experts), ("latent", LatentAttention)):
            if not isinstance(getattr(self, name), (kind, type(None))):
                raise ValueError(f"{name} must be {kind.__name__} or None, not {getattr(self, name)!r}")
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_latent(self, latent: LatentAttention) -> None:
        if self.head_dim != latent.head_dim:
            raise ValueError(f"head_dim must be nope_dim + rope_dim={latent.head_dim}, not {self.head_dim}")
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads must be num_heads={self.num_heads} with latent attention, not {self.num_kv_heads}"
            )
        for name in ("biases", "qkv_biases", "output_bias", "qk_norms", "wide_qk_norms", "attention_sinks"):
            if getattr(self, name):
                raise ValueError(f"{name} must be False with latent attention, where it is not counted")

    @property
    def query_width(self) -> int:
        """Entries of all query heads of one token: h, unless `head_dim` says otherwise."""
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Entries of all values of one token."""
        return self.kv_width if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def output_width(self) -> int:
        """Entries that attention puts out for one token, before its last matrix: one head's values a query head."""
        return self.query_width if self.latent is None else self.value_width

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts; those of `mtp_modules` are not among them."""
        return 0 if self.experts is None else self.experts.layers(0, self.num_layers)

    @property
    def kv_width(self) -> int:
        """Entries of all keys of one token, and as many of its values."""
        return self.num_kv_heads * self.head_dim

    def score_share(self, seq: int) -> float:
        """The scores that windows leave of those of a causal mask, in the mean of the layers.

        Of s tokens the first w see 1, 2, … w tokens and the others w: w(w + 1)/2 + (s − w) w of s(s + 1)/2. 1 without a
        window, or where it is as long as `seq`. Chunks of w tokens leave w(w + 1)/2 each, and the rest r(r + 1)/2.
        """
        s = whole("seq", seq, 1)
        w = s if self.window is None else min(self.window, s)
        seen = w * (w + 1) / 2 + (s - w) * w
        if self.window_chunks:
            seen = (s // w) * w * (w + 1) / 2 + (s % w) * (s % w + 1) / 2
        return 1 - self.windowed_share * (1 - seen / (s * (s + 1) / 2))


def gpt(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    num_heads: int,
    vocab: int,
    seq: int,
    tied: bool = True,
    source: str = "",
) -> Architecture:
    """A model of the GPT family: an MLP of width 4h, biases everywhere, learned positions.

    ``ValueError`` where `hidden` is no multiple of `num_heads`.
    """
    return Architecture(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(hidden, num_heads),
        ffn_hidden=4 * hidden,
        vocab=vocab,
        seq=seq,
        tied=tied,
        biases=True,
        norm="layer",
        gated=False,
        learned_positions=True,
        source=source,
    )


def llama(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    num_heads: int,
    ffn_hidden: int,
    vocab: int,
    seq: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    qkv_biases: bool = False,
    qk_norms: bool = False,
    source: str = "",
) -> Architecture:
    """A model of the Llama family.

    There are as many key and value heads as query heads unless `num_kv_heads` says less, of h/a entries each unless
    `head_dim` says otherwise.

    ``ValueError`` where `hidden` is no multiple of `num_heads`, or `num_kv_heads` does not divide `num_heads`.
    """
    return Architecture(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=_head_dim(hidden, num_heads) if head_dim is None else head_dim,
        ffn_hidden=ffn_hidden,
        vocab=vocab,
        seq=seq,
        tied=tied,
        biases=False,
        norm="rms",
        gated=True,
        learned_positions=False,
        qkv_biases=qkv_biases,
        qk_norms=qk_norms,
        source=source,
    )


def _size(name: str, value: Any, least: int = 1) -> int:
    """`value` as a size: no model has more, and beyond, bytes are no longer exact and plans take too long."""
    number, most = whole(name, value, least), _MOST.get(name, 10**9)
    if number > most:
        raise ValueError(f"{name} must be at most {most:,}, not {number}")
    return number


def _head_dim(hidden: int, num_heads: int) -> int:
    hidden, num_heads = whole("hidden", hidden, 1), whole("num_heads", num_heads, 1)
    if hidden % num_heads:
        raise ValueError(f"hidden must be a multiple of num_heads={num_heads}, not {hidden}")
    return hidden // num_heads
