"""What a verdict depends on, as one number: a rerun skips a learner of whom nothing of this has changed."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[2]
_NO_JUDGES = ("cli", "figures")
_KINDS = (".py", ".json")  # code, what ships of the banks, and recorded costs


@cache
def of_grader() -> str:
    """SHA-256 of the sources that grade or that graded code may call, and of the versions beneath them."""
    digest = hashlib.sha256(f"{platform.python_version()} {version('numpy')} {version('torch')}".encode())
    folders = (path for path in _PACKAGE.iterdir() if path.is_dir() and path.name not in _NO_JUDGES)
    for path in sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in _KINDS):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def of_learner(*parts: Any, grader: str = "") -> str:
    """SHA-256 of `parts` (plain data), which are all that a learner's record depends on beside the `grader`: this one,
    unless the fingerprint of another is told."""
    return hashlib.sha256(json.dumps([grader or of_grader(), *parts], sort_keys=True).encode()).hexdigest()


def version(name: str = "dtlib-course") -> str:
    """The version of a package, "unknown" where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
