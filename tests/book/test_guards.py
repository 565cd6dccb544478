"""The browser tests can fail: a page with one of each mistake is seen through."""

from __future__ import annotations

import pytest

BROKEN = {
    "request": ('<img src="http://127.0.0.1:9/x.png" alt="x">', "left"),
    "script": ("<script>undefined.call()</script>", "complaints"),
    "console": ("<script>console.error('no')</script>", "complaints"),
    "missing file": ('<link rel="stylesheet" href="gone.css">', "complaints"),
    "fetch": ("<script>fetch('page.html').catch(() => 0)</script>", "complaints"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_page_is_noticed(visit, tmp_path, mistake):
    body, where = BROKEN[mistake]
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><title>x</title>{body}")
    with visit() as tab:
        tab.open(page)
        for _ in range(50):  # on a busy machine it is told late
            if not getattr(tab, where):
                tab.page.wait_for_timeout(200)
        assert getattr(tab, where), f"{mistake} went unnoticed"


def test_a_sound_page_is_not(visit, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><meta charset=utf-8><title>x</title><p>fine</p>")
    with visit() as tab:
        tab.open(page).wait_for_timeout(200)
        assert (tab.left, tab.complaints) == ([], [])
