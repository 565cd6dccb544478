"""tp.3: the largest number of ranks that is worth it, on paper."""

from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import models, tp

#: Heads, ranks a node, nodes, the ranks that just reach the share (or, "missed", those before the first that just do
#: not), the fewest that have room, and tokens over width. The heads of some are not divided by a node, or by what is
#: between two degrees.
KINDS = {
    "inside": (32, 8, 4, 4, 1, 0.5, "reached"),
    "inside, missed": (48, 8, 4, 4, 2, 0.5, "missed"),
    "a whole node": (64, 8, 4, 8, 2, 1, "reached"),
    "a whole node, missed": (64, 8, 4, 8, 1, 1, "missed"),
    "several nodes": (96, 8, 6, 24, 8, 1, "reached"),
    "several nodes, missed": (96, 8, 6, 16, 3, 1, "missed"),
    "nodes of six": (60, 6, 5, 12, 1, 1, "reached"),
    "nodes of four, long, missed": (64, 4, 8, 4, 1, 8, "missed"),
    "wide": (32, 8, 4, 8, 1, 0.0625, "reached"),
    "long": (64, 8, 4, 8, 1, 8, "reached"),
    "one rank": (32, 8, 2, 1, 1, 0.25, "missed"),
    "the fewest": (64, 8, 4, 8, 8, 1, "missed"),
    "the next are too many": (64, 8, 4, 8, 9, 1, "missed"),
    "all cards": (128, 8, 4, 32, 1, 2, "generous"),
    "heads of no node": (36, 8, 4, 4, 1, 2, "generous"),
    "more than there are": (64, 4, 2, 8, 12, 2, "generous"),
}


def draw(rng: Rng) -> Cases:
    """The task's model, and each kind, by two parts in a hundred on its side of the least share; then a share that is
    reached exactly, in powers of two: so in any order of operations."""
    cases = [case("70 billion", 8192, 64, 8192, 667e12, 8, 4, 450e9, 50e9, 1, 0.8)]
    for kind, (heads, node, nodes, ranks, fewest, long, how) in KINDS.items():
        hidden = heads * int(rng.choice([64, 80, 128]))
        seq, inside = int(long * hidden), float(rng.integers(100, 900)) * 1e9
        across = inside / int(rng.integers(3, 6))
        behind = next((t for t in degrees(heads, node, nodes) if t > ranks), ranks)
        edge = behind if how == "missed" else ranks
        link = inside if edge <= node else across
        share = float(rng.uniform(0.5, 0.65))  # of those at the edge
        flops = (9 * hidden + 1.5 * seq) / 2 * link * (1 - share) / share / (edge - 1)
        at = [hidden, heads, seq, float(f"{flops:.4g}"), node, nodes, inside, across]
        least = {"reached": 0.98, "missed": 1.02, "generous": 0.1}[how] * reached(at, edge)
        cases.append(case(kind, *at, fewest, least))
    hidden = int(rng.choice([2048, 4096, 8192]))
    exact = (hidden, 32, 2 * hidden, 2.0**38 * hidden, 8, 2, 2.0**37, 2.0**35, 1, 0.5)
    return [*cases, case("just reached", *exact)]


def case(kind: str, *arguments: Any) -> dict[str, Any]:
    words = "{}: h={}, {} heads, s={}, {:.3g} operations/s, {} cards in each of {} nodes, {:.3g} and {:.3g} B/s, "
    words = (words + "at least {} ranks at {:.4f}").format(kind, *arguments)
    found = {"arguments": list(arguments)}
    return call(words, arguments, some=bool(enough(found)))


def degrees(heads: int, node: int, nodes: int) -> list[int]:
    """What divides the heads, and a node or is whole nodes."""
    return [t for t in range(1, node * nodes + 1) if heads % t == 0 and (node % t == 0 or t % node == 0)]


def reached(arguments: Any, ranks: int) -> float:
    """The share of their speed that so many ranks reach."""
    hidden, _, seq, flops, node, _, inside, across, *_ = arguments
    model = models.gpt("", num_layers=1, hidden=hidden, num_heads=1, vocab=1, seq=seq)
    return tp.efficiency(ranks, tp.break_even_ranks(model, flops, inside if ranks <= node else across))


def enough(case: Case) -> list[int]:
    """All numbers of ranks that will do, in increasing order."""
    arguments = case["arguments"]
    _, heads, _, _, node, nodes, _, _, fewest, least = arguments
    rounded = least * (1 - 1e-9)
    return [t for t in degrees(heads, node, nodes) if t >= fewest and reached(arguments, t) >= rounded]


def gives(case: Case, ranks: int) -> str:
    """What so many ranks come to."""
    _, heads, _, _, node, nodes, _, _, fewest, _ = case["arguments"]
    if not 1 <= ranks <= node * nodes:
        return f"where there are {node * nodes} cards"
    if heads % ranks:
        return f"which does not divide {heads} heads"
    if ranks not in degrees(heads, node, nodes):
        return f"neither a part of a node of {node} nor whole nodes"
    few = f"fewer than {fewest}, " if ranks < fewest else ""
    return f"{few}at {reached(case['arguments'], ranks):.1%} of the speed"


def rule(case: Case) -> str:
    *_, fewest, least = case["arguments"]
    return f"at least {fewest} ranks, at {least:.1%} of the speed or more"


EXERCISE = on_paper(
    "tp.3", "largest_degree", "How many ranks share a layer?", draw,
    *choice.largest(
        enough, "ranks", "so many ranks can share the layer and reach the share, and None where none can",
        "no larger number of ranks does", gives=gives, rule=rule,
    ),
)  # fmt: skip
