"""The exercises of the chapter: the reference passes, other right answers too, each known mistake is named.

What the exercises on paper expect is held against torch: bytes that autograd keeps of real layers and chains, and the
peak of a real backward pass.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab, ranks, theory
from dtlib.grading import Exercise, Result, Run, all_exercises, plain
from dtlib.grading.checks.activations import budget, chain, cuts, gated, layer
from dtlib.grading.harness import resolve
from dtlib.ranks.model import GPT, Block, GPTConfig

from .answers import check_blank, check_reference, check_right, check_wrong, of_stem, right_of_stem, wrong_of_stem
from .bank import RightAnswer, WrongAnswer, cells, namespace, reference_namespace

STEM = "activations"
EXERCISES = of_stem(STEM)
WRONG = wrong_of_stem(STEM)
RIGHT = right_of_stem(STEM)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
SEEDS = range(12)


def test_there_are_six_exercises_and_five_mistakes_for_each():
    assert len(EXERCISES) >= 6
    counts = Counter(exercise for exercise, _ in {(wrong.exercise, wrong.mistake) for wrong in WRONG})
    assert set(counts) == set(EXERCISES)
    assert min(counts.values()) >= 5
    others = Counter(right.exercise for right in RIGHT)
    assert min(others[exercise] for exercise in EXERCISES) >= 2


@pytest.mark.parametrize("exercise", EXERCISES)
def test_reference_passes(exercise: str):
    check_reference(exercise)


@pytest.mark.parametrize("right", RIGHT, ids=[f"{right.exercise}: {right.title}" for right in RIGHT])
def test_right_in_another_way_passes(right: RightAnswer):
    check_right(right)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_blank_is_not_attempted(exercise: str):
    check_blank(exercise)


# Every fourth of them in a notebook's way; test_sandbox tries all of them in the grader's.
@pytest.mark.parametrize("wrong", WRONG[::4], ids=[f"{wrong.exercise}: {wrong.title}" for wrong in WRONG[::4]])
def test_mistake_is_named(wrong: WrongAnswer):
    check_wrong(wrong)


def test_mistakes_that_no_answer_makes_are_no_part_of_the_exercises():
    made = {(wrong.exercise, wrong.check, wrong.mistake) for wrong in WRONG}
    shared = {"library called", "out of sight", "out of the thread", "torch's checkpoint called"}
    for name in EXERCISES:
        for check in all_exercises()[name].checks:
            for mistake in check.mistakes:
                if mistake.name not in shared:
                    assert any((name, other.name, mistake.name) in made for other in all_exercises()[name].checks), (
                        name,
                        mistake.name,
                    )


# activations.2: the harness watches torch, so tests/grading/test_paper.py passes it by


def judged(exercise: Exercise, space: dict, seed: int) -> Result:
    harness = resolve(exercise.harness)
    observed = [(case, harness(space[exercise.function], case)) for case in exercise.cases(seed)]
    return exercise.judge([Run(case, (plain.unpack(plain.pack(data)),)) for case, data in observed])


def test_reference_predicts_for_every_seed():
    space = reference_namespace(STEM)
    for seed in range(60):
        assert judged(chain.CHAIN, space, seed).status == "pass", f"seed {seed}"


PREDICTIONS = [wrong for wrong in WRONG if wrong.exercise == "activations.2" and wrong.check != "own prediction"]


@pytest.mark.parametrize("wrong", PREDICTIONS, ids=[wrong.title for wrong in PREDICTIONS])
def test_wrong_prediction_is_named_for_every_seed(wrong: WrongAnswer):
    space = namespace(cells(STEM)["setup"], wrong.source)
    for seed in range(60):
        (told,) = [check for check in judged(chain.CHAIN, space, seed).checks if check.name == wrong.check]
        assert (told.passed, told.mistake) == (False, wrong.mistake), f"seed {seed}: {told.message}"


# What is expected, held against torch


def run_chain(steps: list, x: torch.Tensor) -> torch.Tensor:
    y = x
    for step in steps:
        name, dtype = step if isinstance(step, str) else step[0], x.dtype
        if name == "linear":
            y = torch.nn.Linear(y.shape[-1], step[1], dtype=dtype)(y)
        elif name == "norm":
            y = torch.nn.LayerNorm(y.shape[-1], dtype=dtype)(y)
        elif name == "dropout":
            y = F.dropout(y, 0.1)
        elif name == "softmax":
            y = y.softmax(-1)
        elif name in ("add", "times"):
            y = y + x if name == "add" else y * x
        else:
            y = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh, "double": lambda t: 2 * t}[name](y)
    return y


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_keeps_what_the_exercise_on_chains_expects(seed: int):
    for case in chain.CHAIN.cases(seed):
        steps, tokens, width, element = case["arguments"]
        x = torch.randn(tokens, width).to(DTYPES[element]).requires_grad_()
        measured = lab.saved_bytes(run_chain, steps, x).total
        assert measured == chain.chain_bytes(steps, tokens, width, element), case["words"]


@pytest.mark.parametrize(("element", "flash"), [(2, False), (4, False), (4, True)])
def test_torch_keeps_what_the_exercise_on_a_layer_expects(element: int, flash: bool):
    seq, micro_batch, hidden, heads = 48, 3, 64, 4
    sizes = {"num_layers": 1, "hidden": hidden, "num_heads": heads, "seq": seq, "dtype": DTYPES[element]}
    # Flash attention on a CPU knows no dropout; written out, the layer keeps masks of one byte, as on a GPU.
    config = GPTConfig(**sizes) if flash else GPTConfig(**sizes, dropout=0.1, written_out=True)
    x = torch.randn(micro_batch, seq, hidden, dtype=config.dtype, requires_grad=True)
    measured = lab.saved_bytes(Block(config), x).total
    case = {"arguments": [seq, micro_batch, hidden, heads, element, 0 if flash else 1, flash]}
    statistics = 4 * seq * micro_batch * element  # of two norms: left out by the exercise
    assert measured == sum(layer.part_bytes(case, part) for part in layer.PARTS) + statistics


def test_a_layer_of_the_exercise_is_that_of_the_paper():
    for seq, micro_batch, hidden, heads in ((2048, 1, 12288, 96), (2048, 4, 6144, 64), (640, 3, 768, 12)):
        parts = [
            layer.part_bytes({"arguments": [seq, micro_batch, hidden, heads, 2, 1, False]}, part)
            for part in layer.PARTS
        ]
        paper = theory.activations.layer_bytes(seq, micro_batch, hidden, heads)
        assert sum(parts) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_beats_the_best_one(seed: int):
    for case in cuts.CUTS.cases(seed):
        kept, inputs = case["arguments"]
        starts = cuts.best_starts(kept, inputs)
        assert cuts.peak_of(starts, kept, inputs) == cuts.best_peak(kept, inputs)
        later = range(1, len(kept))
        if len(kept) <= 12:
            plans = [(0, *cut) for count in range(len(kept)) for cut in combinations(later, count)]
        else:
            rng = np.random.default_rng(seed)
            plans = [(0, *sorted(rng.choice(later, rng.integers(1, 20), replace=False))) for _ in range(2000)]
        peaks = [cuts.peak_of(plan, kept, inputs) for plan in plans]
        assert min(peaks) >= cuts.best_peak(kept, inputs)
        if len(kept) <= 12:
            assert min(peaks) == cuts.best_peak(kept, inputs)


@pytest.mark.parametrize("seed", range(4))
def test_a_real_backward_has_the_peak_of_the_rule(seed: int):
    """Layers of a matrix and a tanh, which keep their input and their result; checkpoints are torch's."""
    rng = np.random.default_rng(seed)
    tokens, widths = 256, [int(each) for each in rng.integers(8, 64, 9)]
    layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh()) for a, b in pairwise(widths)]
    inputs = [4 * tokens * width for width in widths[:-1]]
    # A result counts with the next layer, whose input it is, but for the last of a segment.
    starts = [0, *sorted(rng.choice(range(1, 8), 2, replace=False).tolist())]
    ends = [*starts[1:], len(layers)]

    def step(x: torch.Tensor) -> None:
        y = x
        for start, end in zip(starts, ends, strict=True):
            y = checkpoint(torch.nn.Sequential(*layers[start:end]), y, use_reentrant=False)
        y.sum().backward()

    with lab.memory(*layers, detail="ops") as memory:
        step(torch.randn(tokens, widths[0], requires_grad=True))
    measured = max(moment.held.activations for moment in memory.timeline)
    waiting, rule = 0, 0
    for start, end in zip(starts, ends, strict=True):
        rule = max(rule, waiting + sum(inputs[start:end]) + 4 * tokens * widths[end])
        waiting += inputs[start]
    assert measured == rule


def test_the_gradients_of_the_gate_are_those_of_torch():
    for case in gated.GATED.cases(3):
        tensors = [torch.from_numpy(case[name]).double().requires_grad_() for name in ("gate", "up")]
        y = F.silu(tensors[0]) * tensors[1]
        y.backward(torch.from_numpy(case["upstream"]).double())
        np.testing.assert_allclose(gated._output(case), y.detach().numpy(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gated._gate_gradient(case), tensors[0].grad.numpy(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gated._up_gradient(case), tensors[1].grad.numpy(), rtol=1e-12, atol=1e-12)


def test_the_numbers_in_the_texts():
    of_gpt3 = {"arguments": [2048, 1, 12288, 96, 2, 1, False]}
    layer_gb = sum(layer.part_bytes(of_gpt3, part) for part in layer.PARTS) / 1e9
    assert (f"{layer_gb:.1f} GB" in task(1), f"{96 * layer_gb:.0f} GB" in task(1)) == (True, True)
    assert cuts.peak_of([0, 2, 4], [4] * 6, [2] * 6) == 12
    assert "layers would need 12." in task(3)
    (many,) = [case for case in cuts.CUTS.cases(1) if len(case["arguments"][0]) > 14]
    assert len(many["arguments"][0]) == 40
    x = torch.ones(10, 8, requires_grad=True)
    assert lab.saved_bytes(run_chain, [["linear", 32], "gelu", ["linear", 8], "add"], x).total == 2880
    gate, up = torch.ones(2, 64, requires_grad=True)
    for formula, tensors in ((lambda g, u: F.silu(g) * u, 3), (lambda g, u: g * torch.sigmoid(g) * u, 4)):
        assert lab.saved_bytes(formula, gate * 1, up * 1).total == tensors * 4 * 64


def task(number: int) -> str:
    return cells(STEM)[f"{STEM}-{number}-task"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_torch_keeps_and_computes_what_the_exercise_on_a_budget_expects(recompute: str):
    """A layer in bf16, its core or all of it under the library's checkpoint, forward and backward."""
    seq, micro_batch, hidden, heads = 32, 2, 64, 4
    config = GPTConfig(1, hidden, heads, seq, dropout=0.1, written_out=True, dtype=torch.bfloat16)
    model = GPT(config)
    ranks.activations.recompute(model, recompute)
    x = torch.randn(micro_batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
    number = ("none", "selective", "full").index(recompute)
    statistics = 0 if recompute == "full" else 4 * seq * micro_batch * 2
    kept = budget.layer_bytes(seq, micro_batch, hidden, heads)[number]
    assert lab.saved_bytes(model.run_blocks, x).total == kept + statistics
    forward = 4 * micro_batch * seq * seq * hidden + 24 * micro_batch * seq * hidden**2
    with FlopCounterMode(display=False) as flops:
        model.run_blocks(x).sum().backward()
    again = budget.layer_flops(seq, micro_batch, hidden, heads)[number]
    assert flops.get_total_flops() == 3 * forward + again
