"""The built book, its pages, and a browser that opens them from the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def built_book() -> Path:
    """The HTML of the book: what ``DTLIB_BOOK_HTML`` names, else where ``make book`` puts it."""
    return Path(os.environ.get("DTLIB_BOOK_HTML", ROOT / "_build" / "html")).resolve()


def built_pages() -> list[str]:
    """Every page of the built book, relative to its root; one word that fails clearly when there is none."""
    html = built_book()
    found = sorted(page.relative_to(html).as_posix() for page in html.rglob("*.html"))
    return [page for page in found if not page.startswith("_static/")] or ["(no book was built)"]


@pytest.fixture(scope="session")
def html() -> Path:
    """The folder of the built book. A missing book is a failure, not a skip."""
    found = built_book()
    if not (found / "index.html").is_file():
        pytest.fail(f"there is no built book at {found}: run `make book` first", pytrace=False)
    return found


@pytest.fixture(scope="session")
def ledger_file(html: Path) -> Path:
    """The ledger that the book's pages wrote while they were built."""
    return html.parent / "ledger.jsonl"


@pytest.fixture(scope="session")
def browser(lacking: Callable[[str], None]) -> Iterator[Any]:
    """Debian's Chromium, headless. Without it these tests cannot run, and say so."""
    if CHROMIUM is None:
        lacking("Chromium is not installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


class Visit:
    """One page in one browser context, with everything that went wrong while it was open."""

    def __init__(self, browser: Any, *, width: int = 1280, scheme: str = "light", javascript: bool = True) -> None:
        """Open an empty tab."""
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=javascript
        )
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"not found: {request.url}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"script error: {error}"))
        self.page.on("console", self._listen)

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console {message.type}: {message.text}")

    def open(self, file: Path, query: str = "") -> Any:
        """Open `file` from the disk, wait until its scripts have run, and return the page."""
        self.page.goto(file.as_uri() + query, wait_until="load")
        return self.page

    @property
    def left(self) -> list[str]:
        """Requests that left the disk."""
        return [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.fixture
def visit(browser: Any) -> Any:
    """``with visit(width=390, scheme="dark") as tab:`` opens a fresh tab."""
    return lambda **options: Visit(browser, **options)
