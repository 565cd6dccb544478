"""The built pages without a browser: links lead somewhere, nothing is fetched from elsewhere, pages are light."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from dtlib import theory
from dtlib.grading import all_exercises

from .conftest import ROOT, built_pages

PAGES = built_pages()
MAX_PAGE_BYTES = 1_000_000  # without fonts
FONTS = {".woff", ".woff2", ".ttf", ".otf", ".eot"}
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
          "embed": "src", "object": "data", "link": "href", "image": "href", "use": "href"}  # fmt: skip
LOADING_LINKS = {"stylesheet", "preload", "prefetch", "modulepreload", "icon", "shortcut", "preconnect", "dns-prefetch"}
CSS_URL = re.compile(r"""url\(\s*['"]?([^'")]+)['"]?\s*\)|@import\s+['"]([^'"]+)['"]""")


@cache
def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text("utf-8"), "html.parser")


@cache
def anchors(page: Path) -> frozenset[str]:
    found = soup(page)
    return frozenset(tag["id"] for tag in found.find_all(id=True)) | {
        a["name"] for a in found.find_all("a", attrs={"name": True})
    }


def loaded(page: Path) -> list[str]:
    """Addresses that a browser fetches to show `page`, as written in it."""
    found = []
    for tag in soup(page).find_all(list(LOADED)):
        if tag.name == "link" and not LOADING_LINKS & set(tag.get("rel", [])):
            continue
        attributes = (LOADED[tag.name], f"xlink:{LOADED[tag.name]}", "srcset")
        found += [tag[attribute] for attribute in attributes if tag.get(attribute)]
    for style in [*soup(page).find_all("style"), *soup(page).find_all(style=True)]:
        text = style.string or "" if style.name == "style" else style["style"]
        found += [a or b for a, b in CSS_URL.findall(text or "")]
    return [address for address in found if not address.startswith(("data:", "#"))]


def resolve(page: Path, address: str) -> Path:
    return (page.parent / unquote(urlsplit(address).path)).resolve()


def sheet_urls(sheet: Path) -> list[str]:
    text = sheet.read_text("utf-8")
    return [a or b for a, b in CSS_URL.findall(text) if not (a or b).startswith(("data:", "#"))]


def dead_links(page: Path) -> list[str]:
    """Links of `page` to files or anchors that are not there."""
    dead = []
    for tag in soup(page).find_all("a", href=True):
        parts = urlsplit(tag["href"])
        if parts.scheme or parts.netloc:
            continue
        target = resolve(page, tag["href"]) if parts.path else page
        wants_anchor = parts.fragment and target.suffix == ".html"
        if not target.is_file() or (wants_anchor and unquote(parts.fragment) not in anchors(target)):
            dead.append(tag["href"])
    return [link for link in dead if link != "#"]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_images_lead_somewhere(html, name):
    page = html / name
    assert dead_links(page) == []
    missing = [
        address for address in loaded(page) if not urlsplit(address).scheme and not resolve(page, address).is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_loaded_from_elsewhere(html, name):
    page = html / name
    assert [address for address in loaded(page) if urlsplit(address).scheme or urlsplit(address).netloc] == []
    for address in loaded(page):
        if resolve(page, address).suffix == ".css":
            elsewhere = [
                url for url in sheet_urls(resolve(page, address)) if urlsplit(url).scheme or urlsplit(url).netloc
            ]
            assert elsewhere == [], address


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_light(html, name):
    assert page_bytes(html / name) < MAX_PAGE_BYTES


def page_bytes(page: Path) -> int:
    """Bytes of `page` and of everything that it loads, each file once, without fonts."""
    files = {page} | {resolve(page, address) for address in loaded(page)}
    return sum(file.stat().st_size for file in files if file.is_file() and file.suffix not in FONTS)


@pytest.mark.parametrize("name", PAGES)
def test_every_image_and_figure_says_what_it_shows(html, name):
    page = soup(html / name)
    assert [str(tag)[:120] for tag in page.find_all("img") if not tag.get("alt", "").strip()] == []
    assert [str(tag)[:120] for tag in page.select("svg[role=img]") if not tag.get("aria-label", "").strip()] == []


@pytest.mark.parametrize("name", PAGES)
def test_ids_on_a_page_are_unique(html, name):
    ids = [tag["id"] for tag in soup(html / name).find_all(id=True)]
    assert sorted({each for each in ids if ids.count(each) > 1}) == []


def test_each_exercise_and_formula_has_an_address_that_stays(html):
    """Other people's links rest on these names: no number of a page or a section is in them."""
    for name in all_exercises():
        stem, number = name.split(".")
        assert f"exercise-{stem}-{number}" in anchors(html / "chapters" / f"{stem}.html")
    wanted = {f"formula-{name.replace('.', '-').replace('_', '-')}" for name in theory.formulas()}
    assert wanted <= anchors(html / "chapters" / "ledger.html")


def test_every_page_says_what_it_is_and_of_which_version(html):
    titles, texts = [], []
    for page in map(html.__truediv__, PAGES):
        if page.name in ("index.html", "search.html", "genindex.html"):
            continue
        titles.append(soup(page).title.text)
        texts.append(soup(page).find("meta", attrs={"name": "description"})["content"])
        assert 40 <= len(texts[-1]) <= 202, page.name
        assert f"Version {metadata.version('dtlib-course')}" in " ".join(each.text for each in soup(page)("footer"))
    assert len(set(titles)) == len(titles)
    assert len(set(texts)) == len(texts)


def test_code_is_shown_in_colours(html):
    code = [page for page in PAGES if soup(html / page).select(".highlight-ipython3")]
    assert code
    assert [page for page in code if not soup(html / page).select(".highlight .k, .highlight .kn")] == []


def test_no_solution_ships_with_the_pages(html):
    """The sources of the pages are public; the answers are not among them."""
    for source in (html / "_sources").rglob("*"):
        if source.is_file():
            assert not re.search(r'^\s*"?### BEGIN SOLUTION', source.read_text("utf-8"), re.MULTILINE), source.name
    assert not [page for page in PAGES if page.startswith(("solutions/", "exercises/"))]


def test_each_notebook_can_be_downloaded(html):
    for page in (html / "chapters").glob("*.html"):
        notebook = html / "_sources" / "chapters" / f"{page.stem}.ipynb"
        if notebook.is_file():
            assert soup(page).find("a", href=re.compile(rf"_sources/chapters/{page.stem}\.ipynb$")), page.name


def test_the_launch_button_names_a_notebook_of_the_project(html):
    """`make lab` serves the project's folder; the button's path is one in it."""
    launched = {}
    for page in (html / "chapters").glob("*.html"):
        button = soup(page).select_one('a[href^="http://localhost:8888/lab/tree/"]')
        if button:
            launched[page.stem] = urlsplit(button["href"]).path.removeprefix("/lab/tree/")
    assert all((ROOT / path).is_file() for path in launched.values()), launched
    assert set(launched) == {path.stem for path in (html / "_sources" / "chapters").glob("*.ipynb")}


@pytest.fixture
def small_site(tmp_path):
    """A page with one of each mistake that the checks above look for."""
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="gone.html">x</a><a href="#nowhere">x</a><a href="https://example.org">fine</a>'
        '<script src="https://cdn.example.org/a.js"></script><link rel="stylesheet" href="s.css">'
        '<link rel="canonical" href="https://example.org/"><p style="background:url(//example.org/b.png)">'
    )
    (tmp_path / "s.css").write_text("@import 'https://fonts.example.org/f.css'; a{background:url(data:x)}" + " " * 900)
    return page


def test_these_checks_can_fail(small_site):
    assert dead_links(small_site) == ["gone.html", "#nowhere"]
    assert loaded(small_site) == ["https://cdn.example.org/a.js", "s.css", "//example.org/b.png"]
    assert sheet_urls(small_site.parent / "s.css") == ["https://fonts.example.org/f.css"]
    assert page_bytes(small_site) > 900
