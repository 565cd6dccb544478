"""The keys of hubs' configurations: what each family calls its sizes, and what changes no number that is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
"""The sizes that every family has, and the keys that name them."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's configurations mean.

    `made` are fields of `Architecture` that all of its models share, `tied` whether head and embedding are one matrix
    where ``tie_word_embeddings`` is missing. `switches` are keys that are true or false: the default, and the fields
    that follow them. `needed` keys must be given, since what their library assumes fits one size only. `window` says
    which layers have the window where no ``layer_types`` does (``"all"`` but each `full_every`-th, or the ``"last"``),
    `width` which keys say how wide the MLP is, `required` which keys have one value that is counted.
    """

    gated: bool = True
    tied: bool = False
    made: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, tuple[bool, tuple[str, ...]]] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    window: str = ""
    full_every: int = 0
    width: tuple[str, ...] = ("intermediate_size",)
    required: Mapping[str, Any] = field(default_factory=dict)


_BIASED = {"attention_bias": (False, ("qkv_biases", "output_bias"))}
_MLP_BIASED = {"mlp_bias": (False, ("mlp_biases",))}
_PLAIN = {"attention_bias": False, "mlp_bias": False}
_NO_MLP_BIAS = {"mlp_bias": False}
_GEMMA = ("num_key_value_heads", "head_dim")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(switches={**_BIASED, **_MLP_BIASED}),
    "mistral": Family(window="all", required=_PLAIN, needed=("num_key_value_heads", "sliding_window")),
    "qwen2": Family(made={"qkv_biases": True}, window="last", required=_NO_MLP_BIAS, needed=("num_key_value_heads",)),
    "qwen3": Family(
        made={"qk_norms": True}, switches=_BIASED, window="last", required=_NO_MLP_BIAS,
        needed=("num_key_value_heads", "head_dim"),
    ),
    "phi3": Family(window="all", required=_PLAIN),
    "gemma": Family(tied=True, switches=_BIASED, needed=_GEMMA, required=_NO_MLP_BIAS),
    "gemma2": Family(
        tied=True, made={"norms_per_layer": 4}, switches=_BIASED, window="all", full_every=2, required=_NO_MLP_BIAS,
        needed=(*_GEMMA, "sliding_window"),
    ),
    "gemma3_text": Family(
        tied=True, made={"norms_per_layer": 4, "qk_norms": True}, switches=_BIASED, window="all", full_every=6,
        required={**_NO_MLP_BIAS, "use_bidirectional_attention": False}, needed=(*_GEMMA, "sliding_window"),
    ),
    "olmo2": Family(made={"wide_qk_norms": True}, switches=_BIASED, required=_NO_MLP_BIAS),
    "olmo3": Family(
        made={"wide_qk_norms": True}, switches=_BIASED, window="all", full_every=4, required=_NO_MLP_BIAS,
        needed=("sliding_window",),
    ),
    "smollm3": Family(
        tied=True, switches={**_BIASED, **_MLP_BIASED}, needed=("num_key_value_heads",),
        window="last", required={"use_sliding_window": False},
    ),
    "gpt2": Family(gated=False, tied=True, width=("n_inner",), required={"add_cross_attention": False}),
    "gpt_neox": Family(
        gated=False, made={"learned_positions": False, "biases": False, "mlp_biases": True},
        switches={"attention_bias": (True, ("qkv_biases", "output_bias"))},
    ),
    "bloom": Family(gated=False, tied=True, made={"learned_positions": False, "embedding_norm": True}, width=()),
    "falcon": Family(
        gated=False, tied=True, made={"learned_positions": False}, switches={"bias": (False, ("biases",))},
        width=("ffn_hidden_size",), required={"ff_factor": 4},
    ),
    "starcoder2": Family(
        gated=False, tied=True, made={"learned_positions": False}, switches={"use_bias": (True, ("biases",))},
        window="all", needed=("num_key_value_heads",), required={"mlp_type": "default", "norm_type": "layer_norm"},
    ),
}  # fmt: skip
"""The families that are counted, by their ``model_type``."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "dbrx", "gpt_oss", "llama4_text",
         "granitemoe", "phimoe"),
        "no mixture of experts is counted",
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "it has no attention"),
    **dict.fromkeys(("gemma3", "llama4", "mllama", "qwen2_vl", "qwen2_5_vl"), "give its text_config alone"),
}  # fmt: skip
"""Others that are often asked for, and why they are not counted."""

SAME_EVERYWHERE: Mapping[str, Any] = {
    "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "lm_head_bias": False,
    "pruned_heads": {},
}  # fmt: skip
"""Keys that would change a number: they are allowed where they do not."""

USUAL_SEQ: Mapping[str, int] = {"falcon": 2048, "bloom": 2048}
"""Of families whose first files do not say it."""

_HARMLESS = """
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset attn_implementation architectures
    auto_map model_type transformers_version torch_dtype dtype use_cache cache_implementation return_dict torchscript
    output_attentions output_hidden_states output_scores return_dict_in_generate use_bfloat16 tf_legacy_loss
    gradient_checkpointing use_flash_attention_2 unsloth_version unsloth_fixed is_decoder is_llama_config

    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    tokenizer_class prefix

    initializer_range initializer_factor rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps
    attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop embedding_dropout residual_dropout
    hidden_dropout_prob attention_probs_dropout_prob classifier_dropout

    rope_theta rope_scaling rope_parameters rope_local_base_freq rope_interleaved rotary_pct rotary_emb_base
    partial_rotary_factor original_max_position_embeddings no_rope_layers no_rope_layer_interval use_mrope alibi
    full_attn_mod interpolate_factor

    hidden_act hidden_activation activation_function activation attn_logit_softcapping final_logit_softcapping
    query_pre_attn_scalar scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn
    attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion skip_bias_add skip_bias_add_qkv offset_alibi
    slow_but_exact pretraining_tp use_parallel_residual apply_residual_connection_post_layernorm
    summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels

    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty finetuning_task id2label label2id task_specific_params
    problem_type chunk_size_feed_forward cross_attention_hidden_size
"""
HARMLESS = frozenset(_HARMLESS.split())
"""What changes neither parameters nor bytes nor operations: names, tokens, dtypes of the file, rotations, generation.

Rates of dropout are among them: what a run keeps of it is said by the run's own options.
"""
