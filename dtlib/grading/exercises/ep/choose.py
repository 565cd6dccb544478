"""ep.7: how a model with experts lies on a cluster: the fastest dp, tp and ep that fit; on paper."""

from collections.abc import Callable
from math import comb
from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper

Job = dict[str, Any]
Plan = tuple[int, int, int]
Cost = Callable[[Job, int, int, int], float]
GB = 1e9

#: Cards, cards of a node, GB of a card, rates inside and across in GB/s; layers, hidden, width of an expert, experts,
#: experts a token, sequences, tokens of each.
KINDS = {
    "one node": (8, 8, 80, 300, 25, 24, 2048, 1408, 64, 6, 64, 4096),
    "a fast network": (64, 8, 80, 450, 200, 32, 4096, 2048, 64, 4, 128, 4096),
    "a slow network": (32, 8, 80, 300, 5, 24, 2048, 1408, 64, 6, 64, 4096),
    "little memory": (64, 8, 24, 300, 25, 24, 2048, 1408, 64, 6, 64, 2048),
    "few large experts": (32, 8, 80, 450, 50, 32, 4096, 14336, 8, 2, 64, 4096),
    "no room": (8, 8, 24, 300, 25, 48, 4096, 2048, 128, 8, 32, 4096),
    "few sequences": (64, 8, 80, 300, 25, 24, 4096, 1536, 32, 4, 8, 8192),
    "nodes of six": (24, 6, 60, 300, 25, 24, 3072, 1536, 48, 4, 48, 4096),
}
NUMBERS = (
    "cards", "node", "room", "inside, 0", "inside, 1", "across, 0", "across, 1", "layers", "hidden", "expert_hidden",
    "num_experts", "top_k", "sequences", "seq",
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind; for each wrong theory jobs in which what it chooses is not possible or clearly slower; and for each
    number of a job two that differ there."""
    cases = [case(kind, job_of(rng, *sizes)) for kind, sizes in KINDS.items()]
    cases += [case("drawn", choice.led_astray(rng, drawn, possible, wrong)) for wrong in WRONG for _ in range(2)]
    return cases + [case("all but one alike", job) for job in choice.pairs(rng, drawn, possible, NUMBERS, is_whole)]


def drawn(rng: Rng) -> Job:
    node = int(rng.choice([4, 6, 8]))
    return job_of(
        rng, node * int(rng.choice([1, 2, 3, 4, 8, 16])), node, int(rng.choice([16, 24, 40, 80])),
        int(rng.integers(100, 500)), int(rng.integers(3, 100)), int(rng.choice([16, 24, 32])),
        1024 * int(rng.integers(1, 6)), 256 * int(rng.integers(3, 40)), 8 * int(rng.choice([1, 2, 3, 4, 8, 12])),
        int(rng.integers(1, 9)), 24 * int(rng.choice([1, 2, 3, 4])), 1024 * int(rng.integers(1, 9)),
    )  # fmt: skip


def is_whole(job: Job) -> bool:
    """Whether nodes are full, and there are as many experts as a token takes."""
    return bool(job["cards"] % job["node"] == 0 and job["top_k"] <= job["num_experts"])


def job_of(
    rng: Rng, cards: int, node: int, room: int, inside: int, across: int, layers: int, hidden: int, width: int,
    num_experts: int, top_k: int, sequences: int, seq: int,
) -> Job:  # fmt: skip
    slow = rng.choice([1, 1, 1, 30, 900], 2).tolist()  # to start a message
    near = [float(rng.uniform(0.97, 1.03)) for _ in range(3)]
    return {
        "cards": cards, "node": node, "room": room * GB * near[0], "inside": [5e-6 * slow[0], inside * GB * near[1]],
        "across": [2e-5 * slow[1], across * GB * near[2]], "layers": layers, "hidden": hidden, "expert_hidden": width,
        "num_experts": num_experts, "top_k": min(top_k, num_experts), "sequences": sequences, "seq": seq,
    }  # fmt: skip


def case(kind: str, job: Job) -> Job:
    plans = [[*plan, cost] for plan, cost in possible(job).items()]
    return call(f"{kind}: {in_words(job)}", [job], some=bool(plans)) | {"plans": plans}


def parameters(job: Job) -> tuple[float, float]:
    """Of attention, and of all experts."""
    expert = 3 * job["hidden"] * job["expert_hidden"]
    return 4.0 * job["layers"] * job["hidden"] ** 2, float(job["layers"] * job["num_experts"] * expert)


def needed(job: Job, dp: int, tp: int, ep: int, *, over: int = 0, cut: int = 0, dense_over: int = 0) -> float:
    """Bytes of a rank; an expert's optimizer is cut `over` ways, attention's `dense_over` ways, experts `cut` ways."""
    dense, experts = parameters(job)
    states = dense / tp * (6 + 12 / (dense_over or dp)) + experts / (cut or ep) / tp * (6 + 12 / (over or dp // ep))
    return states + kept(job, tp)


def kept(job: Job, tp: int) -> float:
    """Bytes of one sequence."""
    return float(34 * job["seq"] * job["hidden"] * job["layers"] / tp)


def seconds(job: Job, dp: int, tp: int, ep: int, *, copies: bool = False, near: int = 0, group: int = 0,
            is_own: bool = False, twice: bool = False) -> float:  # fmt: skip
    """Seconds of a step; a copy an expert, links, groups and experts drawn `twice` are as `WRONG` says."""
    dense, experts = parameters(job)
    tokens, k, num_experts = job["seq"] * job["sequences"] // dp, job["top_k"], job["num_experts"]

    def ring(n: int, span: int, full_bytes: float) -> float:
        alpha, rate = job["inside" if span <= job["node"] else "across"]
        return 2 * (n - 1) * (alpha + full_bytes / n / rate)

    missed = (1 - 1 / ep) ** k if twice else comb(num_experts - num_experts // ep, k) / comb(num_experts, k)
    visits = k if copies else ep * (1 - missed)
    alpha, rate = job["inside" if (near or tp * ep) <= job["node"] else "across"]
    exchange = (ep - 1) * (alpha + 2 * tokens / tp * job["hidden"] * visits / ep / rate)
    cards, few = tp * dp, group or dp // ep
    gradients = ring(dp, dp if is_own else cards, 4 * dense / tp)
    gradients += ring(few, few if is_own else cards, 4 * experts / ep / tp)
    return 4 * job["layers"] * (ring(tp, tp, 2 * tokens * job["hidden"]) + exchange) + gradients


def possible(
    job: Job, needed: Cost = needed, seconds: Cost = seconds, *, fill_nodes: bool = True, share: bool = True
) -> dict[Plan, float]:
    """The seconds of every (dp, tp, ep) that is possible and fits with a margin of a fifth."""
    found = {}
    for tp in (t for t in range(1, job["node"] + 1) if job["node"] % t == 0 and job["cards"] % t == 0):
        dp = job["cards"] // tp
        for ep in (e for e in range(1, dp + 1) if dp % e == 0 and job["num_experts"] % e == 0):
            if (fill_nodes and job["node"] % (tp * ep) and tp * ep % job["node"]) or (share and job["sequences"] % dp):
                continue  # a group in one node and another in two, or a rank without a sequence
            if 1.2 * needed(job, dp, tp, ep) <= job["room"]:
                found[dp, tp, ep] = seconds(job, dp, tp, ep)
    return found


WRONG: tuple[Callable[[Job], dict[Plan, float]], ...] = (
    lambda job: possible(job, needed=lambda job, dp, tp, ep: needed(job, dp, tp, ep, over=dp)),
    lambda job: possible(job, needed=lambda job, dp, tp, ep: needed(job, dp, tp, ep, over=1)),
    lambda job: possible(job, needed=lambda job, dp, tp, ep: needed(job, dp, tp, ep, cut=1, over=dp)),
    lambda job: possible(job, seconds=lambda job, dp, tp, ep: seconds(job, dp, tp, ep, copies=True)),
    lambda job: possible(job, seconds=lambda job, dp, tp, ep: seconds(job, dp, tp, ep, near=1)),
    lambda job: possible(job, seconds=lambda job, dp, tp, ep: seconds(job, dp, tp, ep, near=ep)),
    lambda job: possible(job, seconds=lambda job, dp, tp, ep: seconds(job, dp, tp, ep, group=dp)),
    lambda job: possible(job, fill_nodes=False),
    lambda job: possible(job, share=False),
    lambda job: possible(job, needed=lambda job, dp, tp, ep: needed(job, dp, tp, ep) - kept(job, tp) / 6),
    lambda job: possible(job, seconds=lambda job, dp, tp, ep: seconds(job, dp, tp, ep, is_own=True)),
    lambda job: possible(job, seconds=lambda job, dp, tp, ep: seconds(job, dp, tp, ep, twice=True)),
    lambda job: possible(job, needed=lambda job, dp, tp, ep: needed(job, dp, tp, ep, dense_over=dp * tp)),
    lambda job: {plan: cost for plan, cost in possible(job).items() if plan[2].bit_count() == 1},
)
"""Optimizers, experts, copies, links, gradients, groups, sequences and margins that are not those of the task."""

EXERCISE = on_paper(
    "ep.7", "choose_layout", "Where to put the experts?", draw,
    *choice.plans(
        "dp, tp, ep", "s", checks=("fits", "fastest"),
        words=("the layout is possible and fits, and None where none does", "no other that fits is faster"),
    ),
)  # fmt: skip
