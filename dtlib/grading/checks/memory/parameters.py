"""memory.1: the parameters of a Llama, on paper."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import any_of
from dtlib.grading.exercise import Case, Check, Exercise, Mistake

from .entries import Entries, entry_gives, inspect_entries

NAMES = ("embedding", "attention", "mlp", "norms", "head")
Shapes = dict[str, list[tuple[int, ...]]]


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    def sizes(groups: int, tied: bool) -> tuple[Any, ...]:
        num_kv_heads = int(rng.integers(1, 5))
        num_heads = num_kv_heads * groups
        hidden = num_heads * 2 * int(rng.integers(4, 40))
        ffn_hidden = int(rng.integers(2 * hidden, 5 * hidden))
        return int(rng.integers(2, 60)), hidden, num_heads, num_kv_heads, ffn_hidden, _vocab(rng), tied

    drawn = [
        (32, 4096, 32, 8, 14336, 128256, False),  # Llama 3 8B
        sizes(int(rng.integers(2, 7)), True),
        sizes(int(rng.integers(2, 7)), False),
        sizes(1, False),
    ]
    words = "{} layers, width {}, {} heads, {} for keys and values, MLP {}, {} tokens, {}tied"
    return [{"arguments": list(each), "words": words.format(*each[:-1], "" if each[-1] else "not ")} for each in drawn]


def _vocab(rng: np.random.Generator) -> int:
    return int(rng.integers(10_000, 200_000))


def shapes(case: Case) -> Shapes:
    """The shape of every tensor of the model, by part: nothing is summed or simplified."""
    num_layers, hidden, num_heads, num_kv_heads, ffn_hidden, vocab, tied = case["arguments"]
    head_dim = hidden // num_heads
    layer: Shapes = {
        "attention": [
            (num_heads * head_dim, hidden),  # queries
            (num_kv_heads * head_dim, hidden),  # keys
            (num_kv_heads * head_dim, hidden),  # values
            (hidden, num_heads * head_dim),  # output
        ],
        "mlp": [(ffn_hidden, hidden), (ffn_hidden, hidden), (hidden, ffn_hidden)],  # gate, up, down
        "norms": [(hidden,), (hidden,)],  # before attention, before the MLP
    }
    whole = {part: tensors * num_layers for part, tensors in layer.items()}
    whole["norms"].append((hidden,))  # before the head
    return {**whole, "embedding": [(vocab, hidden)], "head": [] if tied else [(vocab, hidden)]}


def count(case: Case) -> Entries:
    """The parameters of each part: the elements of its tensors."""
    return {part: sum(map(prod, tensors)) for part, tensors in shapes(case).items()}


def _entry(name: str, formula: Callable[..., int]) -> Any:
    """The mistake that gives ``formula(l, h, a, g, f, V, tied)`` for an entry."""
    return entry_gives(name, lambda case: formula(*case["arguments"]), NAMES)


_ATTENTION_MISTAKES = (
    mistake(
        "a key for each query",
        _entry("attention", lambda l, h, a, g, f, v, tied: 4 * l * h * h),
        "Four square matrices a layer: here every head of queries has keys and values of its own. How many heads are "
        "there for keys and values, and what does that do to the shape of their two matrices?",
    ),
    mistake(
        "one for keys and values",
        _entry("attention", lambda l, h, a, g, f, v, tied: l * (2 * h * h + h * (h // a) * g)),
        "Keys and values share one matrix here. What does a token need from each of the two?",
    ),
    mistake(
        "output shrunk too",
        _entry("attention", lambda l, h, a, g, f, v, tied: l * (h * h + 3 * h * (h // a) * g)),
        "The output matrix has as few rows as the keys. How many heads does attention hand to it: those of the "
        "queries, or those of the keys?",
    ),
    mistake(
        "output forgotten",
        _entry("attention", lambda l, h, a, g, f, v, tied: l * (h * h + 2 * h * (h // a) * g)),
        "Queries, keys, values. What mixes the heads' results before they are added to the stream?",
    ),
    mistake(
        "biases",
        _entry(
            "attention",
            lambda l, h, a, g, f, v, tied: l * (2 * h * h + 2 * h * (h // a) * g + 2 * h + 2 * (h // a) * g),
        ),
        "There is a bias for every output here. Does a model of this family have them?",
    ),
    mistake(
        "one layer",
        _entry("attention", lambda l, h, a, g, f, v, tied: 2 * h * h + 2 * h * (h // a) * g),
        "This is the attention of one layer. How many are there?",
    ),
    mistake(
        "width of one head",
        _entry("attention", lambda l, h, a, g, f, v, tied: l * (2 * h * h + 2 * h * g)),
        "The keys have one entry for each head here. How many entries does a head's key have?",
    ),
)
_MLP_MISTAKES = (
    mistake(
        "no gate",
        _entry("mlp", lambda l, h, a, g, f, v, tied: 2 * l * h * f),
        "Up and down, as in a GPT. What does SwiGLU multiply with what, and where do the two come from?",
    ),
    mistake(
        "four times the width",
        any_of(
            _entry("mlp", lambda l, h, a, g, f, v, tied: 8 * l * h * h),
            _entry("mlp", lambda l, h, a, g, f, v, tied: 12 * l * h * h),
        ),
        "The MLP is four times as wide as the model here. Which argument says how wide it really is?",
    ),
    mistake(
        "one layer",
        _entry("mlp", lambda l, h, a, g, f, v, tied: 3 * h * f),
        "This is the MLP of one layer. How many are there?",
    ),
)
_NORM_MISTAKES = (
    mistake(
        "last norm forgotten",
        _entry("norms", lambda l, h, a, g, f, v, tied: 2 * l * h),
        "Two norms a layer are counted. What happens to the stream between the last layer and the head?",
    ),
    mistake(
        "one norm a layer",
        any_of(
            _entry("norms", lambda l, h, a, g, f, v, tied: l * h + h),
            _entry("norms", lambda l, h, a, g, f, v, tied: l * h),
        ),
        "One norm a layer. A layer has two parts that read the stream: does each get a norm of its own?",
    ),
    mistake(
        "gain and bias",
        any_of(
            _entry("norms", lambda l, h, a, g, f, v, tied: 4 * l * h + 2 * h),
            _entry("norms", lambda l, h, a, g, f, v, tied: 4 * l * h),
        ),
        "Two numbers for each entry of a norm: that is a layer norm. What does an RMS norm learn?",
    ),
)
_VOCABULARY_MISTAKES = (
    mistake(
        "tied head counted",
        _entry("head", lambda l, h, a, g, f, v, tied: v * h),
        "The head is counted where it is tied as well. Whose storage does a tied head have?",
    ),
    mistake(
        "head never counted",
        _entry("head", lambda l, h, a, g, f, v, tied: 0),
        "The head is never counted. Where it is not tied, which matrix turns the last stream into a number for each "
        "token?",
    ),
    mistake(
        "tied the wrong way round",
        _entry("head", lambda l, h, a, g, f, v, tied: v * h if tied else 0),
        "The head is counted where it is tied, and left out where it is not. What does tied mean?",
    ),
    mistake(
        "a table of another size",
        any_of(
            _entry("embedding", lambda l, h, a, g, f, v, tied: v),
            _entry("embedding", lambda l, h, a, g, f, v, tied: 2 * v * h),
        ),
        "The embedding is a table: a row for each token. How long is a row, and is the head a part of it?",
    ),
)


def _check(
    name: str, points: int, description: str, looked_at: tuple[str, ...], mistakes: tuple[Mistake, ...]
) -> Check:
    return Check(name, "value", points, description, inspect_entries(count, NAMES, looked_at), mistakes)


PARAMETERS = Exercise(
    id="memory.1",
    function="llama_parameters",
    title="Every parameter of a Llama",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("llama_parameters"),
        _check("attention", 2, "the attention of all layers", ("attention",), _ATTENTION_MISTAKES),
        _check("mlp", 1, "the MLP of all layers", ("mlp",), _MLP_MISTAKES),
        _check("norms", 1, "all norms", ("norms",), _NORM_MISTAKES),
        _check("vocabulary", 1, "the embedding and the head", ("embedding", "head"), _VOCABULARY_MISTAKES),
    ),
)
