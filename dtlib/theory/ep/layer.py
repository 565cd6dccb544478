"""A layer of experts by its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.valid import amount, flag, whole

from .routing import allowed_groups, choices, groups_of


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of experts by its sizes: E `num_experts` of width f (`expert_hidden`), k `top_k` and S `num_shared` of
    which meet a token of width h (`hidden`); three matrices each where `gated`, else two.

    With `top_groups` a token's experts lie in so many of `groups` groups. A token travels in
    `dispatch_bytes_per_element` w_out and its result in `combine_bytes_per_element` w_back; `weight_bytes` w are read
    for a weight. ``ValueError`` for sizes below 1, more choices than experts, groups that do not divide E.
    """

    hidden: int
    expert_hidden: int
    num_experts: int
    top_k: int
    num_shared: int = 0
    gated: bool = True
    groups: int = 1
    top_groups: int | None = None
    dispatch_bytes_per_element: float = 2
    combine_bytes_per_element: float = 2
    weight_bytes: float = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "expert_hidden"):
            whole(name, getattr(self, name), 1)
        whole("num_shared", self.num_shared, 0)
        flag("gated", self.gated)
        allowed_groups(
            *choices(self.num_experts, self.top_k), groups_of(self.num_experts, self.groups), self.top_groups
        )
        for name in ("dispatch_bytes_per_element", "combine_bytes_per_element", "weight_bytes"):
            amount(name, getattr(self, name), positive=True)

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: 3hf, or 2hf."""
        return (3 if self.gated else 2) * self.hidden * self.expert_hidden

    @property
    def flops_per_token(self) -> int:
        """Operations of a token's experts forward, two a parameter: 6hf (k + S), or 4hf (k + S)."""
        return 2 * self.expert_params * (self.top_k + self.num_shared)
