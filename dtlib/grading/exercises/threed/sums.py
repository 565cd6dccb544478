"""threed.2: along which axes a gradient is summed; on paper."""

from itertools import product

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import by, on_paper

MATRIX, KEYS, EMBEDDING, POSITIONS, NORM, BIAS = WEIGHTS = (
    "matrix", "key heads", "embedding", "positions", "norm", "bias behind a sum",
)  # fmt: skip
COPIES = (POSITIONS, NORM, BIAS)

#: Degrees of dp, cp, pp and tp; whether tokens are split over tp, the table is tied; and heads of keys.
MESHES = (
    ((2, 1, 1, 1), False, True, 8), ((1, 4, 1, 1), False, True, 8), ((1, 1, 4, 1), False, True, 8),
    ((1, 1, 4, 1), False, False, 8), ((1, 1, 1, 4), False, True, 4), ((1, 1, 1, 4), True, True, 4),
    ((1, 1, 1, 8), False, False, 2), ((2, 2, 1, 4), True, False, 2), ((4, 1, 2, 2), False, True, 2),
    ((2, 1, 8, 8), True, True, 8), ((2, 2, 2, 2), True, True, 1), ((1, 1, 1, 1), False, True, 8),
    ((2, 1, 2, 2), False, False, 8), ((1, 2, 1, 4), True, True, 8),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind of weight on each mesh, and on some that are drawn, with the axes in any order."""
    cases = []
    for weight, ((dp, cp, pp, tp), split, tied, heads) in product(WEIGHTS, [*MESHES, *(drawn(rng) for _ in range(3))]):
        sizes = {"dp": dp, "cp": cp, "pp": pp, "tp": tp}
        axes = {str(name): sizes[str(name)] for name in rng.permutation(list(sizes))}
        words = f"{weight} on {', '.join(f'{name} {size}' for name, size in axes.items())}"
        words += f", {'tokens split, ' * split}{'tied' if tied else 'untied'}, {heads} heads of keys"
        cases.append(call(words, [weight, axes, split, tied, heads]))
    return [cases[place] for place in rng.permutation(len(cases))]


def drawn(rng: Rng) -> tuple[tuple[int, ...], bool, bool, int]:
    """A mesh like those of `MESHES`."""
    dp, cp, pp, tp, heads = (2 ** int(rng.integers(5)) for _ in range(5))
    return (3 * dp, cp, pp, tp), bool(rng.integers(2)), bool(rng.integers(2)), heads


def right(case: Case) -> list[str]:
    """Those along which ranks hold the entry and see different terms, where there are several ranks."""
    weight, axes, split, tied, heads = case["arguments"]
    sums = {"dp": True, "cp": True, "pp": weight == EMBEDDING and tied}
    sums["tp"] = (weight in COPIES and split) or (weight == KEYS and heads < axes["tp"])
    return [name for name, size in axes.items() if size > 1 and sums[name]]


of = by("arguments", right, kind="gradient")

EXERCISE = on_paper(
    "threed.2", "summed_along", "Along which axes is this gradient summed?", draw,
    of(MATRIX, KEYS)(2, "slices", "matrices, and key heads that several ranks may hold"),
    of(*COPIES)(3, "copies", "norms, positions and biases, which all ranks of tp hold"),
    of(EMBEDDING)(2, "embedding", "the embedding, which may be the head as well"),
)  # fmt: skip
