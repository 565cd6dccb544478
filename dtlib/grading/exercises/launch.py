"""Where an exercise opens at one click, once a repository is known to hold it: Colab, Binder, Codespaces.

The repository's address is known only to whoever publishes the course, so the committed notebooks have no such links:
`dtlib release --repository` writes them, and the publishing workflow pushes what it wrote to the branch `BRANCH`.
"""

from __future__ import annotations

import re
from typing import Any

BRANCH = "launch"
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")
_INSTALL = """\
# Where the course is not installed yet: install it, and see what works there.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("dtlib") is None:
    course = "dtlib-course[lab] @ git+{repository}@{ref}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", course], check=True)
    doctor = [sys.executable, "-m", "dtlib.cli", "doctor"]
    print(subprocess.run(doctor, stdout=subprocess.PIPE, text=True).stdout)"""


def places(repository: str, stem: str, ref: str = BRANCH) -> dict[str, str]:
    """The addresses at which the exercises of chapter `stem` open, by the name of the place.

    `repository` is the address of the course on GitHub, `ref` a branch or tag of it. Places that open repositories of
    GitHub alone are all that there are: ``ValueError`` for another address.
    """
    found = _GITHUB.fullmatch(repository)
    if found is None:
        raise ValueError(f"repository must be https://github.com/OWNER/NAME, not {repository!r}")
    file = f"exercises/{stem}.ipynb"
    return {
        "Colab": f"https://colab.research.google.com/github/{found[1]}/blob/{ref}/{file}",
        "Binder": f"https://mybinder.org/v2/gh/{found[1]}/{ref}?urlpath=lab/tree/{file}",
        "Codespaces": f"https://codespaces.new/{found[1]}/tree/{ref}?quickstart=1",
    }


def cells(repository: str, stem: str, ref: str = BRANCH) -> list[dict[str, Any]]:
    """The head of a notebook that can be opened anywhere: links, and a cell that installs the course if it must."""
    links = " · ".join(f"[{place}]({address})" for place, address in places(repository, stem, ref).items())
    code = _INSTALL.format(repository=repository.rstrip("/"), ref=ref)
    told = f"*Open this notebook in* {links}"
    return [
        {"cell_type": "markdown", "id": "launch", "metadata": {}, "source": [told]},
        {
            "cell_type": "code", "id": "launch-install", "metadata": {"tags": ["hide-input"]},
            "source": code.splitlines(keepends=True), "execution_count": None, "outputs": [],
        },
    ]  # fmt: skip
