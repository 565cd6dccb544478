"""Looks into folders that strangers filled, and opens their files: never through a link, never blocking, bounded.

Every step from the instructor's folder downwards is opened relative to the one above it and refuses links, so nothing
changes between the look and the reading.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .learners import NOTEBOOK_SUFFIX, printable

MAX_ENTRIES = 100_000
MAX_DEPTH = 4
_PASSED_OVER = {"__MACOSX", "__pycache__", "node_modules", "venv"}
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_TOO_MANY = f"holds more than {MAX_ENTRIES} files, so nothing in it is read"
_KINDS = (
    (stat.S_ISLNK, "a link, which is not followed"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class Refused(Exception):
    """Something is not opened; the text goes on after its name, as in "is a folder"."""


@dataclass(frozen=True)
class Entry:
    """A name in a folder."""

    name: str
    is_folder: bool
    is_link: bool


def entries(folder: Path) -> list[Entry]:
    """What `folder` holds, by name, hidden entries left out. Raises ``OSError``, and `Refused` above `MAX_ENTRIES`."""
    with os.scandir(folder) as found:
        return _listed(found)


def notebooks(root: Path, name: str) -> tuple[list[Path], list[str]]:
    """The notebooks in the folder `name` of `root` and below, and notes on what is not read there."""
    paths: list[Path] = []
    notes: list[str] = []
    others: list[str] = []
    waiting: list[tuple[str, ...]] = [(name,)]
    seen = 0
    while waiting:
        parts = waiting.pop()
        shown = printable("/".join(parts[1:])) or "the folder"
        try:
            with _descended(root, parts) as folder, os.scandir(folder) as found:
                listed = _listed(found)
        except OSError as error:
            notes.append(f"{shown} cannot be opened ({error.strerror})")
            continue
        except Refused as error:
            notes.append(f"{shown} {error}")
            continue
        seen += len(listed)
        if seen > MAX_ENTRIES:
            return [], [f"the folder {_TOO_MANY}"]
        for each in listed:
            below = (*parts, each.name)
            if each.is_folder and len(parts) > MAX_DEPTH:
                notes.append(f"{printable('/'.join(below[1:]))} lies too many folders deep, so it is not read")
            elif each.is_folder:
                waiting.append(below)
            elif NOTEBOOK_SUFFIX.search(each.name):
                paths.append(root.joinpath(*below))
            elif each.is_link:
                notes.append(f"{printable('/'.join(below[1:]))} is a link, which is not followed")
            else:
                others.append(printable(each.name))
    if not paths and not notes:
        only = f", only {', '.join(sorted(others)[:3])}" + (" and others" if len(others) > 3 else "") if others else ""
        notes.append(f"no notebook (.ipynb) is in the folder{only}")
    return paths, notes


def content(path: Path, root: Path | None, most: int) -> bytes:
    """The bytes of the ordinary file at `path`, of which only `root` may be reached through links.

    Raises `Refused` for a file that is larger than `most` bytes, that is none, or that cannot be opened.
    """
    top = path.parent if root is None else root
    try:
        parts = path.relative_to(top).parts
        with _descended(top, parts[:-1]) as folder:
            _refuse(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False), most)
            opened = os.open(parts[-1], _OPEN, dir_fd=folder)
        try:
            _refuse(os.fstat(opened), most)
            with os.fdopen(opened, "rb", closefd=False) as file:
                data = file.read(most + 1)
        finally:
            os.close(opened)
    except (OSError, ValueError, IndexError) as error:
        why = getattr(error, "strerror", None) or "it does not lie in the folder of submissions"
        raise Refused(f"cannot be opened ({why})") from None
    if len(data) > most:
        raise Refused(f"is larger than {most // 2**20} MiB, so it is not read")
    return data


def _listed(found: Iterator[os.DirEntry[str]]) -> list[Entry]:
    listed = []
    for each in found:
        if not each.name.startswith(".") and each.name not in _PASSED_OVER:
            listed.append(Entry(each.name, each.is_dir(follow_symlinks=False), each.is_symlink()))
        if len(listed) > MAX_ENTRIES:
            raise Refused(_TOO_MANY)
    return sorted(listed, key=lambda each: each.name)


@contextmanager
def _descended(root: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """The folder at `parts` below `root`, opened step by step."""
    if ".." in parts:
        raise ValueError("a path must not lead out of the folder of submissions")
    folder = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        for part in parts:
            below = os.open(part, _OPEN | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _refuse(status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"is {next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), 'a device')}")
    if status.st_size > most:
        size = f"{status.st_size / 2**20:.0f} MiB"
        raise Refused(f"is {size} large, and notebooks of more than {most // 2**20} MiB are not read")
