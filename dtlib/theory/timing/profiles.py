"""The habits of frameworks, as constants: what `FITTED` has for Megatron-LM, and where others differ from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from dtlib.theory.units import TFLOP, ms, us

from .constants import FITTED, Constants

_PROFILES: dict[str, Constants] = {"megatron": FITTED}

# Eager kernels; stages filled by their time; gradients one by one at ZeRO 1, behind nothing; a host that meets every
# tensor rank for each layer, and across nodes with a pipeline, or in what seems a later version, which gathers inputs
# again, waits for each six times as long, a little less for those of its node. Found on the
# sweep of `ultrascale_small` and `ultrascale_half`, whose cluster is in them: nearly all of its pipelines on 512 cards,
# all over 32 tensor ranks, and a fifth of the others on 16 to 256 cards, take 0.28 s more for each message between
# stages; hardly any lies between.
_PROFILES["nanotron"] = replace(
    FITTED,
    matmul_share=0.69,
    kept_passes=2.65,
    logit_passes=1,
    layer_host_seconds=3.8 * ms,
    rank_host_seconds=0.46 * ms,
    staged_rank_host_seconds=2.25 * ms,
    far_rank_host_seconds=3.05 * ms,
    data_hiding=0.1,
    sharded_messages=6,
    accumulated_bytes=10,
    head_balance=1,
    stall_seconds=0.28,
    stall_hop_seconds=50 * us,
    stall_cards=512,
    stall_ranks=32,
)

# Kernels of attention without the newest cards' instructions; selective recompute repeats every second product.
_PROFILES["fsdp"] = replace(
    FITTED, matmul_share=0.8, attention_flop_per_s=150 * TFLOP, kept_passes=1.6, selective_products=0.5
)

# Megatron's kernels; held to one machine alone, whose links inside a node are slow.
_PROFILES["deepspeed"] = replace(FITTED, matmul_share=0.8, inside_share=0.35)

PROFILES: Mapping[str, Constants] = MappingProxyType(_PROFILES)
"""The constants of each framework; a constant that it does not name is Megatron's."""


def profile(name: str) -> Constants:
    """The constants of the framework called `name`; ``ValueError`` for one that is not in `PROFILES`."""
    if name not in PROFILES:
        raise ValueError(f"framework must be one of {', '.join(PROFILES)}, not {name!r}")
    return PROFILES[name]
