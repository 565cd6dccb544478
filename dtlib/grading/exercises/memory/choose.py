"""memory.1: the card, and how many of them, that train fastest within a budget; on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import memory
from dtlib.theory.units import GB, GiB

NAMES = ("A", "B", "C", "D")
DAY = 24 * 3600
Job = tuple[Any, ...]

#: Wrong theories, told from the right one by a job each: keywords of `possible`.
WRONG: dict[str, dict[str, Any]] = {
    "GB for GiB": {"room_unit": GB}, "no activations": {"activations": 0}, "any budget": {"budget": float("inf")},
    "any number": {"stock": 10**3}, "all in bf16": {"rate_of": "bf16"}, "all in fp32": {"rate_of": "fp32"},
    "first recipe": {"recipes": 1}, "one card": {"stock": 1}, "the most cards": {"most": True},
}  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The task's cards, a job that tells each wrong theory from the right one, cards that have just room and just not,
    and jobs for which there is nothing: no room, no money, no time."""
    recipes = [[16, "fp32"], [16, "bf16"], [10, "bf16"]]
    cards: dict[str, Any] = {
        "A": [24, {"bf16": 70e12, "fp32": 35e12}, 1.0, 64], "B": [80, {"bf16": 312e12, "fp32": 19.5e12}, 2.5, 16]
    }  # fmt: skip
    cases = [case("the task", (2 * 10**9, 4 * 10**10, 3 * 10**9, 7, 0.4, 20, recipes, cards))]
    for kind, theory in WRONG.items():
        cases.append(case(kind, choice.told_apart(rng, job, possible, partial(possible, **theory))))
    told = ((leanest,), (cheapest,), (leanest, partial(possible, rate_of="bf16")), (cheapest, strongest))
    cases += [case("any job", choice.told_apart(rng, job, possible, *theories)) for theories in told]
    blind = partial(possible, activations=0), partial(possible, room_unit=float("inf"))
    cases.append(case("activations or all", choice.told_apart(rng, job, possible, *blind)))
    cases += in_time(rng, cards["A"])
    some, few = choice.told_apart(rng, job, possible, partial(possible, stock=1)), 10**9
    for kind, spare in (("just room", 0), ("not quite", -1)):
        gib = int(rng.integers(20, 30))
        kept = gib * GiB - 16 * few - spare
        cases.append(case(kind, (few, few, kept, 30, 0.4, 20, [[16, "bf16"]], {"A": [gib, *cards["A"][1:]]})))
    for kind, place, value in (("no room", 0, 10**11), ("no money", 5, 0.5), ("no time", 3, 1e-3)):
        cases.append(case(kind, (*some[:place], value, *some[place + 1 :])))
    return cases


def in_time(rng: Rng, card: list[Any]) -> Cases:
    """Cards that are done just in time, and just not, for two numbers of tokens and two shares of the rate: no other
    number has the four answers."""
    cases, fewest, least = [], int(rng.integers(10, 20)) * 10**9, float(rng.uniform(0.2, 0.3))
    for tokens, share in ((fewest, least), (3 * fewest, least), (fewest, 1.6 * least)):
        for kind, factor in (("just in time", 1.001), ("too late", 0.999)):
            days = 6 * 10**9 * tokens / (8 * share * card[1]["bf16"]) / DAY * factor
            one_kind = {"A": [*card[:3], 8]}
            cases.append(case(kind, (10**9, tokens, 10**9, days, share, 20, [[16, "bf16"]], one_kind)))
    return cases


def job(rng: Rng) -> Job:
    """Two or three recipes, four cards whose prices are in quarters of a dollar, and time enough for some of them."""
    cards = {}
    for name, gib in zip(NAMES, rng.permutation([16, 24, 40, 48, 80]), strict=False):
        rate = float(rng.uniform(60, 90)) * 1e12 * int(gib) / 24
        rates = {"bf16": rate, "fp32": rate / float(rng.choice([2, 4, 16]))}
        price = int(rng.integers(3, 7) * gib / 12) / 4
        cards[name] = [int(gib), rates, price, int(rng.choice([2, 4, 8, 16, 64]))]
    kinds = [[16, "fp32"], [int(rng.choice([16, 18, 20])), "bf16"], [int(rng.choice([6, 10, 12])), "bf16"]]
    recipes = [kinds[each] for each in rng.permutation(3)[: int(rng.integers(2, 4))]]
    num_params = 10**6 * int(rng.integers(500, 5000))
    activations = 10**6 * int(rng.integers(500, 12_000))
    days, dollars = float(rng.integers(20, 200)), int(rng.integers(8, 120)) / 4
    share = float(rng.integers(30, 61)) / 100
    return num_params, int(rng.integers(8, 40)) * num_params, activations, days, share, dollars, recipes, cards


def possible(
    job: Job, room_unit: float = GiB, activations: float | None = None, budget: float | None = None,
    stock: int | None = None, rate_of: str | None = None, recipes: int = 3, most: bool = False,
) -> choice.Possible:  # fmt: skip
    """All (seconds, card, how many) that have room, are paid for and end in time; by the keywords, as others see it."""
    num_params, num_tokens, kept, days, utilisation, dollars, known, cards = job
    kept, dollars = kept if activations is None else activations, dollars if budget is None else budget
    found = []
    for name, (gib, rates, price, available) in cards.items():
        fitting = [
            rates[rate_of or kind] for width, kind in known[:recipes]
            if memory.model_state_bytes(num_params, width) + kept <= gib * room_unit
        ]  # fmt: skip
        for number in range(1, (stock or available) + 1):
            if fitting and number * price <= dollars:
                seconds = 6 * num_params * num_tokens / (number * utilisation * max(fitting))
                found += [(seconds, name, number)] * (seconds <= days * DAY)
    return [each for each in found if not most or each[2] == max(number for *_, number in found)]


def leanest(job: Job) -> choice.Possible:
    """With the recipe that keeps least."""
    return possible((*job[:6], [min(job[6])], job[7]))


def cheapest(job: Job) -> choice.Possible:
    """What the run costs in place of its seconds, with as many cards of a kind as will do."""
    most = {name: (seconds, number) for seconds, name, number in possible(job)}
    return [(seconds * number * job[7][name][2], name, number) for name, (seconds, number) in most.items()]


def strongest(job: Job) -> choice.Possible:
    """With as many as will do of the card that is the fastest alone."""
    most = {name: (seconds, number) for seconds, name, number in possible(job)}
    return [(seconds * number, name, number) for name, (seconds, number) in most.items()]


def case(kind: str, job: Job) -> dict[str, Any]:
    num_params, tokens, kept, days, share, dollars, recipes, cards = job
    words = f"{kind}: {num_params:,} parameters, {tokens:,} tokens, {kept:,} B of activations, {days:.6g} days, "
    words += f"{share:.6g} of the rate, {dollars:g} dollars an hour, "
    words += "recipes of " + ", ".join(f"{width} B in {form}" for width, form in recipes) + ", cards of "
    words += ", ".join(f"{gib} GiB" for gib, *_ in cards.values())
    return call(words, job, some=bool(possible(job)))


def of(case: Case) -> choice.Possible:
    return possible(tuple(case["arguments"]))


EXERCISE = on_paper(
    "memory.1", "fastest_cards", "Which card, and how many?", draw,
    *choice.checks(of, NAMES, "cards where none will do"),
)  # fmt: skip
