"""ep.6: what is wrong with a run whose experts lie on ranks, by loads, bytes, rows and norms; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

from . import _routing

NOTHING, GATHERED, COPIES, DROPPED, SIGN, COLLAPSED, IDLE, TIMES = (
    "nothing wrong", "tokens gathered", "a copy for each expert", "rows dropped", "bias the wrong way",
    "router collapsed", "idle rank", "times the ranks",
)  # fmt: skip
STEPS = 5

#: What is wrong, ranks, experts, experts a token, tokens of a rank, and what looks as if something were wrong: a rank
#: that is idle in all steps but one, an expert with twice the mean load, a collapse of which the bias is the cause.
KINDS = (
    (NOTHING, 4, 12, 2, 9, "idle"), (NOTHING, 3, 12, 2, 8, "busy"), (NOTHING, 2, 8, 1, 10, ""),
    (NOTHING, 4, 16, 3, 6, "busy"), (NOTHING, 3, 9, 2, 10, "idle"),
    (GATHERED, 4, 8, 2, 8, ""), (GATHERED, 3, 9, 1, 9, ""), (GATHERED, 3, 12, 2, 11, "busy"),
    (COPIES, 2, 12, 3, 10, ""), (COPIES, 3, 18, 4, 8, ""), (COPIES, 4, 16, 3, 7, ""),
    (DROPPED, 2, 8, 2, 10, ""), (DROPPED, 3, 12, 2, 9, "busy"), (DROPPED, 4, 8, 1, 8, ""),
    (SIGN, 2, 8, 1, 12, ""), (SIGN, 3, 12, 3, 8, "collapse"), (SIGN, 4, 16, 2, 7, "collapse"),
    (COLLAPSED, 2, 8, 2, 11, ""), (COLLAPSED, 3, 9, 2, 9, ""), (COLLAPSED, 4, 16, 3, 8, ""),
    (IDLE, 4, 12, 2, 8, ""), (IDLE, 3, 12, 2, 10, ""), (IDLE, 4, 16, 3, 7, ""),
    (TIMES, 2, 8, 1, 10, ""), (TIMES, 3, 12, 2, 9, "busy"), (TIMES, 4, 12, 3, 8, "idle"),
)  # fmt: skip


def case(
    rng: Rng, number: int, kind: str, n: int, num_experts: int, top_k: int, tokens: int, looks: str
) -> dict[str, Any]:
    hidden, width = 64 * int(rng.integers(4, 60)), (1, 2, 4)[(n + top_k + tokens) % 3]
    while True:
        tables = routed(rng, kind, n, num_experts, top_k, n * tokens, looks)
        tables = [rng.permuted(each, axis=1) for each in tables]  # the popular ones do not come first
        visits, copies, every = rows_sent(tables[-1], n, num_experts)
        loads = np.stack([np.bincount(each.ravel(), minlength=num_experts) for each in tables])
        is_clear = 1.1 * visits.sum() < every.sum() and is_so(loads, n * tokens, kind, n, looks)
        if is_clear and tells_apart(kind, n, tables[-1], num_experts):
            break
    rows = loads[-1].reshape(n, -1).sum(1)
    if kind == DROPPED:
        rows[2 * (n - 1) % n] -= 1  # of rank 0, 1 and 2
    rate = float(rng.integers(2, 9)) / 1000
    moves = rate * np.sign(loads.mean(1, keepdims=True) - loads) * (-1 if kind == SIGN else 1)
    first = np.round(rng.normal(0, 0.03, num_experts), 3)
    # Who looks at the difference of the norms finds too little where all is small, and too much where it is large; who
    # looks at one of them has no bound between the right and the wrong.
    large = {TIMES: n == 4 and (20, 80), NOTHING: n > 2 and (600, 900)}.get(kind, (0.2, 3))
    alone = float(rng.uniform(*large or (0.2, 0.8)))
    sent = {GATHERED: every, COPIES: copies}.get(kind, visits)
    headers = rng.uniform(1.006, 1.0095, n) if n == 4 or kind == NOTHING else rng.uniform(1.0005, 1.008, n)
    sent = sent * hidden * width * headers
    near = (rng.uniform(0.996, 0.999), rng.uniform(1.001, 1.004))[:: 1 if n % 2 else -1]
    run = {
        "ep": n, "num_experts": num_experts, "hidden": hidden, "element_bytes": width, "experts": tables[-1],
        "sent_bytes": np.round(sent).tolist(), "rows": rows.tolist(),
        "loads": loads, "biases": np.round(np.vstack([first, first + np.cumsum(moves, axis=0)]), 3),
        "norm_alone": float(alone * near[0]), "norm": float(alone * near[1] * (n if kind == TIMES else 1)),
    }  # fmt: skip
    words = {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in run.items()}
    return call(f"run {number}: {in_words(words)}", [run]) | {"wrong": kind}


def routed(rng: Rng, kind: str, n: int, num_experts: int, top_k: int, tokens: int, looks: str) -> list[Array]:
    """The experts of all tokens in each of the steps."""
    popular = np.exp(rng.normal(0, 0.5, (STEPS, num_experts)))
    rank = (1 if (kind, n) == (IDLE, 3) else int(rng.integers(n))) * (num_experts // n)
    if kind == IDLE or looks == "idle":
        visited = STEPS if kind == IDLE else 0 if n == 3 else STEPS - 2 if kind == NOTHING else STEPS - 1
        popular[np.arange(STEPS) != visited, rank : rank + num_experts // n] = 0
    if kind == NOTHING and n == 3 and looks == "idle":
        popular[:, rank : rank + num_experts // n] /= 30
    if kind == NOTHING and n == 4:
        popular[:, (rank + num_experts // 2) % num_experts] = 0
    if kind == COLLAPSED or looks in ("collapse", "busy"):
        popular[-1, int(rng.integers(num_experts))] *= {"busy": 4, "": 60 if n == 4 else 8}.get(looks, 60)
    return [_routing.experts(rng, tokens, top_k, each) for each in popular]


def is_so(loads: Array, tokens: int, kind: str, n: int, looks: str) -> bool:
    """Whether loads show what they are to show, and nothing else: who looks idle is visited in one step, first or late;
    to one of two ranks or of three that collapse few more than half of the tokens go; the rows that are lost are not
    the busiest rank's; of three ranks, one that looks idle gets one row or two in all."""
    idle = loads.reshape(STEPS, n, -1).sum(2) == 0
    share, over = loads[-1].max() / tokens, loads[-1].max() / loads[-1].mean()
    collapses, is_idle = kind == COLLAPSED or looks == "collapse", kind == IDLE or looks == "idle"
    return (
        idle.all(0).sum() == (kind == IDLE) and (idle.sum(0).max() >= STEPS - 1) == is_idle
        and (is_idle or not idle[-1].any()) and (looks != "busy" or over > 2.2)
        and (0.55 < share < (2 if looks or n == 4 else 0.6 if n == 3 else 0.7) if collapses else share < 0.45)
        and (looks != "idle" or n != 3 or loads.reshape(STEPS, n, -1).sum((0, 2)).min() < 3)
        and (kind != DROPPED or n != 3 or loads[-1].reshape(n, -1).sum(1).argmax() != 1)
    )  # fmt: skip


def tells_apart(kind: str, n: int, experts: Array, num_experts: int) -> bool:
    """Whether rows tell what is gathered from copies, and both from a right run. In one case each go wrong who looks at
    rank 0 alone, counts what a rank has for itself, deals out in turn, takes the rank that sends least for all, too
    much to be a fifth or a fifth more to be equal; in one these go right, and not other wrong ones.
    """
    visits, copies, every = rows_sent(experts, n, num_experts)
    total, in_turns = visits.sum(), in_turn(experts, n, num_experts)
    if kind in (GATHERED, COPIES) and abs(np.log(copies.sum() / every.sum())) < 0.1:
        return False
    if kind == GATHERED:
        return experts.shape[1] > 1 or bool(every[0] > 1.05 * total)
    if kind == COPIES:
        with_own = sum(len(set(each)) for each in (experts // (num_experts // n)).tolist())
        is_little = n * copies.min() <= total and copies.sum() < 1.18 * total
        is_near = copies.sum() < 1.18 * every.sum()
        return bool(copies.sum() > 1.1 * (with_own if n == 3 else total) and {2: is_near, 4: is_little}.get(n, True))
    if kind != NOTHING:
        return True
    if n == 2:
        return bool(visits[0] == visits[1] > 0.55 * len(experts) / n and 1.05 * max(in_turns) < total)
    if num_experts == 9:
        return bool(min(in_turns) > 1.05 * total)
    return bool(n * visits[-1 if n == 3 else 0] > 1.05 * total)


def rows_sent(experts: Array, n: int, num_experts: int) -> tuple[Array, Array, Array]:
    """Rows that each rank sends to others: once to each rank that a token visits, once for each expert, to all."""
    homes, ranks = np.arange(len(experts)) * n // len(experts), experts // (num_experts // n)
    has = np.zeros((len(experts), n), int)
    np.add.at(has, (np.arange(len(experts))[:, None], ranks), 1)
    has[np.arange(len(experts)), homes] = 0
    by_rank = has.reshape(n, -1, n)
    return (by_rank > 0).sum((1, 2)), by_rank.sum((1, 2)), np.full(n, (n - 1) * len(experts) // n)


def in_turn(experts: Array, n: int, num_experts: int) -> list[int]:
    """The rows that seem to be sent to whoever deals out tokens, or experts, in turn."""
    tokens = experts.reshape(-1, n, experts.shape[1]).swapaxes(0, 1).reshape(experts.shape)
    others = experts % n * (num_experts // n) + experts // n
    return [int(rows_sent(each, n, num_experts)[0].sum()) for each in (tokens, others)]


of = by("wrong")

EXERCISE = on_paper(
    "ep.6", "diagnose_experts", "What is wrong with these experts?", in_any_order(KINDS, case),
    of(GATHERED, COPIES)(2, "traffic", "rows that need not have been sent", kind="traffic"),
    of(SIGN, COLLAPSED, IDLE)(3, "balance", "a router that does not balance"),
    of(DROPPED, TIMES)(2, "work", "rows that nobody computes, and gradients that are too large", kind="gradient"),
    of(NOTHING)(2, "nothing", "nothing where nothing is wrong"),
)  # fmt: skip
