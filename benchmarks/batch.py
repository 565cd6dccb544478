"""Steps to a goal by batch size: a small GPT, trained many times on one core.

For each batch the rate that needs the fewest steps is looked for in powers of 2: it is bracketed, as both of its
neighbours need more. Steps are counted on one set of sequences, the same for all runs, and are means over seeds. The
law S = S_min (1 + 𝓑/B) is fitted to all batches but `HELD_OUT`, and predicts these. Beside it: the noise scale of a
model on its way to the goal, from gradients of single sequences; and steps at rates above the best, with a warm-up and
without. A sequence is the sample here, of `SEQ` tokens. Runs are counted in steps, so they need no idle machine. Before
all this, least squares with a batch that grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks._batch_ramp import ramped
from benchmarks._report import console, print_table, save
from dtlib.ranks.batch import MicroBatches
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.theory.batch import fit_tradeoff, steps_needed, warmup

SEQ, GOAL, EVERY, MOST_STEPS, SEEDS = 32, 2.7, 5, 2400, 2
CONFIG = GPTConfig(num_layers=1, hidden=32, num_heads=2, seq=SEQ)
BATCHES, HELD_OUT = (1, 2, 4, 8, 16, 32, 64), (4, 16)
WARM_BATCH, WARM_STEPS, FACTORS = 32, (0, 40), (1, 2, 4, 8)
MARKS, SINGLES = (0, 10, 20, 40, 80, 120, 160), 128
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int]] = {  # and where the search begins: 2^…
    "SGD": (torch.optim.SGD, -2),
    "Adam": (torch.optim.Adam, -8),
}


@cache
def held() -> tuple[torch.Tensor, torch.Tensor]:
    """What the loss is looked at."""
    return next(batches(load_text(), batch=128, seq=SEQ, seed=10_000))


def train(name: str, batch: int, rate: float, seed: int, most: int = MOST_STEPS, warm: int = 0,
          each: Callable[[int, GPT], None] | None = None) -> float:  # fmt: skip
    """Steps to `GOAL`, between two looks on a straight line; infinite if it takes more than `most`, or diverges."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    optimizer = OPTIMIZERS[name][0](model.parameters(), lr=rate)
    data, before = batches(load_text(), batch=batch, seq=SEQ, seed=seed), math.inf
    for step in range(most + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                loss = next_token_loss(model(held()[0]), held()[1]).item()
            if loss <= GOAL:
                return step - EVERY * (GOAL - loss) / (before - loss)
            if not loss < 10:
                return math.inf
            before = loss
        if each is not None:
            each(step, model)
        tokens, targets = next(data)
        for group in optimizer.param_groups:
            group["lr"] = float(warmup(step, warm, rate)) if warm else rate
        optimizer.zero_grad()
        next_token_loss(model(tokens), targets).backward()
        optimizer.step()
    return math.inf


def best(name: str, batch: int, start: int) -> tuple[int, dict[int, list[float]]]:
    """The power of 2 whose rate needs the fewest steps in the mean, and the steps of each seed at each power tried."""
    tried: dict[int, list[float]] = {}

    def mean(power: int) -> float:
        if power not in tried:
            least = min((sum(each) / SEEDS for each in tried.values()), default=MOST_STEPS)
            most = MOST_STEPS if math.isinf(least) else min(MOST_STEPS, 2 * math.ceil(least))
            tried[power] = []
            for seed in range(SEEDS):  # one seed that never gets there is enough
                tried[power].append(train(name, batch, 2.0**power, seed, most))
                if math.isinf(tried[power][-1]):
                    break
        return sum(tried[power]) / len(tried[power])

    at = start
    while True:
        nearby = min((at, at - 1, at + 1), key=mean)
        if math.isinf(mean(nearby)):
            nearby = at - 1
            if len(tried) > 12:
                raise RuntimeError(f"no rate brings {name} with a batch of {batch} to {GOAL} in {MOST_STEPS} steps")
        if nearby == at:
            return at, tried
        at = nearby


def noise_on_the_way(name: str, batch: int, rate: float) -> list[dict[str, float]]:
    """|G|², tr Σ and the noise scale of a run at some of its steps, each from `SINGLES` gradients of one sequence."""
    found: list[dict[str, float]] = []
    data = batches(load_text(), batch=1, seq=SEQ, seed=20_000)

    def look(step: int, model: GPT) -> None:
        if step not in MARKS:
            return
        twin = GPT(CONFIG)
        twin.load_state_dict(model.state_dict())
        meter = MicroBatches(twin)
        for _ in range(SINGLES):
            tokens, targets = next(data)
            (next_token_loss(twin(tokens), targets) / SINGLES).backward()
        noise = meter.measured(batch=1, micro_batches=SINGLES)
        with torch.no_grad():
            loss = next_token_loss(model(held()[0]), held()[1]).item()
        found.append({"step": step, "loss": loss, "square": noise.square, "variance": noise.variance,
                      "noise_scale": noise.noise_scale})  # fmt: skip

    train(name, batch, rate, 0, each=look)
    return found


def finite(steps: list[float]) -> list[float | None]:
    """JSON knows no infinity."""
    return [None if math.isinf(each) else each for each in steps]


def measured(name: str) -> dict[str, Any]:
    """All of one optimizer."""
    power = OPTIMIZERS[name][1]
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        power, tried = best(name, batch, power)
        steps = tried[power]
        rows.append({"batch": batch, "rate": 2.0**power, "steps": sum(steps) / SEEDS, "by_seed": steps,
                     "tried": {str(2.0**each): finite(found) for each, found in sorted(tried.items())}})  # fmt: skip
        console.print(f"{name}, batch {batch}: {rows[-1]['steps']:.0f} steps at a rate of 2^{power}")
    kept = [row for row in rows if row["batch"] not in HELD_OUT]
    fit = fit_tradeoff([row["batch"] for row in kept], [row["steps"] for row in kept])
    for row in rows:
        row["fitted"] = float(steps_needed(fit.min_steps, fit.critical_batch, row["batch"]))
    rate = next(row["rate"] for row in rows if row["batch"] == WARM_BATCH)
    warm = [
        {"factor": factor, "warmup_steps": steps,
         "by_seed": finite([train(name, WARM_BATCH, factor * rate, seed, 300, steps) for seed in range(SEEDS)])}
        for factor in FACTORS for steps in WARM_STEPS
    ]  # fmt: skip
    return {"batches": rows, "fit": fit._asdict(), "warmup": warm, "noise": noise_on_the_way(name, WARM_BATCH, rate)}


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    about: dict[str, Any] = {"seq": SEQ, "goal": GOAL, "seeds": SEEDS, "held_out": HELD_OUT, "warm_batch": WARM_BATCH}
    about["ramp"] = ramped()
    for name, shares in about["ramp"]["shares"].items():
        console.print(f"a batch that grows, {name}: {np.mean(shares):.3f} of the samples at equal steps, "
                      f"by the law {(1 + about['ramp']['gain']) / 2:.3f}")  # fmt: skip
    results: dict[str, Any] = {}
    for name in OPTIMIZERS:
        results[name] = measured(name)
        path = save("batch", about | {"optimizers": results})
        rows = [[str(r["batch"]), f"{r['rate']:g}", f"{r['steps']:.0f}", f"{r['batch'] * r['steps']:.0f}",
                 f"{r['fitted']:.0f}", "held out" if r["batch"] in HELD_OUT else ""]
                for r in results[name]["batches"]]  # fmt: skip
        print_table(f"{name}: steps to a loss of {GOAL}", ["batch", "rate", "steps", "samples", "law", ""], rows)
        fit = results[name]["fit"]
        console.print(f"S_min {fit['min_steps']:.0f} ± {fit['min_steps_error']:.0f}, critical batch "
                      f"{fit['critical_batch']:.1f} ± {fit['critical_batch_error']:.1f}")  # fmt: skip
        rows = [[str(r["step"]), f"{r['loss']:.2f}", f"{r['noise_scale']:.1f}"] for r in results[name]["noise"]]
        print_table("The noise scale on the way", ["step", "loss", "noise scale"], rows)
        rows = [[f"{r['factor']} ×", str(r["warmup_steps"]),
                 ", ".join("never" if each is None else f"{each:.0f}" for each in r["by_seed"])]
                for r in results[name]["warmup"]]  # fmt: skip
        print_table(f"Batch {WARM_BATCH}, rates above the best", ["rate", "warm-up", "steps of each seed"], rows)
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
