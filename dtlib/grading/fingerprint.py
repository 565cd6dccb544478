"""What a verdict depends on, as one number: a rerun skips a learner of whom nothing of this has changed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent
_NO_JUDGES = ("figures",)  # they draw
_LIBRARIES = ("numpy", "torch")


@cache
def of_grader() -> str:
    """SHA-256 of the sources that grade or that graded code may call, and of the versions beneath them."""
    digest = hashlib.sha256()
    folders = (path for path in _PACKAGE.iterdir() if path.is_dir() and path.name not in _NO_JUDGES)
    for path in sorted(file for folder in folders for file in folder.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}}
    digest.update(json.dumps(versions, sort_keys=True).encode())
    return digest.hexdigest()


def of_learner(learner: str, submission: str, seed: int, exercises: Sequence[str], limits: Mapping[str, Any]) -> str:
    """SHA-256 of everything that a learner's verdict depends on; `submission` is the digest of what was handed in."""
    parts = [of_grader(), learner, submission, seed, list(exercises), dict(limits)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def version() -> str:
    """The version of dtlib, "unknown" where it is not installed."""
    return _version("dtlib")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
