"""Looks into folders that strangers filled, and opens their files: never through a link, never blocking, bounded."""

from __future__ import annotations

import os
import stat
from itertools import islice
from pathlib import Path

from .names import NOTEBOOK_SUFFIX, printable

MAX_ENTRIES = 100_000
_MAX_DEPTH = 4
_PASSED_OVER = {"__MACOSX", "__pycache__", "node_modules", "venv"}
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
LINK = "a link, which is not followed"
_KINDS = ((stat.S_ISLNK, LINK), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


class Refused(Exception):
    """Something is not opened; the text goes on after its name, as in "is a folder"."""


def entries(folder: Path, most: int = MAX_ENTRIES) -> list[os.DirEntry[str]]:
    """What `folder` holds, by name, hidden entries left out. Raises ``OSError``, and `Refused` for more than `most`."""
    with os.scandir(folder) as found:
        listed = list(islice(found, most + 1))
    if len(listed) > most:
        raise Refused(f"holds more than {MAX_ENTRIES} files, so nothing in it is read")
    shown = (each for each in listed if not each.name.startswith(".") and each.name not in _PASSED_OVER)
    return sorted(shown, key=lambda each: each.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder and no link to one."""
    return entry.is_dir(follow_symlinks=False)


def is_notebook(entry: os.DirEntry[str]) -> bool:
    """Whether it is called like a notebook."""
    return not is_folder(entry) and NOTEBOOK_SUFFIX.search(entry.name) is not None


def notebooks(folder: Path) -> tuple[list[Path], list[str]]:
    """The notebooks in `folder` and below, and notes on what is not read there."""
    paths: list[Path] = []
    notes: list[str] = []
    others: list[str] = []
    left, waiting = MAX_ENTRIES, [folder]
    while waiting:
        inside = waiting.pop()
        try:
            listed = entries(inside, left)
        except OSError as error:
            notes.append(f"{_shown(inside, folder) or 'the folder'} cannot be opened ({error.strerror})")
            continue
        except Refused as error:
            return [], [f"the folder {error}"]
        left -= len(listed)
        for each in listed:
            path = Path(each.path)
            if is_folder(each) and len(path.relative_to(folder).parts) > _MAX_DEPTH:
                notes.append(f"{_shown(path, folder)} lies too many folders deep, so it is not read")
            elif is_folder(each):
                waiting.append(path)
            elif is_notebook(each):
                paths.append(path)
            elif each.is_symlink():
                notes.append(f"{_shown(path, folder)} is {LINK}")
            else:
                others.append(each.name)
    if not paths and not notes:
        only = f", only {', '.join(map(printable, sorted(others)[:3]))}" if others else ""
        notes.append(f"no notebook (.ipynb) is in the folder{only}{' and others' * (len(others) > 3)}")
    return paths, notes


def content(path: Path, most: int) -> bytes:
    """The bytes of the ordinary file at `path`, which is absolute and no part of which may be a link.

    Raises `Refused` for a file that is larger than `most` bytes, that is none, or that cannot be opened.
    """
    try:
        _refuse(path.lstat(), most)
        with open(os.open(path, _OPEN), "rb") as file:
            _refuse(os.fstat(file.fileno()), most)
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != str(path):  # a folder above it has become a link
                raise Refused("cannot be opened (it does not lie where it was found)")
            data = file.read(most + 1)
    except OSError as error:
        raise Refused(f"cannot be opened ({error.strerror})") from None
    if len(data) > most:  # it has grown since
        raise Refused(f"is larger than {most // 2**20} MiB, so it is not read")
    return data


def _shown(path: Path, folder: Path) -> str:
    return printable("/".join(path.relative_to(folder).parts))


def _refuse(status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"is {next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), 'a device')}")
    if status.st_size > most:
        size = f"{status.st_size / 2**20:.0f} MiB"
        raise Refused(f"is {size} large, and notebooks of more than {most // 2**20} MiB are not read")
