"""mtp.1: what further heads weigh, compute and hold, on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.theory import memory, models, mtp

TRIPLE = "parameters, operations, logits_bytes"


def draw(rng: Rng) -> Cases:
    """Llama 3 8B with four heads; one token, two, a power of two and none, of both kinds, in one graph and in turn,
    with norms of one parameter an entry and of two."""
    cases = [case("llama3-8b", 4, False, 8192, False, 4)]
    for n, behind, turns, width, of_gpt in (
        (1, False, False, 4, True), (1, True, True, 2, False), (2, True, False, 2, True), (3, False, True, 4, False),
        (4, True, True, 2, True), (5, False, False, 2, True), (3, True, False, 4, False), (2, False, True, 4, True),
    ):  # fmt: skip
        heads, dim = int(rng.choice([3, 5, 7, 12])), int(rng.choice([32, 48, 64]))
        sizes: dict[str, Any] = {
            "num_layers": 1, "hidden": heads * dim, "num_heads": heads, "vocab": int(rng.integers(3_000, 90_000)),
            "seq": 128 * int(rng.integers(2, 20)),
        }  # fmt: skip
        model = models.gpt("", **sizes) if of_gpt else models.llama("", ffn_hidden=3 * heads * dim + 64, **sizes)
        cases.append(case(model, n, behind, sizes["seq"] * int(rng.choice([2, 3, 5])), turns, width))
    return cases


def case(model: Any, n: int, behind: bool, tokens: int, turns: bool, width: int) -> dict[str, Any]:
    model = models.checked_model(model)
    forward = memory.forward_flops_per_token(model)
    layer = models.layer_parameters(model).total, int((forward.total - forward.head) / model.num_layers)
    given = [model.hidden, model.vocab, *layer, models.norm_parameters(model), n, behind, tokens, turns, width]
    words = "h={}, V={}, a layer of {} parameters and {} operations, norms of {}, n={}, {}, {} tokens, {}, {} B"
    told = [*given[:6], "modules" if behind else "heads", tokens, "in turn" if turns else "one graph", width]
    kind = mtp.KINDS[behind]
    right = [
        mtp.extra_parameters(model, n, kind), mtp.extra_flops_per_token(model, n, kind),
        mtp.logits_bytes(1, tokens, model.vocab, n, in_turn=turns, element_bytes=width),
    ]  # fmt: skip
    return call(words.format(*told), given) | {"right": right}


def right(case: Case) -> list[float]:
    return list(case["right"])


part = partial(values, right=right, parts=TRIPLE, rtol=1e-9)

EXERCISE = on_paper(
    "mtp.1", "heads_bill", "The bill of the heads", draw,
    part(2, "parameters", "parameters that further heads add", part=0),
    part(3, "operations", "operations that they add for a token, forward", part=1),
    part(2, "logits", "bytes of logits that are kept for backward", part=2),
)  # fmt: skip
