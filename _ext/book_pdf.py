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
from pypdf.generic import ArrayObject, DictionaryObject, NameObject, NullObject, NumberObject

PAPER: dict[str, Any] = {
    "format": "A4",
    "margin": {"top": "14mm", "bottom": "18mm", "left": "14mm", "right": "14mm"},
    "scale": 0.78,  # of its size on a screen: a line of 95 columns fits the sheet
}
NUMBERS = """<style>@page {{ size: A4; margin: 0 }} body {{ margin: 0; font: 9pt sans-serif; color: #444 }}
p {{ height: 297mm; margin: 0; padding-top: 284mm; box-sizing: border-box; text-align: center; break-after: page }}
p:last-child {{ break-after: auto }}</style>{}"""
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
    places: dict[str, ArrayObject] = {}
    owners: list[str] = []
    for page in pages:
        where = page.as_uri()
        tab = browser.new_page()
        tab.goto(where, wait_until="load")
        tab.evaluate("document.fonts.ready")
        tab.evaluate(AIM, sorted(wanted[where]))
        reader = PdfReader(io.BytesIO(tab.pdf(**PAPER, print_background=True, outline=True, tagged=True)))
        tab.close()
        first = len(writer.pages)
        writer.append(reader)
        owners += [where] * len(reader.pages)
        places[where] = _place(writer, first, 0)
        for name, place in reader.named_destinations.items():
            number = first + (reader.get_destination_page_number(place) or 0)
            places[f"{where}#{unquote(name.lstrip('/'))}"] = _place(writer, number, float(place.top or 0))
    for number, where in enumerate(owners):
        for annotation in writer.pages[number].get("/Annots", ()):
            _keep_inside(annotation.get_object(), where, places)
    _number(browser, writer)
    writer.add_metadata({"/Title": "The mathematics of distributed training"})
    writer.compress_identical_objects()
    return writer


def _place(writer: PdfWriter, page: int, top: float) -> ArrayObject:
    """A place in the file as links name it: the top of its page, or so many points above the foot."""
    reference = writer.pages[page].indirect_reference
    height = NumberObject(round(top)) if top else NullObject()
    return ArrayObject([reference, NameObject("/XYZ"), NullObject(), height, NullObject()])


def _keep_inside(annotation: DictionaryObject, where: str, places: Mapping[str, ArrayObject]) -> None:
    """Lead a link to a page of the book to its place in this file; other links stay, and links to other files go."""
    action = annotation.get("/A", {})
    target = str(action.get("/URI", ""))
    inside = annotation.get("/Dest", action.get("/D"))
    if inside is not None and not isinstance(inside, ArrayObject):
        target = f"{where}#{unquote(str(inside).lstrip('/'))}"
    if not target.startswith("file:"):
        return
    page, _ = urldefrag(target)
    annotation.pop("/A", None)
    place = places.get(unquote(target), places.get(target, places.get(page)))
    if place is not None:
        annotation[NameObject("/Dest")] = place


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
