"""Attention over tokens on several ranks, four ways in one run: forward and backward, causal.

`dtlib.ranks.cp` by a ring, in zig-zag and in contiguous order, and by all-to-alls; and the plain way: gather all keys
and values, let torch's own attention see them, and scatter their gradients. torch's own context parallelism has no
attention for CPUs. All must find the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import cp, sp
from dtlib.theory import cp as theory
from dtlib.theory.units import format_bytes, format_seconds

WORLD_SIZES, ROUNDS = (2, 4), 7
SEQ, HEADS, KV_HEADS, HEAD_DIM = 2048, 4, 2, 64
PLAIN = "keys gathered, torch's attention"


def gathered(q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, layout: cp.Layout) -> Tensor:
    """What this rank's queries see once all keys and values are here; parts are contiguous and equal."""
    kv_bsx = torch.cat([k_bgsd, v_bgsd], 1).transpose(1, 2).flatten(2)
    whole = sp.gather_tokens(kv_bsx).unflatten(2, (2 * KV_HEADS, HEAD_DIM)).transpose(1, 2)
    k_bgtd, v_bgtd = whole.chunk(2, 1)
    seen = torch.arange(layout.seq) <= layout.positions()[:, None]
    return F.scaled_dot_product_attention(q_basd, k_bgtd, v_bgtd, attn_mask=seen, enable_gqa=True)


WAYS: dict[str, tuple[Any, str]] = {
    "ring, zig-zag": (cp.ring_attention, "zigzag"),
    "ring, contiguous": (cp.ring_attention, "contiguous"),
    "heads for tokens": (cp.ulysses_attention, "zigzag"),
    PLAIN: (gathered, "contiguous"),
}


def measured() -> tuple[lab.Race, dict[str, tuple[list[Tensor], int, int]]]:
    """In a rank: the race; and by contender its result and gradients, its bytes and its peak."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, heads, SEQ, HEAD_DIM, generator=generator)
                   for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))  # fmt: skip
    runs, found = {}, {}

    def run(attention: Any, layout: cp.Layout, own: list[Tensor], gradient: Tensor) -> list[Tensor]:
        out = attention(*own, layout)
        return [out.detach(), *torch.autograd.grad(out, own, gradient)]

    for name, (attention, order) in WAYS.items():
        layout = cp.Layout(SEQ, order=order)
        own = [layout.take(each, 2).requires_grad_() for each in (q, k, v)]
        runs[name] = functools.partial(run, attention, layout, own, layout.take(do, 2))
        runs[name]()
        lab.barrier()
        with lab.wire() as wire:
            result = runs[name]()
        lab.barrier()
        with lab.memory() as memory:
            runs[name]()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, result)
        whole = [layout.put_together(list(each), 2) for each in zip(*parts, strict=True)]
        found[name] = whole, wire.total_bytes, memory.peak
    return lab.race(runs, rounds=ROUNDS), found


def main() -> None:
    """Measure, print, save."""
    rows, records = [], []
    for n in WORLD_SIZES:
        race, found = lab.run(measured, n, timeout_s=600)[0]
        sizes = 1, SEQ, KV_HEADS, HEAD_DIM, n
        ring = 4 * n * theory.ring_elements(*sizes)
        by_heads = 4 * n * theory.ulysses_elements(1, SEQ, HEADS, KV_HEADS, HEAD_DIM, n)
        for name, (whole, sent, peak) in found.items():
            for ours, torchs in zip(whole, found[PLAIN][0], strict=True):
                torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-4)  # float32, sums in another order
            ratio, expected = race.ratio(name, PLAIN), {"heads for tokens": by_heads}.get(name, ring)
            expected = expected if name != PLAIN else 4 * n * theory.ring_elements(*sizes, backward=False) * 2
            cells = [format_bytes(sent / n), f"{sent / expected:.4f}", format_bytes(peak)]
            rows.append([name, str(n), format_seconds(race.median(name)), *ratio_cells(ratio), *cells])
            records.append({"contender": name, "ranks": n, "ratio": ratio.median, "middle_half": ratio[1:]})
            records[-1] |= {"total_bytes": sent, "peak_bytes": peak, "seconds": race.seconds[name]}
    columns = ["contender", "ranks", "pass", "over the plain way", "middle half", "sent by a rank", "/ theory", "peak"]
    print_table(f"Causal attention of {SEQ} tokens, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} of keys", columns, rows)
    path = save("cp", {"race": records})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
