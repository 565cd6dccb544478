"""The ledger: its file, what of the formulas it covers, and where a line is from."""

import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import warnings

import numpy as np
import pytest

from dtlib import lab
from dtlib.lab import here, ledger

pytestmark = pytest.mark.usefixtures("own_ledger")


def check(measured, theory=100, rtol=0.0, by="count", formula="testing.sent_bytes", **options):
    return lab.check(formula, theory=theory, measured=measured, by=by, rtol=rtol, **options)


def test_the_line_holds_everything_and_comes_back():
    check(0.5, 0.25, rtol=2.0, by="values", formula="testing.step_seconds")
    (line,) = ledger.read()
    assert (line.formula, line.theory, line.measured, line.ratio) == ("testing.step_seconds", 0.25, 0.5, 2.0)
    assert (line.by, line.rtol, line.passed, line.run) == ("values", 2.0, True, here.RUN_ID)
    assert line.where == "tests/lab/test_ledger.py::test_the_line_holds_everything_and_comes_back"
    assert line.versions["numpy"] == np.__version__
    assert line.versions["dtlib"] == importlib.metadata.version("dtlib-course")
    assert line.machine == here.machine()
    assert line.time.endswith("+00:00")
    assert ledger.Line.from_json(line.to_json()) == line


def test_integers_stay_exact_and_the_file_is_strict_json():
    check(2**70 + 1, 2**70 + 1)
    with pytest.raises(lab.CheckError):
        check(math.inf, 1.0)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for text in ledger.default_path().read_text().splitlines():
        json.loads(text, parse_constant=refuse)
    first, second = ledger.read()
    assert first.measured == 2**70 + 1
    assert isinstance(first.measured, int)
    assert second.measured == math.inf
    assert math.isnan(second.ratio)


def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it():
    lab.check("collectives.ring_all_reduce_steps", theory=2, measured=2, by="count")
    with open(ledger.default_path(), "a") as file:
        file.write('{"formula": "cut o')
    lab.check("collectives.ring_all_reduce_steps", theory=6, measured=6, by="count")
    with pytest.warns(ledger.LedgerWarning, match="line 2 of the ledger"):
        assert [line.theory for line in ledger.read()] == [2, 6]


def test_lines_that_cannot_be_read_are_named():
    check(100)
    with ledger.default_path().open("a") as file:
        file.write('{"formula": "testing.sent_bytes", "theo\n[1]\n\n{"formula": 1}\n')
    check(100)
    with pytest.warns(ledger.LedgerWarning) as caught:
        assert len(ledger.read()) == 2
    assert [str(each.message).split(" of")[0] for each in caught] == ["line 2", "line 3", "line 5"]


def test_no_file_is_an_empty_ledger(tmp_path):
    assert ledger.read(tmp_path / "nothing") == []


def test_a_ledger_that_cannot_be_written_warns_and_the_page_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DTLIB_LEDGER", str(tmp_path / "file" / "ledger.jsonl"))
    with pytest.warns(ledger.LedgerWarning, match="was not written"):
        row = check(100)
    assert row.passed
    assert not row.recorded
    with pytest.warns(ledger.LedgerWarning), pytest.raises(lab.CheckError):
        check(101)


def _append_many(path, name, count):
    long = ledger.Line(name, 1, 1, 1.0, "count", 0.0, True, "x" * 20_000, "m", "t", "r")
    for _ in range(count):
        ledger.append(long, path)


def test_processes_that_write_at_once_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_append_many, args=(path, f"w{i}", 50)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = ledger.read(path)
    assert sorted(line.formula for line in lines) == sorted(f"w{i}" for i in range(4) for _ in range(50))


def test_the_default_file_is_in_the_users_state_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DTLIB_LEDGER")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ledger.default_path().name == "ledger.jsonl"
    if os.name == "posix" and os.uname().sysname != "Darwin":
        assert ledger.default_path() == tmp_path / "dtlib" / "ledger.jsonl"


def test_only_the_first_process_of_a_torchrun_job_shows_and_writes(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("RANK", "1")
    assert check(100).recorded is False
    assert capsys.readouterr().out == ""
    with pytest.raises(lab.CheckError):
        check(101)
    assert ledger.read() == []
    monkeypatch.setenv("RANK", "0")
    assert check(100).recorded


# --- coverage


def entry_of(name, **options):
    return next(e for e in ledger.coverage(chapter="testing", **options).entries if e.formula.name == name)


def test_coverage_finds_what_was_not_measured():
    assert set(ledger.coverage(chapter="testing").missing) == {
        "testing.sent_bytes",
        "testing.step_seconds",
        "testing.num_steps",
    }
    check(101, rtol=0.02, by="wire")
    check(98, rtol=0.02, by="count")
    check(90, rtol=0.1, by="memory")
    with pytest.raises(lab.CheckError):
        check(3, formula="testing.num_steps")
    check(3.0, 1.0, rtol=None, by="clock", formula="testing.step_seconds")
    coverage = ledger.coverage(chapter="testing")
    assert coverage.missing == ("testing.num_steps",)  # a failed line is evidence of nothing
    sent = entry_of("testing.sent_bytes")
    assert (sent.evidence, sent.by) == ("measured", ("wire", "count"))  # not the memory's wide line
    assert (sent.num_lines, sent.failed, sent.asserted, sent.worst_ratio) == (3, 0, True, 0.98)
    assert entry_of("testing.num_steps").failed == 1
    assert entry_of("testing.num_steps").worst_ratio is None
    shown = entry_of("testing.step_seconds")
    assert (shown.evidence, shown.asserted, shown.worst_ratio) == ("compared", False, 3.0)
    check(1.05, 1.0, rtol=0.1, by="clock", formula="testing.step_seconds")
    assert entry_of("testing.step_seconds").worst_ratio == 1.05  # what was asserted counts, where there is any
    json.dumps([entry.as_dict() for entry in coverage.entries], allow_nan=False)


@pytest.mark.parametrize(
    ("by", "rtol", "evidence", "word"),
    [
        ("wire", 0.0, "measured", "measured 100 B"),
        ("clock", 0.029, "measured", "measured 100 B"),
        ("count", 0.03, "compared", "measured 100 B"),
        ("clock", None, "compared", "measured 100 B"),
        ("published", 0.0, "published", "published 100 B"),
        ("simulation", 0.0, "derived", "simulated 100 B"),
        ("derivation", 0.0, "derived", "derived 100 B"),
        ("definition", 0.0, "defined", "defined 100 B"),
    ],
)
def test_each_line_says_what_it_is_evidence_of(by, rtol, evidence, word):
    row = check(100, rtol=rtol, by=by)
    assert ledger.read()[-1].evidence == entry_of("testing.sent_bytes").evidence == evidence
    assert word in str(row)
    assert f">{row.seen}</th>" in row._repr_html_()


def test_the_counts_name_each_kind_of_evidence_by_itself(monkeypatch):
    check(100, by="wire")
    check(100, by="published")  # the formula has a stronger one
    check(1.0, 1.0, by="simulation", formula="testing.step_seconds")
    coverage = ledger.coverage(chapter="testing")
    assert coverage.counts == {"measured": 1, "compared": 0, "published": 0, "derived": 1, "defined": 0, "missing": 1}
    assert str(coverage) == (
        "Of 3 formulas, 1 were measured by something that does not know the formula; "
        "1 were held against another derivation or a simulation; 1 have no evidence."
    )


def test_a_line_by_an_unknown_method_is_left_out(tmp_path):
    check(100)
    with ledger.default_path().open("a") as file:
        file.write(ledger.read()[0].to_json().replace('"count"', '"eye"') + "\n")
    with pytest.warns(ledger.LedgerWarning, match="by is 'eye'"):
        assert len(ledger.read()) == 1


def test_a_page_that_ran_again_replaces_what_it_measured(monkeypatch):
    check(108, rtol=0.1)
    check(109, rtol=0.1)
    monkeypatch.setattr(here, "RUN_ID", "second")
    check(101, rtol=0.1)
    assert entry_of("testing.sent_bytes").worst_ratio == 1.01
    monkeypatch.setattr(here, "RUN_ID", "third")
    with pytest.raises(lab.CheckError):
        check(200, rtol=0.1)
    assert ledger.coverage().entries
    assert "testing.sent_bytes" in ledger.coverage().missing
    monkeypatch.setenv("DTLIB_WHERE", "chapters/other.ipynb")
    check(105, rtol=0.1)
    assert entry_of("testing.sent_bytes").where == ("chapters/other.ipynb",)


def test_unregistered_names_are_listed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    _append_many(path, "gone.formula", 1)
    assert ledger.coverage(path).unregistered == ("gone.formula",)


# --- where


def test_where_a_script_ran(tmp_path, monkeypatch):
    script = tmp_path / "chapters" / "demo.py"
    code = compile("from dtlib.lab import here\nplace = here.where()", str(script), "exec")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    space = {}
    exec(code, space)
    assert space["place"] == "chapters/demo.py"
    monkeypatch.setenv("DTLIB_WHERE", "chapters/collectives.ipynb")
    exec(code, space)
    assert space["place"] == "chapters/collectives.ipynb"
