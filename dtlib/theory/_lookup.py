"""Presets are found by what people say: case, spaces, hyphens and leading words do not matter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Preset = TypeVar("Preset")


def find(what: str, name: str, known: Mapping[str, Preset]) -> Preset:
    """The entry of `known` called `name`, or the only one whose name contains its words.

    ``ValueError`` that lists the names that fit, or all of them, otherwise; `what` says what they are names of.
    """
    wanted = _words(name) if isinstance(name, str) else []
    exact = [each for each in known if _words(each) == wanted]
    some = [each for each in known if wanted and _contains(_words(each), wanted)]
    found = exact or some
    if len(found) != 1:
        fitting = f" fits {', '.join(found)};" if found else " is unknown;"
        raise ValueError(f"name {name!r} of {what}{fitting} there are {', '.join(known)}")
    return known[found[0]]


def _words(name: str) -> list[str]:
    """Runs of letters and runs of digits: ``"NVLink4"`` and ``"nvlink 4"`` are the same two words."""
    return re.findall(r"[a-z]+|\d+", name.lower())


def _contains(words: list[str], wanted: list[str]) -> bool:
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words)))
