"""Buttons at the top of a page: open the notebook in the reader's own JupyterLab, its exercises anywhere.

The theme already offers the notebook as a download. ``make lab`` starts JupyterLab on the port below; the button
opens the page's notebook there. A repository's address is known only to whoever publishes the book: the environment
variable ``DTLIB_REPOSITORY_URL`` (set by the publishing workflow) adds the buttons that need it. The exercises open
from the branch that this workflow pushes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

from dtlib.grading.exercises import launch as elsewhere

LAB_URL = "http://localhost:8888/lab/tree/"


def repository(app: Sphinx, config: Config) -> None:
    """Turn on the theme's repository buttons when the repository's address is known."""
    url = os.environ.get("DTLIB_REPOSITORY_URL", "").strip()
    if not url:
        return
    config.html_theme_options |= {
        "repository_url": url,
        "repository_branch": os.environ.get("DTLIB_REPOSITORY_BRANCH", "main"),
        "use_repository_button": True,
        "use_issues_button": True,
        "use_source_button": True,
    }


def launch(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the JupyterLab button to the pages that are notebooks."""
    if not context.get("sourcename", "").endswith(".ipynb"):
        return
    lab = {
        "type": "link",
        "url": f"{LAB_URL}{pagename}.ipynb",
        "text": "JupyterLab on this computer",
        "tooltip": "Opens the notebook where `make lab` is running",
        "icon": "fas fa-laptop-code",
        "label": "launch-jupyterlab",
    }
    context["header_buttons"].insert(0, {
        "type": "group",
        "tooltip": "Run this page",
        "icon": "fas fa-rocket",
        "label": "launch-buttons",
        "buttons": [lab, *exercises(Path(app.srcdir), Path(pagename).name)],
    })  # fmt: skip


def exercises(course: Path, stem: str) -> Iterator[dict[str, str]]:
    """A button for each place that opens the chapter's exercises, where the repository is one that they can open."""
    url = os.environ.get("DTLIB_REPOSITORY_URL", "").strip()
    if not (url.startswith("https://github.com/") and (course / "exercises" / f"{stem}.ipynb").is_file()):
        return
    for place, address in elsewhere.places(url, stem).items():
        yield {
            "type": "link",
            "url": address,
            "text": f"Exercises in {place}",
            "tooltip": f"Opens the exercises of this chapter in {place}",
            "icon": "fas fa-cloud",
            "label": f"launch-{place.lower()}",
        }


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect after the theme, which makes the list of buttons."""
    app.connect("config-inited", repository)
    app.connect("html-page-context", launch, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
