"""Published models, and the two that this course trains. Each says where its sizes were printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dtlib.theory.lookup import find

from .architecture import Architecture, gpt, llama
from .mixtures import MIXTURES

_GPT2 = "Radford et al. 2019, Table 2, and the released weights"
_GPT3 = "Brown et al. 2020, arXiv 2005.14165, Table 2.1"
_LLAMA2 = "Touvron et al. 2023, arXiv 2307.09288, and the released configuration"
_LLAMA3 = "Grattafiori et al. 2024, arXiv 2407.21783, Table 3, and the released configuration"
_QWEN25 = "Yang et al. 2024, arXiv 2412.15115, Table 1, and the released configurations"
_QWEN3 = "Yang et al. 2025, arXiv 2505.09388, Table 1, and the released configurations"
_BLOOM = "BigScience Workshop 2022, arXiv 2211.05100, Table 3, and the released configurations"
_MPT = "mosaicml/llm-foundry, scripts/train"
_SC21 = "Narayanan et al. 2021, arXiv 2104.04473, Table 1"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, Table 3"
_MEGATRON_2020 = "NVIDIA/Megatron-LM repository, 2020; vocabulary padded to 51200"
_MEGATRON_H100 = "NVIDIA/Megatron-LM README, core r0.8.0"
_ULTRASCALE = "Ultra-Scale Playbook sweep, vinjn/nanotron-ultrascale-playbook"
_COURSE = "this course, dtlib.ranks.model"

_Size = tuple[str, int, int, int]
"""A name, l, h, a."""


def _gpts(sizes: Iterable[_Size], *, vocab: int, seq: int, source: str, tied: bool = True) -> list[Architecture]:
    return [
        gpt(name, num_layers=l, hidden=h, num_heads=a, vocab=vocab, seq=seq, tied=tied, source=source)
        for name, l, h, a in sizes
    ]


def _llamas(sizes: Iterable[tuple[str, int, int, int, int, int]], **shared: Any) -> list[Architecture]:
    """Sizes: a name, l, h, a, key and value heads, the width of the MLP; what they share is as `llama` takes it."""
    return [
        llama(name, num_layers=l, hidden=h, num_heads=a, num_kv_heads=g, ffn_hidden=f, **shared)
        for name, l, h, a, g, f in sizes
    ]


_COURSE_MODELS = (
    gpt("tiny", num_layers=2, hidden=64, num_heads=4, vocab=256, seq=64, source=_COURSE),
    gpt("25m", num_layers=8, hidden=512, num_heads=8, vocab=256, seq=64, source=_COURSE),
)
_GPT2_MODELS = _gpts(
    [
        ("gpt2-124m", 12, 768, 12),
        ("gpt2-355m", 24, 1024, 16),
        ("gpt2-774m", 36, 1280, 20),
        ("gpt2-1.5b", 48, 1600, 25),
    ],
    vocab=50257,
    seq=1024,
    source=_GPT2,
)
_GPT3_MODELS = _gpts([("gpt3-175b", 96, 12288, 96)], vocab=50257, seq=2048, source=_GPT3)
_LLAMA2_MODELS = _llamas(
    [
        ("llama2-7b", 32, 4096, 32, 32, 11008),
        ("llama2-13b", 40, 5120, 40, 40, 13824),
        ("llama2-70b", 80, 8192, 64, 8, 28672),
    ],
    vocab=32000,
    seq=4096,
    source=_LLAMA2,
)
_LLAMA3_MODELS = _llamas(
    [
        ("llama3-8b", 32, 4096, 32, 8, 14336),
        ("llama3-70b", 80, 8192, 64, 8, 28672),
        ("llama3-405b", 126, 16384, 128, 8, 53248),
    ],
    vocab=128256,
    seq=8192,
    source=_LLAMA3,
)
_QWEN_MODELS = [
    *_llamas(
        [
            ("qwen2.5-0.5b", 24, 896, 14, 2, 4864),
            ("qwen2.5-1.5b", 28, 1536, 12, 2, 8960),
            ("qwen2.5-3b", 36, 2048, 16, 2, 11008),
        ],
        vocab=151936, seq=32768, tied=True, qkv_biases=True, source=_QWEN25,
    ),
    *_llamas(
        [
            ("qwen2.5-7b", 28, 3584, 28, 4, 18944),
            ("qwen2.5-14b", 48, 5120, 40, 8, 13824),
            ("qwen2.5-32b", 64, 5120, 40, 8, 27648),
            ("qwen2.5-72b", 80, 8192, 64, 8, 29568),
        ],
        vocab=152064, seq=131072, qkv_biases=True, source=_QWEN25,
    ),
    *_llamas(
        [
            ("qwen3-0.6b", 28, 1024, 16, 8, 3072),
            ("qwen3-1.7b", 28, 2048, 16, 8, 6144),
            ("qwen3-4b", 36, 2560, 32, 8, 9728),
        ],
        vocab=151936, seq=32768, head_dim=128, tied=True, qk_norms=True, source=_QWEN3,
    ),
    *_llamas(
        [
            ("qwen3-8b", 36, 4096, 32, 8, 12288),
            ("qwen3-14b", 40, 5120, 40, 8, 17408),
            ("qwen3-32b", 64, 5120, 64, 8, 25600),
        ],
        vocab=151936, seq=32768, head_dim=128, qk_norms=True, source=_QWEN3,
    ),
]  # fmt: skip
_BLOOM_MODELS = [  # positions are a bias on the scores, which has no parameters
    replace(each, learned_positions=False, embedding_norm=True)
    for each in _gpts(
        [
            ("bloom-560m", 24, 1024, 16),
            ("bloom-1.1b", 24, 1536, 16),
            ("bloom-1.7b", 24, 2048, 16),
            ("bloom-3b", 30, 2560, 32),
            ("bloom-7.1b", 30, 4096, 32),
            ("bloom-176b", 70, 14336, 112),
        ],
        vocab=250880,
        seq=2048,
        source=_BLOOM,
    )
]
_MPT_MODELS = _gpts(
    [
        ("mpt-125m", 12, 768, 12),
        ("mpt-350m", 24, 1024, 16),
        ("mpt-760m", 24, 1536, 12),
        ("mpt-1b", 24, 2048, 16),
        ("mpt-3b", 32, 2560, 20),
        ("mpt-7b", 32, 4096, 32),
        ("mpt-13b", 40, 5120, 40),
        ("mpt-30b", 48, 7168, 56),
        ("mpt-70b", 80, 8192, 64),
    ],
    vocab=50368,
    seq=2048,
    source=_MPT,
)
_MEGATRON_MODELS = [
    *_gpts(
        [
            ("megatron2020-1b", 24, 1920, 15),
            ("megatron2020-2b", 30, 2304, 18),
            ("megatron2020-4b", 36, 3072, 24),
            ("megatron2020-8b", 42, 4096, 32),
        ],
        vocab=51200,
        seq=1024,
        source=_MEGATRON_2020,
    ),
    *_gpts(
        [
            ("sc21-1.7b", 24, 2304, 24),
            ("sc21-3.6b", 30, 3072, 32),
            ("sc21-7.5b", 36, 4096, 32),
            ("sc21-18.4b", 40, 6144, 48),
            ("sc21-39.1b", 48, 8192, 64),
            ("sc21-76.1b", 60, 10240, 80),
            ("sc21-145.6b", 80, 12288, 96),
            ("sc21-310.1b", 96, 16384, 128),
            ("sc21-529.6b", 105, 20480, 128),
            ("sc21-1008b", 128, 25600, 160),
        ],
        vocab=51200,
        seq=2048,
        source=_SC21,
    ),
    *_gpts(
        [
            ("korthikanti-22b", 48, 6144, 64),
            ("korthikanti-175b", 96, 12288, 96),
            ("korthikanti-530b", 105, 20480, 128),
            ("korthikanti-1t", 128, 25600, 160),
        ],
        vocab=51200,
        seq=2048,
        source=_KORTHIKANTI,
    ),
    *_gpts(
        [
            ("megatron-h100-1.7b", 24, 2048, 16),
            ("megatron-h100-7.1b", 30, 4096, 32),
            ("megatron-h100-16b", 32, 6144, 48),
            ("megatron-h100-32b", 48, 7168, 56),
            ("megatron-h100-70b", 84, 8192, 64),
        ],
        vocab=131072,
        seq=4096,
        tied=False,
        source=_MEGATRON_H100,
    ),
]
_ULTRASCALE_MODELS = _llamas(
    [("ultrascale-1.34b", 16, 2048, 32, 32, 8192), ("ultrascale-3.57b", 28, 3072, 32, 32, 8192)],
    vocab=131072,
    seq=4096,
    tied=True,
    source=_ULTRASCALE,
)

MODELS: Mapping[str, Architecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            *_COURSE_MODELS, *_GPT2_MODELS, *_GPT3_MODELS, *_LLAMA2_MODELS, *_LLAMA3_MODELS, *_QWEN_MODELS,
            *_BLOOM_MODELS, *_MPT_MODELS, *_MEGATRON_MODELS, *_ULTRASCALE_MODELS, *MIXTURES,
        )
    }
)  # fmt: skip
"""The models that `model` finds, by name."""


def model(name: str) -> Architecture:
    """The published model called `name`, for example ``model("llama3-70b")`` or ``model("GPT-3")``.

    Case, spaces and hyphens do not matter, and any words of the name will do where they fit one model only. Raises
    ``ValueError`` that lists the names otherwise.
    """
    return find("model", name, MODELS)


def checked_dense(given: str | Architecture, asked: str, *, but_experts: bool = False) -> Architecture:
    """`checked_model`, or ``ValueError`` for what `asked` does not count yet: latent attention, modules that predict
    further tokens and, unless `but_experts`, experts."""
    found = checked_model(given)
    rest = not_dense(replace(found, experts=None) if but_experts else found)
    if rest:
        kind = "dense but for experts" if but_experts else "dense"
        raise ValueError(f"model must be {kind}, since {asked} counts nothing else yet: {found.name} has {rest}")
    return found


def not_dense(model: Architecture) -> str:
    """What `model` has that a dense transformer has not, in words; nothing where it is one."""
    experts = "" if model.experts is None else f"{model.experts.num_experts} experts a layer"
    latent = "latent attention" if model.latent else ""
    further = "modules that predict further tokens" if model.mtp_modules else ""
    return " and ".join(each for each in (experts, latent, further) if each)


def checked_model(given: str | Architecture) -> Architecture:
    """The model that is `given`, or that `model` finds by the name given; else ``ValueError``."""
    if isinstance(given, str):
        return model(given)
    if not isinstance(given, Architecture):
        raise ValueError(f"model must be an Architecture or the name of a published one, not {given!r}")
    return given
