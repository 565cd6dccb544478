"""One card: what it reaches of products, memory and its host's link, and what a layer takes beside the course's theory.

Links between cards are not measured here. Every ratio is of one run, in which what is compared takes turns; each number
is a median, with quartiles in the file. Without a card it says so, and measures nothing.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import _gpu_compression as compression
from benchmarks import _gpu_layer as layer
from benchmarks import _gpu_moves as moves
from benchmarks import _gpu_products as products
from benchmarks._gpu_clock import Clock
from benchmarks._report import console, print_table, save
from dtlib.theory.units import GB, TFLOP, GiB, format_bytes, format_seconds


def main() -> None:
    """Measure, print, save."""
    if not torch.cuda.is_available():
        console.print("no card that CUDA knows: nothing to measure")
        return
    about = card()

    def keep(results: dict[str, Any]) -> Path:
        return save("gpu", {"card": about, **results})

    results = measured(Clock(), keep)
    show(results)
    path = keep(results)
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


def card() -> dict[str, Any]:
    """The card's name, memory and multiprocessors, and what its driver says of it."""
    properties = torch.cuda.get_device_properties(0)
    about = {"name": properties.name, "memory_bytes": properties.total_memory}
    about["multiprocessors"] = properties.multi_processor_count
    asked = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"
    said = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return about | dict(zip(asked.split(","), said.stdout.strip().split(", "), strict=False))


def measured(clock: Clock, keep: Callable[[dict[str, Any]], Any], **sizes: dict[str, Any]) -> dict[str, Any]:
    """All sections, by name; one that fails has its error in place of its numbers. `sizes` are a section's own.

    `keep` is called after each with what there is: who interrupts the rest has that.
    """
    results: dict[str, Any] = {}

    def section(name: str, work: Callable[..., Any]) -> None:
        start = time.perf_counter()
        try:
            results[name] = work(**sizes.get(name, {}))
        except Exception as error:
            console.print_exception()
            results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        clock.free()
        keep(results)
        console.print(f"[dim]{name}: {time.perf_counter() - start:.1f} s[/]")

    section("device_copy", lambda **sizes: moves.device_copy(clock, **sizes))
    memory = results["device_copy"].get("bytes_per_s", 3e12)
    section("squares", lambda **sizes: products.squares(clock, **sizes))
    squares = results["squares"] if isinstance(results["squares"], list) else []
    best = max((each["bf16"]["flop_per_s"] for each in squares), default=800 * TFLOP)
    section("llamas", lambda **sizes: products.llamas(clock, best, memory, **sizes))
    section("experts", lambda **sizes: products.experts(clock, **sizes))
    section("layers", lambda **sizes: layer.layers(clock, **sizes))
    section("attention", lambda **sizes: layer.attention(clock, **sizes))
    section("exchanges", lambda **sizes: compression.exchanges(clock, memory, **sizes))
    section("memory_bound", lambda **sizes: moves.memory_bound(clock, **sizes))
    section("updates", lambda **sizes: moves.updates(clock, **sizes))
    section("host_link", lambda **sizes: moves.host_link(clock, **sizes))
    section("beside_products", lambda **sizes: moves.beside_products(clock, **sizes))
    section("saves", lambda **sizes: moves.saves(clock, **sizes))
    section("kernels", lambda **sizes: compression.kernels(clock, memory, **sizes))
    return results


def show(results: dict[str, Any]) -> None:
    """The tables, one a section; a section without numbers says why."""
    for name, table in TABLES.items():
        found = results[name]
        if "error" in found:
            console.print(f"{name}: {found['error']}", markup=False)
        else:
            title, columns, rows = table(found)
            print_table(title, columns, rows)


Table = tuple[str, list[str], list[list[str]]]


def rate(flop_per_s: float) -> str:
    """TFLOP/s, in whole numbers."""
    return f"{flop_per_s / TFLOP:.0f}"


def speed(bytes_per_s: float) -> str:
    """GB/s, in whole numbers."""
    return f"{bytes_per_s / GB:,.0f}"


def _squares(found: Any) -> Table:
    kinds = list(found[0])[1:]
    rows = [[str(each["side"]), *(rate(each[kind]["flop_per_s"]) for kind in kinds)] for each in found]
    return "Products n × n × n, TFLOP/s", ["n", *kinds], rows


def _llamas(found: Any) -> Table:
    rows, tokens = [], sorted({each["rows"] for each in found})
    for key in dict.fromkeys((each["model"], each["tp"], each["product"]) for each in found):
        of = {each["rows"]: each for each in found if (each["model"], each["tp"], each["product"]) == key}
        cells = [f"{of[n]['share']:.2f} / {of[n]['theory_share']:.2f}" if n in of else "" for n in tokens]
        rows.append([f"{key[0]}, tp {key[1]}, {key[2]}", *cells])
    return "Share of the best square, / theory, by tokens", ["product", *map(str, tokens)], rows


def _experts(found: Any) -> Table:
    kinds = [kind for kind in ("alike", "drawn") if kind in found[0]]
    rows = [[str(each["tokens_an_expert"]), *(rate(each[kind]["flop_per_s"]) for kind in kinds),
             speed(each["weights_bytes_per_s"])] for each in found]  # fmt: skip
    return "Experts of a rank, TFLOP/s", ["tokens an expert", *kinds, "weights, GB/s"], rows


def _layers(found: Any) -> Table:
    rows = []
    for each in found:
        for how in layer.HOW:
            one = each[how]
            planned = format_seconds(one["planner_seconds"]) if one["planner_seconds"] else ""
            sizes = [
                format_bytes(one[kind]) if kind in one else "" for kind in ("kept_bytes", "theory_bytes", "peak_bytes")
            ]
            rows.append([f"{each['tokens']} tokens, {how}", format_seconds(one["seconds"].median), planned,
                         f"{one['ratio'].median:.3f}", f"{one['theory_ratio']:.3f}", *sizes])  # fmt: skip
    columns = ["recompute", "both passes", "planner", "ratio", "theory", "kept", "theory", "peak"]
    return "A layer of Llama 3 8B", columns, rows


def _attention(found: Any) -> Table:
    kinds = [kind for kind in found[0] if kind not in ("seq", "forward_flops")]
    rows = [[str(each["seq"]), *(f"{rate(each[kind]['forward_flop_per_s'])} ({each[kind]['over_forward'].median:.2f})"
                                 for kind in kinds)] for each in found]  # fmt: skip
    return "Causal attention forward, TFLOP/s (both passes over forward)", ["tokens", *kinds], rows


def _exchanges(found: Any) -> Table:
    rows = []
    for each in found:
        numbers = speed(each["bytes_per_s"]), f"{each['passes']:.1f}", speed(each["pays_below"])
        name = f"{each['scheme']}, {each['dtype']}, {each['ranks']} ranks"
        rows.append([name, format_seconds(each["seconds"].median), *numbers])
    return "Exchanges without the sending", ["scheme", "time", "GB/s", "passes", "pays below, GB/s"], rows


def _moved(title: str) -> Callable[[Any], Table]:
    def table(found: Any) -> Table:
        rows = [
            [name, format_seconds(each["seconds"].median), speed(each["bytes_per_s"])] for name, each in found.items()
        ]
        return title, ["", "time", "GB/s"], rows

    return table


def _beside(found: Any) -> Table:
    rows = []
    for name, each in found.items():
        times = [format_seconds(each[kind].median) for kind in ("copy", "products", "together")]
        rows.append([name, *times, f"{each['hidden_share'].median:.2f}", f"{each['slower'].median:.3f}"])
    return "A copy while products run", ["", "copy", "products", "together", "hidden", "slower"], rows


def _saves(found: Any) -> Table:
    rows = [[name, format_seconds(each["stall_seconds"].median), f"{each['slower'].median:.3f}"]
            for name, each in found.items() if isinstance(each, dict)]  # fmt: skip
    return f"A save of {found['bytes'] / GiB:.1f} GiB to the host", ["", "stall", "step over a step without"], rows


def _kernels(found: Any) -> Table:
    rows = [[name, format_seconds(each["seconds"].median), speed(each["bytes_per_s"]), f"{each['passes']:.1f}"]
            for name, each in found.items()]  # fmt: skip
    return "Parts of compression, fp32", ["", "time", "GB/s", "passes"], rows


TABLES: dict[str, Callable[[Any], Table]] = {
    "llamas": _llamas,
    "squares": _squares,
    "experts": _experts,
    "layers": _layers,
    "attention": _attention,
    "exchanges": _exchanges,
    "kernels": _kernels,
    "device_copy": lambda found: _moved("The card's memory")({"copy": found}),
    "memory_bound": _moved("Bound by memory"),
    "updates": _moved("A step of AdamW"),
    "host_link": _moved("Between card and host"),
    "beside_products": _beside,
    "saves": _saves,
}
