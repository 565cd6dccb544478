"""The folder that results go into: one grader at a time, every file whole or not there, nothing of others touched."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dtlib.grading.classroom.intake import folders
from dtlib.grading.classroom.seals import Key

RESULTS = "results.json"
LEARNERS, REPORTS, FEEDBACK, GRADESCOPE = "learners", "reports", "feedback", "gradescope"
LOCK = ".dtlib-grade.lock"
#: The endings of a learner's four files, and how they begin, whichever version of dtlib wrote them.
MARKS = {
    LEARNERS: (".json", b'{\n "schema": "dtlib-grade-learner/'),
    REPORTS: (".md", b"<!-- dtlib-grade-report/"),
    FEEDBACK: (".html", b"<!doctype html>\n<!-- dtlib-grade-report/"),
    GRADESCOPE: (".json", b'{\n "extra_data": {\n  "schema": "dtlib-grade/'),
}
_TOP = (RESULTS, "report.md", "report.html", "scores.csv", "canvas.csv", "moodle.csv", "junit.xml")
_TEMPORARY = ".dtlib-grade-"
MOST_BYTES = 256 * 2**20  # of a file that is read again


def refuse(out: Path, submissions: Path, what: str = "the submissions") -> None:
    """Raise ``ValueError`` where `out` is no place for results of `submissions`, called `what`. Writes nothing."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, and {out} is a file")
    results, source = out.resolve(), submissions.resolve()
    if results == source or source in results.parents:
        raise ValueError(f"out must not lie inside {what}, and {out} is in {submissions}")
    if results in source.parents:
        raise ValueError(f"{what} must not lie inside out, and {submissions} is in {out}")
    if link := next((name for name in (*MARKS, LOCK) if (out / name).is_symlink()), ""):
        raise ValueError(f"out holds a link, {out / link}, which could lead anywhere: choose another folder")
    taken = [name for name in (*_TOP, *MARKS) if (out / name).exists()]
    if taken and not (out / LOCK).exists():
        raise ValueError(f"out holds {taken[0]}, which dtlib did not write, in {out}: choose another folder")


class Folder:
    """The results folder, made where it does not exist and locked until the ``with`` block ends.

    Raises ``ValueError`` where another grader holds it. What a grader that was killed left half-written is removed.
    What is read again bears the seal of `key`.
    """

    def __init__(self, path: Path, key: Key) -> None:
        self.path, self.key = path.resolve(), key

    def __enter__(self) -> Folder:
        self._is_new = not self.path.exists()
        places = (self.path, *(self.path / name for name in MARKS))
        try:
            for place in places:
                place.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"out cannot be written, {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            told = f"another dtlib grade is writing to {self.path}: wait for it, or choose another folder"
            raise ValueError(told) from None
        for left in (left for place in places for left in place.glob(f"{_TEMPORARY}*.tmp")):
            left.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_new and not any(each.is_file() and each.name != LOCK for each in self.path.rglob("*")):
            shutil.rmtree(self.path)  # refused before anything was written
        self._lock.close()

    def of(self, kind: str, name: str) -> Path:
        """Where the file of a `kind` (a key of `MARKS`) stands of the learner with the file name `name`."""
        return self.path / kind / f"{name}{MARKS[kind][0]}"

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[IO[str]]:
        """A text file that becomes `path` when the block ends well: whole and on the disk, or as it was before."""
        temporary = path.parent / f"{_TEMPORARY}{hashlib.sha256(path.name.encode()).hexdigest()[:16]}.tmp"
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def write(self, path: Path, text: str) -> None:
        """Have `path` hold `text`; a file that does is left alone."""
        if self._read(path) != text.encode():
            with self.writing(path) as file:
                file.write(text)

    def write_json(self, path: Path, data: Any) -> None:
        """Have `path` hold `data` as JSON."""
        self.write(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def write_sealed(self, path: Path, record: Mapping[str, Any]) -> None:
        """Have `path` hold `record` and its seal."""
        self.write(path, self.key.sealed(record))

    def read_sealed(self, path: Path, schema: str) -> dict[str, Any] | None:
        """The record in `path`, None where there is none of that `schema` that bears our seal."""
        record = self.key.opened(self._read(path))
        return record if record and record["schema"] == schema else None

    def remove_others(self, keep: Collection[str]) -> None:
        """Remove the files of learners who are no longer there, those alone that say they are ours."""
        for record in sorted((self.path / LEARNERS).glob("*.json")):
            if record.stem not in keep and self._is_ours(record, LEARNERS):
                for kind in reversed(MARKS):
                    if self._is_ours(self.of(kind, record.stem), kind):
                        self.of(kind, record.stem).unlink()

    def _is_ours(self, path: Path, kind: str) -> bool:
        return self._read(path).startswith(MARKS[kind][1])

    def _read(self, path: Path) -> bytes:
        try:
            return folders.content(path, MOST_BYTES)
        except folders.Refused:
            return b""
