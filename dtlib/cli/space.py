"""Which plans ``dtlib plan`` looks at: degrees that are held fixed, choices left open, what a framework runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from .options import FRAMEWORKS, some_of

if TYPE_CHECKING:
    from dtlib.theory.planner import Space

DEGREES = ("dp", "tp", "pp", "cp", "ep")  # as theory.footprint has them, which --help does not wait for


def degree_options(command: Any) -> Any:
    """A flag for each degree that may be held fixed."""
    for name in reversed(DEGREES):
        command = click.option(f"--{name}", type=int, help=f"This {name}.")(command)
    return command


_CHOICES = {
    "zero": "Stages of ZeRO (FSDP is 3, or 2 where it keeps what it gathered): 0, 1, 2, 3.",
    "shard": "States split among so many ranks (hybrid, HSDP; 3/8 is ZeRO 3 among 8), or: all, node.",
    "schedule": "Schedules of pipelines: 1F1B, interleaved, ZB-H1.",
    "recompute": "What is computed again: so many layers of a stage, or: none, selective, some, full.",
    "sequence_parallel": "How tensor parallelism splits tokens: none, again, keep.",
}
"""Flags that leave some choices open, in the order of help; a test holds what they name to what is looked at."""


def choice_options(command: Any) -> Any:
    """A flag for each choice of which some may be left out."""
    for name in reversed(_CHOICES):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, metavar="NAME[,NAME]", help=_CHOICES[name])(command)
    return command


def chosen_space(given: dict[str, Any]) -> Space:
    """What is looked at, of all choices; ``ValueError`` for a name that is not among them."""
    from dtlib.theory import planner
    from dtlib.theory.timing.space import EVERYTHING, SIZED, is_size

    if "selective" in (given["recompute"] or "").split(",") and given["attention"] == "flash":
        raise ValueError("recompute must be none, some or full: flash attention leaves selective nothing to save")
    chosen: dict[str, Any] = {}
    for name in _CHOICES:
        sizes = _sizes(given[name]) if name in SIZED else []
        try:
            chosen |= some_of(name, given[name], [*getattr(EVERYTHING, name), *sizes])
        except ValueError as error:
            number = ", or a number above 0" if name in SIZED and "there are" in str(error) else ""
            raise ValueError(f"{error}{number}") from error
    framework = chosen_framework(given)
    runs = EVERYTHING if framework is None else planner.FRAMEWORKS[framework]
    for name, asked in chosen.items():
        known = getattr(runs, name)
        for each in asked:
            if each not in known and not (is_size(each) and name in SIZED and {"node", "some"} & set(known)):
                raise ValueError(
                    f"{name} must be some of {', '.join(map(str, known))} with framework={framework}, not {each}"
                )
    for axis, name, alone in (("tp", "sequence_parallel", "none"), ("pp", "schedule", "1F1B")):
        if given[axis] == 1 and alone not in chosen.get(name, (alone,)):
            raise ValueError(f"{name} must name {alone} with {axis}=1, not {given[name]}")
    if given["tp"] == 1 and given["tp_overlap"]:
        raise ValueError("tp_overlap must be absent with tp=1: a rank alone sends nothing")
    return replace(runs, **chosen)


def chosen_framework(given: dict[str, Any]) -> str | None:
    """The framework that was asked for by one of its names."""
    from dtlib.theory.lookup import find

    names = {each: each for each in FRAMEWORKS} | {"torchtitan": "fsdp", "megatron-lm": "megatron"}
    return None if given["framework"] is None else find("framework", given["framework"], names)


def _sizes(text: str | None) -> list[int]:
    """The whole numbers in a list such as ``node, 8``."""
    return [int(each) for each in (text or "").split(",") if each.strip().isdecimal() and int(each)]
