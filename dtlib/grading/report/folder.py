"""The folder that results go into: one grader at a time, every file whole or not there, nothing of others touched."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .text import clean

LEARNERS, REPORTS, GRADESCOPE = "learners", "reports", "gradescope"
RESULTS = "results.json"
TOP = (RESULTS, "report.md", "scores.csv", "statistics.csv", "junit.xml")
LOCK = ".dtlib-grade.lock"
_TEMPORARY = ".dtlib-grade-"
_NAME_CHARS = 48


class FolderError(ValueError):
    """Raised where the folder cannot be used for results: what stands in the way."""


def refuse(out: Path, submissions: Path) -> None:
    """Raise `FolderError` where `out` is no place for results of `submissions`. Writes nothing."""
    if out.exists() and not out.is_dir():
        raise FolderError(f"out must be a folder, and {out} is a file")
    here, there = out.resolve(), submissions.resolve()
    if here == there or there in here.parents:
        raise FolderError(f"out must not lie inside the submissions, and {out} is in {submissions}")
    if here in there.parents:
        raise FolderError(f"the submissions must not lie inside out, and {submissions} is in {out}")
    if not out.is_dir() or (out / LOCK).exists():
        return
    taken = [name for name in (*TOP, LEARNERS, REPORTS, GRADESCOPE) if (out / name).exists()]
    if taken:
        raise FolderError(f"out holds {taken[0]}, which dtlib did not write, in {out}: choose another folder")


class Folder:
    """The results folder, made where it does not exist and locked until the ``with`` block ends.

    Raises `FolderError` where another grader holds it. What a grader that was killed left half-written is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> Folder:
        try:
            for folder in (self.path, *(self.path / name for name in (LEARNERS, REPORTS, GRADESCOPE))):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("a", encoding="utf-8")
        except OSError as error:
            raise FolderError(f"out cannot be written, {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise FolderError(
                f"another dtlib grade is writing to {self.path}: wait for it, or choose another"
            ) from error
        for folder in (self.path, *(self.path / name for name in (LEARNERS, REPORTS, GRADESCOPE))):
            for left in folder.glob(f"{_TEMPORARY}*.tmp"):
                left.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def learner(self, name: str) -> Path:
        """Where the record of the learner with the file name `name` stands."""
        return self.path / LEARNERS / f"{name}.json"

    def report(self, name: str) -> Path:
        """Where the report for the learner with the file name `name` stands."""
        return self.path / REPORTS / f"{name}.md"

    def gradescope(self, name: str) -> Path:
        """Where Gradescope's results of the learner with the file name `name` stand."""
        return self.path / GRADESCOPE / f"{name}.json"

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

    def write_text(self, path: Path, text: str) -> None:
        """Replace `path` by `text`."""
        with self.writing(path) as file:
            file.write(text)

    def write_json(self, path: Path, data: Any) -> None:
        """Replace `path` by `data` as JSON."""
        with self.writing(path) as file:
            json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where there is no such file or it holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def seal(record: Mapping[str, Any]) -> str:
    """A checksum of `record`, its own entry ``"seal"`` left out: a file that was damaged is noticed by it."""
    rest = {key: value for key, value in record.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def file_names(learners: Sequence[str]) -> dict[str, str]:
    """For each learner a name that is safe for a file on every system, and another for every other learner.

    A name that is plain stays as it is. From any other, a readable part and a checksum of the whole are made.
    """
    plain: dict[str, int] = {}
    for learner in learners:
        plain[_readable(learner).casefold()] = plain.get(_readable(learner).casefold(), 0) + 1
    names: dict[str, str] = {}
    taken: set[str] = set()
    for learner in learners:
        name = _readable(learner)
        if name != learner or plain[name.casefold()] > 1:
            name = f"{name}-{hashlib.sha256(learner.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
        while name.casefold() in taken:  # somebody is called what another's checksum says
            name += "-2"
        taken.add(name.casefold())
        names[learner] = name
    return names


def _readable(learner: str) -> str:
    text = unicodedata.normalize("NFC", clean(learner, 4 * _NAME_CHARS))
    name = re.sub(r"[^\w.-]+", "-", text)[:_NAME_CHARS].strip(".-_ ")
    reserved = re.fullmatch(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name, re.I)
    return f"learner-{name}" if reserved else name or "learner"
