"""Optimizer states on the host: bytes that a simulated step moves, seconds, memory of both sides, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from dtlib.theory import footprint, hardware, models, planner
from dtlib.theory.memory import recipe
from dtlib.theory.models import Adapters, model_parameters
from dtlib.theory.planner import Machine, Plan
from dtlib.theory.timing import host_bytes
from dtlib.theory.units import GB

H100, MODEL = hardware.accelerator("H100"), models.model("llama3-8b")
WIDTHS = {2: np.float16, 4: np.float32}


class Host:
    """A memory that counts what is read and written, and a link that counts what passes."""

    def __init__(self):
        self.moved = self.passed = 0

    def write(self, tensor):
        self.moved += tensor.nbytes
        return tensor

    read = write

    def arrives(self, tensor):
        self.passed += tensor.nbytes
        return self.write(tensor.copy())

    def leaves(self, tensor):
        self.passed += tensor.nbytes
        return self.read(tensor).copy()


def adam(host, gradients, kept, weights_type):
    """One update of a state of three fp32 tensors: everything is read once, and written once."""
    g = host.read(gradients).astype(np.float32)
    p, m, v = (host.read(each) for each in kept)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    p = p - 1e-3 * m / (np.sqrt(v) + 1e-8)
    kept[:] = [host.write(each.astype(np.float32)) for each in (p, m, v)]
    return host.write(p.astype(weights_type))


@pytest.mark.parametrize("name", ["16-byte", "18-byte"])
def test_bytes_are_those_of_a_simulated_step(name):
    each, number = recipe(name).per_param, 1000
    host, kept = Host(), [np.ones(number, np.float32), *np.zeros((2, number), np.float32)]
    gradients = host.arrives(np.ones(number, WIDTHS[each.gradients]))
    weights = host.leaves(adam(host, gradients, kept, WIDTHS[each.weights]))
    assert weights.dtype == np.float16
    assert np.all(kept[0] < 1)
    travels, moved = host_bytes(Plan(recipe=name))
    assert host.passed == travels * number
    assert host.moved == moved * number
    update = 2 * each.optimizer + each.gradients + each.weights
    assert host.moved != update * number  # as if nothing came and went


def terms(plan, **machine):
    return planner.step_time(MODEL, plan, Machine(accelerator=H100, gpus=plan.world_size, **machine)).parts


@pytest.mark.parametrize(("zero", "shares"), [(0, 1), (1, 8), (2, 8), (3, 8)])
def test_seconds_by_hand(zero, shares):
    plan, psi = Plan(dp=8, zero=zero, offload=True), model_parameters(MODEL).total
    found, plain = terms(plan), terms(plan.changed(offload=False))
    assert found["host_link"] == pytest.approx(6 * psi / shares / H100.host_link.link_bytes_per_s)
    assert found["host_update"] == pytest.approx(36 * psi / shares * 8 / (614.4 * GB))
    assert found["optimizer"] < plain["optimizer"]
    rest = set(plain) - {"host_link", "host_update", "optimizer"}
    assert all(found[name] == plain[name] for name in rest)
    assert plain["host_link"] == plain["host_update"] == 0
    assert terms(plan, host_memory_bytes_per_s=61.44 * GB)["host_update"] == pytest.approx(10 * found["host_update"])


def test_adapters_travel_alone():
    lora = Adapters(8)
    whole, found = (terms(Plan(offload=True, adapters=each)) for each in (None, lora))
    share = MODEL.num_layers * lora.layer_parameters(MODEL) / model_parameters(MODEL).total
    for name in ("host_link", "host_update"):
        assert found[name] == pytest.approx(share * whole[name])


@pytest.mark.parametrize("adapters", [None, Adapters(8)])
@pytest.mark.parametrize("zero", range(4))
def test_card_and_host_together_keep_what_the_card_kept(zero, adapters):
    plain = footprint.Setup(dp=4, pp=2, zero=zero, recipe="18-byte", adapters=adapters)
    moved = replace(plain, offload=True)
    for stage in range(2):
        kept = footprint.rank_memory(MODEL, moved, stage)
        assert kept.master_weights == kept.first_moment == kept.second_moment == 0
        assert kept.weights > 0 < kept.gradients
    of_stage = [footprint.rank_states(MODEL, plain, stage).optimizer for stage in range(2)]
    assert footprint.host_states(MODEL, moved) == pytest.approx(max(of_stage))
    assert footprint.host_states(MODEL, plain) == 0


def test_a_model_of_experts_keeps_theirs_on_the_host_too():
    setup = footprint.Setup(dp=8, ep=4, zero=1, offload=True)
    kept = footprint.rank_memory("mixtral-8x7b", setup)
    assert kept.states == kept.weights + kept.gradients
    assert footprint.host_states("mixtral-8x7b", setup) > 0


def test_the_search_finds_room_with_the_host():
    machine = Machine(accelerator=H100, gpus=2)
    with pytest.raises(ValueError, match="fits"):
        planner.search("llama2-13b", machine, sequences=16)
    found = planner.search("llama2-13b", machine, sequences=16, like=Plan(offload=True))
    assert found.best.time.host_update > found.best.time.host_link > 0
    assert "optimizer states on the host" in found.best.fit.outside
    assert found.best.interval.low is None
    assert found.buys["host memory"] < found.buys["host link"] < found.best.time.total


def test_hosts_are_those_of_their_generation_or_given():
    for name, rate in (("V100", 153.6), ("A100", 409.6), ("H100", 614.4)):
        assert Machine(accelerator=hardware.accelerator(name), gpus=8).host_rate == pytest.approx(rate * GB)
    gb200 = hardware.accelerator("GB200")
    assert Machine(accelerator=gb200, gpus=4, host_memory_bytes_per_s=1e12).host_rate == 1e12
    with pytest.raises(ValueError, match="host_link must be given on GB200-186GB"):
        planner.step_time(MODEL, Plan(offload=True), Machine(accelerator=gb200, gpus=1))
    linked = replace(gb200, host_link=replace(H100.host_link, name="a link"))
    with pytest.raises(ValueError, match="host_memory must be given on GB200-186GB"):
        planner.step_time(MODEL, Plan(offload=True), Machine(accelerator=linked, gpus=1))
    with pytest.raises(ValueError, match="host_memory_bytes_per_s must be"):
        Machine(accelerator=H100, gpus=1, host_memory_bytes_per_s=0)
