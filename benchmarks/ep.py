"""Experts on other ranks against every rank gathering all tokens, and against slots of one size: a layer, in one run.

All compute the same layer of experts, forward and backward, with each rank's own tokens: `dtlib.ranks.ep`; tokens
gathered from all ranks by rings, each rank computing its own experts, the answers reduced and scattered; the same by
gloo's own calls, of which the reduce-scatter sends twice as much; and a capacity of `CAPACITY` times the mean, each
expert's slots sent whether they are filled or not. All but the last must agree on the answers and on every gradient:
it drops what does not fit. The targets: at most 0.95 of the best one's time on two ranks and 0.75 on four. How far the
products are the same work for all depends on how wide an expert is: so the race is run with three widths. Beside it
run as many products without any exchange: nobody gets below. Last, what torch has of its own for one rank's products:
`grouped_mm`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import ep
from dtlib.ranks.collectives import ring_all_gather, ring_reduce_scatter
from dtlib.ranks.experts import MoE, Pairs, Routed, pairs_of
from dtlib.ranks.model import GPTConfig
from dtlib.theory.ep import capacity
from dtlib.theory.units import format_bytes, format_seconds

WORLD_SIZES, RATIOS = (2, 4), (0.25, 0.5, 1.0)
TOKENS, ROUNDS, CAPACITY, SAME = 1024, 15, 1.25, 1e-4
CONFIG = GPTConfig(hidden=512, num_heads=8, num_experts=16, top_k=2)
OURS, GATHERED, GLOOS_WAY = "ours", "gather all tokens", "the same by gloo's calls"
PADDED, ALONE = f"padded to {CAPACITY} of the mean", "no exchange"
TARGETS = {2: 0.95, 4: 0.75}


class Calls(NamedTuple):
    """A way to gather all ranks' rows, and to sum them so that each gets its own."""

    gather: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]


def _gloos_gather(rows: Tensor) -> Tensor:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer name first
    gathered = rows.new_empty(len(rows) * dist.get_world_size(), *rows.shape[1:])
    call(gathered, rows)
    return gathered


def _gloos_scatter(rows: Tensor) -> Tensor:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own = rows.new_empty(len(rows) // dist.get_world_size(), *rows.shape[1:])
    call(own, rows)
    return own


RINGS, GLOOS = Calls(ring_all_gather, ring_reduce_scatter), Calls(_gloos_gather, _gloos_scatter)


class Gather(torch.autograd.Function):
    """All ranks' rows; backward each rank's own, summed."""

    @staticmethod
    def forward(context: Any, rows: Tensor, calls: Calls) -> Tensor:
        """(t, …) to (N t, …)."""
        context.calls = calls
        return calls.gather(rows.contiguous())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """A reduce-scatter."""
        return Scatter.apply(gradient, context.calls), None


class Scatter(torch.autograd.Function):
    """The sum over ranks, of which each gets its rows; backward all of them."""

    @staticmethod
    def forward(context: Any, rows: Tensor, calls: Calls) -> Tensor:
        """(N t, …) to (t, …)."""
        context.calls = calls
        return calls.scatter(rows.contiguous())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """An all-gather."""
        return Gather.apply(gradient, context.calls), None


class GatherAll(nn.Module):
    """The way of those who gather all tokens on every rank."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x_th: Tensor, routed: Routed, experts: ep.OwnExperts, shared: Any) -> Tensor:
        """The answers of all ranks' experts to this rank's tokens."""
        ((split, _),) = experts.splits["up_ehf"]
        (own,) = split.ranges[dist.get_rank()]
        experts_tk = self.calls.gather(routed.experts_tk)
        weights_tk, x_nh = (Gather.apply(each, self.calls) for each in (routed.weights_tk, x_th))
        row_p, weights_p, counts_e = pairs_of(Routed(experts_tk, weights_tk, weights_tk), CONFIG.num_experts)
        start, stop = sum(counts_e[: own.start]), sum(counts_e[: own.stop])
        pairs = Pairs(row_p[start:stop], weights_p[start:stop], counts_e[own.start : own.stop])
        return Scatter.apply(experts(x_nh, pairs), self.calls)


class Even(torch.autograd.Function):
    """An all-to-all of equal parts, which is its own way back."""

    @staticmethod
    def forward(context: Any, slots: Tensor) -> Tensor:
        """As many to each rank."""
        arrived = torch.empty_like(slots)
        dist.all_to_all_single(arrived, slots.contiguous())
        return arrived

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """The same."""
        return Even.apply(gradient)


class Padded(nn.Module):
    """The way of those who send every expert the same number of slots, one copy for each expert."""

    def forward(self, x_th: Tensor, routed: Routed, experts: ep.OwnExperts, shared: Any) -> Tensor:
        """The answers to what fits; nothing to the rest."""
        (t, h), n, e = x_th.shape, dist.get_world_size(), CONFIG.num_experts
        slots = capacity(t, CONFIG.top_k, e, CAPACITY)
        row_p, weights_p, counts_e = pairs_of(routed, e, CAPACITY)
        counts = torch.tensor(counts_e)
        first_p = (counts.cumsum(0) - counts).repeat_interleave(counts)
        slot_p = torch.arange(e).repeat_interleave(counts) * slots + torch.arange(len(row_p)) - first_p
        sent_ch = x_th.new_zeros(e * slots, h).index_copy(0, slot_p, x_th.index_select(0, row_p))
        arrived_ch = Even.apply(sent_ch)  # by rank, then by expert
        row_c = torch.arange(e * slots).view(n, e // n, slots).transpose(0, 1).flatten()
        every = Pairs(row_c, x_th.new_ones(e * slots), [n * slots] * (e // n))
        back_ch = Even.apply(experts(arrived_ch, every))
        answers_ph = back_ch.index_select(0, slot_p) * weights_p[:, None]
        return torch.zeros_like(x_th).index_add(0, row_p, answers_ph)


class Alone(nn.Module):
    """As many products on each rank, with its own experts alone: what is left where nothing is sent."""

    def forward(self, x_th: Tensor, routed: Routed, experts: ep.OwnExperts, shared: Any) -> Tensor:
        """Answers of the wrong experts."""
        own = len(experts.up_ehf)
        return experts(x_th, pairs_of(routed._replace(experts_tk=routed.experts_tk % own), own))


class Layer:
    """A layer of experts on ranks, by one of the ways, and this rank's tokens."""

    def __init__(self, config: GPTConfig, way: nn.Module) -> None:
        torch.manual_seed(0)
        self.moe = MoE(config)
        self.moe.experts, self.moe.way = ep.OwnExperts(self.moe.experts, None), way
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.x_bsh = torch.randn(1, TOKENS, config.hidden, generator=generator).requires_grad_()

    def step(self) -> Tensor:
        """Forward and backward of the mean square of the answers."""
        self.moe.zero_grad()
        self.x_bsh.grad = None
        y_bsh = self.moe(self.x_bsh)
        y_bsh.square().mean().backward()
        return y_bsh.detach()

    def found(self) -> list[Tensor]:
        """Answers and gradients of a step."""
        return [self.step(), self.x_bsh.grad, *(each.grad for each in self.moe.parameters())]


def measured(config: GPTConfig) -> tuple[lab.Race, dict[str, int], float]:
    """In a rank: the race; bytes of a step by contender; how far ours and the gathered ones are apart."""
    ways = {OURS: ep.Exchange(config.num_experts, None), GATHERED: GatherAll(RINGS)}
    ways |= {GLOOS_WAY: GatherAll(GLOOS), PADDED: Padded(), ALONE: Alone()}
    contenders = {name: Layer(config, way) for name, way in ways.items()}
    ours, *others = (contenders[name].found() for name in (OURS, GATHERED, GLOOS_WAY))
    off = max(float((mine - other).abs().max() / other.abs().max())
              for theirs in others for mine, other in zip(ours, theirs, strict=True))  # fmt: skip
    if not off <= SAME:
        raise AssertionError(f"answers or gradients differ by {off:.1e}")
    race = lab.race({name: one.step for name, one in contenders.items()}, rounds=ROUNDS)
    sent = {}
    for name, one in contenders.items():
        with lab.wire() as wire:
            one.step()
        sent[name] = wire.total_bytes
    return race, sent, off


def of_torch() -> lab.Race:
    """In one process: our products against `grouped_mm`, with tokens that lie expert by expert."""
    (h, e, k), f = (CONFIG.hidden, CONFIG.num_experts, CONFIG.top_k), CONFIG.hidden
    torch.manual_seed(0)
    moe = MoE(replace(CONFIG, expert_ratio=1.0))
    x_nh = torch.randn(TOKENS * k, h, requires_grad=True)
    counts = torch.randint(e, (TOKENS * k,)).bincount(minlength=e)
    ends, pairs = counts.cumsum(0).int(), Pairs(torch.arange(TOKENS * k), torch.ones(TOKENS * k), counts.tolist())

    def torchs() -> Tensor:
        wide_nf = F.grouped_mm(x_nh, moe.experts.up_ehf, offs=ends)
        return F.grouped_mm(F.gelu(wide_nf, approximate="tanh"), moe.experts.down_efh, offs=ends)

    def pass_of(layer: Any) -> Any:
        return lambda: layer().square().mean().backward()

    assert f == moe.experts.up_ehf.shape[2]
    torch.testing.assert_close(torchs(), moe.experts(x_nh, pairs))
    return lab.race({"grouped_mm": pass_of(torchs), OURS: pass_of(lambda: moe.experts(x_nh, pairs))}, rounds=ROUNDS)


def dtensors_word() -> str:
    """In a rank: what DTensor says of experts that lie on all ranks, in the first line."""
    mesh, parts = init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]
    tensors = torch.ones(4, 8), torch.ones(4, 8, 8), torch.arange(1, 5, dtype=torch.int32)
    rows_nh, up_ehf, ends = (distribute_tensor(each, mesh, parts) for each in tensors)
    logging.disable(logging.ERROR)  # torch prints its traceback as well
    try:
        return f"gives {F.grouped_mm(rows_nh, up_ehf, offs=ends).placements}"
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def main() -> None:
    """Measure, print, save."""
    load = os.getloadavg()[0]
    times, records, verdicts = [], [], []
    for n in WORLD_SIZES:
        for width in RATIOS:
            config = replace(CONFIG, expert_ratio=width)
            race, sent, off = lab.run(measured, n, args=(config,), timeout_s=600)[0]
            better = min((GATHERED, GLOOS_WAY, PADDED), key=race.median)
            for name in race.seconds:
                ratio, cpu = race.ratio(name, better), race.cpu_ratio(name, better)
                times.append([name, str(n), str(config.expert_hidden), format_seconds(race.median(name))])
                times[-1] += [*ratio_cells(ratio), f"{cpu.median:.3f}", format_bytes(sent[name] / n)]
                records.append({"contender": name, "ranks": n, "expert_hidden": config.expert_hidden, "off": off})
                records[-1] |= {"over": better, "ratio": ratio.median, "middle_half": ratio[1:]}
                records[-1] |= {"cpu_ratio": cpu.median, "total_bytes": sent[name], "seconds": race.seconds[name]}
            ours = race.ratio(OURS, better)
            verdict = "✓" if ours.median <= TARGETS[n] else "✗ missed"
            verdicts.append(f"{verdict} {n} ranks, experts {config.expert_hidden} wide: {ours} of “{better}” (at most "
                            f"{TARGETS[n]}); “{ALONE}” {race.ratio(ALONE, better).median:.3f}; "
                            f"of “{GLOOS_WAY}” {race.ratio(OURS, GLOOS_WAY).median:.3f}")  # fmt: skip
    columns = ["contender", "ranks", "width", "step", "over the better", "middle half", "core time", "sent by a rank"]
    size = f"{CONFIG.num_experts} experts, top-{CONFIG.top_k}, hidden {CONFIG.hidden}, {TOKENS} tokens a rank"
    print_table(f"A layer of {size}, forward and backward", columns, times)
    for verdict in verdicts:
        console.print(verdict)
    torchs = lab.run(of_torch, 1)[0]
    console.print(f"products alone, one rank: ours take {torchs.ratio(OURS, 'grouped_mm')} of torch's grouped_mm")
    said = lab.run(dtensors_word, 2)[0]
    console.print(f"grouped_mm of DTensors, on this machine: {said}")
    console.print(f"load of the machine before: {load:.1f}")
    grouped = {"ratio": torchs.ratio(OURS, "grouped_mm"), "seconds": torchs.seconds}
    path = save(
        "ep", {"race": records, "grouped_mm": grouped, "dtensor": said, "targets": TARGETS, "load_before": load}
    )
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
