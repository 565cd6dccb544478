"""Names that tell nothing: the same for a learner in each report, and nobody's without the secret salt."""

from __future__ import annotations

import csv
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from .intake.names import folded
from .report.record import Record
from .report.text import cell

_UNREADABLE = "What was handed in cannot be read."
_NO_NOTEBOOK = "No notebook was handed in."


class Pseudonyms:
    """Pseudonyms from the salt in `folder`, which is made where there is none, and who they are, in ``mapping.csv``.

    Raises ``ValueError`` where the folder lies inside of `out`, or `out` inside of it, or it cannot be used.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, results = folder.resolve(), out.resolve()
        if self.folder.is_relative_to(results) or results.is_relative_to(self.folder):
            raise ValueError(f"anonymous must be a folder apart from the results, not {folder}")
        self._known: dict[str, str] = {}
        salt = self.folder / "salt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not salt.exists():
                with open(os.open(salt, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(32))
            self._salt = salt.read_bytes()
        except OSError as error:
            raise ValueError(f"anonymous must be a folder that can be written: {error}") from error
        if len(self._salt) < 32:
            raise ValueError(f"the salt must have 32 bytes, and {salt} has {len(self._salt)}")

    def of(self, learner: str) -> str:
        """The pseudonym of a learner, whichever way the name is written."""
        known = folded(learner).encode("utf-8", "replace")
        name = f"learner-{hmac.new(self._salt, known, hashlib.sha256).hexdigest()[:12]}"
        if self._known.setdefault(name, learner) != learner:
            raise ValueError(f"two learners have the pseudonym {name}: remove {self.folder / 'salt'} and start again")
        return name

    def hide(self, record: Record, id: str | None) -> Record:
        """`record` without what tells of whom it is: names, names of files, times, and what was printed."""
        entries = [
            {
                **entry,
                "reason": _reason(entry),
                "measured": {**entry["measured"], "printed": ""},
            }
            for entry in record["exercises"]
        ]
        kept = {name: value for name, value in record.items() if name != "name"}
        kept["measured"] = {**record["measured"], "handed_in": ""}
        if "late" in record:
            kept["late"] = {**record["late"], "handed_in": ""}
        return {**kept, "learner": self.of(id or record["learner"]), "notes": [], "exercises": entries}

    def write(self, names: Mapping[str, str]) -> None:
        """Write down who is who; `names` are those of the roster, by id."""
        place = os.open(self.folder / "mapping.csv", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(place, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["pseudonym", "learner", "name"])
            rows.writerows([name, cell(who), cell(names.get(who, ""))] for name, who in sorted(self._known.items()))


def _reason(entry: Record) -> str:
    """The reason of an exercise; where a reason may tell names of files, one that tells none."""
    if entry["trouble"] == "unreadable":
        return _UNREADABLE
    return _NO_NOTEBOOK if entry["status"] == "not attempted" and entry["reason"] else str(entry["reason"])
