"""What is all-reduced, counted in elements: a ring sends 2(t−1)/t of them from each rank."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import checked_recompute
from dtlib.theory.valid import whole


@formula("tp.layer_elements", source="shoeybi2019", label="eq-tp-layer", equation=r"4\,b\,s\,h")
def layer_elements(micro_batch: int, seq: int, hidden: int, *, recompute: str = "none") -> int:
    """Elements that a layer all-reduces for one micro-batch.

    4bsh: attention and MLP each add up an output in the forward pass, and the gradient of an input in the backward
    pass. A ``"full"`` recompute runs the forward pass again: 6bsh; a ``"selective"`` one repeats the core of attention,
    which sends nothing. Neither t nor h² occurs: what travels are activations, not weights. ``ValueError`` for sizes
    below 1 or another `recompute`. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    return (6 if checked_recompute(recompute) == "full" else 4) * b * s * h


@dataclass(frozen=True)
class OutsideElements(Breakdown):
    """Elements that are all-reduced outside the layers: forward by the `embedding`, backward by the `head`, and for
    the `loss`."""

    embedding: int
    head: int
    loss: int


@formula("tp.outside_elements", source="shoeybi2019", label="eq-tp-loss", equation=r"2\,b\,s\,h + 3\,b\,s")
def outside_elements(micro_batch: int, seq: int, hidden: int) -> OutsideElements:
    """Elements all-reduced outside the layers for one micro-batch.

    bsh for the embedding, whose rows lie on different ranks; bsh for the gradient of the head's input; 3bs for the
    loss: each token's largest logit, its sum of exponentials and its target's logit. The vocabulary does not occur,
    because no logit travels. ``ValueError`` for sizes below 1.
    """
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    return OutsideElements(embedding=b * s * h, head=b * s * h, loss=3 * b * s)
