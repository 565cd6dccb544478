"""Presets are found by what people say: case, spaces, hyphens and leading words do not matter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

Preset = TypeVar("Preset")


def find(what: str, name: str, known: Mapping[str, Preset]) -> Preset:
    """The entry of `known` called `name`, or the only one whose name contains its words.

    Otherwise ``ValueError``: it lists the names that fit, or those that look like `name`, or all of them. `what` says
    what they are names of. A single letter or figure is no name but of what is called so: it would mean by chance.
    """
    wanted = _words(name) if isinstance(name, str) else ()
    exact = [each for each in known if _words(each) == wanted]
    some = [each for each in known if len("".join(wanted)) > 1 and _contains(_words(each), wanted)]
    found = exact or some
    if len(found) == 1:
        return known[found[0]]
    if found:
        raise ValueError(f"name {name!r} of {what} fits {', '.join(found)}; say which")
    alike = difflib.get_close_matches("".join(wanted), {"".join(_words(each)): each for each in known}, cutoff=0.5)
    meant = [each for each in known if "".join(_words(each)) in alike]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are {', '.join(known)}"
    raise ValueError(f"name {name!r} of {what} is unknown; {hint}")


@lru_cache(maxsize=1024)
def _words(name: str) -> tuple[str, ...]:
    """Runs of letters and runs of digits: ``"NVLink4"`` and ``"nvlink 4"`` are the same two words.

    A minus that leads counts, -1 is not 1; any other is a hyphen.
    """
    return tuple(re.findall(r"[a-z]+|(?:^\s*-\s*)?\d+", name.lower()))


def _contains(words: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether `wanted` are among `words`, in this order."""
    rest = iter(words)
    return all(word in rest for word in wanted)
