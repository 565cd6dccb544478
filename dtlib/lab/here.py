"""Where this process runs: which page or script, on what machine, with which versions. Facts only, no
torch."""

from __future__ import annotations

import os
import platform
import sys
import uuid
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

RUN_ID = uuid.uuid4().hex[:12]  #: names this process (and what it forks) in the ledger

_LIBRARY = str(Path(__file__).resolve().parent.parent)


def shell() -> Any | None:
    """The IPython shell that runs this code, None outside IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def in_notebook() -> bool:
    """True where rich output is displayed: an IPython shell that belongs to a Jupyter kernel."""
    current = shell()
    return current is not None and getattr(current, "kernel", None) is not None


def is_first_process() -> bool:
    """False in every process but the first of a job that torchrun started; True everywhere else."""
    return os.environ.get("TORCHELASTIC_RUN_ID") is None or os.environ.get("RANK", "0") == "0"


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """This machine in a few words, for example ``"Linux x86_64, 2 cores"``. It names no host."""
    count = cores()
    return f"{platform.system()} {platform.machine()}, {count} core{'s' if count > 1 else ''}"


@cache
def _own_version() -> str:
    try:
        return metadata.version("dtlib-course")
    except metadata.PackageNotFoundError:  # run from its folder
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of this course, of Python, and of those libraries that are loaded and change what is measured."""
    found = {"dtlib": _own_version(), "python": platform.python_version()}
    for name in ("numpy", "torch"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(module.__version__)
    return found


def where() -> str:
    """The page, test or script that is running, as ``folder/file``; ``"interactive"`` where there is none.

    The environment variable ``DTLIB_WHERE`` decides where it is set: a kernel cannot know the name of the
    notebook that it runs, so whoever builds the book says it.
    """
    said = os.environ.get("DTLIB_WHERE")
    if said:
        return said
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if shell() is not None:
        page = test.split("::")[0]  # nbval starts the kernel inside a test that is named after the notebook
        if page.endswith(".ipynb"):
            return _short(page)
        edited = shell().user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")  # type: ignore[union-attr]
        return _short(edited) if edited else "interactive"
    if test:
        return test
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return "interactive" if file.startswith("<") else _short(file)


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:]).lstrip("/")
