"""activations.1: which tensor a layer keeps that it should not, by what it keeps at several lengths; on paper."""

from dataclasses import replace
from typing import Any

from dtlib.grading.exercises.inputs import Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import activations, models

NOTHING, FLASH, SCORES, MASKS, INPUT, GELU, NORMS = (
    "nothing wrong", "matrix in spite of flash", "scores kept", "wide masks", "input three times", "GELU in steps",
    "norms in fp32",
)  # fmt: skip

#: What is wrong, bytes of an element and in a mask, flash attention, entries a head, micro-batch, and the lengths.
#: Where an element has four bytes, fp32 is no fault of a norm.
KINDS = (
    (NOTHING, 2, 1, False, 64, 1, (512, 1024, 2048)), (NOTHING, 2, 1, True, 64, 4, (1024, 4096)),
    (NOTHING, 4, 1, False, 128, 3, (256, 1024)), (NOTHING, 4, 2, True, 80, 2, (2048, 8192)),
    (NOTHING, 4, 4, False, 64, 2, (512, 2048)),
    (FLASH, 2, 1, True, 128, 1, (1024, 2048, 4096)), (FLASH, 4, 2, True, 64, 3, (512, 1024)),
    (SCORES, 2, 1, False, 64, 2, (512, 1024)), (SCORES, 4, 4, False, 128, 1, (256, 1024, 2048)),
    (MASKS, 2, 1, False, 64, 3, (512, 2048)), (MASKS, 2, 1, True, 80, 1, (1024, 4096)),
    (MASKS, 4, 1, True, 128, 2, (256, 512, 1024)), (MASKS, 4, 2, False, 64, 1, (512, 1024)),
    (INPUT, 2, 1, False, 64, 1, (512, 2048)), (INPUT, 4, 1, True, 128, 5, (1024, 4096)),
    (GELU, 2, 1, True, 80, 2, (512, 1024)), (GELU, 4, 4, False, 64, 1, (256, 2048)),
    (NORMS, 2, 1, False, 128, 1, (512, 1024, 4096)), (NORMS, 2, 1, True, 64, 3, (2048, 8192)),
)  # fmt: skip
"""Each fault with and without flash attention where it has both, and layers without a fault, in any order."""


def case(
    rng: Rng, number: int, kind: str, element: int, mask: int, flash: bool, width: int, micro_batch: int,
    seqs: tuple[int, ...],
) -> dict[str, Any]:  # fmt: skip
    heads = int(rng.integers(10, 40))
    told: dict[str, Any] = {
        "micro_batch": micro_batch, "hidden": width * heads, "num_heads": heads, "element_bytes": element,
        "mask_bytes": mask, "flash": flash,
    }  # fmt: skip
    told |= {"seqs": list(seqs), "kept_bytes": [kept(kind, seq, **told) for seq in seqs]}
    return call(f"layer {number}: {in_words(told)}", [told]) | {"wrong": kind}


def kept(
    kind: str, seq: int, micro_batch: int, hidden: int, num_heads: int, element_bytes: int, mask_bytes: int, flash: bool
) -> int:
    """Bytes that the layer keeps."""
    model = models.gpt("", num_layers=1, hidden=hidden, num_heads=num_heads, vocab=1, seq=seq)
    mask = element_bytes if kind == MASKS else mask_bytes
    widths = activations.Widths(
        element=element_bytes, core=element_bytes, mask=mask, core_mask=mask, statistic=4, log_sum_exp=4
    )
    attention = "flash" if flash and kind != FLASH else "matrix"
    layer = activations.layer_activations(model, micro_batch, attention=attention, widths=widths)  # type: ignore[arg-type]
    if kind == SCORES:
        layer = replace(layer, softmax_output=2 * layer.softmax_output)
    if kind == INPUT:
        layer = replace(layer, attention_input=3 * layer.attention_input)
    if kind == GELU:
        layer = replace(layer, mlp_activation=3 * layer.mlp_activation)
    fp32 = 2 * 4 * seq * micro_batch * hidden if kind == NORMS else 0
    return round(layer.total + fp32)


of = by("wrong", kind="memory")

EXERCISE = on_paper(
    "activations.1", "diagnose_layer", "What does this layer keep too much?", in_any_order(KINDS, case),
    of(FLASH, SCORES)(2, "matrices", "s×s entries a head that are too many"),
    of(MASKS, INPUT, GELU, NORMS)(3, "tensors", "tensors that are too wide, or too many"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
