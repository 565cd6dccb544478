"""memory.2: the bytes of the model states by recipe, on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

PARTS = "`weights`, `gradients`, `master_weights`, `main_gradients`, `moments`"
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
LONGEST = 4096  # of a block


def recipe(
    weights: str = "bf16", gradients: str = "bf16", master: bool = True, main_gradients: bool = False, block: int = 0
) -> dict[str, Any]:
    """A recipe as the task writes it; with a `block` the moments have 8 bits each."""
    return {
        "weights": weights, "gradients": gradients, "master_weights": master, "main_gradients": main_gradients,
        "moments": "int8" if block else "fp32", "block": block or None,
    }  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The known recipes; every format; moments of 8 bits where blocks divide, where they do not, where one is short."""
    block, odd = int(rng.choice([64, 256, 2048])), int(rng.integers(10, 100)) * 2 + 1
    count = int(rng.integers(10**5, 10**11)) // LONGEST * LONGEST
    drawn = [
        ("16 bytes", count + 1, recipe()),
        ("12 bytes", count + 3, recipe(master=False)),
        ("18 bytes", count, recipe(gradients="fp32")),
        ("20 bytes", count + 1, recipe(main_gradients=True)),
        ("all in fp32", count, recipe("fp32", "fp32", master=False)),
        ("all in fp32, and a copy of the weights", count + 1, recipe("fp32", "fp32")),
        ("fp16, and both copies of gradients in fp32", count + 5, recipe("fp16", "fp32", False, True)),
        (f"moments of 8 bits in blocks of {block}", count + 1, recipe(block=block)),
        (f"moments of 8 bits in blocks of {block}, all full", count, recipe(master=False, block=block)),
        (f"moments of 8 bits in blocks of {odd}, the last one full but for one", 40 * odd - 1, recipe(block=odd)),
        ("moments of 8 bits in one block", LONGEST - block // 2, recipe("fp8", "fp8", True, True, block=LONGEST)),
    ]
    return [call(f"{number:,} parameters, {name}", [number, each]) for name, number, each in drawn]


def right(case: Case) -> dict[str, int]:
    num_params, how = case["arguments"]
    num_scales = -(-num_params // how["block"]) if how["moments"] == "int8" else 0  # rounded up
    return {
        "weights": BYTES[how["weights"]] * num_params,
        "gradients": BYTES[how["gradients"]] * num_params,
        "master_weights": 4 * num_params if how["master_weights"] else 0,
        "main_gradients": 4 * num_params if how["main_gradients"] else 0,
        "moments": 2 * (BYTES[how["moments"]] * num_params + 4 * num_scales),
    }


part = partial(values, right=right, parts=PARTS, rtol=1e-14)

EXERCISE = on_paper(
    "memory.2", "state_bytes", "The bill of a recipe", draw,
    part(1, "weights and gradients", "the weights and the gradients", part=("weights", "gradients")),
    part(2, "copies", "the fp32 copies of weights and gradients", part=("master_weights", "main_gradients")),
    part(2, "moments", "Adam's moments, scales included", part="moments"),
)  # fmt: skip
