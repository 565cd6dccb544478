"""tp.2: what one rank keeps of a layer's weights and activations, on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.theory import activations

#: Heads of queries, of keys and values, and ranks: fewer ranks than heads of keys, as many, more; one head for all, and
#: a head for each query.
SPLITS = ((24, 8, 1), (24, 6, 2), (16, 4, 4), (24, 2, 8), (12, 3, 6), (16, 1, 4), (30, 30, 5), (12, 12, 3))


def draw(rng: Rng) -> Cases:
    """A published layer over the ranks of a node, and of two; each kind of split, in turn with biases and without."""
    cases = [case(8192, 64, 8, 28672, False, 8192, 1, ranks) for ranks in (8, 16)]
    for number, (heads, kv_heads, ranks) in enumerate(SPLITS):
        hidden = heads * int(rng.choice([48, 64, 80, 128]))
        middle = 120 * int(rng.integers(10, 60)) if ranks in (3, 5, 6) else 64 * int(rng.integers(20, 90))
        biases = bool((number + number // 4) % 2)
        seq, batch = 128 * int(rng.integers(3, 40)), int(rng.choice([2, 3, 5]))
        cases.append(case(hidden, heads, kv_heads, middle, biases, seq, batch, ranks))
    return cases


def case(*arguments: Any) -> dict[str, Any]:
    words = "h={}, {} heads, {} of keys and values, f={}, biases {}, s={}, b={}, t={}".format(*arguments)
    return call(words, arguments)


def right(case: Case) -> dict[str, float]:
    """The first matrices of a pair have a t-th of their outputs, the second ones of their inputs."""
    hidden, heads, kv_heads, middle, biases, seq, batch, ranks = case["arguments"]
    own_heads = heads // ranks + 2 * max(kv_heads // ranks, 1)
    first = {"attention": own_heads * (hidden // heads), "mlp": 2 * middle // ranks}
    second = {"attention": hidden // ranks, "mlp": middle // ranks}
    weights = {
        name: hidden * (first[name] + second[name]) + (first[name] + hidden if biases else 0)
        for name in ("attention", "mlp")
    }
    kept = activations.layer_bytes(seq, batch, hidden, heads, tp=ranks)
    return {**weights, "norms": 2 * hidden, "activations": kept}


ATTENTION = "the weights of attention, with heads that several ranks have"
part = partial(values, right=right, parts="the keys attention, mlp, norms, activations", kind="memory", rtol=1e-9)

EXERCISE = on_paper(
    "tp.2", "kept_by_rank", "What one rank keeps", draw,
    part(2, "attention", ATTENTION, part="attention"),
    part(1, "mlp", "the weights of the MLP", part="mlp"),
    part(1, "norms", "the weights of the norms", part="norms"),
    part(3, "activations", "the bytes of a GPT layer's activations", part="activations"),
)  # fmt: skip
