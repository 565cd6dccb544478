"""The built book as one PDF: each page as its print style shows it, joined, with bookmarks, page numbers and links.

``make pdf`` runs it on the book that ``make book`` built. Chromium prints each page by itself; pypdf joins them in the
order of the contents, turns links between pages into links inside the file, and lays the numbers under the pages.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from playwright.sync_api import Browser, sync_playwright
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, Fit, FloatObject, NameObject, NullObject

Place = tuple[int, float | None]
"""A page of the file, from 0, and how many points above its foot; None for its top."""

PAPER: dict[str, Any] = {
    "format": "A4",
    "margin": {"top": "14mm", "bottom": "18mm", "left": "14mm", "right": "14mm"},
    "scale": 0.78,  # of its size on a screen: a line of 95 columns fits the sheet
}
NUMBERS = """<style>@page {{ size: A4; margin: 0 }} body {{ margin: 0; font: 9pt sans-serif; color: #444 }}
p {{ height: 297mm; margin: 0; padding-top: 284mm; box-sizing: border-box; text-align: center; break-after: page }}
p:last-child {{ break-after: auto }}</style>{}"""
HEADINGS = """() => [...document.querySelectorAll("main :is(h1, h2, h3)")].map((each) => {
  const copy = each.cloneNode(true);
  copy.querySelectorAll(".headerlink, .katex-mathml").forEach((other) => other.remove());
  return [+each.tagName[1], (each.closest("section") || each).id, copy.textContent.trim()];
})"""
AIM = """(ids) => ids.forEach((id) => {
  const link = document.createElement("a");
  link.href = "#" + id;
  document.body.append(link);
})"""
"""Chromium keeps the place of an element in the PDF where the same page links to it."""


def contents(html: Path) -> list[Path]:
    """The pages of the book in the order in which a reader turns them, from the one that the index leads to."""
    found, following = [], re.search(r'url=([^"]+)"', (html / "index.html").read_text("utf-8"))
    page = html / "index.html"
    while following is not None:
        page = (page.parent / following[1]).resolve()
        found.append(page)
        following = re.search(r'<link rel="next"[^>]* href="([^"]+)"', page.read_text("utf-8"))
    return found


def aims(pages: Sequence[Path]) -> dict[str, set[str]]:
    """The elements of each page, by its address, that a link of any page leads to."""
    found: dict[str, set[str]] = {page.as_uri(): set() for page in pages}
    for page in pages:
        for href in re.findall(r'href="([^"]*#[^"]+)"', page.read_text("utf-8")):
            where, name = urldefrag(urljoin(page.as_uri(), href))
            if where in found:
                found[where].add(name)
    return found


def join(browser: Browser, pages: Sequence[Path]) -> PdfWriter:
    """All `pages` in one: the headings of each as bookmarks, links that stay inside, numbers at the foot."""
    wanted, writer = aims(pages), PdfWriter()
    places: dict[str, Place] = {}
    owners: list[str] = []
    for page in pages:
        where, first = page.as_uri(), len(writer.pages)
        headings, reader = printed(browser, where, wanted[where])
        writer.append(reader, import_outline=False)
        owners += [where] * len(reader.pages)
        places[where] = first, None
        for name, at in reader.named_destinations.items():
            number = reader.get_destination_page_number(at) or 0
            places[f"{where}#{unquote(name.lstrip('/'))}"] = first + number, float(at.top)
        above: list[Any] = []
        for level, name, text in headings:
            number, top = places[f"{where}#{name}"]
            above = above[: level - 1]
            above.append(writer.add_outline_item(
                title=text, page_number=number, parent=above[-1] if above else None, fit=Fit.xyz(top=top),
            ))  # fmt: skip
    for number, where in enumerate(owners):
        for annotation in writer.pages[number].get("/Annots", ()):
            _keep_inside(writer, annotation.get_object(), where, places)
    _number(browser, writer)
    writer.add_metadata({"/Title": "The mathematics of distributed training"})
    for sheet in writer.pages:
        sheet.compress_content_streams()
    writer.compress_identical_objects()
    return writer


def printed(browser: Browser, where: str, names: set[str]) -> tuple[list[tuple[int, str, str]], PdfReader]:
    """Level, id and words of the headings of a page, and its PDF, which knows the places of `names` and of these."""
    tab = browser.new_page()
    tab.goto(where, wait_until="load")
    tab.evaluate("document.fonts.ready")
    headings = [(level, name, text) for level, name, text in tab.evaluate(HEADINGS) if name]
    tab.evaluate(AIM, sorted(names.union(name for _, name, _ in headings)))
    found = tab.pdf(**PAPER, print_background=True)
    tab.close()
    return headings, PdfReader(io.BytesIO(found))


def _keep_inside(writer: PdfWriter, annotation: DictionaryObject, where: str, places: Mapping[str, Place]) -> None:
    """Lead a link to a page of the book to its place in this file; other links stay, and links to other files go."""
    action = annotation.get("/A", {})
    target = str(action.get("/URI", ""))
    inside = annotation.get("/Dest", action.get("/D"))
    if inside is not None and not isinstance(inside, ArrayObject):
        target = f"{where}#{unquote(str(inside).lstrip('/'))}"
    if not target.startswith("file:"):
        return
    annotation.pop("/A", None)
    annotation.pop("/Dest", None)
    place = places.get(unquote(target), places.get(urldefrag(target)[0]))
    if place is not None:
        number, top = place
        height = NullObject() if top is None else FloatObject(top)
        sheet = writer.pages[number].indirect_reference
        annotation[NameObject("/Dest")] = ArrayObject([sheet, NameObject("/XYZ"), NullObject(), height, NullObject()])


def _number(browser: Browser, writer: PdfWriter) -> None:
    """Lay its number under each page."""
    tab = browser.new_page()
    tab.set_content(NUMBERS.format("".join(f"<p>{number}</p>" for number in range(1, len(writer.pages) + 1))))
    numbers = PdfReader(io.BytesIO(tab.pdf(prefer_css_page_size=True)))
    tab.close()
    for page, number in zip(writer.pages, numbers.pages, strict=True):
        page.merge_page(number)


def main(html: str, file: str) -> None:
    """Print the book in the folder `html` into `file`; exits where there is no book, or no browser to print it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("Chromium is not installed (apt-get install chromium)")
    if not Path(html, "index.html").is_file():
        sys.exit(f"there is no built book at {html}: run `make book` first")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        writer = join(browser, contents(Path(html).resolve()))
        browser.close()
    writer.write(file)
    sys.stdout.write(f"{file}: {len(writer.pages)} pages, {Path(file).stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
