"""An MLP of many experts, of which each token visits a few: the router, the experts, and the layer that they make.

Shapes are written as suffixes: ``t`` tokens, ``h`` hidden, ``e`` experts, ``k`` choices of a token, ``f`` width of an
expert, ``n`` rows that experts work on (the tokens, or copies that came from other ranks), ``p`` pairs of a row and an
expert that it visits, expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtlib.theory.ep import checked_routing
from dtlib.theory.valid import flag, whole

from .config import GPTConfig


class Routed(NamedTuple):
    """Where tokens go: `experts_tk` (int64), with which `weights_tk` their answers count, and all `scores_te`."""

    experts_tk: Tensor
    weights_tk: Tensor
    scores_te: Tensor


class Router(nn.Module):
    """Chooses `top_k` of `num_experts` for each token, by the scores of a matrix (e, h).

    Scores are the softmax or the sigmoid of the logits, in float32 at least whatever `dtype` the weights have. The
    choice goes by score + `bias_e`, a buffer that no gradient reaches (`ranks.ep.move_bias`), the weights by the scores
    alone: divided by their sum if `normalised`, then times `scale`. Ties go to the lower index, on every machine. With
    `groups` the experts lie in so many groups of equal size, and a token is limited to the `top_groups` whose two best
    experts have the largest sum.

    ``ValueError`` for sizes that do not fit. Sources: Shazeer et al. 2017, arXiv 1701.06538; groups and bias:
    DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalised: bool = True,
        groups: int = 1,
        top_groups: int | None = None,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        top_groups = checked_routing(num_experts, top_k, scoring, normalised, groups, top_groups)
        self.top_k, self.scoring, self.normalised, self.scale = top_k, scoring, normalised, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)
        self.bias_e: Tensor
        self.register_buffer("bias_e", torch.zeros(num_experts, dtype=torch.promote_types(dtype, torch.float32)))
        self.loads_e: Tensor | None = None
        """How many visits each expert got from this rank in training, since `ranks.ep.move_bias` looked last."""

    def forward(self, x_th: Tensor) -> Routed:
        """Tokens (t, h) to their experts and weights (t, k) and all scores (t, e)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(x_th.device.type, enabled=False):
            logits_te = F.linear(x_th.to(wide), self.weight.to(wide))
            scores_te = logits_te.softmax(-1) if self.scoring == "softmax" else logits_te.sigmoid()
        experts_tk = self.choose(scores_te.detach())
        weights_tk = scores_te.gather(1, experts_tk)
        if self.normalised:
            weights_tk = weights_tk / weights_tk.sum(-1, keepdim=True).clamp_min(1e-20)
        self._count(experts_tk)
        return Routed(experts_tk, weights_tk * self.scale, scores_te)

    def choose(self, scores_te: Tensor) -> Tensor:
        """The experts (t, k) of each token, the best first."""
        biased_te = scores_te + self.bias_e
        if self.top_groups < self.groups:
            biased_tge = biased_te.unflatten(1, (self.groups, -1))
            best_tg = biased_tge.sort(dim=-1, descending=True).values[..., :2].sum(-1)
            allowed_tg = torch.zeros_like(best_tg, dtype=torch.bool)
            allowed_tg.scatter_(1, _best(best_tg, self.top_groups), True)
            biased_te = biased_tge.masked_fill(~allowed_tg[..., None], -torch.inf).flatten(1)
        return _best(biased_te, self.top_k)

    def _count(self, experts_tk: Tensor) -> None:
        """Add to the loads, unless nobody trains, or the backward pass computes what was counted already."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            now_e = loads(experts_tk, len(self.bias_e))
            self.loads_e = now_e if self.loads_e is None else self.loads_e + now_e


def _best(scores_te: Tensor, k: int) -> Tensor:
    """The `k` largest of each row; of equal ones that with the lower index, which ``topk`` does not promise."""
    return scores_te.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()  # a view would keep all


def loads(experts_tk: Tensor, num_experts: int) -> Tensor:
    """How many visits each expert gets: (e,), int64."""
    visits_p = experts_tk.flatten()
    return visits_p.new_zeros(num_experts).scatter_add_(0, visits_p, torch.ones_like(visits_p))


class Pairs(NamedTuple):
    """Which rows visit which experts, expert by expert: `row_p`, `weights_p`, and how many pairs each expert has."""

    row_p: Tensor
    weights_p: Tensor
    counts_e: list[int]


def pairs_of(routed: Routed, num_experts: int, capacity_factor: float | None = None) -> Pairs:
    """The visits of `routed`, sorted by expert, an expert's by token.

    With a `capacity_factor` an expert has `room` for so many of the call's tokens at most: the *later* ones are
    dropped.
    """
    t, k = routed.experts_tk.shape
    expert_p = routed.experts_tk.flatten()
    order_p = expert_p.argsort(stable=True)
    counts_e = loads(expert_p, num_experts)
    if capacity_factor is not None:
        most, expert_p = room(t, k, num_experts, capacity_factor), expert_p[order_p]
        place_p = torch.arange(t * k, device=expert_p.device) - (counts_e.cumsum(0) - counts_e)[expert_p]
        order_p, counts_e = order_p[place_p < most], counts_e.clamp(max=most)
    row_p = order_p.div(k, rounding_mode="floor")
    return Pairs(row_p, routed.weights_tk.flatten()[order_p], counts_e.tolist())


def room(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """The tokens that an expert takes: c times its even share, rounded up, c read as the decimal that is printed."""
    return min(tokens, ceil(Fraction(repr(float(capacity_factor))) * tokens * top_k / num_experts))


class Experts(nn.Module):
    """`num_experts` MLPs of `width`, without biases, their matrices stacked: `up_ehf`, `down_efh`.

    A GELU lies between, or with `gated` the SiLU of the first half of the columns of `up_ehf` times the second. An
    expert without tokens has a gradient of zeros: weight decay and moments go on as everywhere.
    """

    def __init__(
        self, num_experts: int, hidden: int, width: int, *, gated: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden": hidden, "width": width}
        num_experts, hidden, width = (whole(name, size, 1) for name, size in sizes.items())
        self.gated = flag("gated", gated)
        self.up_ehf = nn.Parameter(torch.empty(num_experts, hidden, (2 if gated else 1) * width, dtype=dtype))
        self.down_efh = nn.Parameter(torch.empty(num_experts, width, hidden, dtype=dtype))
        for each in (self.up_ehf, self.down_efh):
            nn.init.normal_(each, std=0.02)

    def forward(self, x_nh: Tensor, pairs: Pairs) -> Tensor:
        """What the experts of each row answer, weighted and added up: (n, h)."""
        tensors = [x_nh, pairs.weights_p, self.up_ehf, self.down_efh]
        if torch.is_autocast_enabled(x_nh.device.type) and x_nh.dtype != torch.float64:
            narrow = torch.get_autocast_dtype(x_nh.device.type)
            tensors = [each if each is pairs.weights_p else each.to(narrow) for each in tensors]
        with torch.autocast(x_nh.device.type, enabled=False):
            return _Grouped.apply(*tensors, pairs.row_p, pairs.counts_e, self.gated)


class _Grouped(torch.autograd.Function):
    """One product an expert, each written to where it belongs. Kept are the rows and what lies before the bend."""

    @staticmethod
    def forward(
        context: Any, x_nh: Tensor, weights_p: Tensor, up_ehf: Tensor, down_efh: Tensor, *others: Any
    ) -> Tensor:
        row_p, counts_e, gated = others
        x_ph = x_nh.index_select(0, row_p)
        wide_pf = x_ph.new_empty(len(x_ph), up_ehf.shape[2])
        _products(x_ph, up_ehf, counts_e, wide_pf)
        z_ph = torch.empty_like(x_ph)
        _products(_bent(wide_pf, gated).mul_(weights_p[:, None]), down_efh, counts_e, z_ph)
        context.save_for_backward(x_nh, weights_p, up_ehf, down_efh, row_p, wide_pf)
        context.counts_e, context.gated = counts_e, gated
        return torch.zeros_like(x_nh).index_add_(0, row_p, z_ph)

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy_nh: Tensor) -> Any:
        x_nh, weights_p, up_ehf, down_efh, row_p, wide_pf = context.saved_tensors
        counts_e, (needs_x, needs_weights, needs_up, needs_down, *_) = context.counts_e, context.needs_input_grad
        dz_ph, bent_pf = dy_nh.index_select(0, row_p), _bent(wide_pf, context.gated)
        dbent_pf = torch.empty_like(bent_pf)
        _products(dz_ph, down_efh.mT, counts_e, dbent_pf)
        dweights_p = (dbent_pf * bent_pf).sum(-1, dtype=weights_p.dtype) if needs_weights else None
        ddown_efh = None
        if needs_down:
            ddown_efh = _gradients(bent_pf.mul_(weights_p[:, None]), dz_ph, counts_e)
        dx_nh = dup_ehf = None
        if needs_x or needs_up:
            dwide_pf = _bent_back(dbent_pf.mul_(weights_p[:, None]), wide_pf, context.gated)
            if needs_up:
                dup_ehf = _gradients(x_nh.index_select(0, row_p), dwide_pf, counts_e)
            if needs_x:
                _products(dwide_pf, up_ehf.mT, counts_e, dz_ph)
                dx_nh = torch.zeros_like(x_nh).index_add_(0, row_p, dz_ph)
        return dx_nh, dweights_p, dup_ehf, ddown_efh, None, None, None


def _products(rows_pi: Tensor, matrices_eio: Tensor, counts_e: list[int], out_po: Tensor) -> None:
    """Each expert's rows times its matrix."""
    parts = zip(rows_pi.split(counts_e), matrices_eio, out_po.split(counts_e), strict=True)
    for rows_ni, matrix_io, out_no in parts:
        torch.mm(rows_ni, matrix_io, out=out_no)


def _gradients(rows_pi: Tensor, gradient_po: Tensor, counts_e: list[int]) -> Tensor:
    """Each expert's matrix of a gradient, zeros where it has no rows."""
    out_eio = rows_pi.new_empty(len(counts_e), rows_pi.shape[1], gradient_po.shape[1])
    parts = zip(rows_pi.split(counts_e), gradient_po.split(counts_e), out_eio, strict=True)
    for rows_ni, gradient_no, out_io in parts:
        torch.mm(rows_ni.t(), gradient_no, out=out_io)  # zeros where there are no rows
    return out_eio


def _bent(wide_pf: Tensor, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(wide_pf, approximate="tanh")
    gate_pf, up_pf = wide_pf.chunk(2, -1)
    return F.silu(gate_pf).mul_(up_pf)


def _bent_back(gradient_pf: Tensor, wide_pf: Tensor, gated: bool) -> Tensor:
    if not gated:
        return torch.ops.aten.gelu_backward(gradient_pf, wide_pf, approximate="tanh")
    gate_pf, up_pf = wide_pf.chunk(2, -1)
    dgate_pf = torch.ops.aten.silu_backward(gradient_pf * up_pf, gate_pf)
    return torch.cat([dgate_pf, gradient_pf.mul_(F.silu(gate_pf))], -1)


class Here(nn.Module):
    """The way of tokens to experts that are all in this process; `ranks.ep.Exchange` is the way to other ranks."""

    def __init__(self, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.capacity_factor = capacity_factor

    def forward(
        self, x_th: Tensor, routed: Routed, experts: Experts, shared: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """What its experts answer to each token (t, h), the shared ones too."""
        y_th = experts(x_th, pairs_of(routed, len(experts.up_ehf), self.capacity_factor))
        return y_th if shared is None else y_th + shared(x_th)


class Apart:
    """What lies around experts that this rank has whole: nothing. `ranks.tp` has another for those that ranks split."""

    def enter(self, x_bsh: Tensor) -> tuple[Tensor, Tensor]:
        """What the router sees and what experts do."""
        return x_bsh, x_bsh

    def weigh(self, routed: Routed) -> Routed:
        """With which weights experts count here."""
        return routed

    def leave(self, y_bsh: Tensor) -> Tensor:
        """The layer's answer from that of this rank's experts."""
        return y_bsh


class Shared(Experts):
    """Experts that every token visits. S of them are one of S times the width, which is the same."""

    def forward(self, x_th: Tensor) -> Tensor:  # type: ignore[override]
        """(t, h) to (t, h)."""
        t = len(x_th)
        return super().forward(x_th, Pairs(torch.arange(t, device=x_th.device), x_th.new_ones(t), [t]))


class MoE(nn.Module):
    """The layer in the place of an MLP: a `router`, the `way` to the `experts`, and `shared` ones, or None.

    Of what a capacity drops nothing comes back but what the shared experts say: the token goes on by the residual path
    of its `Block`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, width, kind = config.hidden, config.expert_hidden, {"gated": config.swiglu, "dtype": config.dtype}
        self.router = Router(
            hidden, config.num_experts, config.top_k, scoring=config.scoring, normalised=config.normalised,
            groups=config.expert_groups, top_groups=config.top_groups, scale=config.expert_scale, dtype=config.dtype,
        )  # fmt: skip
        self.around, self.way = Apart(), Here(config.capacity_factor)
        self.experts: nn.Module = Experts(config.num_experts, hidden, width, **kind)
        self.shared = Shared(1, hidden, config.num_shared * width, **kind) if config.num_shared else None

    def forward(self, x_bsh: Tensor) -> Tensor:
        """(b, s, h) to (b, s, h); a token's answer depends on no other token, but for a capacity."""
        routed_bsh, x_bsh = self.around.enter(x_bsh)
        routed = self.around.weigh(self.router(routed_bsh.flatten(0, -2)))
        return self.around.leave(self.way(x_bsh.flatten(0, -2), routed, self.experts, self.shared).view_as(x_bsh))
