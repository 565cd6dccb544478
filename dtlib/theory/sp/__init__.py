"""Sequence parallelism as algebra: what the ranks of a tensor-parallel group keep and send if they split tokens too.

Letters: b sequences (`micro_batch`) of s tokens (`seq`), width h (`hidden`), a heads (`num_heads`), t ranks (`tp`).

| plan | outside of the matrices | phases | kept of a layer, attention's core apart |
|---|---|---|---|
| ``"none"`` | every rank has all tokens | 8 | sbh (10 + 24/t) |
| ``"keep"`` | split by tokens; gathered inputs are kept | 8 | sbh (4 + 30/t) |
| ``"again"`` | split by tokens; inputs are gathered again | 10 | sbh · 34/t |

A phase is half of a ring all-reduce: each rank sends (t−1)/t · bsh elements. A full recompute of a layer sends its 4
forward phases again and keeps 2sbh/t, under plan ``"none"`` 2sbh. Arguments out of range raise ``ValueError``, which
names the argument, its value and the rule.
"""

from .plans import PLANS, kept_bytes, norm_elements, phases, sent_elements
from .timing import core_seconds, even_link, saved_seconds

__all__ = [
    "PLANS",
    "core_seconds",
    "even_link",
    "kept_bytes",
    "norm_elements",
    "phases",
    "saved_seconds",
    "sent_elements",
]
