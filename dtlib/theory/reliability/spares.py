"""Nodes that stand by: how likely they suffice, how long a job waits without, how many of them pay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from dtlib.theory.formula import formula
from dtlib.theory.valid import at_most, number, whole

_MOST = 10_000


@formula(
    "reliability.spares_suffice",
    source="derived here",
    label="eq-reliability-spares",
    equation=r"\sum_{i=0}^{k} e^{-A} \frac{A^i}{i!}, \quad A = \frac{N \rho}{m}",
)
def spares_suffice(spares: int, nodes: int, unit_mtbf: float, repair: float) -> float:
    """The chance that at most k `spares` are wanted in the ρ seconds of a `repair`: failures in it are Poisson's.

    Of N `nodes` that always run, so many are in repair at any time, whatever the law of its length.
    """
    k, load = _load(spares, nodes, unit_mtbf, repair)
    return min(1.0, sum(itertools.islice(_poisson(load), k + 1)))


def spares_needed(nodes: int, unit_mtbf: float, repair: float, chance: float = 0.99) -> int:
    """The fewest spares that suffice with this `chance`; ``ValueError`` where it is above 1 − 10⁻⁹."""
    if number("chance", chance) > 1 - 1e-9:
        raise ValueError(f"chance must be at most 1 − 1e-9, not {chance!r}")
    _, load = _load(0, nodes, unit_mtbf, repair)
    return next(k for k, so_far in enumerate(itertools.accumulate(_poisson(load))) if so_far >= chance)


@formula(
    "reliability.standing_share",
    source="erlang1917",
    label="eq-reliability-standing",
    equation=r"\frac{A^{c}/c!}{\sum_{i=0}^{c} A^i/i!}, \quad A = \frac{N \rho}{m}, \; c = k + 1",
)
def standing_share(spares: int, nodes: int, unit_mtbf: float, repair: float) -> float:
    """The share of all time that a job stands since more than k `spares` are in repair, for ρ seconds in the mean.

    While N `nodes` run one fails each m/N seconds; k + 1 in repair and the job stands, so nothing more fails: Erlang's
    loss formula, with repairs as calls. Without a spare ρ/(ρ + m/N).
    """
    k, load = _load(spares, nodes, unit_mtbf, repair)
    share = 1.0
    for i in range(1, k + 2):
        share = load * share / (i + load * share)
    return share


@formula(
    "reliability.spare_pays_from",
    source="derived here",
    label="eq-reliability-spare-pays",
    equation=r"\sqrt{m/\rho}",
    use="In a smaller job one spare idles for longer than the job would wait.",
)
def spare_pays_from(unit_mtbf: float, repair: float) -> float:
    """Nodes of a job above which a spare that always suffices makes more of all nodes' time than none.

    N/(N + 1) of them run with it, 1/(1 + Nρ/m) of the time without: equal at N² = m/ρ. Above, one spare may suffice no
    more.
    """
    return math.sqrt(number("unit_mtbf", unit_mtbf, positive=True) / number("repair", repair, positive=True))


def _poisson(load: float) -> Iterator[float]:
    """Chances of 0, 1, 2, … failures, from logarithms: neither e^{−A} nor A^i leaves the range of doubles."""
    log = math.log(load) if load else -math.inf
    return (math.exp(i * log - load - math.lgamma(i + 1)) if i else math.exp(-load) for i in itertools.count())


def _load(spares: int, nodes: int, unit_mtbf: float, repair: float) -> tuple[int, float]:
    """Spares, and failures in the time of a repair."""
    k = at_most("spares", whole("spares", spares, 0), _MOST)
    n = whole("nodes", nodes, 1)
    load = n * number("repair", repair) / number("unit_mtbf", unit_mtbf, positive=True)
    if load > _MOST:
        raise ValueError(f"repair must be so short that at most {_MOST:,} nodes are in it at a time, not {repair!r}")
    return k, load
