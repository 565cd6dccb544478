"""memory.2: the bytes of the model states by recipe, on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import any_of
from dtlib.grading.exercise import Case, Check, Exercise

from .entries import Entries, entry_gives, inspect_entries

NAMES = ("weights", "gradients", "master_weights", "main_gradients", "moments")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
Recipe = Mapping[str, Any]


def recipe(
    weights: str = "bf16", gradients: str = "bf16", master: bool = True, main_gradients: bool = False, block: int = 0
) -> dict[str, Any]:
    """A recipe as the task writes it; with a `block` the moments have 8 bits each."""
    return {
        "weights": weights,
        "gradients": gradients,
        "master_weights": master,
        "main_gradients": main_gradients,
        "moments": "int8" if block else "fp32",
        "block": block or None,
    }


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    block = int(rng.choice([64, 256, 2048]))
    drawn = {
        "16 bytes": recipe(),
        "12 bytes": recipe(master=False),
        "18 bytes": recipe(gradients="fp32"),
        "20 bytes": recipe(main_gradients=True),
        "all in fp32": recipe("fp32", "fp32", master=False),
        f"moments of 8 bits in blocks of {block}": recipe(block=block),
        "weights in fp8, 8-bit moments": recipe("fp8", "bf16", bool(rng.integers(2)), block=4096),
    }
    cases = []
    for name, each in drawn.items():
        num_params = int(rng.integers(10**5, 10**11)) | 1  # no multiple of any block
        cases.append({"arguments": [num_params, each], "words": f"{num_params:,} parameters, {name}"})
    return cases


def _blocks(num_params: int, block: int) -> int:
    return -(-num_params // block)


def count(case: Case) -> Entries:
    """The bytes of each part."""
    num_params, how = case["arguments"]
    if how["moments"] == "int8":
        moments = 2 * (num_params + 4 * _blocks(num_params, how["block"]))
    else:
        moments = 2 * 4 * num_params
    return {
        "weights": _BYTES[how["weights"]] * num_params,
        "gradients": _BYTES[how["gradients"]] * num_params,
        "master_weights": 4 * num_params if how["master_weights"] else 0,
        "main_gradients": 4 * num_params if how["main_gradients"] else 0,
        "moments": moments,
    }


def _entry(name: str, formula: Callable[[int, Recipe], Any]) -> Any:
    return entry_gives(name, lambda case: formula(*case["arguments"]), NAMES)


def _moments(in_8_bits: Callable[[int, int], Any]) -> Any:
    """The mistake that gives ``in_8_bits(num_params, block)`` for moments of 8 bits, and is right for others."""
    return _entry("moments", lambda n, how: in_8_bits(n, how["block"]) if how["block"] else 8 * n)


STATES = Exercise(
    id="memory.2",
    function="state_bytes",
    title="The bill of a recipe",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("state_bytes"),
        Check(
            "weights and gradients",
            "value",
            1,
            "the weights and the gradients",
            inspect_entries(count, NAMES, ("weights", "gradients")),
            (
                mistake(
                    "two bytes for everything",
                    any_of(
                        _entry("weights", lambda n, how: 2 * n),
                        _entry("gradients", lambda n, how: 2 * n),
                    ),
                    "It is right for formats of 16 bits, and only there. What does the recipe say about the others?",
                ),
                mistake(
                    "gradients like the weights",
                    _entry("gradients", lambda n, how: _BYTES[how["weights"]] * n),
                    "The gradients have the format of the weights here. Backward makes them so; can they be kept in "
                    "another one?",
                ),
                mistake(
                    "bits for bytes",
                    _entry("weights", lambda n, how: 8 * _BYTES[how["weights"]] * n),
                    "A factor of 8. How many bits has a byte?",
                ),
                mistake(
                    "bytes of one parameter",
                    _entry("weights", lambda n, how: _BYTES[how["weights"]]),
                    "These are the bytes of one parameter. How many parameters does the model have?",
                ),
            ),
        ),
        Check(
            "copies",
            "value",
            2,
            "the fp32 copies of weights and gradients",
            inspect_entries(count, NAMES, ("master_weights", "main_gradients")),
            (
                mistake(
                    "a master copy always",
                    _entry("master_weights", lambda n, how: 4 * n),
                    "Every recipe has a master copy here. What would one be good for where the recipe says no, where "
                    "the weights are fp32 themselves, say?",
                ),
                mistake(
                    "master copy never",
                    _entry("master_weights", lambda n, how: 0),
                    "No recipe has a master copy here. Where do updates go that are too small for the weights' format?",
                ),
                mistake(
                    "master copy in the weights' format",
                    _entry("master_weights", lambda n, how: _BYTES[how["weights"]] * n * how["master_weights"]),
                    "This copy is as coarse as the weights. What is it kept for, and which format does that take?",
                ),
                mistake(
                    "one copy of gradients",
                    _entry("main_gradients", lambda n, how: 0),
                    "The second copy of the gradients is missing. A recipe that keeps main gradients keeps them beside "
                    "those of the backward pass: which of the sums of 16, 18 and 20 bytes is that?",
                ),
                mistake(
                    "difference counted",
                    _entry("main_gradients", lambda n, how: (4 - _BYTES[how["gradients"]]) * n * how["main_gradients"]),
                    "Only what the fp32 copy is larger by was counted. Is the other copy overwritten, or does it stay?",
                ),
            ),
        ),
        Check(
            "moments",
            "value",
            2,
            "Adam's moments, scales included",
            inspect_entries(count, NAMES, ("moments",)),
            (
                mistake(
                    "one moment",
                    any_of(
                        _entry("moments", lambda n, how: count({"arguments": [n, how]})["moments"] // 2),
                        _entry("moments", lambda n, how: n if how["block"] else 4 * n),
                    ),
                    "This is one moment. Which two running means does Adam keep?",
                ),
                mistake(
                    "scales forgotten",
                    _moments(lambda n, block: 2 * n),
                    "Two bytes a parameter. A number of 8 bits says a fraction of something: where is that kept?",
                ),
                mistake(
                    "last block forgotten",
                    _moments(lambda n, block: 2 * (n + 4 * (n // block))),
                    "The scales are those of the full blocks. Which scale do the last parameters have?",
                ),
                mistake(
                    "a fraction of a scale",
                    _moments(lambda n, block: 2 * n + 8 * n / block),
                    "There is a fraction of a scale in it. Can a block that is not full have less than one?",
                ),
                mistake(
                    "half of the scales",
                    _moments(lambda n, block: 2 * n + 4 * _blocks(n, block)),
                    "This is half of what the scales take. Are the mean of the gradient and that of its square of one "
                    "size, and how many bytes has a number in fp32?",
                ),
                mistake(
                    "always in fp32",
                    _entry("moments", lambda n, how: 8 * n),
                    "The moments are in fp32 in every recipe here. What do those with 8 bits save?",
                ),
                mistake(
                    "in the weights' format",
                    _entry("moments", lambda n, how: 2 * _BYTES[how["weights"]] * n),
                    "The moments have the format of the weights here. The second one adds up squares of gradients: "
                    "what becomes of small terms in a coarse sum, and what does the recipe say?",
                ),
            ),
        ),
    ),
)
