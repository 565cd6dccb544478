"""The registry of closed forms. Every registered formula must be measured somewhere in the book."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


@dataclass(frozen=True)
class Formula:
    """One closed form of the book: what it is called, what it says, who found it, where it is taught."""

    name: str
    function: Callable[..., Any]
    equation: str
    source: str
    chapter: str
    use: str = ""
    label: str = ""

    @property
    def title(self) -> str:
        """The first line of the function's docstring, without the full stop."""
        return (inspect.getdoc(self.function) or self.name).splitlines()[0].rstrip(".")


_registry: dict[str, Formula] = {}


def formula(
    name: str, *, source: str, chapter: str = "", equation: str = "", use: str = "", label: str = ""
) -> Callable[[F], F]:
    """Register a closed form under `name`, for example ``"collectives.ring_all_reduce_bytes"``.

    `equation` is its LaTeX without dollar signs, `source` a key of ``chapters/references.bib`` or the words
    "derived here". `chapter` is the stem of the chapter that teaches it, where that is not the first word of `name`;
    `label` the theorem, equation or section of that chapter where it is derived. `use` says in a sentence what it
    decides, of a threshold or an optimum: those come first on the cheat sheet. The function itself is returned
    unchanged. Registering a name for a second function raises ``ValueError``; running the same definition again (a
    notebook cell, a reloaded module) replaces it.
    """
    for argument, value in (("name", name), ("source", source)):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{argument} must be a non-empty string, not {value!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must look like 'chapter.what_it_is', in lower case, not {name!r}")

    def register(function: F) -> F:
        known = _registry.get(name)
        if known is not None and not _same_definition(known.function, function):
            raise ValueError(f"name {name!r} already belongs to {_where(known.function)}; choose another")
        _registry[name] = Formula(name, function, equation, source, chapter or name.partition(".")[0], use, label)
        return function

    return register


def formulas(chapter: str | None = None) -> dict[str, Formula]:
    """All registered formulas by name, or those of one chapter, in the order of their names."""
    return {name: known for name, known in sorted(_registry.items()) if chapter in (None, known.chapter)}


def _same_definition(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    return _where(old) == _where(new)


def _where(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
