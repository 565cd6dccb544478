"""Parameters, counted part by part: exact whole numbers, no model needed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import whole

from .architecture import Architecture
from .experts import LatentAttention
from .presets import checked_model
from .tensor_parallel import checked_ep, checked_tp, kv_width_of_rank


@dataclass(frozen=True, kw_only=True)
class LayerParameters(Breakdown):
    """Parameters of one layer: its attention, its MLP, or in place of it shared experts, experts and router, its
    norms."""

    attention: int
    mlp: int
    shared_experts: int = 0
    experts: int = 0
    router: int = 0
    norms: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return int(sum(self.parts.values()))


@dataclass(frozen=True, kw_only=True)
class ModelParameters(Breakdown):
    """Parameters of a model: `attention`, `mlp`, `norms` and what stands in place of an MLP are those of all layers;
    the norms outside of them are among `norms`, and `mtp` is all of the modules that predict further tokens."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    shared_experts: int = 0
    experts: int = 0
    router: int = 0
    norms: int
    mtp: int = 0
    head: int

    @property
    def total(self) -> int:
        """Ψ, all parameters of the model."""
        return int(sum(self.parts.values()))

    @property
    def without_input_embedding(self) -> int:
        """All but the tables that are only looked up in: a tied embedding stays, since the head multiplies by it."""
        return self.total - self.positions - (self.embedding if self.head else 0)

    @property
    def without_embeddings(self) -> int:
        """All but the tables and the head."""
        return self.total - self.positions - self.embedding - self.head


def layer_parameters(model: Architecture | str, *, with_experts: bool | None = None) -> LayerParameters:
    """Count the parameters of one layer of `model`.

    With q = a·d entries of all queries of a token, k of all keys, f of the MLP: attention has h·q + 2·h·k + q·h
    weights (and q + 2k biases before the scores, h behind them, a sinks), the MLP 2·h·f (f + h biases) or, gated,
    3·h·f (2f + h biases), the norms h each (2h each with a bias), those of queries and keys d each, or q and k. E
    experts are E such MLPs, a router h·E (E biases). Latent attention has h·r + r·q for queries (h·q without a rank),
    h·(c + d_r) + c·a·(d_n + d_v) for keys and values, a·d_v·h behind them, and norms of r and c.

    `with_experts` says which layer is meant where some have experts and others have none, else ``ValueError``.
    """
    return layer_of_rank(checked_model(model), 1, with_experts=with_experts)


def layer_of_rank(model: Architecture, tp: int, ep: int = 1, *, with_experts: bool | None = None) -> LayerParameters:
    """`layer_parameters` on one of `tp` ranks, and of `ep` that share the experts.

    The ranks of tp split the columns of the first matrices of each pair and the rows of the second, of experts too: as
    Megatron-LM does where no tensor parallelism of the experts' own is asked for. Norms over the width, the biases of
    the second matrices, the router and the matrices that lead to latent vectors are on every rank. ``ValueError`` for
    a `tp` or an `ep` that `model` does not divide by.
    """
    t, experts = checked_tp(model, tp), checked_ep(model, ep)
    with_experts = has_experts(model, with_experts)
    mlp = shared = routed = router = 0
    if with_experts and model.experts is not None:
        chosen = model.experts
        routed = experts * _mlp(model, chosen.hidden // t, chosen.biases)
        shared = _mlp(model, chosen.shared_hidden // t, chosen.biases) if chosen.shared_hidden else 0
        router = chosen.num_experts * (model.hidden + chosen.router_bias) + chosen.shared_gate * model.hidden
    else:
        mlp = _mlp(model, model.ffn_hidden // t, model.biases or model.mlp_biases)
    attention, of_heads = _attention(model, t) if model.latent is None else _latent(model, model.latent, t)
    norms = model.norms_per_layer * norm_parameters(model) + of_heads
    return LayerParameters(
        attention=attention, mlp=mlp, shared_experts=shared, experts=routed, router=router, norms=norms
    )


def has_experts(model: Architecture, given: bool | None) -> bool:
    """Whether the layer that is meant has experts: as `given`, or as all layers of `model`; ``ValueError`` where only
    some have and none is given, or where none has."""
    with_experts = model.num_expert_layers
    if given is not None:
        if given and not with_experts:
            raise ValueError(f"with_experts must be False for {model.name}, which has none")
        return given
    if 0 < with_experts < model.num_layers:
        raise ValueError(
            f"with_experts must be given for {model.name}, of whose {model.num_layers} layers {with_experts} have "
            "experts"
        )
    return with_experts > 0


def _mlp(model: Architecture, width: int, biases: bool) -> int:
    """Parameters of an MLP, with `width` of its entries on a rank."""
    h, first = model.hidden, 2 if model.gated else 1
    return (first + 1) * h * width + (first * width + h if biases else 0)


def _attention(model: Architecture, t: int) -> tuple[int, int]:
    """Parameters of attention on a rank, and those of the norms of its heads."""
    h, q, k = model.hidden, model.query_width // t, kv_width_of_rank(model, t)
    attention = 2 * h * q + 2 * h * k
    if model.biases or model.qkv_biases:
        attention += q + 2 * k
    if model.biases or model.output_bias:
        attention += h
    if model.attention_sinks:
        attention += model.num_heads // t
    widths = (q, k) if model.wide_qk_norms else (model.head_dim, model.head_dim) if model.qk_norms else ()
    return attention, sum(norm_parameters(model, width) for width in widths)


def _latent(model: Architecture, latent: LatentAttention, t: int) -> tuple[int, int]:
    """The same of latent attention."""
    h, a, c, r = model.hidden, model.num_heads // t, latent.kv_rank, latent.q_rank
    queries = (h if r is None else r) * a * model.head_dim + (0 if r is None else h * r)
    keys_and_values = h * (c + latent.rope_dim) + c * a * (latent.nope_dim + latent.value_dim)
    norms = norm_parameters(model, c) + (0 if r is None else norm_parameters(model, r))
    return queries + keys_and_values + a * latent.value_dim * h, norms


def mtp_parameters(model: Architecture, tp: int = 1, ep: int = 1) -> LayerParameters:
    """Parameters of one module that predicts a further token, on a rank: a layer as the last one, and with its norms
    and its attention two norms more, a matrix from 2h to h, and a norm before the head."""
    layer = layer_of_rank(model, tp, ep, with_experts=last_has_experts(model))
    h = model.hidden
    return replace(layer, attention=layer.attention + 2 * h * h // tp, norms=layer.norms + 3 * norm_parameters(model))


def last_has_experts(model: Architecture) -> bool:
    """Whether the last layer of `model` has experts."""
    return model.experts is not None and model.experts.layers(model.num_layers - 1, model.num_layers) > 0


def model_parameters(model: Architecture | str) -> ModelParameters:
    """Count the parameters of `model`: l layers, one norm behind them, V·h for the embedding (and a norm where it has
    one), again V·h for a head that is not tied to it (V more with a bias), s·h for learned positions, and
    `Architecture.mtp_modules`."""
    model = checked_model(model)
    return layers_of_rank(
        model, 1, 1, model.num_expert_layers, model.num_layers - model.num_expert_layers, first=True, last=True
    )


@lru_cache(maxsize=8192)
def layers_of_rank(
    model: Architecture, tp: int, ep: int, sparse: int, dense: int, *, first: bool, last: bool
) -> ModelParameters:
    """Parameters of one of `tp` ranks, and of `ep` that share experts, that hold `sparse` layers with experts and
    `dense` without: with the embedding where it is among the `first` ranks, with the norm behind the layers, the head
    and the modules of further tokens where it is among the `last`, which copy a tied embedding if they are others."""
    counts = {kind: count for kind, count in ((False, dense), (True, sparse)) if count}
    kinds = [(count, layer_of_rank(model, tp, ep, with_experts=kind)) for kind, count in counts.items()]
    sums = {
        each.name: sum(count * getattr(layer, each.name) for count, layer in kinds) for each in fields(LayerParameters)
    }
    rows = -(-model.vocab // tp)
    outside = last + (first and model.embedding_norm)
    modules = model.mtp_modules * mtp_parameters(model, tp, ep).total if last and model.mtp_modules else 0
    head = rows * (model.hidden * (not (model.tied and first)) + model.head_bias) if last else 0
    sums["norms"] += outside * norm_parameters(model)
    return ModelParameters(
        embedding=rows * model.hidden if first else 0,
        positions=model.seq * model.hidden if first and model.learned_positions else 0,
        head=head,
        mtp=modules,
        **sums,
    )


def active_parameters(model: Architecture | str) -> ModelParameters:
    """The parameters that one token meets: those of `model_parameters`, of its experts the top k.

    What is called active differs: `ModelParameters.total` has both embeddings, as Mixtral's 12.9 billion have,
    `ModelParameters.without_input_embedding` the head alone, as gpt-oss-20b's 3.6, and
    `ModelParameters.without_embeddings` neither, as GLM-4.5's 32. All of a model without experts are active.
    """
    model = checked_model(model)
    found, experts = model_parameters(model), model.experts
    if experts is None:
        return found
    asleep = experts.num_experts - experts.top_k
    each = layer_of_rank(model, 1, with_experts=True).experts // experts.num_experts
    modules = model.mtp_modules * last_has_experts(model)
    return replace(
        found,
        experts=found.experts - model.num_expert_layers * asleep * each,
        mtp=found.mtp - modules * asleep * each,
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
