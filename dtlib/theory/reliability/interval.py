"""How long to work between two saves. In all of them the interval is seconds of work from the end of one save to the
start of the next: the save itself is not counted in it."""

from __future__ import annotations

import math

from dtlib.theory.formula import formula
from dtlib.theory.valid import number


@formula(
    "reliability.young_interval",
    source="young1974",
    label="eq-reliability-young",
    equation=r"\tau = \sqrt{2\,\delta M}",
    use="Whoever saves less often loses more to failures than to saving, whoever saves more often the other way round.",
)
def young_interval(save: float, mtbf: float) -> float:
    """Seconds of work between saves of δ seconds (`save`) that waste least, to first order.

    A second of work costs δ/τ of saving and, with τ/2 lost in each failure, τ/(2M): least where both are equal. The
    minimum of `waste`. Source: Young 1974, Communications of the ACM 17 (9).
    """
    return math.sqrt(2 * number("save", save) * number("mtbf", mtbf, positive=True))


@formula(
    "reliability.daly_interval",
    source="daly2006",
    label="eq-reliability-daly",
    equation=(
        r"\tau = \begin{cases} \sqrt{2\,\delta M}\left(1 + \frac13\sqrt{\frac{\delta}{2M}}"
        r" + \frac19\,\frac{\delta}{2M}\right) - \delta & \delta < 2M \\ M & \text{else} \end{cases}"
    ),
)
def daly_interval(save: float, mtbf: float, restart: float = 0) -> float:
    """Seconds of work between saves of δ seconds (`save`), by the higher-order form, a series for `best_interval`.

    √(2δM)[1 + ⅓√(δ/2M) + ⅑ δ/2M] − δ for δ < 2M, else M. The `restart` may be given, and drops out: it is paid once a
    failure whatever the interval. Source: Daly 2006, Future Generation Computer Systems 22 (3).
    """
    delta, mean = number("save", save), number("mtbf", mtbf, positive=True)
    number("restart", restart)
    if delta >= 2 * mean:
        return mean
    z = math.sqrt(delta / (2 * mean))
    return math.sqrt(2 * delta * mean) * (1 + z / 3 + z * z / 9) - delta


@formula(
    "reliability.best_interval",
    source="daly2006",
    label="thm-reliability-best",
    equation=r"\tau = M(1 + W), \quad W e^W = -e^{-1 - \delta/M}, \; W > -1",
    use="With exponential failures any other interval makes less of the time.",
)
def best_interval(save: float, mtbf: float) -> float:
    """Seconds of work between saves of δ seconds (`save`) at which `goodput` is largest, exactly.

    Its derivative is 0 where e^{(τ+δ)/M}(1 − τ/M) = 1: with x = τ/M, x + ln(1 − x) = −δ/M, which the upper branch of
    Lambert's W solves, x = 1 + W. By Newton's method. Neither restart nor detection matter. 0 for a save that takes
    no time; towards M for one of many M. There `goodput` is 1 − τ/M, times e^{−R/M} M/(M + d). Source: Daly 2006, who
    solves the equation by a series.
    """
    cost = number("save", save) / number("mtbf", mtbf, positive=True)
    if cost > 35:  # 1 − x = e^{−x−δ/M}: M, to the last digit
        return float(mtbf)
    x = 1 - math.exp(-1 - cost) if cost > 0.5 else math.sqrt(2 * cost) * (1 - math.sqrt(2 * cost) / 3)
    for _ in range(50):
        step = (_hazard(x) - cost) * (1 - x) / x if x else 0.0
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x * mtbf


def _hazard(x: float) -> float:
    """−x − ln(1 − x), by its series x²/2 + x³/3 + … where the difference would lose digits."""
    if x > 0.1:
        return -x - math.log1p(-x)
    return sum(x**k / k for k in range(2, 20))
