"""Names of learners: read off what was handed in, made fit to be shown, and made safe as names of files."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable

NOTEBOOK_SUFFIX = re.compile(r"\.ipynb(?:\.(?:json|txt))?$", re.IGNORECASE)  # browsers like to add the second one
_MOODLE = re.compile(r"_assignsubmission_(?:file|onlinetext)_?")
_COPY = r"[\s_-]*(?:\(\d{1,2}\)|copy[\s_]?\d*)"
_COPIES = re.compile(rf"^(?:{_COPY})+|(?:{_COPY})+$", re.IGNORECASE)
_FILLER = {"answer", "answers", "copy", "exercise", "exercises", "final", "solution", "solutions", "solved"}
_SEPARATORS = " \t_-.,;+"
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?$", re.IGNORECASE)
_OURS = re.compile(r"-[0-9a-f]{16}$", re.IGNORECASE)
_MAX_SHOWN = 80


def learner_of(name: str, stems: Iterable[str]) -> str:
    """The learner that a notebook's file name gives; "" where it names the chapter alone, such as ``dp (1).ipynb``.

    The suffix, Moodle's marks and the name of a chapter (with what marks a copy behind it) are taken off:
    ``alice_collectives.ipynb``, ``collectives-alice (2).ipynb`` and ``alice.ipynb`` are all of alice.
    """
    name = _MOODLE.sub("_", NOTEBOOK_SUFFIX.sub("", name))
    for stem in stems:
        parts = re.split(rf"(?:^|(?<=[\W_])){re.escape(stem)}(?=[\W_]|$)", name, maxsplit=1, flags=re.IGNORECASE)
        if len(parts) == 2:
            before, after = parts[0].strip(_SEPARATORS), _COPIES.sub("", parts[1]).strip(_SEPARATORS)
            rest = f"{before}_{after}" if before and after else before or after
            return "" if rest.casefold() in _FILLER else rest
    return name.strip("_") or name


def learner_of_folder(name: str) -> str:
    """The learner that the name of a folder gives: Moodle's marks and a stray ``.ipynb`` are taken off."""
    return _MOODLE.sub("", NOTEBOOK_SUFFIX.sub("", name)).strip("_") or name


def printable(text: str, most: int = _MAX_SHOWN) -> str:
    """`text` on one line, without characters that are invisible, turn the line around or are none; cut after `most`."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    text = unicodedata.normalize("NFC", text)
    shown = [" " if each.isspace() else "�" if unicodedata.category(each)[0] == "C" else each for each in text]
    return " ".join("".join(shown).split())


def distinct(names: Iterable[str]) -> dict[str, str]:
    """For each of `names`, all different, one to show. No two that are shown differ in case or accents' form alone."""
    shown: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names):
        base = printable(name) or "unnamed"
        number, candidate = 1, base
        while _folded(candidate) in taken:
            number += 1
            candidate = f"{base} ({number})"
        taken.add(_folded(candidate))
        shown[name] = candidate
    return shown


def safe_name(learner: str) -> str:
    """`learner` as a name for a file, without a suffix: at most 100 bytes, on every system, never hidden, never a path.

    Ordinary names, also with spaces and accents, stay as they are. All others get a digest of the name, which no
    ordinary name ends in, so two learners that `find` tells apart never share a file.
    """
    if (
        learner == printable(learner)
        and len(learner.encode()) <= 100
        and all(each.isalnum() or each in " _-.@+()" for each in learner)
        and learner[:1].isalnum()
        and learner[-1] not in " ."
        and not _RESERVED.match(learner)
        and not _OURS.search(learner)
    ):
        return learner
    readable = re.sub(r"[^A-Za-z0-9]+", "_", learner)[:40].strip("_") or "learner"
    return f"{readable}-{hashlib.sha256(learner.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
