"""Notebooks as they are handed in, and what the grader reads of them."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from dtlib.grading.classroom.intake import Submission, find
from dtlib.grading.sandbox.runner import Cell

from .answers import ROOT

STEMS = ("collectives", "dp")

DP = (ROOT / "solutions" / "dp.ipynb").read_bytes()
COLLECTIVES = (ROOT / "solutions" / "collectives.ipynb").read_bytes()
BLANK_DP = (ROOT / "exercises" / "dp.ipynb").read_bytes()


def notebook(*cells, **others) -> dict:
    """A notebook of code cells, given as source or (id, source)."""
    pairs = [("", each) if isinstance(each, str) else each for each in cells]
    code = [{"cell_type": "code", "id": id, "metadata": {}, "outputs": [], "source": source} for id, source in pairs]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code, **others}


def write(path: Path, content: bytes | str | dict | list = DP) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    return path


def read(submission: Submission) -> Submission:
    submission.read(tempfile.TemporaryFile())  # noqa: SIM115  the submission keeps it
    return submission


def problem_of(submission: Submission, stem: str) -> str:
    return submission.problem(stem)[0]


def cells_of(submission: Submission, stem: str) -> list[Cell]:
    return [] if problem_of(submission, stem) else submission.cells(stem)


def only(folder: Path) -> Submission:
    (found,) = find(folder)
    return read(found)


def of(tmp_path: Path, content, name: str = "dp.ipynb") -> Submission:
    write(tmp_path / "alice" / name, content)
    return only(tmp_path)


def functions(submission: Submission, stem: str) -> list[str]:
    return re.findall(r"^def (\w+)", "\n".join(each.source for each in cells_of(submission, stem)), re.M)
