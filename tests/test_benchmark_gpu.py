"""The benchmark of a card at tiny sizes on a CPU: every section runs, its shapes are right, and its counts of bytes."""

import json
import math

import pytest
import torch

from benchmarks import _gpu_compression, _gpu_layer, _gpu_products, gpu
from benchmarks._gpu_clock import Clock, Spread
from dtlib import theory
from dtlib.ranks import compression

TINY = {
    "device_copy": {"num_bytes": 4096},
    "squares": {"sides": (8, 16)},
    "llamas": {"most": 0},
    "experts": {"num": 2, "hidden": 8, "width": 8, "tokens": (1, 4)},
    "layers": {"seqs": (), "name": "llama3-8b"},
    "attention": {"seqs": (16,), "heads": 2},
    "exchanges": {"matrices": {"a": (64, 32), "b": (16, 48)}},
    "memory_bound": {"rows": 4, "hidden": 8},
    "updates": {"num_params": 4096},
    "host_link": {"num_bytes": 4096},
    "beside_products": {"side": 64, "num_bytes": 4096},
    "saves": {"num_bytes": 4096, "side": 16, "products": 2},
    "kernels": {"num": 4096},
}


@pytest.fixture(scope="module")
def clock():
    return Clock("cpu")


def test_every_section_runs_and_its_table_is_shown(clock, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", _without_fused)
    kept = []
    results = gpu.measured(clock, lambda found: kept.append(len(found)), **TINY)
    assert kept == list(range(1, len(results) + 1))
    assert results.keys() >= gpu.TABLES.keys()
    assert not [name for name, found in results.items() if "error" in found]
    gpu.show(results)
    json.dumps(results)


def _without_fused(parameters, fused=None, foreach=None):
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_section_that_fails_leaves_its_error_and_the_others(clock, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", _without_fused)
    results = gpu.measured(clock, print, **TINY | {"squares": {"sides": (-1,)}})
    assert "error" in results["squares"]
    assert results["experts"][0]["alike"]["flop_per_s"] > 0
    gpu.show(results)


def test_the_products_of_all_tensor_ranks_are_those_of_the_layer():
    for model in _gpu_products.MODELS:
        m = theory.models.model(model)
        whole = m.hidden * (2 * m.query_width + 2 * m.kv_width + 3 * m.ffn_hidden)
        for tp in _gpu_products.SPLITS:
            assert tp * sum(math.prod(each) for each in _gpu_products.products_of(model, tp).values()) == whole
    assert len(list(_gpu_products.shapes())) == 2 * 4 * 4 * 5


def test_a_layer_beside_theory_at_a_small_size(clock, monkeypatch):
    small = theory.models.Architecture(
        name="small", num_layers=1, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden=56, vocab=16,
        seq=16, tied=True, biases=False, norm="rms", gated=True, learned_positions=False,
    )  # fmt: skip
    monkeypatch.setattr(theory.models, "model", lambda name: small)
    (found,) = _gpu_layer.layers(clock, seqs=(16,))
    assert found["forward_flops"] == 16 * (2 * 32 * (2 * 32 + 2 * 16 + 3 * 56) + 2 * 2 * 32 * 17 / 2)
    assert found["full"]["theory_bytes"] == 2 * 16 * 32 < found["none"]["theory_bytes"]
    assert found["full"]["planner_seconds"] is None  # of no known card
    assert found["full"]["ratio"].median > 0
    gpu.show({name: {"error": "none"} for name in gpu.TABLES} | {"layers": [found]})


@pytest.mark.parametrize("n", [2, 3])
def test_the_exchanges_send_what_theory_says(clock, n):
    entries = 64 * 48
    found = {
        each["scheme"]: each["sent_bytes"]
        for each in _gpu_compression.exchanges(clock, 1e9, {"a": (64, 48)}, (n,))
        if each["dtype"] == "float32"
    }
    of = theory.compression
    assert found["float16"] == pytest.approx(of.all_reduced_bytes(2 * entries, n))
    assert found["int8"] == pytest.approx(of.two_pass_bytes(entries, n))
    assert found["largest 1 %"] == of.all_gathered_bytes(of.sparse_bytes(round(entries / 100)), n)
    assert found["QSGD, 7 levels"] == of.all_gathered_bytes(of.qsgd_bytes(entries, 7), n)
    assert found["PowerSGD, rank 4"] == pytest.approx(of.all_reduced_bytes(4 * of.low_rank_elements([(64, 48)], 4), n))


def test_among_ranks_an_exchange_leaves_the_gradient_of_them_all(clock):
    of = _gpu_compression.bucket(clock, {"a": (8, 4)}, torch.float32)
    before = of.flat.clone()
    with _gpu_compression.among(3):
        compression.TopK(1.0)(of, None).wait()
    torch.testing.assert_close(of.flat, 3 * before)


def test_a_spread_is_of_quartiles():
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys):
    gpu.main()
    assert "no card" in capsys.readouterr().out
