"""memory.1: the parameters of a Llama, on paper."""

from functools import partial
from math import prod
from typing import Any

from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values

PARTS = "`embedding`, `attention`, `mlp`, `norms`, `head`"


def draw(rng: Rng) -> Cases:
    """Llama 3 8B; odd sizes, whose counts no float32 holds; several heads of queries a key, tied and not; one key for
    each, and one for all, in one layer."""

    def sizes(queries: int, keys: int, tied: bool, num_layers: int = 0) -> tuple[Any, ...]:
        hidden = queries * keys * 2 * int(rng.integers(4, 40))
        ffn_hidden = hidden * 2 + int(rng.integers(1, 2 * hidden - 1))
        num_layers = num_layers or int(rng.integers(2, 60))
        return num_layers, hidden, queries * keys, keys, ffn_hidden, int(rng.integers(10_000, 200_000)), tied

    drawn = [
        (32, 4096, 32, 8, 14336, 128256, False),
        (51, 5115, 33, 11, 13651, 128257, False),
        sizes(int(rng.integers(2, 7)), int(rng.integers(2, 5)), True),
        sizes(int(rng.integers(2, 7)), int(rng.integers(2, 5)), False),
        sizes(1, int(rng.integers(2, 5)), False),
        sizes(int(rng.integers(2, 7)), 1, True, num_layers=1),
    ]
    words = "{} layers, width {}, {} heads, {} for keys and values, MLP {}, {} tokens, {}tied"
    return [call(words.format(*each[:-1], "" if each[-1] else "not "), each) for each in drawn]


def right(case: Case) -> dict[str, int]:
    """The parameters of each part: the elements of all its tensors, with nothing summed or simplified before."""
    num_layers, hidden, num_heads, num_kv_heads, ffn_hidden, vocab, tied = case["arguments"]
    head_dim = hidden // num_heads
    queries, keys = (num_heads * head_dim, hidden), (num_kv_heads * head_dim, hidden)
    layer = {
        "attention": [queries, keys, keys, queries[::-1]],  # queries, keys, values, output
        "mlp": [(ffn_hidden, hidden), (ffn_hidden, hidden), (hidden, ffn_hidden)],  # gate, up, down
        "norms": [(hidden,), (hidden,)],  # before attention, before the MLP
    }
    whole = {part: tensors * num_layers for part, tensors in layer.items()}
    whole["norms"].append((hidden,))  # before the head
    whole |= {"embedding": [(vocab, hidden)], "head": [] if tied else [(vocab, hidden)]}
    return {part: sum(map(prod, tensors)) for part, tensors in whole.items()}


part = partial(values, right=right, parts=PARTS, rtol=1e-14)

EXERCISE = on_paper(
    "memory.1", "llama_parameters", "Every parameter of a Llama", draw,
    part(2, "attention", "the attention of all layers", part="attention"),
    part(1, "mlp", "the MLP of all layers", part="mlp"),
    part(1, "norms", "all norms", part="norms"),
    part(1, "vocabulary", "the embedding and the head", part=("embedding", "head")),
)  # fmt: skip
