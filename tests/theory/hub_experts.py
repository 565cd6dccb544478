"""Configurations of models with experts as hubs publish them, and the shapes that transformers makes of them."""

from math import prod

_COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.39.3",
    "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK = {
    **_COMMON, "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "n_group": 8,
    "norm_topk_prob": False, "pretraining_tp": 1, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "seq_aux": True, "topk_group": 3, "topk_method": "group_limited_greedy",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"},
}  # fmt: skip
_LATENT = {**_DEEPSEEK, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN2_MOE = {
    **_COMMON, "model_type": "qwen2_moe", "decoder_sparse_step": 1, "norm_topk_prob": False,
    "use_sliding_window": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN3_MOE = {
    **_COMMON, "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False, "rope_scaling": None,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_GPT_OSS = {
    **_COMMON, "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "initial_context_length": 4096, "output_router_logits": False, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip
_LLAMA4 = {
    **_COMMON, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
    "attn_temperature_tuning": True, "cache_implementation": "static", "floor_scale": 8192, "for_llm_compressor": False,
    "head_dim": 128, "intermediate_size_mlp": 16384, "no_rope_layers": [], "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "rope_scaling": {"rope_type": "llama3", "factor": 16.0},
}  # fmt: skip
_GLM = {
    **_COMMON, "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "n_group": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None, "routed_scaling_factor": 2.5,
    "topk_group": 1,
}  # fmt: skip


def _sizes(config, layers, hidden, heads, kv_heads, width, vocab, seq, top_k, **more):
    named = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
             "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocab,
             "max_position_embeddings": seq, "num_experts_per_tok": top_k}  # fmt: skip
    return {**config, **named, **more}


def _latent(
    name, layers, hidden, heads, width, vocab, experts, top_k, expert, shared, dense, q_rank, seq=163840, **more
):
    return _sizes(
        {**_LATENT, "model_type": name}, layers, hidden, heads, heads, width, vocab, seq, top_k,
        n_routed_experts=experts, moe_intermediate_size=expert, n_shared_experts=shared, first_k_dense_replace=dense,
        q_lora_rank=q_rank, **more,
    )  # fmt: skip


_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_MIXTRAL = {**_COMMON, "model_type": "mixtral", "output_router_logits": False, "router_aux_loss_coef": 0.02}
_OF_A_PART = {"return_dict": True, "tie_word_embeddings": True, "max_length": 20, "top_k": 50, "id2label": {"0": "a"}}
_PHIMOE = {**_COMMON, "model_type": "phimoe", "input_jitter_noise": 0.01, "router_jitter_noise": 0.01}

EXPERTS = {
    "Mixtral-8x7B": _sizes(
        _MIXTRAL, 32, 4096, 32, 8, 14336, 32000, 32768, 2, num_local_experts=8, sliding_window=None
    ),
    "Mixtral-8x22B": _sizes(
        _MIXTRAL, 56, 6144, 48, 8, 16384, 32000, 65536, 2, num_local_experts=8, sliding_window=None
    ),
    "DBRX": {
        "model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "max_seq_len": 32768, "vocab_size": 100352, "emb_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
        "output_router_logits": False, "router_aux_loss_coef": 0.05,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000, **_OF_A_PART},
        "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05,
                       "moe_num_experts": 16, "moe_top_k": 4, "moe_normalize_expert_weights": 1,
                       "uniform_expert_assignment": False, **_OF_A_PART},
    },
    "DeepSeekMoE-16B": _sizes(
        {**_DEEPSEEK, "model_type": "deepseek"}, 28, 2048, 16, 16, 10944, 102400, 4096, 6, n_routed_experts=64,
        moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
    ),
    "DeepSeek-V2-Lite": _latent("deepseek_v2", 27, 2048, 16, 10944, 102400, 64, 6, 1408, 2, 1, None),
    "DeepSeek-V2": _latent("deepseek_v2", 60, 5120, 128, 12288, 102400, 160, 6, 1536, 2, 1, 1536),
    "DeepSeek-V3": _latent(
        "deepseek_v3", 61, 7168, 128, 18432, 129280, 256, 8, 2048, 1, 3, 1536, num_nextn_predict_layers=1,
        quantization_config=_FP8,
    ),
    "Kimi-K2": _latent(
        "kimi_k2", 61, 7168, 64, 18432, 163840, 384, 8, 2048, 1, 1, 1536, num_nextn_predict_layers=0,
        seq=131072,
        quantization_config=_FP8,
    ),
    "Qwen1.5-MoE-A2.7B": _sizes(
        _QWEN2_MOE, 24, 2048, 16, 16, 5632, 151936, 8192, 4, num_experts=60, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, sliding_window=32768, max_window_layers=21,
    ),
    "Qwen2-57B-A14B": _sizes(
        _QWEN2_MOE, 28, 3584, 28, 4, 18944, 151936, 32768, 8, num_experts=64, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, sliding_window=65536, max_window_layers=28,
    ),
    "Qwen3-30B-A3B": _sizes(
        _QWEN3_MOE, 48, 2048, 32, 4, 6144, 151936, 40960, 8, num_experts=128, moe_intermediate_size=768,
        max_window_layers=48,
    ),
    "Qwen3-235B-A22B": _sizes(
        _QWEN3_MOE, 94, 4096, 64, 4, 12288, 151936, 40960, 8, num_experts=128, moe_intermediate_size=1536,
        max_window_layers=94,
    ),
    "OLMoE-1B-7B": _sizes(
        {**_COMMON, "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "norm_topk_prob": False}, 16,
        2048, 16, 16, 1024, 50304, 4096, 8, num_experts=64,
    ),
    "gpt-oss-20b": _sizes(
        _GPT_OSS, 24, 2880, 64, 8, 2880, 201088, 131072, 4, num_local_experts=32,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "gpt-oss-120b": _sizes(_GPT_OSS, 36, 2880, 64, 8, 2880, 201088, 131072, 4, num_local_experts=128),
    "Llama-4-Scout (text)": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "boi_token_index": 200080,
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408},
        "text_config": _sizes(
            _LLAMA4, 48, 5120, 40, 8, 8192, 202048, 10485760, 1, num_local_experts=16, interleave_moe_layer_step=1,
            use_qk_norm=True,
        ),
    },
    "Llama-4-Maverick (text)": _sizes(
        _LLAMA4, 48, 5120, 40, 8, 8192, 202048, 1048576, 1, num_local_experts=128, interleave_moe_layer_step=2,
        moe_layers=[*range(1, 48, 2)], use_qk_norm=False,
    ),
    "GLM-4.5": _sizes(
        _GLM, 92, 5120, 96, 8, 12288, 151552, 131072, 8, n_routed_experts=160, n_shared_experts=1, use_qk_norm=True,
        moe_intermediate_size=1536, first_k_dense_replace=3,
    ),
    "GLM-4.5-Air": _sizes(
        _GLM, 46, 4096, 96, 8, 10944, 151552, 131072, 8, n_routed_experts=128, n_shared_experts=1, use_qk_norm=False,
        moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "Phi-3.5-MoE": _sizes(
        _PHIMOE, 32, 4096, 32, 8, 6400, 32064, 131072, 2, num_local_experts=16, attention_bias=True, lm_head_bias=True,
        sliding_window=131072, original_max_position_embeddings=4096,
    ),
    "Grok-1": _sizes(
        {**_COMMON, "model_type": "grok-1", "attn_output_multiplier": 0.088, "embedding_multiplier_scale": 78.38,
         "output_multiplier_scale": 0.577, "max_attn_value": 30.0, "tie_word_embeddings": True}, 64, 6144, 48, 8, 32768,
        131072, 8192, 2, num_experts=8,
    ),
}  # fmt: skip


def shapes(config):
    """The tensors of the model that transformers builds, by name: a dictionary of shapes, written from its modules.

    An expert's index is left out: "experts" have their number as the first dimension. Buffers are not parameters:
    the bias of DeepSeek-V3's and GLM's routers, which no gradient moves, is one.
    """
    c = {"attn_config": {}, "ffn_config": {}, **config.get("text_config", config)}
    c = {**c["attn_config"], **c["ffn_config"], **c}  # a part's own name and head are not the model's
    kind, h = c["model_type"], c.get("hidden_size", c.get("d_model"))
    layers, heads = c.get("num_hidden_layers", c.get("n_layers")), c.get("num_attention_heads", c.get("n_heads"))
    kv, vocab = c.get("num_key_value_heads", c.get("kv_n_heads")), c["vocab_size"]
    number = next(
        c[key] for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if key in c
    )
    width = c.get("moe_intermediate_size", c.get("intermediate_size", c.get("ffn_hidden_size")))
    norm_bias = kind == "phimoe"
    found = {"embed_tokens": (vocab, h), "norm": (h,)}
    if norm_bias:
        found["norm.bias"] = (h,)
    if not c.get("tie_word_embeddings"):
        found["lm_head"] = (vocab, h)
    if c.get("lm_head_bias"):
        found["lm_head.bias"] = (vocab,)

    def mlp(name, inner):
        return {f"{name}.{part}": (h, inner) for part in ("gate", "up")} | {f"{name}.down": (inner, h)}

    for i in range(layers):
        layer = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        if kind == "grok-1":
            layer |= {"post_attn_norm": (h,), "post_moe_norm": (h,)}
        if norm_bias:
            layer |= {f"{name}.bias": shape for name, shape in layer.items()}
        if "kv_lora_rank" in c:
            rank, nope, rope, value = (
                c[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            )
            q = c["q_lora_rank"]
            queries = {"q_proj": (h, heads * (nope + rope))} if q is None else {
                "q_a_proj": (h, q), "q_a_layernorm": (q,), "q_b_proj": (q, heads * (nope + rope))
            }  # fmt: skip
            layer |= queries | {
                "kv_a_proj_with_mqa": (h, rank + rope), "kv_a_layernorm": (rank,),
                "kv_b_proj": (rank, heads * (nope + value)), "o_proj": (heads * value, h),
            }  # fmt: skip
        else:
            d = c.get("head_dim") or h // heads
            layer |= {"q": (h, heads * d), "k": (h, kv * d), "v": (h, kv * d), "o": (heads * d, h)}
            biased = (
                "qkv" if kind == "qwen2_moe" else {"glm4_moe": "qkv"}.get(kind, "qkvo") * bool(c.get("attention_bias"))
            )
            layer |= {f"{name}.bias": (layer[name][1],) for name in biased}
            if kind == "qwen3_moe" or (kind == "glm4_moe" and c["use_qk_norm"]):
                layer |= {"q_norm": (d,), "k_norm": (d,)}
            if kind == "olmoe":
                layer |= {"q_norm": (heads * d,), "k_norm": (kv * d,)}
            if kind == "gpt_oss":
                layer["sinks"] = (heads,)
        step = c.get("interleave_moe_layer_step", c.get("decoder_sparse_step", 1))
        dense = i < c.get("first_k_dense_replace", 0) or i in c.get("mlp_only_layers", []) or (i + 1) % step
        if dense:
            layer |= mlp("mlp", c.get("intermediate_size_mlp", c.get("intermediate_size")))
        else:
            layer |= {name: (number, *shape) for name, shape in mlp("experts", width).items()}
            layer["router"] = (number, h)
            if kind == "gpt_oss":
                layer |= {
                    "experts.gate_up_bias": (number, 2 * width), "experts.down_bias": (number, h),
                    "router.bias": (number,),
                }  # fmt: skip
            if c.get("n_shared_experts"):
                layer |= mlp("shared_experts", c["n_shared_experts"] * width)
            if kind == "llama4_text":
                layer |= mlp("shared_expert", width)
            if c.get("shared_expert_intermediate_size"):
                layer |= mlp("shared_expert", c["shared_expert_intermediate_size"]) | {"shared_expert_gate": (1, h)}
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def counted(config):
    """Parameters of `shapes`, in all and with as many experts of each layer as a token goes through."""
    c = config.get("text_config", config)
    top_k = c["num_experts_per_tok"] if "num_experts_per_tok" in c else c["ffn_config"]["moe_top_k"]
    total = active = 0
    for name, shape in shapes(config).items():
        total += prod(shape)
        active += prod(shape) // shape[0] * top_k if ".experts." in name else prod(shape)
    return total, active
