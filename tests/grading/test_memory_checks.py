"""What the memory exercises are judged by is right: counts, bits, gradients and steps, held against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dtlib.grading import all_exercises
from dtlib.grading.checks.memory import backward, parameters, states, training, utilisation
from dtlib.grading.checks.memory.bits import encoded, rounded
from dtlib.grading.harness import memory as harness
from dtlib.theory import memory, models

SEEDS = range(20)


def cases(exercise: str) -> list[dict[str, Any]]:
    return [case for seed in SEEDS for case in all_exercises()[exercise].cases(seed)]


def test_counted_parameters_are_those_of_the_theory_and_of_the_published_model():
    for case in cases("memory.1"):
        num_layers, hidden, num_heads, num_kv_heads, ffn_hidden, vocab, tied = case["arguments"]
        total = models.llama_num_params(num_layers, hidden, num_heads, num_kv_heads, ffn_hidden, vocab, tied=tied)
        assert sum(parameters.count(case).values()) == total
    assert (
        sum(parameters.count(cases("memory.1")[0]).values()) == models.model_parameters(models.model("llama3-8b")).total
    )


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (states.recipe(master=False), "12-byte"),
        (states.recipe(), "16-byte"),
        (states.recipe(gradients="fp32"), "18-byte"),
        (states.recipe(main_gradients=True), "20-byte"),
        (states.recipe("fp32", "fp32", master=False), "fp32"),
    ],
)
def test_bills_are_those_of_the_recipes(how: dict[str, Any], name: str):
    parts, theory = states.count({"arguments": [1000, how]}), memory.recipe(name).states(1000)
    assert sum(parts.values()) == theory.total
    assert parts["moments"] == theory.first_moment + theory.second_moment
    for part in ("weights", "gradients", "master_weights", "main_gradients"):
        assert parts[part] == getattr(theory, part)


def test_a_last_block_has_a_scale_of_its_own():
    whole = states.count({"arguments": [4096, states.recipe(block=2048)]})
    assert sum(whole.values()) == memory.adam_8bit(block=2048).states(4096).total
    assert states.count({"arguments": [4097, states.recipe(block=2048)]})["moments"] == whole["moments"] + 2 * (1 + 4)


def test_the_published_run_gives_the_published_shares():
    case = cases("memory.3")[0]
    assert round(100 * utilisation._mfu(case), 2) == pytest.approx(53.33, abs=0.1)
    assert round(100 * utilisation._hfu(case), 2) == pytest.approx(71.1, abs=0.1)


def test_drawn_jobs_are_possible():
    for case in cases("memory.3"):
        assert 0 < utilisation._mfu(case) <= utilisation._hfu(case) < 1


def test_rounded_bits_are_those_of_torch():
    upper = np.arange(2**16, dtype=np.uint64) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint64)
    bits = (upper[:, None] | lower).astype(np.uint32)
    numbers = torch.from_numpy(bits.view(np.float32).copy())
    wanted = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    seen = rounded(bits.astype(np.uint64))
    is_nan = torch.isnan(numbers).numpy()
    assert np.array_equal(seen[~is_nan], wanted[~is_nan])
    assert np.array_equal(seen[is_nan], (bits[is_nan] >> 16) | 0x40)
    assert is_nan.sum() == 2 * (127 * 6 + 5)


def test_bytes_of_all_ranks_are_the_bytes_of_the_table():
    values = np.arange(35, dtype=np.float32).reshape(7, 5)
    for n in range(1, 10):
        whole = [encoded({"values": values, "rank": rank, "n": n}) for rank in range(n)]
        one = encoded({"values": values, "rank": 0, "n": 1})
        assert np.array_equal(np.concatenate(whole), one)
        assert max(map(len, whole)) - min(map(len, whole)) in (0, 10)


def test_drawn_numbers_are_what_their_case_says():
    for case in cases("memory.4"):
        bits = np.asarray(case["values"]).view(np.uint32)
        if case["what"] == "ties":
            assert set((bits & 0xFFFF).ravel()) == {0x8000}
            assert set((bits >> 16 & 1).ravel()) == {0, 1}
        elif case["what"] != "specials":
            assert 0x8000 not in bits & 0xFFFF
            assert np.isfinite(case["values"]).all()
    rows = [case for case in cases("memory.4") if case["what"] == "rows"]
    assert any(len(case["values"]) % case["n"] == 0 for case in rows)
    assert any(0 < len(case["values"]) < case["n"] for case in rows)
    assert any(len(case["values"]) % case["n"] > 1 for case in rows)


def torch_steps(case: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The first batch's gradients and the weights after all steps of an ordinary loop."""
    model = harness.network(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, first = harness._make_optimizer(case)(trained), []
    for batch in harness._batches(case):
        harness.loss_fn(model, batch).backward()
        first = first or [None if each.grad is None else each.grad.numpy().copy() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return first, [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("seed", [1, 2])
def test_gradients_and_steps_by_hand_are_those_of_torch(number: int, seed: int):
    case = all_exercises()["memory.6"].cases(seed)[number]
    first, after = torch_steps(case)
    for index, (seen, wanted) in enumerate(zip(training.gradients(case, training.start(case), 0), first, strict=True)):
        assert (wanted is not None) == training.is_trained(case, index)
        if wanted is not None:
            np.testing.assert_allclose(seen, wanted, rtol=1e-4, atol=1e-6)
    for seen, wanted in zip(backward.expected(case), after, strict=True):
        np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=0.005 * case["learning_rate"])


def test_half_a_step_is_the_furthest_that_rounding_moves():
    values = np.random.default_rng(0).standard_normal(10_000)
    moved = np.abs(training.bf16(values) - values)
    assert (moved <= training.half_step(values) + 1e-7).all()
    assert (moved > 0.99 * training.half_step(values)).any()


def test_small_updates_are_lost_without_a_master_copy_and_matter():
    for seed in SEEDS:
        (case,) = [each for each in all_exercises()["memory.5"].cases(seed) if each["learning_rate"] < 5e-4]
        least = min(training.half_step(each).min() for each in training.start(case))
        assert case["learning_rate"] < 0.3 * least  # one update is far from half a step of bf16
        assert len(case["inputs"]) * case["learning_rate"] > 1.5 * training.half_step(np.array(0.99))


def answer_by(convert: Callable[[Any], Any]) -> list[str]:
    case = {"values": np.ones((2, 2), np.float32), "rank": 0, "n": 1}
    return harness.encode(lambda values, rank, n: bytes(convert(values).nbytes), case)["shortcut"]


@pytest.mark.parametrize(
    "convert",
    [
        lambda values: torch.from_numpy(values).bfloat16(),
        lambda values: torch.from_numpy(values).to(torch.bfloat16),
        lambda values: torch.from_numpy(values).type(torch.bfloat16),
        lambda values: torch.tensor(values, dtype=torch.bfloat16),
        lambda values: torch.empty(values.shape, dtype=torch.bfloat16).copy_(torch.from_numpy(values)),
        lambda values: torch.nn.Linear(2, 2).to(torch.bfloat16).weight,
    ],
)
def test_bfloat16_of_torch_is_seen(convert: Callable[[Any], Any]):
    assert answer_by(convert)


def test_other_tensors_are_not():
    assert answer_by(lambda values: torch.from_numpy(values).view(torch.int32) >> 16) == []


def keeps(hold: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """What is seen of an answer to memory.6 that holds on to something of each gradient."""
    rng = np.random.default_rng(1)
    case = training.drawn_case(rng, [384] * 6 + [1], 2, learning_rate=1e-3, weight_decay=0.0, words="few layers")

    log, hooks = [], []

    def answer(model: Any, make_optimizer: Any) -> None:
        def update(parameter: Any, optimizer: Any) -> None:
            log.append(hold(parameter.grad))
            optimizer.step()
            parameter.grad = None

        for parameter in model.parameters():
            optimizer = make_optimizer([parameter])
            hooks.append(parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: update(p, o)))

    seen = harness.update_in_backward(answer, case)
    log.clear()
    for hook in hooks:
        hook.remove()
    return {**seen, "num_params": training.num_params(case)}


@pytest.mark.parametrize(
    ("hold", "tensors", "aside"),
    [
        (lambda gradient: None, 0, 0),
        (lambda gradient: gradient.clone(), 4, 0),
        (lambda gradient: gradient.bfloat16(), 2, 0),
        (lambda gradient: gradient.numpy(), 4, 0),  # the tensor's own memory, kept alive
        (lambda gradient: gradient.numpy().copy(), 0, 4),
        (lambda gradient: bytes(gradient.numpy()), 0, 4),
        (lambda gradient: gradient.view(torch.int16).numpy()[..., ::2].copy(), 0, 2),
    ],
)
def test_whatever_is_kept_is_counted_where_it_lies(hold: Callable[[Any], Any], tensors: int, aside: int):
    seen = keeps(hold)
    num_params, steps = seen["num_params"], len(seen["rest"])
    extra = sum(seen["rest"][-1].values()) / num_params - 12
    assert extra == pytest.approx(tensors * steps, abs=0.01)
    assert (seen["python_bytes"] > 1.5 * num_params) == bool(aside)
    assert seen["python_bytes"] >= aside * steps * num_params
