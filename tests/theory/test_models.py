"""Parameter counts against modules on the meta device, published counts and closed forms: equal to the integer."""

import csv
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dtlib.ranks import model as course
from dtlib.theory import models
from dtlib.theory.breakdown import Breakdown

DATA = Path(__file__).parents[2] / "chapters" / "data"


class LlamaLayer(nn.Module):
    """Written from the papers, not from the formulas: every matrix a module."""

    def __init__(self, m):
        super().__init__()
        h, d, f = m.hidden, m.head_dim, m.ffn_hidden
        self.attention_norm, self.mlp_norm = nn.RMSNorm(h), nn.RMSNorm(h)
        self.q = nn.Linear(h, m.num_heads * d, bias=m.qkv_biases)
        self.k, self.v = (nn.Linear(h, m.num_kv_heads * d, bias=m.qkv_biases) for _ in "kv")
        self.o = nn.Linear(m.num_heads * d, h, bias=False)
        if m.qk_norms:
            self.q_norm, self.k_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.gate, self.up, self.down = (nn.Linear(*io, bias=False) for io in ((h, f), (h, f), (f, h)))


def llama_module(m):
    with torch.device("meta"):
        layers = [LlamaLayer(m) for _ in range(m.num_layers)]
        embedding, head = nn.Embedding(m.vocab, m.hidden), nn.Linear(m.hidden, m.vocab, bias=False)
        if m.tied:
            head.weight = embedding.weight
        return nn.ModuleDict(
            {"embedding": embedding, "layers": nn.ModuleList(layers), "norm": nn.RMSNorm(m.hidden), "head": head}
        )


def gpt_module(m):
    """torch's own layer, which has a GPT's matrices, biases and norms."""
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(m.hidden, m.num_heads, 4 * m.hidden) for _ in range(m.num_layers)]
        embedding, head = nn.Embedding(m.vocab, m.hidden), nn.Linear(m.hidden, m.vocab, bias=False)
        if m.tied:
            head.weight = embedding.weight
        modules = {
            "embedding": embedding,
            "layers": nn.ModuleList(layers),
            "norm": nn.LayerNorm(m.hidden),
            "head": head,
        }
        modules["positions"] = nn.Embedding(m.seq, m.hidden) if m.learned_positions else nn.Identity()
        modules["embedding_norm"] = nn.LayerNorm(m.hidden) if m.embedding_norm else nn.Identity()
        return nn.ModuleDict(modules)


def counted(module):
    return sum(parameter.numel() for parameter in module.parameters())


def mpt_rows():
    with (DATA / "llmfoundry_mpt_a100.csv").open() as file:
        return list(csv.DictReader(file))


# --- modules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, m in models.MODELS.items() if m.gated and m.experts is None])
def test_llama_presets_equal_modules_on_the_meta_device(name):
    m = models.model(name)
    module, parts = llama_module(m), models.model_parameters(m)
    assert parts.total == counted(module)
    assert parts.embedding == module["embedding"].weight.numel()
    layer = models.layer_parameters(m)
    assert layer.total == counted(module["layers"][0])
    assert layer.mlp == sum(counted(getattr(module["layers"][0], part)) for part in ("gate", "up", "down"))
    assert layer.attention == sum(counted(getattr(module["layers"][0], part)) for part in "qkvo")


@pytest.mark.parametrize("name", [name for name, m in models.MODELS.items() if not m.gated])
def test_gpt_presets_equal_modules_on_the_meta_device(name):
    m = models.model(name)
    module, parts = gpt_module(m), models.model_parameters(m)
    assert parts.total == counted(module)
    assert parts.positions == counted(module["positions"])
    layer, reference = models.layer_parameters(m), module["layers"][0]
    assert layer.total == counted(reference)
    assert layer.attention == counted(reference.self_attn)
    assert layer.mlp == counted(reference.linear1) + counted(reference.linear2)
    assert layer.norms == counted(reference.norm1) + counted(reference.norm2)


@pytest.mark.parametrize("name", sorted(course.PRESETS))
@pytest.mark.parametrize("tied", [True, False])
def test_the_courses_own_models_have_the_sizes_of_ranks(name, tied):
    mine, config = models.model(name), course.preset(name, tied=tied)
    for field in ("num_layers", "hidden", "num_heads", "seq", "vocab"):
        assert getattr(mine, field) == getattr(config, field)
    assert mine.ffn_hidden == config.mlp_ratio * config.hidden
    with torch.device("meta"):
        module = course.GPT(config)
    total = models.model_parameters(dataclasses.replace(mine, tied=tied)).total
    assert total == config.num_params == counted(module)


def test_every_preset_of_ranks_is_a_preset_here():
    assert set(course.PRESETS) <= set(models.MODELS)


# --- published counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("bloom-560m", 559_214_592),
        ("bloom-1.1b", 1_065_314_304),
        ("bloom-1.7b", 1_722_408_960),
        ("bloom-3b", 3_002_557_440),
        ("bloom-7.1b", 7_069_016_064),
        ("bloom-176b", 176_247_271_424),
    ],
)
def test_released_weights_have_as_many_parameters(name, num_params):
    assert models.model_parameters(models.model(name)).total == num_params


@pytest.mark.parametrize(
    ("name", "sizes", "num_params"),
    [
        ("Llama 3.2 1B", (16, 2048, 32, 8, 8192, 128256, True), 1_235_814_400),
        ("Llama 3.2 3B", (28, 3072, 24, 8, 8192, 128256, True), 3_212_749_824),
        ("Mistral 7B", (32, 4096, 32, 8, 14336, 32000, False), 7_241_732_096),
        ("TinyLlama 1.1B", (22, 2048, 32, 4, 5632, 32000, False), 1_100_048_384),
    ],
)
def test_released_weights_that_are_no_presets(name, sizes, num_params):
    l, h, a, g, f, vocab, tied = sizes
    m = models.llama(
        name, num_layers=l, hidden=h, num_heads=a, num_kv_heads=g, ffn_hidden=f, vocab=vocab, seq=4096, tied=tied
    )
    assert models.model_parameters(m).total == num_params


def test_every_row_of_llm_foundry_to_the_integer():
    rows = mpt_rows()
    assert len(rows) == 61
    for row in rows:
        m = dataclasses.replace(models.model(f"mpt-{row['model']}"), seq=int(row["seq"]))
        assert models.model_parameters(m).total == int(row["num_params"]), row


@pytest.mark.parametrize("family", ["sc21", "ultrascale"])
def test_names_of_papers_are_the_counts_rounded(family):
    for name, m in models.MODELS.items():
        if name.startswith(family):
            printed = name.split("-")[1].removesuffix("b")
            billions = models.model_parameters(m).total / 1e9
            digits = len(printed.partition(".")[2])
            assert abs(billions - float(printed)) <= 0.5 * 10**-digits, name


def test_megatron_2020_prints_three_digits():
    printed = {"1b": 1.16, "2b": 2.03, "4b": 4.24, "8b": 8.67}
    for name, billions in printed.items():
        total = models.model_parameters(models.model(f"megatron2020-{name}")).total
        assert total / 1e9 == pytest.approx(billions, abs=0.005)


# --- closed forms ----------------------------------------------------------------------------------------------

small = st.integers(1, 40)


@settings(deadline=None)
@given(num_layers=small, heads=small, head_dim=small, vocab=small, seq=small)
def test_gpts_closed_form_lacks_the_last_norm(num_layers, heads, head_dim, vocab, seq):
    h = heads * head_dim
    m = models.gpt("any", num_layers=num_layers, hidden=h, num_heads=heads, vocab=vocab, seq=seq)
    closed = models.gpt_num_params(num_layers, h, vocab, seq)
    assert models.model_parameters(m).total - closed == 2 * h
    printed = 12 * num_layers * h**2 * (1 + 13 / (12 * h) + (vocab + seq) / (12 * num_layers * h))
    assert closed == pytest.approx(printed, rel=1e-12)  # float64 sums of four terms


@settings(deadline=None)
@given(num_layers=small, groups=small, per_group=small, head_dim=small, f=small, vocab=small, tied=st.booleans())
def test_llamas_closed_form_is_exact(num_layers, groups, per_group, head_dim, f, vocab, tied):
    heads = groups * per_group
    m = models.llama(
        "any", num_layers=num_layers, hidden=heads * head_dim, num_heads=heads, num_kv_heads=groups,
        ffn_hidden=f, vocab=vocab, seq=8, tied=tied,
    )  # fmt: skip
    closed = models.llama_num_params(num_layers, heads * head_dim, heads, groups, f, vocab, tied=tied)
    assert models.model_parameters(m).total == closed


def test_a_head_of_another_width_and_a_gated_mlp_with_biases():
    m = dataclasses.replace(models.model("llama3-8b"), head_dim=256, biases=True)
    h, q, k, f = 4096, 32 * 256, 8 * 256, 14336
    layer = models.layer_parameters(m)
    assert layer.attention == h * (q + 2 * k) + (q + 2 * k) + q * h + h
    assert layer.mlp == 2 * (h * f + f) + f * h + h


# --- breakdowns ------------------------------------------------------------------------------------------------


def test_the_parts_are_whole_numbers_that_add_up():
    parts = models.model_parameters(models.model("gpt3"))
    assert sum(parts.parts.values()) == parts.total
    assert all(isinstance(part, int) for part in (*parts.parts.values(), parts.total))
    rows = parts.table()
    assert [row.name for row in rows] == ["embedding", "positions", "attention", "mlp", "norms"]
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.name for row in parts.table(zeros=True)][-1] == "head"


def test_breakdowns_add_and_scale_part_by_part():
    layer = models.layer_parameters(models.model("tiny"))
    assert layer + layer == layer.scaled(2)
    with pytest.raises(TypeError):
        layer + models.model_parameters(models.model("tiny"))
    with pytest.raises(ValueError, match="factor must be finite and zero or more, not -1"):
        layer.scaled(-1)


def test_breakdowns_are_frozen_and_refuse_negative_parts():
    @dataclasses.dataclass(frozen=True)
    class Two(Breakdown):
        first_half: float
        second_half: float

    assert Two(0, 0).table(zeros=True)[0].share == 0
    with pytest.raises(ValueError, match="second_half must be finite and zero or more, not -2"):
        Two(1, -2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Two(1, 2).first_half = 3


# --- names and bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "name"),
    [("GPT-3", "gpt3-175b"), ("llama3 405B", "llama3-405b"), ("Llama-2-7b", "llama2-7b"), ("25M", "25m")],
)
def test_models_are_found_by_what_people_say(said, name):
    assert models.model(said).name == name


def test_every_preset_has_a_source_and_finds_itself():
    for name, m in models.MODELS.items():
        assert models.model(name) is m
        assert m.source


def test_unknown_models_list_what_there_is():
    with pytest.raises(ValueError, match="name 'abacus' of model is unknown; there are tiny, 25m, gpt2-124m"):
        models.model("abacus")
    with pytest.raises(ValueError, match=r"name 'lama3-8' of model is unknown; did you mean .*llama3-8b.*\?$"):
        models.model("lama3-8")
    with pytest.raises(ValueError, match="'70b' of model fits llama2-70b, llama3-70b, mpt-70b"):
        models.model("70b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"hidden": 64.0}, "hidden must be a whole number of at least 1, not 64.0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=4; 3 does not"),
        ({"norm": "batch"}, "norm must be one of layer, rms, not 'batch'"),
        ({"tied": 1}, "tied must be True or False, not 1"),
    ],
)
def test_sizes_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(models.model("tiny"), **change)


def test_builders_and_closed_forms_refuse_heads_that_do_not_fit():
    sizes = {"num_layers": 1, "vocab": 8, "seq": 8}
    with pytest.raises(ValueError, match="hidden must be a multiple of num_heads=3, not 64"):
        models.gpt("any", hidden=64, num_heads=3, **sizes)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads=4; 3 does not"):
        models.llama_num_params(1, 64, 4, 3, 128, 8)
    with pytest.raises(ValueError, match="hidden must be a multiple of num_heads=5, not 64"):
        models.llama_num_params(1, 64, 5, 1, 128, 8)
    with pytest.raises(ValueError, match="vocab must be at least 1, not 0"):
        models.gpt_num_params(1, 64, 0, 8)
