"""Configurations as model hubs publish them, and the parameters of the released weights."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama", "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
    "use_cache": True,
}  # fmt: skip
_LLAMA3 = {
    **_LLAMA, "mlp_bias": False, "rope_theta": 500000.0, "vocab_size": 128256, "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "transformers_version": "4.40.1",
}  # fmt: skip
_QWEN3 = {
    **_QWEN2, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "model_type": "qwen3",
    "max_position_embeddings": 40960, "num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None,
    "vocab_size": 151936,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "model_type": "mistral", "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0", "use_cache": True,
}  # fmt: skip
_GEMMA = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "hidden_act": "gelu", "initializer_range": 0.02, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "max_position_embeddings": 8192, "vocab_size": 256000, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "cache_implementation": "hybrid", "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "cache_implementation": "hybrid", "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "vocab_size": 262144,
    "max_position_embeddings": 32768,
}  # fmt: skip
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 32000,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "phi3",
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "use_cache": True, "attention_bias": False,
}  # fmt: skip
_FALCON = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "parallel_attn": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65024,
}  # fmt: skip
_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu", "hidden_dropout_prob": 0, "initializer_range": 0.02, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True,
}  # fmt: skip
_OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096, "model_type": "olmo2",
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": False, "vocab_size": 100352,
}  # fmt: skip
_STARCODER2 = {
    "activation_function": "gelu_pytorch_tanh", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
    "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.018, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default",
    "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip


def _sizes(config, layers, hidden, heads, kv_heads, width, **more):
    named = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
             "intermediate_size": width} | ({} if kv_heads is None else {"num_key_value_heads": kv_heads})  # fmt: skip
    return {**config, **named, **more}


PUBLISHED = {
    "Llama 2 7B": (
        _sizes(_LLAMA, 32, 4096, 32, 32, 11008, vocab_size=32000, max_position_embeddings=4096, rope_scaling=None),
        6_738_415_616,
    ),
    "Llama 3 8B": (_sizes(_LLAMA3, 32, 4096, 32, 8, 14336, rope_scaling=None), 8_030_261_248),
    "Llama 3.1 70B": (_sizes(_LLAMA3, 80, 8192, 64, 8, 28672), 70_553_706_496),
    "Llama 3.1 405B": (_sizes(_LLAMA3, 126, 16384, 128, 8, 53248), 405_853_388_800),
    "Llama 3.2 1B": (
        _sizes(_LLAMA3, 16, 2048, 32, 8, 8192, head_dim=64, tie_word_embeddings=True), 1_235_814_400,
    ),
    "SmolLM2 135M": (
        _sizes(_LLAMA, 30, 576, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192, is_llama_config=True,
               tie_word_embeddings=True, rope_interleaved=False, rope_scaling=None, rope_theta=100000),
        134_515_008,
    ),
    "SmolLM3 3B": (
        _sizes({**_LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 4, "mlp_bias": False}, 36, 2048, 16, 4,
               11008, vocab_size=128256, max_position_embeddings=65536, tie_word_embeddings=True,
               use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 36,
               no_rope_layers=[1, 1, 1, 0] * 9),
        3_075_098_624,
    ),
    "Mistral 7B v0.1": (
        _sizes(_MISTRAL, 32, 4096, 32, 8, 14336, vocab_size=32000, max_position_embeddings=32768, sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral 7B v0.3": (
        _sizes(_MISTRAL, 32, 4096, 32, 8, 14336, vocab_size=32768, max_position_embeddings=32768, sliding_window=None),
        7_248_023_552,
    ),
    "Mistral Nemo": (
        _sizes(_MISTRAL, 40, 5120, 32, 8, 14336, vocab_size=131072, max_position_embeddings=131072,
               sliding_window=None, head_dim=128, attention_dropout=0.0),
        12_247_782_400,
    ),
    "Qwen2.5 0.5B": (
        _sizes(_QWEN2, 24, 896, 14, 2, 4864, vocab_size=151936, max_position_embeddings=32768, max_window_layers=24,
               tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen2.5 72B": (
        _sizes(_QWEN2, 80, 8192, 64, 8, 29568, vocab_size=152064, max_position_embeddings=131072,
               max_window_layers=80, tie_word_embeddings=False),
        72_706_203_648,
    ),
    "Qwen3 0.6B": (
        _sizes(_QWEN3, 28, 1024, 16, 8, 3072, max_window_layers=28, tie_word_embeddings=True), 596_049_920,
    ),
    "Qwen3 32B": (
        _sizes(_QWEN3, 64, 5120, 64, 8, 25600, max_window_layers=64, tie_word_embeddings=False), 32_762_123_264,
    ),
    "Gemma 2B": (_sizes({**_GEMMA, "model_type": "gemma"}, 18, 2048, 8, 1, 16384, head_dim=256), 2_506_172_416),
    "Gemma 7B": (_sizes({**_GEMMA, "model_type": "gemma"}, 28, 3072, 16, 16, 24576, head_dim=256), 8_537_680_896),
    "Gemma 2 2B": (_sizes(_GEMMA2, 26, 2304, 8, 4, 9216, head_dim=256), 2_614_341_888),
    "Gemma 2 9B": (_sizes(_GEMMA2, 42, 3584, 16, 8, 14336, head_dim=256, sliding_window_size=4096), 9_241_705_984),
    "Gemma 2 27B": (_sizes(_GEMMA2, 46, 4608, 32, 16, 36864, head_dim=128), 27_227_128_320),
    "Gemma 3 270M": (
        _sizes(_GEMMA3, 18, 640, 4, 1, 2048, head_dim=256, sliding_window=512, _sliding_window_pattern=6,
               use_bidirectional_attention=False,
               layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3),
        268_098_176,
    ),
    "Gemma 3 1B": (
        _sizes(_GEMMA3, 26, 1152, 4, 1, 6912, head_dim=256, sliding_window=512, sliding_window_pattern=6), 999_885_952,
    ),
    "Phi-3 mini": (
        _sizes(_PHI3, 32, 3072, 32, 32, 8192, vocab_size=32064, max_position_embeddings=4096, sliding_window=2047),
        3_821_079_552,
    ),
    "Phi-3 medium": (
        _sizes(_PHI3, 40, 5120, 40, 10, 17920, vocab_size=32064, max_position_embeddings=4096, sliding_window=2047),
        13_960_238_080,
    ),
    "Phi-4": (
        _sizes(_PHI3, 40, 5120, 40, 10, 17920, vocab_size=100352, max_position_embeddings=16384, sliding_window=None),
        14_659_507_200,
    ),
    "Phi-4 mini": (
        _sizes(_PHI3, 32, 3072, 24, 8, 8192, vocab_size=200064, max_position_embeddings=131072, sliding_window=262144,
               tie_word_embeddings=True, partial_rotary_factor=0.75, full_attn_mod=1, interpolate_factor=1,
               lm_head_bias=False, mlp_bias=False),
        3_836_021_760,
    ),
    "Falcon 7B": (
        {**_FALCON, "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True,
         "new_decoder_architecture": False},
        6_921_720_704,
    ),
    "Falcon 40B": (
        {**_FALCON, "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
         "multi_query": True, "new_decoder_architecture": True},
        41_303_293_952,
    ),
    "Falcon RW 1B": (
        {**_FALCON, "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "multi_query": False,
         "new_decoder_architecture": False, "alibi": True, "bias": True, "parallel_attn": False, "vocab_size": 50304},
        1_311_625_216,
    ),
    "Falcon 2 11B": (
        {**_FALCON, "num_hidden_layers": 60, "hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8,
         "multi_query": True, "new_decoder_architecture": True, "ff_factor": 4, "ffn_hidden_size": 16384,
         "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "max_position_embeddings": 8192},
        11_102_822_400,
    ),
    "GPT-2": (
        {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
         "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
         "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
         "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
         "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
         "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
        124_439_808,
    ),
    "GPT-NeoX 20B": (_sizes(_NEOX, 44, 6144, 64, None, 24576, vocab_size=50432), 20_554_567_680),
    "Pythia 160M": (_sizes(_NEOX, 12, 768, 12, None, 3072, vocab_size=50304), 162_322_944),
    "BLOOM 7.1B": (
        {"apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
         "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
         "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
         "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 4096, "n_inner": None, "n_layer": 30,
         "num_attention_heads": 32, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 4, "seq_length": 2048,
         "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0,
         "use_cache": True, "vocab_size": 250880},
        7_069_016_064,
    ),
    "StarCoder2 3B": (_sizes(_STARCODER2, 30, 3072, 24, 2, 12288), 3_030_371_328),
    "StarCoder2 7B": (_sizes(_STARCODER2, 32, 4608, 36, 4, 18432), 7_173_923_840),
    "OLMo 2 1B": (_sizes(_OLMO2, 16, 2048, 16, 16, 8192), 1_484_916_736),
    "OLMo 2 7B": (_sizes(_OLMO2, 32, 4096, 32, 32, 11008), 7_298_617_344),
    "OLMo 2 32B": (_sizes(_OLMO2, 64, 5120, 40, 8, 27648), 32_234_279_936),
    "OLMo 3 7B": (
        _sizes({**_OLMO2, "model_type": "olmo3"}, 32, 4096, 32, 32, 11008, vocab_size=100278, sliding_window=4096,
               max_position_embeddings=65536,
               layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8),
        7_298_011_136,
    ),
}  # fmt: skip
"""A configuration, and the number of parameters of the weights."""

WINDOWS = {
    "Mistral 7B v0.1": (4096, 1), "Phi-3 mini": (2047, 1), "Phi-3 medium": (2047, 1), "Phi-4 mini": (262144, 1),
    "StarCoder2 3B": (4096, 1), "StarCoder2 7B": (4096, 1), "Gemma 2 2B": (4096, 1 / 2), "Gemma 2 9B": (4096, 1 / 2),
    "Gemma 2 27B": (4096, 1 / 2), "Gemma 3 270M": (512, 5 / 6), "Gemma 3 1B": (512, 22 / 26),
    "OLMo 3 7B": (4096, 3 / 4),
}  # fmt: skip
"""Windows, and the share of the layers that have one; the others have none."""

REFUSED = {
    "Llama with experts": (
        _sizes({**_LLAMA3, "num_local_experts": 8}, 32, 4096, 32, 8, 14336),
        "num_local_experts must be absent, since no experts of llama are counted, not 8",
    ),
    "Granite": ({"model_type": "granitemoe", "num_local_experts": 32}, "no experts of granitemoe are counted, not 32"),
    "ERNIE": ({"model_type": "ernie4_5_moe"}, "not 'ernie4_5_moe': its experts are not counted"),
    "Gemma 3 4B": ({"model_type": "gemma3", "text_config": {}}, "not 'gemma3': give its text_config alone"),
    "Mamba": ({"model_type": "mamba"}, "not 'mamba': it has no attention"),
    "FP8 weights": (
        _sizes({**_LLAMA3, "quantization_config": {"quant_method": "fp8"}}, 32, 4096, 32, 8, 14336),
        r"others may change a number, not quantization_config=\{'quant_method': 'fp8'\}",
    ),
}  # fmt: skip
"""Configurations that are not counted, and why."""
