"""The stages of ZeRO as data: what a rank frees, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Every stage splits the optimizer's states. It also frees:

    - `frees_gradients`: what other ranks own of a gradient, once it has been reduced;
    - `frees_weights`: what other ranks own of the weights, once their module has run.

    `in_flight` reductions may be under way at once; each holds a buffer, and room for what arrives.
    """

    frees_gradients: bool
    frees_weights: bool
    in_flight: int


STAGES = {
    1: Stage(frees_gradients=False, frees_weights=False, in_flight=2),
    2: Stage(frees_gradients=True, frees_weights=False, in_flight=1),
    3: Stage(frees_gradients=True, frees_weights=True, in_flight=1),
}
