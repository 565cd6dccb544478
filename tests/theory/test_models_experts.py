"""Models with experts: counted against the shapes that transformers makes, and to the published digit."""

import csv
import dataclasses
from pathlib import Path

import pytest

from dtlib.theory import memory, models, planner, threed
from dtlib.theory.hub import from_config
from dtlib.theory.models import Experts

from .hub_experts import EXPERTS, counted, shapes

DATA = Path(__file__).parents[2] / "chapters" / "data"
V3 = EXPERTS["DeepSeek-V3"]


def published():
    with (DATA / "moe_models.csv").open(encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_configuration_with_experts_has_the_parameters_of_its_modules(name):
    made = from_config(EXPERTS[name], name)
    total, active = counted(EXPERTS[name])
    parts, met = models.model_parameters(made), models.active_parameters(made)
    assert (parts.total, met.total) == (total, active)
    assert met.parts | {"experts": parts.experts} == parts.parts
    by_name = {key.rpartition(".")[0]: 0 for key in shapes(EXPERTS[name])}
    assert parts.embedding == made.vocab * made.hidden
    assert len([key for key in by_name if key.endswith("experts")]) >= made.num_expert_layers > 0


@pytest.mark.parametrize("name", published())
def test_every_published_row_is_met_to_its_digit(name):
    row, made = published()[name], from_config(EXPERTS[name], name)
    total, active = models.model_parameters(made), models.active_parameters(made)
    assert round(total.total / 1e9, 3) == float(row["total_counted_B"])
    assert round(active.total / 1e9, 3) == float(row["active_counted_B"])
    for found, column in (
        (active.without_input_embedding, "active_without_input_embedding_B"),
        (active.without_embeddings, "active_without_both_embeddings_B"),
    ):
        assert found / 1e9 == pytest.approx(float(row[column]), abs=0.0011)  # a difference of rounded numbers
    sizes = {
        "num_layers": made.num_layers, "hidden_size": made.hidden, "num_attention_heads": made.num_heads,
        "num_routed_experts": made.experts.num_experts, "top_k": made.experts.top_k, "vocab_size": made.vocab,
        "expert_intermediate_size": made.experts.hidden, "first_dense_layers": made.experts.first_dense,
    }  # fmt: skip
    assert sizes == {key: int(row[key]) for key in sizes}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Mixtral-8x7B", (46.7, "total"), (12.9, "total")),
        ("Mixtral-8x22B", (141, "total"), (39, "total")),
        ("DBRX", (132, "total"), (36, "total")),
        ("DeepSeekMoE-16B", (16.4, "total"), (2.8, "total")),
        ("DeepSeek-V2-Lite", (15.7, "total"), (2.4, "without_input_embedding")),  # 2.45, cut
        ("DeepSeek-V2", (236, "total"), (21, "total")),
        ("DeepSeek-V3", (671, "total"), (37, "without_input_embedding")),
        ("Kimi-K2", (1026, "total"), (32, "without_input_embedding")),  # 1.04 trillion are printed too: not from this
        ("Qwen1.5-MoE-A2.7B", (14.3, "total"), (2.7, "total")),
        ("Qwen2-57B-A14B", (57.4, "total"), (14, "total")),
        ("Qwen3-30B-A3B", (30.5, "total"), (3.3, "total")),  # 3.35, cut
        ("Qwen3-235B-A22B", (235, "total"), (22, "total")),
        ("OLMoE-1B-7B", (6.9, "total"), (1.3, "total")),
        ("gpt-oss-20b", (20.9, "total"), (3.6, "without_input_embedding")),
        ("gpt-oss-120b", (116.8, "total"), (5.1, "without_input_embedding")),
        ("Llama-4-Scout (text)", (107.8, "total"), (17, "total")),  # 109 with the encoder of images
        ("Llama-4-Maverick (text)", (400.7, "total"), (17, "total")),
        ("GLM-4.5", (351.2, "without_embeddings"), (32, "without_embeddings")),  # 355 with the module of further tokens
        ("GLM-4.5-Air", (106, "without_embeddings"), (12, "without_embeddings")),
        ("Phi-3.5-MoE", (41.9, "total"), (6.6, "total")),
        ("Grok-1", (314, "without_embeddings"), (84, "total")),  # 314.88, cut
    ],
)
def test_what_is_printed_in_model_cards(name, total, active):
    """Rounded or cut, in the convention that fits: with both embeddings, without the input's, or without both."""
    made = from_config(EXPERTS[name], name)
    for found, (billions, convention) in (
        (models.model_parameters(made), total),
        (models.active_parameters(made), active),
    ):
        digit = 1 if isinstance(billions, int) else 0.1
        assert -digit / 2 <= getattr(found, convention) / 1e9 - billions < digit


PRESETS = {name: name.lower().replace("llama-4", "llama4").removesuffix(" (text)") for name in EXPERTS}
PRESETS["DBRX"] = "dbrx-132b"
del PRESETS["Qwen1.5-MoE-A2.7B"]


@pytest.mark.parametrize(("name", "preset"), PRESETS.items())
def test_a_preset_is_what_its_configuration_gives(name, preset):
    published = models.model(preset)
    assert dataclasses.replace(from_config(EXPERTS[name], preset), source=published.source) == published


def test_every_preset_with_experts_has_its_configuration_here():
    assert set(PRESETS.values()) == {name for name, m in models.MODELS.items() if m.experts is not None}


@pytest.mark.parametrize(("name", "printed"), [("DeepSeek-V3", 11.6), ("GLM-4.5", 4.0)])
def test_a_module_of_further_tokens_is_a_layer_and_its_entrance(name, printed):
    made = from_config(EXPERTS[name], name)
    one, two = (models.model_parameters(dataclasses.replace(made, mtp_modules=n)) for n in (1, 2))
    last = [key for key in shapes(EXPERTS[name]) if key.startswith(f"layers.{made.num_layers - 1}.")]
    layer = counted_of(name, last)
    assert one.mtp == layer + 2 * made.hidden**2 + 3 * made.hidden
    assert (two.mtp, two.total - one.total) == (2 * one.mtp, one.mtp)
    assert one.mtp / 1e9 == pytest.approx(printed, abs=0.05)
    met = models.active_parameters(dataclasses.replace(made, mtp_modules=1))
    asleep = made.experts.num_experts - made.experts.top_k
    assert one.mtp - met.mtp == asleep * 3 * made.hidden * made.experts.hidden


def counted_of(name, keys):
    found = shapes(EXPERTS[name])
    total = 0
    for key in keys:
        size = 1
        for length in found[key]:
            size *= length
        total += size
    return total


def test_glms_355_billion_are_the_layers_and_its_module():
    made = dataclasses.replace(from_config(EXPERTS["GLM-4.5"]), mtp_modules=1)
    assert models.model_parameters(made).without_embeddings / 1e9 == pytest.approx(355, abs=0.5)


def test_dense_models_are_active_as_a_whole():
    for name in ("llama3-70b", "gpt2-124m"):
        whole = models.model_parameters(name)
        assert models.active_parameters(name) == whole
    table = 50257 * 768
    assert whole.without_input_embedding == whole.total - 1024 * 768  # tied: the head multiplies by the embedding
    assert whole.without_embeddings == whole.total - table - 1024 * 768
    whole = models.model_parameters("llama3-70b")
    assert whole.without_input_embedding == whole.total - 128256 * 8192


# --- which layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2, 5])
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_layers_with_experts_are_those_that_one_would_list(first, every):
    experts = Experts(num_experts=4, top_k=2, hidden=8, first_dense=first, every=every)
    mine = [i for i in range(40) if i >= first and (i - first) % every == 0]
    for start in range(12):
        for stop in range(start, 14):
            assert experts.layers(start, stop) == sum(start <= i < stop for i in mine)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0, 1, 2]}),
        (
            "Qwen3-30B-A3B",
            {
                "num_hidden_layers": 62,
                "hidden_size": 6144,
                "num_attention_heads": 96,
                "num_experts": 160,
                "qkv_bias": False,
                "shared_expert_intermediate_size": 0,
                "use_qk_norm": True,
            },
        ),  # Coder's
        ("Qwen1.5-MoE-A2.7B", {"decoder_sparse_step": 3, "mlp_only_layers": [2]}),
        ("Llama-4-Maverick (text)", {"moe_layers": None, "interleave_moe_layer_step": 4}),
        ("DeepSeek-V3", {"first_k_dense_replace": 0}),
        ("DeepSeek-V3", {"num_hidden_layers": 4}),
        ("GLM-4.5", {"n_shared_experts": None}),
        ("Phi-3.5-MoE", {"lm_head_bias": False, "attention_bias": False}),
        ("gpt-oss-20b", {"attention_bias": False}),
    ],
)
def test_other_models_of_a_family_are_counted_as_well(name, changes):
    config = {**EXPERTS[name], **changes}
    made = from_config(config)
    assert (models.model_parameters(made).total, models.active_parameters(made).total) == counted(config)


def test_a_layer_with_experts_and_one_without_are_told_apart():
    made = from_config(V3)
    with pytest.raises(ValueError, match="with_experts must be given for deepseek_v3, of whose 61 layers 58 have exp"):
        models.layer_parameters(made)
    dense, sparse = (models.layer_parameters(made, with_experts=kind) for kind in (False, True))
    assert dense.mlp == 3 * 7168 * 18432
    assert (sparse.mlp, sparse.experts, sparse.router) == (0, 256 * 3 * 7168 * 2048, 256 * 7168)
    assert dense.attention == sparse.attention == 187_105_280


@pytest.mark.parametrize(("tp", "ep"), [(1, 8), (2, 4), (4, 64)])
def test_ranks_share_experts_and_repeat_router_and_latents(tp, ep):
    made = from_config(V3)
    whole, mine = (
        models.layer_parameters(made, with_experts=True),
        models.layer_of_rank(made, tp, ep, with_experts=True),
    )
    assert mine.experts * tp * ep == whole.experts
    assert mine.shared_experts * tp == whole.shared_experts
    assert (mine.router, mine.norms) == (whole.router, whole.norms)
    down = 7168 * (1536 + 512 + 64)  # leads to what all heads share
    assert (mine.attention - down) * tp == whole.attention - down


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mixtral-8x7B", {"n_routed_experts": 8}, "not n_routed_experts=8"),
        ("Mixtral-8x7B", {"num_experts_per_tok": None}, "config must have num_experts_per_tok beside num_local_exp"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "top_k must be at most num_experts=8, not 9"),
        ("Mixtral-8x7B", {"shared_expert_intermediate_size": 64}, "not shared_expert_intermediate_size=64"),
        ("Mixtral-8x7B", {"quantization_config": {"quant_method": "gptq"}}, "not quantization_config="),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias must be False or absent"),
        ("DeepSeek-V3", {"index_head_dim": 128}, "not index_head_dim=128"),
        ("DeepSeek-V3", {"v_head_dim": None}, "config must have v_head_dim"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [1]}, r"mlp_only_layers must leave layers with experts at equal .*\[1\]"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [48]}, r"mlp_only_layers must be layers below 48, not \[48\]"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, each once, not 3"),
        (
            "Qwen3-30B-A3B",
            {"shared_expert_intermediate_size": 64},
            "shared_expert_intermediate_size must be 0 or .* 64",
        ),
        ("Qwen3-30B-A3B", {"use_qk_norm": False}, "use_qk_norm must be True or absent"),
        ("Llama-4-Maverick (text)", {"moe_layers": [1, 2, 4]}, r"moe_layers must leave layers with experts at equal"),
        ("Llama-4-Maverick (text)", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 48 of 0 and 1, not"),
        ("DBRX", {"ffn_config": None}, "ffn_config must be an object of hyperparameters, not None"),
        ("OLMoE-1B-7B", {"n_shared_experts": 1}, "not n_shared_experts=1"),
        ("Grok-1", {"residual_moe": True}, "not residual_moe=True"),
    ],
)
def test_a_key_that_changes_the_count_is_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        from_config({**EXPERTS[name], **changes})


@pytest.mark.parametrize("name", EXPERTS)
def test_who_does_not_say_how_many_experts_is_not_taken_for_dense(name):
    """A shared one is an expert, too: libraries assume one or two of them where nothing is said."""
    config = EXPERTS[name]
    inner = next((key for key in ("text_config", "ffn_config") if key in config), "")
    said = config[inner] if inner else config
    numbers = [key for key in said if key.endswith(("local_experts", "num_experts", "_routed_experts"))]
    shared = [key for key in said if key.startswith(("n_shared", "shared_expert"))]
    for key, value in [(key, value) for key in numbers for value in ("missing", None, 0)] + [
        (k, "missing") for k in shared
    ]:
        changed = {k: v if k != key else value for k, v in said.items() if (k, value) != (key, "missing")}
        with pytest.raises(ValueError, match=f"{key}( must be .* not 0|[;,])"):
            from_config({**config, inner: changed} if inner else changed)
    assert len(numbers) == 1


@pytest.mark.parametrize("name", EXPERTS)
def test_no_family_reads_a_key_that_nobody_has_heard_of(name):
    config = EXPERTS[name]
    for key in ("expert_of_experts", "num_zero_experts", "moe_latent_dim"):
        inside = {"text_config": {**config["text_config"], key: 7}} if "text_config" in config else {key: 7}
        with pytest.raises(ValueError, match=f"{key}=7"):
            from_config({**config, **inside})


def test_chunks_of_attention_leave_the_pairs_that_share_one():
    scout = from_config(EXPERTS["Llama-4-Scout (text)"])
    assert (scout.window, scout.windowed_share, scout.window_chunks) == (8192, 0.75, True)
    for seq, size in ((1, 1), (7, 3), (9, 3), (7, 7), (8, 9)):
        made = dataclasses.replace(scout, window=size)
        pairs = sum(j // size == i // size for i in range(seq) for j in range(i + 1))
        assert made.score_share(seq) == pytest.approx(0.25 + 0.75 * pairs / (seq * (seq + 1) / 2))
    oss = from_config(EXPERTS["gpt-oss-20b"])
    assert (oss.window, oss.windowed_share) == (128, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k must be at most num_experts=8, not 9"),
        ({"hidden": 0}, "hidden must be at least 1, not 0"),
        ({"every": 0}, "every must be at least 1, not 0"),
        ({"shared_hidden": -1}, "shared_hidden must be at least 0, not -1"),
        ({"router_bias": 1}, "router_bias must be True or False, not 1"),
    ],
)
def test_experts_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Experts(**{"num_experts": 8, "top_k": 2, "hidden": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 8}, "experts must be Experts or None, not 8"),
        ({"head_dim": 128}, r"head_dim must be nope_dim \+ rope_dim=192, not 128"),
        ({"num_kv_heads": 64}, "num_kv_heads must be num_heads=128 with latent attention, not 64"),
        ({"qk_norms": True}, "qk_norms must be False with latent attention, where it is not counted"),
        ({"mtp_modules": -1}, "mtp_modules must be at least 0, not -1"),
    ],
)
def test_architectures_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(from_config(V3), **changes)


def test_ep_divides_the_experts():
    with pytest.raises(ValueError, match="ep of deepseek_v3 must divide its 256 experts; 3 does not"):
        models.checked_ep(from_config(V3), 3)
    with pytest.raises(ValueError, match="ep of llama3-8b must be 1, since it has no experts, not 2"):
        models.checked_ep("llama3-8b", 2)


# --- operations, and what does not count experts yet -----------------------------------------------------------


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mixtral-8x7B", "Llama-4-Maverick (text)", "Qwen1.5-MoE-A2.7B"])
@pytest.mark.parametrize("modules", [0, 2])
def test_a_token_is_multiplied_by_the_matrices_that_it_meets(name, modules):
    """Two operations for each weight of a matrix that is active: no norm, no bias, no embedding."""
    made = dataclasses.replace(from_config(EXPERTS[name], name), mtp_modules=modules)
    found = memory.forward_flops_per_token(made, seq=1000)
    met = models.active_parameters(made).total - made.vocab * made.hidden
    vectors = [shape[0] for shape in shapes(EXPERTS[name]).values() if len(shape) == 1]
    last = [
        s[0] for key, s in shapes(EXPERTS[name]).items() if len(s) == 1 and str(made.num_layers - 1) in key.split(".")
    ]
    met -= sum(vectors) + modules * (sum(last) + 3 * made.hidden) - modules * made.vocab * made.hidden
    assert found.total - found.scores - found.weighted_values == 2 * met
    entries = made.num_heads * (made.head_dim + (made.latent.value_dim if made.latent else made.head_dim))
    seen = 1000 * made.score_share(1000)
    assert found.scores + found.weighted_values == pytest.approx(2 * (made.num_layers + modules) * entries * seen)


@pytest.mark.parametrize(("name", "gigaflop"), [("DeepSeek-V3", 250), ("DeepSeek-V2", 155)])
def test_operations_of_training_are_those_of_what_is_active(name, gigaflop):
    """DeepSeek's own account at 4096 tokens (arXiv 2505.09343, Table 2). 6Ψ counts the embedding, too: 3 % more."""
    made = from_config(EXPERTS[name])
    each = 3 * memory.forward_flops_per_token(made, seq=4096, causal=True).total
    assert each / 1e9 == pytest.approx(gigaflop, rel=0.01)
    width = (made.query_width + made.output_width) // 2
    found = memory.training_flops_per_token(
        models.active_parameters(made).total, made.num_layers, width, 4096, causal=True
    )
    assert 1.02 < found.model / each < 1.03


@pytest.mark.parametrize("change", ["experts", "latent", "mtp_modules"])
def test_what_counts_dense_models_alone_says_so(change):
    made, plan = from_config(EXPERTS["DeepSeek-V3"]), planner.Plan(dp=2)
    if change != "experts":
        made = dataclasses.replace(made, experts=None, mtp_modules=int(change == "mtp_modules"))
    if change == "mtp_modules":
        made = dataclasses.replace(made, latent=None)
    has = {"experts": "256 experts a layer", "latent": "latent attention", "mtp_modules": "modules that predict"}[
        change
    ]
    has = "latent attention" if change == "experts" else has  # experts are counted, what comes with them is not
    said = f"model must be dense but for experts, since .* counts nothing else yet: .* has {has}"
    for law in (threed.sent_bytes, threed.activation_bytes):
        with pytest.raises(ValueError, match=said):
            law(made, plan)
