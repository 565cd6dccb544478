"""What hubs publish beside the weights: read, counted to the integer, and refused where a key is not understood."""

import dataclasses

import pytest

from dtlib.theory import memory, models
from dtlib.theory.activations import layer_activations
from dtlib.theory.hub import from_config

from . import hub_configurations as hub

LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2_CONFIG = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    "n_inner": None,
}  # fmt: skip
QWEN2_CONFIG = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA_CONFIG, "llama3-8b"), (GPT2_CONFIG, "gpt2-124m"), (QWEN2_CONFIG, "qwen2.5-0.5b")],
)
def test_a_hubs_hyperparameters_give_the_published_model(config, name):
    published = models.model(name)
    assert dataclasses.replace(from_config(config, name), source=published.source) == published


@pytest.mark.parametrize("name", hub.PUBLISHED)
def test_a_hubs_configuration_has_the_parameters_of_the_weights(name):
    config, num_params = hub.PUBLISHED[name]
    made = from_config(config)
    assert models.model_parameters(made).total == num_params
    window, share = hub.WINDOWS.get(name, (None, 1))
    assert (made.window, made.windowed_share) == (window, pytest.approx(share))


@pytest.mark.parametrize("name", hub.REFUSED)
def test_a_configuration_that_is_not_counted_says_why(name):
    config, message = hub.REFUSED[name]
    with pytest.raises(ValueError, match=message):
        from_config(config)


@pytest.mark.parametrize("name", [*hub.PUBLISHED])
def test_a_key_that_is_not_understood_is_refused_by_name(name):
    """A key that nobody has heard of, and each one of another family that changes a number there."""
    config, num_params = hub.PUBLISHED[name]
    for key, value in (("use_mla", False), ("kv_lora_rank", 512), ("lm_head_bias", True), ("n_shared_experts", 1)):
        with pytest.raises(ValueError, match=key):
            from_config({**config, key: value})
    assert models.model_parameters(from_config({**config, "use_mla": None})).total == num_params
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "qk_layernorm", "head_dim"):
        with pytest.raises(ValueError, match=key):
            from_config({**config, key: "false"})


@pytest.mark.parametrize(
    ("key", "more"),
    [  # of a layer: h = 4096, 8 of 32 heads of keys, an MLP of 14336
        ("attention_bias", 4096 + 2 * 1024 + 4096),
        ("mlp_bias", 2 * 14336 + 4096),
    ],
)
def test_biases_are_counted(key, more):
    plain, biased = (from_config({**LLAMA_CONFIG, key: value}) for value in (False, True))
    assert models.layer_parameters(biased).total - models.layer_parameters(plain).total == more


def test_a_window_leaves_the_scores_that_pairs_of_tokens_have():
    for seq, window in ((1, 1), (7, 3), (7, 7), (8, 9), (64, 5)):
        m = dataclasses.replace(models.model("tiny"), window=window, windowed_share=0.25)
        seen = sum(1 for i in range(seq) for j in range(seq) if i - window < j <= i)
        whole = seq * (seq + 1) / 2
        assert m.score_share(seq) == pytest.approx(0.75 + 0.25 * seen / whole)
    mistral = from_config(hub.PUBLISHED["Mistral 7B v0.1"][0])
    assert 1 / mistral.score_share(32768) == pytest.approx(4.27, abs=0.01)
    assert mistral.score_share(4096) == 1
    with_window, without = (
        memory.forward_flops_per_token(m, causal=True) for m in (mistral, dataclasses.replace(mistral, window=None))
    )
    assert with_window.scores == pytest.approx(without.scores * mistral.score_share(32768))


def test_norms_behind_attention_and_mlp_keep_their_inputs():
    plain = models.model("tiny")
    four = dataclasses.replace(plain, norms_per_layer=4)
    found, more = (layer_activations(m, 2, dropout=False) for m in (plain, four))
    assert more.total - found.total == more.output_norm_inputs == 2 * (2 * 2 * plain.seq * plain.hidden)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type must be one of llama, .* not 'mamba'"),
        ({"num_experts": 8}, r"num_experts must be absent, .* not 8"),
        ({"hidden_size": None}, r"config must have hidden_size or n_embd"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures must be those of words, .* not \['LlamaForSeq",
        ),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, r"architectures must be those of words"),
        ({"attention_bias": "false"}, r"attention_bias must be true or false, not 'false'"),
        ({"hidden_size": "4096"}, r"hidden_size must be a whole number of at least 1, not '4096'"),
        ({"hidden_size": 1e30}, r"hidden_size must be a whole number of at least 1, not 1e\+30"),
        ({"hidden_size": 10**30}, r"hidden must be at most 1,000,000,000, not"),
        ({"num_attention_heads": 2**20, "head_dim": 128}, r"num_heads must be at most 10,000, not"),
        ({"n_layer": 31}, r"num_hidden_layers and n_layer must be equal, not 32 and 31"),
        ({"sliding_window": 4096}, r"others may change a number, not sliding_window=4096"),
        ({"model_type": "mistral"}, r"config must have sliding_window"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]},
            r"layer_types must be 32 of full_attention and sliding_attention, not",
        ),
        ({"num_attention_heads": 33}, r"hidden must be a multiple of num_heads=33, not 4096"),
    ],
)
def test_a_hubs_hyperparameters_are_refused_where_they_cannot_be_counted(changes, message):
    with pytest.raises(ValueError, match=message):
        from_config({**LLAMA_CONFIG, **changes})
