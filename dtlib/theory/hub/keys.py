"""The keys of hubs' configurations: what each family calls its sizes, and what changes no number that is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .experts import ExpertKeys

SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
"""The sizes that every family has, and the keys that name them."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
"""What says that there are experts: refused of a family whose experts are not counted."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's configurations mean.

    `made` are fields of `Architecture` that all of its models share, `tied` whether head and embedding are one matrix
    where ``tie_word_embeddings`` is missing. `switches` are keys that are true or false: the default, and the fields
    that follow them. `needed` keys must be given, since what their library assumes fits one size only. `window` says
    which layers have the window where no ``layer_types`` does (``"all"`` but each `full_every`-th, or the ``"last"``;
    ``"chunks"`` in place of windows), `width` which keys say how wide the MLP is, `kv_heads` how many heads of keys
    there are, `required` which keys have one value that is counted. `experts` says where experts are described,
    `latent` whether attention is latent, `stored_in` in which formats weights are published: their scales are no
    parameters.
    """

    gated: bool = True
    tied: bool = False
    made: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, tuple[bool, tuple[str, ...]]] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    window: str = ""
    full_every: int = 0
    width: tuple[str, ...] = ("intermediate_size",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    required: Mapping[str, Any] = field(default_factory=dict)
    experts: ExpertKeys | None = None
    latent: bool = False
    stored_in: tuple[str, ...] = ()


_BIASED = {"attention_bias": (False, ("qkv_biases", "output_bias"))}
_MLP_BIASED = {"mlp_bias": (False, ("mlp_biases",))}
_PLAIN = {"attention_bias": False, "mlp_bias": False}
_NO_MLP_BIAS = {"mlp_bias": False}
_GEMMA = ("num_key_value_heads", "head_dim")
_FROM = ExpertKeys(
    number="n_routed_experts", width="moe_intermediate_size", shared_number="n_shared_experts", layers="from"
)
_STEP = ExpertKeys(number="num_experts", width="moe_intermediate_size", layers="step")
_DEEPSEEK = ("moe_intermediate_size", "n_shared_experts", "first_k_dense_replace")

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
    "mixtral": Family(
        window="all", needed=("num_key_value_heads",), experts=ExpertKeys(number="num_local_experts"),
        required=_PLAIN,
    ),
    "dbrx": Family(
        kv_heads=("kv_n_heads",), width=("ffn_hidden_size",), needed=("kv_n_heads", "ffn_hidden_size"), required=_PLAIN,
        experts=ExpertKeys(number="moe_num_experts", top_k=("moe_top_k",), width="ffn_hidden_size"),
    ),
    "deepseek": Family(switches=_BIASED, experts=_FROM, needed=_DEEPSEEK, required=_NO_MLP_BIAS),
    "deepseek_v2": Family(latent=True, experts=_FROM, needed=_DEEPSEEK, required=_PLAIN),
    "deepseek_v3": Family(latent=True, experts=_FROM, needed=_DEEPSEEK, required=_PLAIN, stored_in=("fp8",)),
    "kimi_k2": Family(
        latent=True, experts=_FROM, needed=_DEEPSEEK, required=_PLAIN,
        stored_in=("fp8", "compressed-tensors"),
    ),
    "qwen2_moe": Family(
        switches={"qkv_bias": (True, ("qkv_biases",))}, window="last", required=_PLAIN,
        needed=("num_key_value_heads", "shared_expert_intermediate_size"),
        experts=replace(_STEP, shared_width="shared_expert_intermediate_size", shared_gate=True),
    ),
    "qwen3_moe": Family(
        made={"qk_norms": True}, switches=_BIASED, window="last", experts=_STEP,
        required={**_NO_MLP_BIAS, "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        needed=("num_key_value_heads", "head_dim"), stored_in=("fp8",),
    ),
    "glm4_moe": Family(
        switches={"attention_bias": (False, ("qkv_biases",)), "use_qk_norm": (False, ("qk_norms",))}, experts=_FROM,
        needed=(*_DEEPSEEK, "num_key_value_heads", "head_dim"), required=_NO_MLP_BIAS,
    ),
    "olmoe": Family(
        made={"wide_qk_norms": True}, switches=_BIASED, required=_NO_MLP_BIAS, experts=ExpertKeys(number="num_experts"),
        needed=("intermediate_size",),
    ),
    "gpt_oss": Family(
        made={"attention_sinks": True}, window="all", full_every=2, stored_in=("mxfp4",),
        switches={"attention_bias": (True, ("qkv_biases", "output_bias"))},
        experts=ExpertKeys(
            number="num_local_experts", top_k=("num_experts_per_tok", "experts_per_token"), router_bias=True,
            biases=True,
        ),
        needed=("num_key_value_heads", "head_dim", "sliding_window"),
    ),
    "llama4_text": Family(
        switches={**_BIASED, "use_qk_norm": (True, ())}, window="chunks", width=("intermediate_size_mlp",),
        required=_NO_MLP_BIAS,
        needed=("num_key_value_heads", "head_dim", "intermediate_size"),
        experts=ExpertKeys(number="num_local_experts", one_shared=True, layers="list"),
    ),
    "phimoe": Family(
        made={"norm": "layer"}, switches={**_BIASED, "lm_head_bias": (False, ("head_bias",))}, window="all",
        needed=("num_key_value_heads",), required=_NO_MLP_BIAS,
        experts=ExpertKeys(number="num_local_experts"),
    ),
    "grok-1": Family(
        tied=True, made={"norms_per_layer": 4}, needed=("num_key_value_heads",), required=_PLAIN,
        experts=ExpertKeys(number="num_experts"),
    ),
}  # fmt: skip
"""The families that are counted, by their ``model_type``."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("granitemoe", "jamba", "ernie4_5_moe", "hunyuan_v1_moe", "minimax", "qwen3_next", "deepseek_v32"),
        "its experts are not counted",
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "it has no attention"),
    **dict.fromkeys(("gemma3", "mllama", "qwen2_vl", "qwen2_5_vl"), "give its text_config alone"),
}  # fmt: skip
"""Others that are often asked for, and why they are not counted."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "llama4": ("text_config",), "kimi_k25": ("text_config",), "dbrx": ("attn_config", "ffn_config"),
}  # fmt: skip
"""Keys that hold others: those of the text alone, or of parts of a layer."""

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
    router_aux_loss_coef output_router_logits router_jitter_noise input_jitter_noise norm_topk_prob scoring_func
    routed_scaling_factor topk_method n_group topk_group aux_loss_alpha seq_aux ep_size num_nextn_predict_layers
    moe_jitter_eps moe_loss_weight moe_normalize_expert_weights uniform_expert_assignment ffn_act_fn swiglu_limit
    initial_context_length clip_qkv emb_pdrop attn_output_multiplier embedding_multiplier_scale
    output_multiplier_scale max_attn_value
    attn_temperature_tuning floor_scale attn_scale for_llm_compressor

    problem_type chunk_size_feed_forward cross_attention_hidden_size
"""
HARMLESS = frozenset(_HARMLESS.split())
"""What changes neither parameters nor bytes nor operations: names, tokens, dtypes of the file, rotations, generation.

Rates of dropout are among them: what a run keeps of it is said by the run's own options. So are the modules that
predict further tokens: they are no part of the model that a file describes, and `from_config` says who counts them.
"""
