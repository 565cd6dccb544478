"""memory.3: MFU and HFU, on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import factor_off, gives_part, inspect_part, mistake, own_formula
from dtlib.grading.compare import any_of
from dtlib.grading.exercise import Case, Check, Exercise
from dtlib.theory import memory as theory

_PAIR = "mfu, hfu"


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    def job(recompute: str) -> tuple[Any, ...]:
        num_layers, hidden = int(rng.integers(12, 100)), 128 * int(rng.integers(8, 96))
        num_params, seq = 12 * num_layers * hidden**2 + 50_000 * hidden, 1024 * int(rng.choice([2, 8, 32]))
        num_gpus, peak = 8 * int(rng.integers(1, 65)), float(rng.choice([312e12, 989e12, 2250e12]))
        needed = 6 * num_params + 12 * num_layers * hidden * seq
        tokens_per_s = round(float(rng.uniform(0.2, 0.6)) * num_gpus * peak / needed)
        return num_params, num_layers, hidden, seq, recompute, tokens_per_s, num_gpus, peak

    drawn = [
        (64862437376, 80, 8192, 2048, "full", 410 * 64, 64, 312e12),  # llm-foundry's MPT 70B
        job("none"),
        job("selective"),
        job("full"),
    ]
    words = "{:,} parameters, {} layers of width {}, {} tokens a sequence, recompute {}, {:,} tokens/s on {} GPUs"
    return [{"arguments": list(each), "words": words.format(*each)} for each in drawn]


def _flops(case: Case) -> theory.TokenFlops:
    num_params, num_layers, hidden, seq, recompute, *_ = case["arguments"]
    return theory.training_flops_per_token(num_params, num_layers, hidden, seq, recompute=recompute)


def _share(case: Case, flops_per_token: float) -> float:
    tokens_per_s, num_gpus, peak = case["arguments"][5:]
    return float(flops_per_token * tokens_per_s / (num_gpus * peak))


def _mfu(case: Case) -> float:
    return _share(case, _flops(case).model)


def _hfu(case: Case) -> float:
    return _share(case, _flops(case).total)


def _gives(part: int, flops_per_token: Callable[..., float]) -> Any:
    """The mistake that counts ``flops_per_token(Ψ, l, h, s, recompute)``."""
    return gives_part(lambda case: _share(case, flops_per_token(*case["arguments"][:5])), part, _PAIR)


def _on_one_gpu(of: Callable[[Case], float]) -> Callable[[Case], float]:
    return lambda case: of(case) * float(case["arguments"][6])


def _again(recompute: str, full: float, selective: float) -> float:
    return {"none": 0.0, "selective": selective, "full": full}[recompute]


UTILISATION = Exercise(
    id="memory.3",
    function="utilisations",
    title="Two utilisations",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("utilisations"),
        Check(
            "mfu",
            "value",
            2,
            "the model FLOPs utilisation",
            inspect_part(_mfu, 0, _PAIR),
            (
                mistake(
                    "attention forgotten",
                    _gives(0, lambda n, l, h, s, recompute: 6 * n),
                    "Only the products with parameters are counted. Which products have no parameter in them, and how "
                    "do they grow with the sequence?",
                ),
                mistake(
                    "recompute counted",
                    gives_part(_hfu, 0, _PAIR),
                    "What is computed a second time is counted here. Does the model learn more from it?",
                ),
                mistake(
                    "forward alone",
                    _gives(0, lambda n, l, h, s, recompute: 2 * n + 4 * l * h * s),
                    "A third: this is the forward pass. What does the backward pass compute for each product of the "
                    "forward?",
                ),
                mistake(
                    "attention forward alone",
                    _gives(0, lambda n, l, h, s, recompute: 6 * n + 4 * l * h * s),
                    "The parameters' products count forward and backward, those between tokens forward only. Are they "
                    "not differentiated?",
                ),
                mistake(
                    "causal half",
                    _gives(0, lambda n, l, h, s, recompute: 6 * n + 6 * l * h * s),
                    "Half of attention: what a causal mask leaves. What does the task say that the published rates "
                    "count?",
                ),
                mistake(
                    "layers forgotten",
                    _gives(0, lambda n, l, h, s, recompute: 6 * n + 12 * h * s),
                    "Attention of one layer is counted. Ψ has the parameters of all layers: and this?",
                ),
                mistake(
                    "peak of one GPU",
                    gives_part(_on_one_gpu(_mfu), 0, _PAIR),
                    "More than all. The tokens are those of all GPUs: and the peak?",
                ),
                mistake(
                    "percent",
                    factor_off(_mfu, 100, 0, _PAIR),
                    "A factor of 100. Does the task ask for a share or for percent?",
                ),
            ),
        ),
        Check(
            "hfu",
            "value",
            3,
            "the hardware FLOPs utilisation",
            inspect_part(_hfu, 1, _PAIR),
            (
                mistake(
                    "recompute forgotten",
                    gives_part(_mfu, 1, _PAIR),
                    "This is the same as the MFU, whatever is computed again. What did the hardware do in that time?",
                ),
                mistake(
                    "attention not computed again",
                    _gives(1, lambda n, l, h, s, recompute: 6 * n + 12 * l * h * s + _again(recompute, 2 * n, 0)),
                    "The products with parameters are computed again, attention is not. What does a full recompute "
                    "run, and what a selective one?",
                ),
                mistake(
                    "selective taken for full",
                    gives_part(lambda case: _mfu(case) * (1 if case["arguments"][4] == "none" else 4 / 3), 1, _PAIR),
                    "A third more wherever something is recomputed. How much of a layer does a selective recompute run "
                    "again?",
                ),
                mistake(
                    "always a third more",
                    factor_off(_mfu, 4 / 3, 1, _PAIR),
                    "A third more in every case. What is computed again where `recompute` says none?",
                ),
                mistake(
                    "selective ignored",
                    _gives(
                        1,
                        lambda n, l, h, s, recompute: (
                            6 * n + 12 * l * h * s + _again(recompute, 2 * n + 4 * l * h * s, 0)
                        ),
                    ),
                    "A selective recompute costs nothing here. Which part of a layer does it run again?",
                ),
                mistake(
                    "backward again",
                    _gives(
                        1,
                        lambda n, l, h, s, recompute: (
                            6 * n + 12 * l * h * s + _again(recompute, 4 * n + 8 * l * h * s, 8 * l * h * s)
                        ),
                    ),
                    "What is recomputed counts twice here. Which pass is run again: the forward, or the backward?",
                ),
                mistake(
                    "attention three times again",
                    _gives(
                        1,
                        lambda n, l, h, s, recompute: (
                            6 * n + 12 * l * h * s + _again(recompute, 2 * n + 12 * l * h * s, 12 * l * h * s)
                        ),
                    ),
                    "All of attention, forward and backward, is counted again. Which of its passes is run twice?",
                ),
                mistake(
                    "less than the model needs",
                    any_of(
                        factor_off(_mfu, 3 / 4, 1, _PAIR),
                        gives_part(lambda case: _mfu(case) ** 2 / _hfu(case), 1, _PAIR),
                    ),
                    "This is less than the MFU. Can hardware do less than the model needs?",
                ),
                mistake(
                    "peak of one GPU",
                    gives_part(_on_one_gpu(_hfu), 1, _PAIR),
                    "More than all. The tokens are those of all GPUs: and the peak?",
                ),
                mistake(
                    "attention forgotten",
                    _gives(1, lambda n, l, h, s, recompute: 6 * n + _again(recompute, 2 * n, 0)),
                    "Only the products with parameters are counted. Which have no parameter in them?",
                ),
            ),
        ),
    ),
)
