"""A chapter in JupyterLab reads as in the book, and its slider asks the function again. A real server and browser."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from types import SimpleNamespace

import nbformat
import pytest

from .test_pattern import ROOT

CODE = """\
from dtlib import figures
figures.slider(lambda n: {"ring": 2 * (n - 1) / n}, name="ranks N", values=[2, 4, 8, 16], start=4,
               y_label="sent", format_y="{:.3f}".format)
"""


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory):
    """The address that `make lab` opens, in a folder with a notebook of one slider, a chapter and its exercises."""
    tmp_path = tmp_path_factory.mktemp("lab")
    for folder in ("chapters", "exercises"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / folder / "tp.ipynb", tmp_path / folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "slider.ipynb")
    told = subprocess.run(
        ["make", "-s", "--no-print-directory", "-n", "lab"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    program, *options = shlex.split(told.splitlines()[-1])
    command = [
        str(ROOT / program), *options, "--no-browser", "--ServerApp.port=0", "--allow-root",
        "--IdentityProvider.token=", "--ServerApp.password=",
        "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ("DTLIB_STATIC", "MAKEFLAGS")}
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        environment[name] = str(tmp_path / name.lower())
    log = (tmp_path / "log.txt").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        found = None
        while not found and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.3)
            found = re.search(r"(http://(?:localhost|127\.0\.0\.1):\d+/)(\S*)", (tmp_path / "log.txt").read_text())
        if not found:
            pytest.fail("JupyterLab did not start:\n" + (tmp_path / "log.txt").read_text()[-2000:])
        yield SimpleNamespace(root=found[1], opens=found[1] + found[2])
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def test_make_lab_opens_the_exercises_and_the_books_button_the_chapter(browser, html, jupyterlab):
    """The server is the one that `make lab` starts, the path the one that the book's button leads to."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(90_000)
    page.goto(jupyterlab.opens)
    page.locator(".jp-DirListing-item", has_text="tp.ipynb").wait_for()
    assert "exercises" in page.locator(".jp-FileBrowser-crumbs").inner_text()
    button = re.search(r'href="http://localhost:8888/([^"]+)"', (html / "chapters" / "tp.html").read_text())
    page.goto(jupyterlab.root + button[1])
    page.locator(".jp-NotebookPanel-notebook").wait_for()
    assert page.locator(".jp-Dialog").count() == 0, page.locator(".jp-Dialog").all_inner_texts()
    page.close()


def test_in_jupyterlab_the_slider_recomputes(browser, jupyterlab):
    page = browser.new_page()
    page.set_default_timeout(90_000)
    page.goto(f"{jupyterlab.root}lab/tree/slider.ipynb?reset")
    page.locator("#jp-main-statusbar", has_text="Idle").wait_for()  # earlier, a cell would run into the void
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    widget = page.locator(".jp-OutputArea-output .widget-hslider")
    widget.wait_for()
    reading = page.locator(".jp-OutputArea-output .dtlib-slider li b")
    assert reading.inner_text() == "1.500"
    widget.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".jp-OutputArea-output .dtlib-slider li b", has_text="1.750").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator(".jp-OutputArea-output .dtlib-slider li b", has_text="1.875").wait_for()
    assert page.locator(".jp-OutputArea-output input[type=range]").count() == 0, "the static slider is shown as well"
    page.close()


def test_in_jupyterlab_a_chapter_reads_as_in_the_book(browser, jupyterlab):
    from playwright.sync_api import expect

    page = browser.new_page(viewport={"width": 1280, "height": 4000})
    page.set_default_timeout(90_000)
    errors = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"{jupyterlab.root}lab/tree/chapters/tp.ipynb?reset")
    page.locator("#jp-main-statusbar", has_text="Idle").wait_for()
    chapter = page.locator(".jp-NotebookPanel-notebook")
    theorem = chapter.locator("aside, div", has_text="The conjugate pair").locator("visible=true").first
    theorem.wait_for()
    chapter.locator(".katex").nth(10).wait_for(state="attached")  # formulas come one by one
    for raw in ("```", "{prf:", ":label:", "$b", r"\frac"):  # until then each is shown as it is written
        expect(chapter).not_to_contain_text(raw, use_inner_text=True, timeout=90_000)
    text = chapter.inner_text()
    assert re.search(r"Theorem \d", text)
    assert "bent = [np.maximum" in text.replace("\xa0", " ")  # the first line of a folded answer, and no more of it
    assert 'print(f"cut the other way' not in text
    assert errors == []
    page.close()
