"""The book's Sphinx extensions, on a small book of their own where that is quick enough."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from nbformat import v4

from dtlib import theory
from dtlib.grading.exercises.launch import places

ROOT = Path(__file__).parents[2]


def extension(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("css", "kept"),
    [
        (".used{a:b}", ".used{a:b}"),
        (".gone{a:b}", ""),
        (".used .gone{a:b}", ""),
        (".gone, p.used{a:b}", " p.used{a:b}"),
        ("p:not(.gone){a:b}", "p:not(.gone){a:b}"),
        (":root{--x:1}p{a:b}", ":root{--x:1}p{a:b}"),
        ("@media print{.gone{a:b}}", ""),
        ("@media print{.used{a:b}.gone{a:b}}", "@media print{.used{a:b}}"),
        ("@font-face{src:url(x)}", "@font-face{src:url(x)}"),
        ("@keyframes k{from{a:b}}", "@keyframes k{from{a:b}}"),
    ],
)
def test_only_rules_for_missing_classes_are_purged(css, kept):
    assert extension("book_offline").purge(css, {"used"}) == kept


def test_only_tokens_without_a_colour_lose_their_span():
    code = '<span class="k">def</span><span class="w"> </span><span class="nf">f</span><span class="o">&lt;</span>'
    assert extension("book_offline").plain(code, {"k", "o"}) == (
        '<span class="k">def</span> f<span class="o">&lt;</span>'
    )


def test_folds_buttons_and_entries_are_named_by_what_stands_there():
    page = (
        '<summary aria-label="Toggle hidden content"><p>Show</p></summary><summary aria-label="mine">'
        '<button class="btn search-button-field" title="Search" aria-label="Search" x>'
        '<div role="list" class="citation-list"><div class="citation" id="id3" role="doc-biblioentry"><ul role="list">'
    )
    assert extension("book_offline").named(page) == (
        '<summary><p>Show</p></summary><summary aria-label="mine">'
        '<button class="btn search-button-field" title="Search" x>'
        '<div class="citation-list"><div class="citation" id="id3"><ul role="list">'
    )


def test_recurring_styles_are_written_once_and_weigh_as_much_as_before():
    style = "padding:.1rem .6rem;color:&quot;x&quot;"
    rows = "".join(f'<td{klass} style="{style}">{n}</td>' for n, klass in enumerate(["", ' class="a"'] * 3))
    page = extension("book_offline").share_styles(f'<head></head>{rows}<p style="color:red">')
    assert style not in page
    assert '<style>.z0{padding:.1rem .6rem!important;color:"x"!important}</style></head>' in page
    assert page.count('<td class="z0">') == page.count('<td class="z0 a">') == 3
    assert page.endswith('<p style="color:red">')


@pytest.mark.parametrize(
    ("latex", "shown"),
    [
        ("a = b", "a = b"),
        (r"a &= b \\ &= c", r"\begin{split}a &= b \\ &= c\end{split}"),
        (r"\begin{align}a &= b\end{align}", r"\begin{align*}a &= b\end{align*}"),
        (r"\begin{align*}a\end{align*}", r"\begin{align*}a\end{align*}"),
        (r"\begin{cases}1 \\ 2\end{cases}", r"\begin{cases}1 \\ 2\end{cases}"),
    ],
)
def test_only_sphinx_numbers_equations(latex, shown):
    assert extension("katex_math").display(latex) == shown


def test_the_vendored_katex_fetches_nothing():
    sheet = (ROOT / "_assets" / "katex" / "katex.min.css").read_text()
    fonts = {line.split(")")[0] for line in sheet.split("url(")[1:]}
    assert fonts
    assert [font for font in fonts if not (ROOT / "_assets" / "katex" / font).is_file()] == []


CONFIG = """
title: small
author: nobody
only_build_toc_files: true
execute: {execute_notebooks: cache, timeout: 300}  # a busy machine starts a kernel late
bibtex_bibfiles: [references.bib]
sphinx:
  local_extensions: {%s}
  config: {nb_execution_show_tb: true}
"""


def config(*extensions: str) -> str:
    """The configuration of a small book with these of our extensions."""
    return CONFIG % ", ".join(f"{name}: {ROOT / '_ext'}" for name in extensions)


NOTEBOOK = """---
file_format: mystnb
kernelspec: {name: python3}
---
# Page

```{code-cell} ipython3
import os
from dtlib import lab
lab.check("collectives.ring_all_reduce_bytes", theory=%s, measured=14, by="count")
print(os.environ["DTLIB_STATIC"], os.environ["DTLIB_WHERE"])
```
"""
LEDGER = """# Ledger

```{ledger}
```

```{ledger} chapters
```

```{bibliography}
```
"""


@pytest.fixture
def small_book(tmp_path):
    """A book of two pages: one that measures, one that shows the ledger."""
    (tmp_path / "_config.yml").write_text(config("book_ledger", "book_execute"))
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: page\nchapters: [{file: ledger}]\n")
    (tmp_path / "ledger.md").write_text(LEDGER)
    shutil.copy(ROOT / "chapters" / "references.bib", tmp_path)
    (tmp_path / "page.md").write_text(NOTEBOOK % 14)
    return tmp_path


def build(book: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from jupyter_book.cli.main import main; main()",
        "build",
        str(book),
        "-W",
        "--keep-going",
        "-q",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def lines(book: Path) -> list[dict]:
    return [json.loads(line) for line in (book / "_build" / "ledger.jsonl").read_text().splitlines()]


def test_a_build_measures_into_its_own_ledger_and_forgets_what_a_page_no_longer_says(small_book):
    done = build(small_book)
    assert done.returncode == 0, done.stderr
    assert [(line["where"], line["theory"]) for line in lines(small_book)] == [("page", 14)]
    page = (small_book / "_build" / "html" / "ledger.html").read_text()
    assert "formulas, 1 were measured by" in page
    assert "<strong>none</strong>" in page
    measuring = (small_book / "_build" / "html" / "page.html").read_text()
    assert "1 page" in measuring
    (target,) = re.findall(r'href="page\.html#(measured-[\w-]+)"', page)
    assert measuring.count(f'id="{target}"') == 1
    for name in theory.formulas():
        assert page.count(f'id="formula-{extension("book_ledger").dashed(name)}"') == 1, name

    # The page changes: its old line goes. The ledger's page is written again although it did not change.
    (small_book / "page.md").write_text(NOTEBOOK.replace("lab.check(", "0 and lab.check(") % 14)
    assert build(small_book).returncode == 0
    assert lines(small_book) == []
    assert "formulas, 0 were measured by" in (small_book / "_build" / "html" / "ledger.html").read_text()


def test_a_disagreement_fails_the_build_and_the_next_one_too(small_book):
    (small_book / "page.md").write_text(NOTEBOOK % 15)
    first, second = build(small_book), build(small_book)
    assert first.returncode != 0
    assert "CheckError" in first.stderr
    assert second.returncode != 0, "a page with a failed cell was taken for up to date"


def test_every_extension_of_ours_is_one_that_the_book_loads():
    told = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]
    ours = {file.stem for file in (ROOT / "_ext").glob("*.py") if "def setup(app" in file.read_text()}
    assert set(told["local_extensions"]) == ours
    assert ours <= set(told["config"]["extensions"])


MEETING = NOTEBOOK.replace(
    "import os\n",
    """import os, time
from pathlib import Path
Path(os.environ["DTLIB_WHERE"] + ".here").touch()
for _ in range(4000):
    if len(list(Path().glob("*.here"))) == 2:
        break
    time.sleep(0.05)
else:
    raise TimeoutError("the other page was not run beside this one")
""",
)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core runs one page at a time")
def test_pages_are_executed_side_by_side_each_under_its_own_name(small_book):
    for name in ("page", "other"):
        (small_book / f"{name}.md").write_text((MEETING % 14).replace("import os, time", f"import os, time  # {name}"))
    (small_book / "_toc.yml").write_text("format: jb-book\nroot: page\nchapters: [{file: other}, {file: ledger}]\n")
    done = build(small_book)
    assert done.returncode == 0, done.stderr
    assert sorted(line["where"] for line in lines(small_book)) == ["other", "page"]
    for name in ("page", "other"):
        assert f"1 {name}" in (small_book / "_build" / "html" / f"{name}.html").read_text()


TEXT = """# Page

> **In short.** Two sentences. And a number, $2D$.

See {numref}`fig-two`.

$$
x = 1
$$ (eq-one)

```{prf:theorem} More than $x$ of them
:label: thm-one

There are two.
```

> Another quotation.
"""
CODE = """from IPython.display import HTML, display
from matplotlib import pyplot as plt
from dtlib import figures
figures.style.use()
display(HTML("<table><tr><td>a table</td></tr></table>"))
for _ in range(2):
    figure, axes = plt.subplots()
    plt.close(figure)
    display(figure)"""
PROOFS = "  extra_extensions: [sphinx_proof]\n"
CAPTION = {"caption": "Two *pictures*, and no table.", "label": "fig-two"}


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """The page of a small book with a lesson and its exercises, as HTML."""
    book = tmp_path_factory.mktemp("lesson")
    (book / "_config.yml").write_text(config("book_site", "book_lessons", "book_buttons") + PROOFS)
    (book / "_toc.yml").write_text("format: jb-book\nroot: chapters/page\n")
    (book / "references.bib").touch()
    drawn = v4.new_code_cell(CODE, metadata={"mystnb": {"figure": CAPTION}})
    (book / "_static").mkdir()
    shutil.copy(ROOT / "_static" / "mark.png", book / "_static")
    pages = {"chapters": [v4.new_markdown_cell(TEXT), drawn]}
    pages["exercises"] = [v4.new_markdown_cell("# Page\n## 1. One after another ★")]
    for folder, cells in pages.items():
        (book / folder).mkdir()
        nbformat.write(v4.new_notebook(cells=cells), book / folder / "page.ipynb")
    published = {
        "DTLIB_SITE_URL": "https://example.org/course",
        "DTLIB_REPOSITORY_URL": "https://github.com/owner/course",
    }
    done = build(book, **published)
    assert done.returncode == 0, done.stderr
    return (book / "_build" / "html" / "chapters" / "page.html").read_text()


def test_a_cell_with_a_caption_has_its_pictures_in_one_numbered_figure(lesson):
    (shown,) = re.findall(r"<figure.*?</figure>", lesson, flags=re.DOTALL)
    assert shown.count('class="dtlib-figure"') == 2
    assert "a table" in lesson.replace(shown, "")
    assert "a table" not in shown
    assert re.search(r'caption-number">Fig. 1 <.*Two <em>pictures</em>, and no table', shown, flags=re.DOTALL)
    assert re.search(r'href="#fig-two">.*?Fig. 1<', lesson)


def test_an_opening_knows_how_long_the_page_is_and_what_is_on_it(lesson):
    (box,) = re.findall(r'<div class="opening admonition">.*?</div>', lesson, flags=re.DOTALL)
    assert ">In short</p>" in box
    assert "<p>Two sentences. And a number" in box
    assert "About 5 minutes" in box
    assert 'href="#equation-eq-one">(1)<' in box
    assert re.search(r'href="#thm-one">More than <.*?x.*?> of them</a>', box)
    assert 'href="#exercise-page-1" id="exercise-page-1">One after another ★</a>' in box
    assert lesson.count("In short") == 1
    assert "<blockquote>\n<div><p>Another quotation" in lesson


def told(page: str) -> dict[str, str]:
    """What the head of a page says of it, by name."""
    head = BeautifulSoup(page, "html.parser").head
    said = {tag.get("name") or tag.get("property"): tag["content"] for tag in head.find_all("meta", content=True)}
    return said | {tag["rel"][0]: tag["href"] for tag in head.find_all("link", rel="canonical")}


def test_a_published_page_says_what_it_is_and_where(lesson):
    head = told(lesson)
    address = "https://example.org/course/chapters/page.html"
    assert (head["canonical"], head["og:url"], head["og:title"]) == (address, address, "Page")
    assert head["description"] == head["og:description"] == "Two sentences. And a number, 2D. About 5 minutes to read."
    assert head["og:image"].startswith("https://example.org/course/_images/social_previews/")
    assert head["og:image"].endswith(".png")
    assert head["og:site_name"] == "small"
    assert f"Version {importlib.metadata.version('dtlib-course')}" in lesson


def test_a_published_page_opens_its_exercises_elsewhere(lesson):
    buttons = BeautifulSoup(lesson, "html.parser").select(".dropdown-launch-buttons a")
    names = [" ".join(each.text.split()) for each in buttons]
    assert names == [
        "JupyterLab on this computer",
        *(f"Exercises in {each}" for each in ("Colab", "Binder", "Codespaces")),
    ]
    assert [each["href"] for each in buttons[1:]] == [*places("https://github.com/owner/course", "page").values()]


def test_a_book_that_nobody_publishes_names_no_address(small_book):
    (small_book / "_config.yml").write_text(config("book_site"))
    (small_book / "_toc.yml").write_text("format: jb-book\nroot: page\n")
    (small_book / "page.md").write_text("# Page\n\n" + "Six bytes & more < all of $\\frac{N}{2}$ words. " * 20)
    assert build(small_book, DTLIB_SITE_URL="").returncode == 0
    page = (small_book / "_build" / "html" / "page.html").read_text()
    head = told(page)
    assert "canonical" not in head
    assert not [name for name in head if name and name.startswith("og:")]
    assert head["description"].startswith("Six bytes & more < all of (N)/2 words. Six bytes")
    assert head["description"].endswith(" …")
    assert len(head["description"]) <= 202


@pytest.mark.parametrize(
    ("words", "code", "folded", "expected"),
    [(0, 0, 0, 5), (2000, 0, 0, 10), (2000, 100, 0, 20), (2000, 100, 500, 20)],
)
def test_the_minutes_of_a_page_are_those_of_what_is_seen(words, code, folded, expected):
    cells = [
        v4.new_markdown_cell("word " * words + "$$a = b c$$"),
        v4.new_code_cell("x = 1\n" * code),
        v4.new_code_cell("x = 1\n" * folded, metadata={"tags": ["hide-input"]}),
    ]
    assert extension("book_lessons").minutes(v4.new_notebook(cells=cells)) == expected
