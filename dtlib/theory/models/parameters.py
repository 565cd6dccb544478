"""Parameters, counted part by part: exact whole numbers, no model needed."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import whole

from .architecture import Architecture
from .presets import checked_model
from .tensor_parallel import checked_tp, kv_width_of_rank


@dataclass(frozen=True)
class LayerParameters(Breakdown):
    """Parameters of one layer: its attention, its MLP, its norms."""

    attention: int
    mlp: int
    norms: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.norms


@dataclass(frozen=True)
class ModelParameters(Breakdown):
    """Parameters of a model: `attention`, `mlp` and `norms` are those of all layers; the norms outside of them are
    among `norms`."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """Ψ, all parameters of the model."""
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.head


def layer_parameters(model: Architecture | str) -> LayerParameters:
    """Count the parameters of one layer of `model`.

    With q = a·d entries of all queries of a token, k of all keys, f of the MLP: attention has h·q + 2·h·k + q·h
    weights (and q + 2k biases before the scores, h behind them), the MLP 2·h·f (f + h biases) or, gated, 3·h·f (2f + h
    biases), the norms h each (2h each with a bias), those of queries and keys d each, or q and k.
    """
    return layer_of_rank(checked_model(model), 1)


def layer_of_rank(model: Architecture, tp: int) -> LayerParameters:
    """`layer_parameters` on one of `tp` ranks.

    They split the columns of the first matrices of each pair and the rows of the second. Norms over the width and the
    biases of the second matrices are on every rank. ``ValueError`` for a `tp` that `model` does not divide by.
    """
    t = checked_tp(model, tp)
    h, q, k, f = model.hidden, model.query_width // t, kv_width_of_rank(model, t), model.ffn_hidden // t
    attention, mlp = 2 * h * q + 2 * h * k, (3 if model.gated else 2) * h * f
    if model.biases or model.qkv_biases:
        attention += q + 2 * k
    if model.biases or model.output_bias:
        attention += h
    if model.biases or model.mlp_biases:
        mlp += (2 if model.gated else 1) * f + h
    widths = (q, k) if model.wide_qk_norms else (model.head_dim, model.head_dim) if model.qk_norms else ()
    of_heads = sum(norm_parameters(model, width) for width in widths)
    return LayerParameters(attention, mlp, model.norms_per_layer * norm_parameters(model) + of_heads)


def model_parameters(model: Architecture | str) -> ModelParameters:
    """Count the parameters of `model`: l layers, one norm behind them, V·h for the embedding (and a norm where it has
    one), again V·h for a head that is not tied to it, s·h for learned positions."""
    model = checked_model(model)
    layer, table = layer_parameters(model), model.vocab * model.hidden
    return ModelParameters(
        embedding=table,
        positions=model.seq * model.hidden if model.learned_positions else 0,
        attention=model.num_layers * layer.attention,
        mlp=model.num_layers * layer.mlp,
        norms=model.num_layers * layer.norms + (1 + model.embedding_norm) * norm_parameters(model),
        head=0 if model.tied else table,
    )


def norm_parameters(model: Architecture | str, width: int | None = None) -> int:
    """Parameters of one norm over `width` entries (default: h): twice as many with a bias, as many without."""
    model = checked_model(model)
    return (2 if model.norm == "layer" else 1) * (model.hidden if width is None else whole("width", width, 1))


@formula(
    "models.gpt_num_params",
    source="narayanan2021",
    chapter="memory",
    label="eq-memory-gpt",
    equation=r"12\, l h^2 \Bigl(1 + \frac{13}{12 h} + \frac{V + s}{12\, l h}\Bigr)",
)
def gpt_num_params(num_layers: int, hidden: int, vocab: int, seq: int) -> int:
    """Parameters of a GPT, in closed form.

    12 l h² (1 + 13/(12h) + (V + s)/(12 l h)) = 12 l h² + 13 l h + (V + s) h, for an MLP of width 4h, biases, a tied
    head and learned positions. The last norm is missing: the exact count is 2h larger. Each argument is a whole
    number of at least 1, else ``ValueError``. Source: Narayanan et al. 2021, arXiv 2104.04473, equation 2.
    """
    l, h = whole("num_layers", num_layers, 1), whole("hidden", hidden, 1)
    return 12 * l * h * h + 13 * l * h + (whole("vocab", vocab, 1) + whole("seq", seq, 1)) * h


@formula(
    "models.llama_num_params",
    source="derived here",
    chapter="memory",
    label="eq-memory-llama",
    equation=r"l\,\bigl(2h^2 + 2h^2\tfrac{a_{\text{kv}}}{a} + 3hf + 2h\bigr) + h + cVh",
)
def llama_num_params(
    num_layers: int, hidden: int, num_heads: int, num_kv_heads: int, ffn_hidden: int, vocab: int, *, tied: bool = False
) -> int:
    """Parameters of a Llama, in closed form.

    l (2h² + 2h² g/a + 3 h f + 2h) + h + c V h with g of a heads for keys and values, an MLP of width f, and c = 2
    embedding matrices, 1 where they are `tied`. Exact. ``ValueError`` for sizes below 1, or where a does not divide h
    or g does not divide a. Derived here; sizes as in Touvron et al. 2023, arXiv 2307.09288.
    """
    l, h, f = whole("num_layers", num_layers, 1), whole("hidden", hidden, 1), whole("ffn_hidden", ffn_hidden, 1)
    a, g, vocab = whole("num_heads", num_heads, 1), whole("num_kv_heads", num_kv_heads, 1), whole("vocab", vocab, 1)
    if h % a:
        raise ValueError(f"hidden must be a multiple of num_heads={a}, not {h}")
    if a % g:
        raise ValueError(f"num_kv_heads must divide num_heads={a}; {g} does not")
    return l * (2 * h * h + 2 * h * (h // a) * g + 3 * h * f + 2 * h) + h + (1 if tied else 2) * vocab * h
