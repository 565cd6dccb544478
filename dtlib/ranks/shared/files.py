"""The files of a checkpoint: written under another name until all are there, each with its SHA-256 beside it.

Imported when one is written or read, as `planners` is. ``sha256sum -c *.sha256 .*.sha256`` inside of a checkpoint
checks it without this library.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

METADATA, SETTINGS, UNFINISHED = ".metadata", "settings.pt", ".part"
_SUM = ".sha256"


def packed(settings: Any) -> bytes:
    """`settings` as they are written; ``ValueError`` for what could not be read again: tensors, numbers, strings, and
    lists and dictionaries of them can."""
    file = io.BytesIO()
    try:
        torch.save(settings, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise ValueError(f"what is saved must be tensors, numbers, strings, lists and dictionaries: {error}") from None
    return file.getvalue()


class Writer(dcp.FileSystemWriter):
    """Writes the checkpoint `path` as ``path.part``, and takes the suffix away when all of it is on the disk."""

    def __init__(self, path: Path, settings: bytes) -> None:
        super().__init__(path.with_suffix(UNFINISHED))
        self.finished, self.settings = path, settings

    def write_data(self, plan: Any, planner: Any) -> Any:
        """On every rank: its tensors, and the sum of each file by the rank that wrote it."""
        written = super().write_data(plan, planner)
        for name in sorted({each.storage_data.relative_path for each in written.wait()}):
            _add_sum(self.finished.with_suffix(UNFINISHED) / name)
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """On the first rank, when all have written. The last act is one rename: before it there is no checkpoint of
        that name, after it a whole one."""
        super().finish(metadata, results)
        part = self.finished.with_suffix(UNFINISHED)
        _write(part / SETTINGS, self.settings)
        for name in (METADATA, SETTINGS):
            _add_sum(part / name)
        _sync(part)
        os.replace(part, self.finished)
        _sync(self.finished.parent)


def shards(checkpoint: Path) -> list[str]:
    """The files that hold its tensors, as its metadata say."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().storage_data
    return sorted({each.relative_path for each in stored.values()})


def damage(checkpoint: Path, names: Iterable[str]) -> str | None:
    """What is wrong with the first of these files that is not as it was written, and whose it is; None if all are."""
    for name in names:
        file, kept = checkpoint / name, checkpoint / f"{name}{_SUM}"
        shard = re.match(r"__(\d+)_", name)
        whose = f"{file}, which rank {shard[1] if shard else 0} wrote,"
        for each in (file, kept):
            if not each.is_file():
                return f"{whose} is missing" if each == file else f"{whose} has lost its sum {each.name}"
        wanted, found = kept.read_text("utf-8", errors="replace")[:64], _digest(file)
        if found != wanted:
            return f"{whose} is damaged: its SHA-256 is {found[:8]}…, and was {wanted[:8]}… when written"
    return None


def damage_of_all(checkpoint: Path) -> str | None:
    """The same of a whole checkpoint, read by this process alone."""
    return damage(checkpoint, (METADATA, SETTINGS)) or damage(checkpoint, shards(checkpoint))


def _add_sum(file: Path) -> None:
    _write(file.with_name(file.name + _SUM), f"{_digest(file)}  {file.name}\n".encode())


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Bring the names in `folder` to the disk: a file's own sync does not."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
