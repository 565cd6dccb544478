"""Names of learners: read off files and folders, made fit to be shown, and made safe as names of files."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import PurePath

NOTEBOOK_SUFFIX = re.compile(r"\.ipynb(?:\.(?:json|txt))?$", re.IGNORECASE)  # browsers like to add the second one
_MOODLE = re.compile(r"(.+?)_assignsubmission_(?:file|onlinetext)(?:_.*)?", re.S)
_CANVAS = re.compile(r"(?:LATE_)?(anon_[^\W_]+|[^\W_]+(?:_LATE)?_\d+)_(?:(\d+)_.+|(?:text|link)\.html)", re.S)
# Nothing in it may be given back, or a name of fifty copies takes for ever.
_COPY = r"[\s_-]*+(?:\(\d{1,2}\)|copy[\s_]?+\d*+)"
_COPIES = re.compile(rf"^(?:{_COPY})++|(?:{_COPY})++$", re.IGNORECASE)
_FILLER = {"answer", "answers", "copy", "exercise", "exercises", "final", "solution", "solutions", "solved"}
_PACKED = {".7z", ".gz", ".rar", ".tar", ".tgz", ".zip"}
_SEPARATORS = " \t_-.,;+"
_PLAIN = re.compile(r"(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))\w(?:[\w.-]{0,46}\w)?", re.IGNORECASE)
_OURS = re.compile(r"-[0-9a-f]{16}$", re.IGNORECASE)
_MOST_SHOWN = 80


def learner_of(name: str, stems: Iterable[str] = ()) -> str:
    """The learner that the name of a folder or notebook gives; "" where it names a chapter alone, as ``dp (1).ipynb``.

    The suffix and the name of one of the chapters `stems` (with what marks a copy behind it) are taken off:
    ``alice_collectives.ipynb``, ``collectives-alice (2).ipynb`` and ``alice.ipynb`` are all of alice. In a name that
    Moodle made, the learner stands before its marks, and the file's own name behind them.
    """
    name = NOTEBOOK_SUFFIX.sub("", name)
    if match := _MOODLE.fullmatch(name):
        return match[1]
    for stem in stems:
        parts = re.split(rf"(?:^|(?<=[\W_])){re.escape(stem)}(?=[\W_]|$)", name, maxsplit=1, flags=re.IGNORECASE)
        if len(parts) == 2:
            before, after = parts[0].strip(_SEPARATORS), _COPIES.sub("", parts[1]).strip(_SEPARATORS)
            rest = f"{before}_{after}" if before and after else before or after
            return "" if rest.casefold() in _FILLER else rest
    return name.strip("_") or name


def of_canvas(names: Collection[str]) -> dict[str, str]:
    """The learner of each file that Canvas named, where most `names` are as it packs them,
    ``adalovelace_LATE_271_8282_dp.ipynb`` or ``anon_X3fa2_8281_dp.ipynb``.

    The first number is the learner's; the second is the file's, and no other file has it. An entry of text or a link
    has none. Empty where fewer than two files have such a number, or two the same.
    """
    found = [match for name in names if (match := _CANVAS.fullmatch(name))]
    numbers = [match[2] for match in found if match[2]]
    if len(numbers) < 2 or len(set(numbers)) < len(numbers) or 2 * len(found) <= len(names):
        return {}
    return {match.string: match[1].replace("_LATE_", "_") for match in found}


def instead(name: str) -> str:
    """What a file is that is called `name`, and what to do about it."""
    path = PurePath(name)
    if path.suffix.lower() not in _PACKED:
        return "no notebook (.ipynb)"
    into = printable(path.stem.removesuffix(".tar"))
    return f"no notebook (.ipynb): it is packed, and counts once it is unpacked, into a folder {into}"


def printable(text: str, most: int = _MOST_SHOWN) -> str:
    """`text` on one line, without characters that are invisible, turn the line around or are none; cut after `most`."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    text = unicodedata.normalize("NFC", text)
    shown = [" " if each.isspace() else "�" if unicodedata.category(each)[0] == "C" else each for each in text]
    return " ".join("".join(shown).split())


def distinct(names: Collection[str]) -> tuple[dict[str, str], list[list[str]]]:
    """For each of `names`, all different, one to show, and the shown names that look alike, group by group.

    Names look alike that differ in case, in the form of a letter or in what cannot be shown alone. Each of them but the
    first gets a number, so that no two that are shown look alike.
    """
    bases = {name: printable(name) or "unnamed" for name in sorted(names)}
    taken = {folded(base) for base in bases.values()}
    groups: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for name, base in bases.items():
        group = groups.setdefault(folded(base), [])
        number, shown[name] = 1, base
        while group and folded(shown[name]) in taken:
            number += 1
            shown[name] = f"{printable(base, _MOST_SHOWN - 8)} ({number})"
        taken.add(folded(shown[name]))
        group.append(shown[name])
    return shown, [group for group in groups.values() if len(group) > 1]


def file_name(learner: str) -> str:
    """A name for files of `learner`, safe on every system, and another for every learner that `distinct` tells apart.

    A plain name stays as it is. Any other becomes a readable part and a digest, which no plain name ends in.
    """
    if _PLAIN.fullmatch(learner) and not _OURS.search(learner):
        return learner
    readable = re.sub(r"\W+", "-", learner)[:40].strip("-_") or "learner"
    return f"{readable}-{hashlib.sha256(learner.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def folded(name: str) -> str:
    """What names have in common that differ in case or form alone."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
