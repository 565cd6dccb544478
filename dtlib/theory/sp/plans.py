"""The three plans: what each keeps, and what each sends."""

from __future__ import annotations

from types import MappingProxyType

from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import checked_recompute
from dtlib.theory.valid import flag, whole

PLANS = MappingProxyType({"none": (8, 10, 24), "keep": (8, 4, 30), "again": (10, 0, 34)})
"""Of each plan its phases a layer, and the bytes an element of bsh that a layer keeps: on each rank, and split."""


def _checked(plan: str) -> tuple[int, int, int]:
    if plan not in PLANS:
        raise ValueError(f"plan must be one of {', '.join(PLANS)}, not {plan!r}")
    return PLANS[plan]


def phases(plan: str, *, recompute: str = "none", early_stop: bool = False) -> int:
    """Halves of an all-reduce in a layer, forward and backward.

    Four all-reduces are 8. Split by tokens, each becomes an all-gather in front of a pair of matrices and a
    reduce-scatter behind it, and in the backward pass the other way round: 8 again. To gather the two inputs once more
    for the gradients of the weights, instead of keeping them, takes 2 more.

    A ``"full"`` recompute sends the 4 of the forward pass again. With `early_stop`, as torch's checkpoint has it, it
    ends with the last tensor that the backward pass needs. Without dropout that is the input of the layer's last
    matrix: where tokens are split, the reduce-scatter behind it is left out, so 3. (With dropout it is the mask behind
    that sum, and all 4 are sent.) A ``"selective"`` one repeats attention's core, which sends
    nothing. ``ValueError`` for another plan or `recompute`.
    """
    once, *_ = _checked(plan)
    last = flag("early_stop", early_stop) and plan != "none"
    return once + (4 - last if checked_recompute(recompute) == "full" else 0)


@formula("sp.sent_elements", source="korthikanti2023", label="thm-sp-conjugate", equation=r"n\,\frac{t-1}{t}\,b\,s\,h")
def sent_elements(
    micro_batch: int,
    seq: int,
    hidden: int,
    tp: int,
    plan: str = "none",
    *,
    recompute: str = "none",
    early_stop: bool = False,
) -> float:
    """Elements that a rank sends in a layer.

    For one micro-batch: `phases` times (t−1)/t · bsh: the same for tensor parallelism with and without split tokens, a
    quarter more if the inputs are gathered again, a half more if the layer is computed again. ``ValueError`` for sizes
    below 1, another plan or `recompute`.
    """
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    t = whole("tp", tp, 1)
    return phases(plan, recompute=recompute, early_stop=early_stop) * (t - 1) / t * b * s * h


@formula(
    "sp.kept_bytes",
    source="korthikanti2023",
    label="thm-sp-conjugate",
    equation=r"s\,b\,h\,\Bigl(c_0 + \frac{c_1}{t} + \frac{5 a s}{h t}\Bigr)",
)
def kept_bytes(
    seq: int,
    micro_batch: int,
    hidden: int,
    num_heads: int,
    tp: int,
    plan: str = "none",
    *,
    core: bool = True,
    recompute: str = "none",
) -> float:
    """Activations of a layer on one rank.

    Of a GPT, in 2 bytes an element and 1 a mask: (c₀, c₁) = (10, 24) with all tokens on each rank, (4, 30) with tokens
    split and gathered inputs kept, (0, 34) with inputs gathered again; `core` is attention's, 5as/h, which is split by
    heads in all plans. A ``"selective"`` recompute keeps no core, a ``"full"`` one the layer's input alone: 2, or 2/t
    with tokens split. So of the (4, 30) a full one frees 4 + 28/t, 7.5 on eight ranks, where gathering again frees 4 −
    4/t. Statistics of norms are left out. ``ValueError`` for sizes below 1, another plan or `recompute`.
    """
    s, b, h = whole("seq", seq, 1), whole("micro_batch", micro_batch, 1), whole("hidden", hidden, 1)
    a, t = whole("num_heads", num_heads, 1), whole("tp", tp, 1)
    _, everywhere, split = _checked(plan)
    if checked_recompute(recompute) == "full":
        return 2 * s * b * h / (1 if plan == "none" else t)
    return s * b * h * (everywhere + split / t + (5 * a * s / h / t if core and recompute == "none" else 0))


def norm_elements(micro_batch: int, seq: int, tp: int) -> float:
    """Elements that each rank would send for one layer's two norms if they were split over h instead of tokens.

    A norm needs two sums over the width of each token, and its backward pass two more: 2bs elements all-reduced each
    time, 4 times a layer, 2(t−1)/t of them sent: hardly anything. What speaks against it is the rest: the output of the
    matrices in front would have to be scattered by columns, and what comes behind gathered, just as tokens are.
    """
    b, s, t = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("tp", tp, 1)
    return 4 * 2 * b * s * 2 * (t - 1) / t
