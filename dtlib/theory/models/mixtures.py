"""Published models with experts. Each says where its sizes were printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .architecture import Architecture, llama
from .experts import Experts, LatentAttention

_CONFIG = "and the released configuration"
_MIXTRAL = f"Jiang et al. 2024, arXiv 2401.04088, {_CONFIG}s"
_DBRX = f"databricks/dbrx {_CONFIG}"
_DEEPSEEK1 = f"Dai et al. 2024, arXiv 2401.06066, {_CONFIG}"
_DEEPSEEK2 = f"DeepSeek-AI 2024, arXiv 2405.04434, {_CONFIG}s"
_DEEPSEEK3 = f"DeepSeek-AI 2024, arXiv 2412.19437, {_CONFIG}"
_KIMI = f"Kimi Team 2025, arXiv 2507.20534, {_CONFIG}"
_QWEN2 = f"Yang et al. 2024, arXiv 2407.10671, {_CONFIG}s"
_QWEN3 = f"Yang et al. 2025, arXiv 2505.09388, Table 2, {_CONFIG}s"
_OLMOE = f"Muennighoff et al. 2024, arXiv 2409.02060, {_CONFIG}"
_GPT_OSS = f"OpenAI 2025, arXiv 2508.10925, Table 1, {_CONFIG}s"
_LLAMA4 = f"meta-llama/llama-models, the text models alone, {_CONFIG}s"
_GLM = f"GLM-4.5 Team 2025, arXiv 2508.06471, {_CONFIG}s"
_PHI = f"Abdin et al. 2024, arXiv 2404.14219, {_CONFIG}"
_GROK = "xai-org/grok-1"

_V3 = {"latent": LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)}
_LITE = {"latent": replace(_V3["latent"], q_rank=None)}
_NORMED_HEADS = {"head_dim": 128, "qk_norms": True}
_OSS = {
    "head_dim": 64, "qkv_biases": True, "output_bias": True, "attention_sinks": True, "window": 128,
    "windowed_share": 0.5,
}  # fmt: skip
_CHUNKS = {"head_dim": 128, "window": 8192, "windowed_share": 0.75, "window_chunks": True}
_PHI_MORE = {"norm": "layer", "qkv_biases": True, "output_bias": True, "head_bias": True, "window": 131072}
_BIASED = {"router_bias": True, "biases": True}


def _experts(number: int, top_k: int, hidden: int, shared: int = 0, first_dense: int = 0, **more: Any) -> Experts:
    return Experts(
        num_experts=number, top_k=top_k, hidden=hidden, shared_hidden=shared, first_dense=first_dense, **more
    )


_Row = tuple[str, str, tuple[int, int, int, int, int, int, int], Experts, Mapping[str, Any]]
"""A name, a source; l, h, a, key and value heads, the width of dense layers (of experts where there are none), V, s;
experts, and what else a Llama has not."""

_ROWS: tuple[_Row, ...] = (
    ("mixtral-8x7b", _MIXTRAL, (32, 4096, 32, 8, 14336, 32000, 32768), _experts(8, 2, 14336), {}),
    ("mixtral-8x22b", _MIXTRAL, (56, 6144, 48, 8, 16384, 32000, 65536), _experts(8, 2, 16384), {}),
    ("dbrx-132b", _DBRX, (40, 6144, 48, 8, 10752, 100352, 32768), _experts(16, 4, 10752), {}),
    ("deepseekmoe-16b", _DEEPSEEK1, (28, 2048, 16, 16, 10944, 102400, 4096), _experts(64, 6, 1408, 2816, 1), {}),
    ("deepseek-v2-lite", _DEEPSEEK2, (27, 2048, 16, 16, 10944, 102400, 163840), _experts(64, 6, 1408, 2816, 1), _LITE),
    ("deepseek-v2", _DEEPSEEK2, (60, 5120, 128, 128, 12288, 102400, 163840), _experts(160, 6, 1536, 3072, 1), _V3),
    ("deepseek-v3", _DEEPSEEK3, (61, 7168, 128, 128, 18432, 129280, 163840), _experts(256, 8, 2048, 2048, 3), _V3),
    ("kimi-k2", _KIMI, (61, 7168, 64, 64, 18432, 163840, 131072), _experts(384, 8, 2048, 2048, 1), _V3),
    ("qwen2-57b-a14b", _QWEN2, (28, 3584, 28, 4, 18944, 151936, 32768), _experts(64, 8, 2560, 20480, shared_gate=True),
     {"qkv_biases": True}),
    ("qwen3-30b-a3b", _QWEN3, (48, 2048, 32, 4, 6144, 151936, 40960), _experts(128, 8, 768), _NORMED_HEADS),
    ("qwen3-235b-a22b", _QWEN3, (94, 4096, 64, 4, 12288, 151936, 40960), _experts(128, 8, 1536), _NORMED_HEADS),
    ("olmoe-1b-7b", _OLMOE, (16, 2048, 16, 16, 1024, 50304, 4096), _experts(64, 8, 1024), {"wide_qk_norms": True}),
    ("gpt-oss-20b", _GPT_OSS, (24, 2880, 64, 8, 2880, 201088, 131072), _experts(32, 4, 2880, **_BIASED), _OSS),
    ("gpt-oss-120b", _GPT_OSS, (36, 2880, 64, 8, 2880, 201088, 131072), _experts(128, 4, 2880, **_BIASED), _OSS),
    ("llama4-scout", _LLAMA4, (48, 5120, 40, 8, 16384, 202048, 10485760), _experts(16, 1, 8192, 8192), _CHUNKS),
    ("llama4-maverick", _LLAMA4, (48, 5120, 40, 8, 16384, 202048, 1048576), _experts(128, 1, 8192, 8192, 1, every=2),
     _CHUNKS),
    ("glm-4.5", _GLM, (92, 5120, 96, 8, 12288, 151552, 131072), _experts(160, 8, 1536, 1536, 3),
     {**_NORMED_HEADS, "qkv_biases": True}),
    ("glm-4.5-air", _GLM, (46, 4096, 96, 8, 10944, 151552, 131072), _experts(128, 8, 1408, 1408, 1),
     {"head_dim": 128, "qkv_biases": True}),
    ("phi-3.5-moe", _PHI, (32, 4096, 32, 8, 6400, 32064, 131072), _experts(16, 2, 6400), _PHI_MORE),
    ("grok-1", _GROK, (64, 6144, 48, 8, 32768, 131072, 8192), _experts(8, 2, 32768),
     {"norms_per_layer": 4, "tied": True}),
)  # fmt: skip


def _mixture(name: str, source: str, sizes: tuple[int, ...], experts: Experts, more: Mapping[str, Any]) -> Architecture:
    l, h, a, g, f, vocab, seq = sizes
    head_dim = more["latent"].head_dim if "latent" in more else h // a
    plain = llama(
        name, num_layers=l, hidden=h, num_heads=a, num_kv_heads=g, ffn_hidden=f, vocab=vocab, seq=seq,
        head_dim=head_dim, source=source,
    )  # fmt: skip
    return replace(plain, experts=experts, **more)


MIXTURES = tuple(_mixture(*row) for row in _ROWS)
"""Their sizes are those that `from_config` reads in the published files."""
