"""`lab.check`: what agrees, what is no comparison, and the row that is shown."""

import math

import numpy as np
import pytest

from dtlib import lab
from dtlib.lab import ledger
from dtlib.lab.launch import context
from dtlib.lab.row import Row

pytestmark = pytest.mark.usefixtures("own_ledger")


def check(measured, theory=100, rtol=0.0, by="count", formula="testing.sent_bytes", **options):
    return lab.check(formula, theory=theory, measured=measured, by=by, rtol=rtol, **options)


# --- agreement and disagreement


@pytest.mark.parametrize(
    ("theory", "measured", "rtol"),
    [
        (100, 100, 0.0),
        (100, 100.0, 0),
        (0, 0, 0.0),
        (0.0, 0, 0.5),
        (-4.0, -4.1, 0.05),
        (100, 101, 0.01),
        (2**63 + 1, 2**63 + 1, 0.0),
        (np.float32(0.5), 0.5, 0.0),
        (np.uint64(7), np.int32(7), 0.0),
        ([1, 2, 3], (1, 2, 3), 0.0),
        (5, [5, 5, 5], 0.0),
        (np.ones((2, 3)), np.full((2, 3), 1.01), 0.02),
    ],
)
def test_agrees(theory, measured, rtol):
    row = check(measured, theory, rtol)
    assert row.passed
    assert row.recorded
    assert ledger.read()[-1].passed


@pytest.mark.parametrize(
    ("theory", "measured", "rtol"),
    [
        (100, 101, 0.0),
        (100, 102, 0.01),
        (100, 98, 0.01),
        (0, 1e-300, 0.9),
        (1, -1, 0.5),
        (2**63, 2**63 + 1, 0.0),  # equal as floats
        (np.uint64(2**63), 2**63 + 1, 0.0),
        ([2**60, 2**60], [2**60, 2**60 + 1], 0.0),
        ([1, 2, 3], [1, 2, 4], 0.1),
        (5, [5, 5, 6], 0.0),
        (1.0, math.nan, 1e9),
        (math.nan, math.nan, 0.5),
        (math.inf, math.inf, 0.5),
        (1.0, math.inf, 0.5),
        (math.inf, 1.0, 0.5),
        (100, 111, 0.105),  # the tolerance is a share of theory, not of what was measured
        ([1.0, 1.0], [1.0, math.nan], 0.5),
    ],
)
def test_disagrees(theory, measured, rtol):
    with pytest.raises(lab.CheckError):
        check(measured, theory, rtol)
    (line,) = ledger.read()
    assert not line.passed


def test_a_tensor_may_be_compared():
    import torch

    assert check(torch.full((3,), 2.0, dtype=torch.bfloat16), 2.0).passed
    with pytest.raises(lab.CheckError):
        check(torch.tensor([2, 3]), 2)


def test_the_worst_element_is_reported():
    row = check(np.array([[1.0, 2.02], [3.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 4.0]]), rtol=0.1)
    assert (row.theory, row.measured, row.element) == (2.0, 2.02, (0, 1))
    assert "worst element [0, 1]" in str(row)
    with pytest.raises(lab.CheckError, match=r"worst element \[2\]"):
        check([1.05, 1.0, math.nan], [1.0, 1.0, 1.0], rtol=0.1)


def test_of_elements_that_agree_alike_the_largest_is_reported():
    """A zero would agree with a formula that is off by any factor."""
    row = check([0.0, -2.0, 1.0], [0.0, -2.0, 1.0])
    assert (row.theory, row.measured, row.element) == (-2.0, -2.0, (1,))


def test_an_element_that_disagrees_hides_no_other():
    with pytest.raises(lab.CheckError, match="measured 4 B"):
        check([1, 2, 4], [1, 2, 3])


def test_the_error_names_both_numbers_the_ratio_and_what_was_allowed():
    with pytest.raises(lab.CheckError) as caught:
        check(1_060_000, 1_000_000, rtol=0.01, by="wire")
    message = str(caught.value)
    for part in (
        "testing.sent_bytes",
        "1000000",
        "1060000",
        "KiB",
        "wire",
        "1.06",
        "±0.01",
        "0.06 of theory",
    ):
        assert part in message
    assert isinstance(caught.value, AssertionError)


# --- arguments that make no comparison


def test_unknown_formula_names_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean 'testing\.sent_bytes'"):
        check(1, formula="testing.send_bytes")
    with pytest.raises(ValueError, match="is not in theory"):
        check(1, formula=["testing.sent_bytes"])


@pytest.mark.parametrize("by", ["guess", "", None, "Wire", 3])
def test_unknown_method(by):
    with pytest.raises(ValueError, match="by must be one of wire, count"):
        check(100, by=by)


@pytest.mark.parametrize("rtol", [-0.1, math.nan, math.inf, True, "0.1"])
def test_bad_rtol(rtol):
    with pytest.raises(ValueError, match="rtol must be a finite number"):
        check(100, rtol=rtol)


def test_a_case_is_said_behind_the_title():
    row = check(100, case="4 ranks")
    assert row.title.endswith(" · 4 ranks")
    assert all("4 ranks" in text for text in (str(row), row._repr_html_()))
    with pytest.raises(ValueError, match="case must be a text, not 4"):
        check(100, case=4)


@pytest.mark.parametrize("by", [by for by in ledger.METHODS if by != "clock"])
def test_only_time_may_go_unasserted(by):
    with pytest.raises(ValueError, match="only for by='clock'"):
        check(100, rtol=None, by=by)


@pytest.mark.parametrize("value", [None, "100", True, [True], 1j, [], {}, [[1, 2], [3]], object()])
def test_not_a_number(value):
    with pytest.raises(ValueError, match=r"measured (must be a number|is empty)"):
        check(value)
    with pytest.raises(ValueError, match=r"theory (must be a number|is empty)"):
        check(100, value)


@pytest.mark.parametrize(("theory", "measured"), [([1, 2], [1, 2, 3]), ([1], 1), ([[1, 2]], [1, 2])])
def test_shapes_differ(theory, measured):
    with pytest.raises(ValueError, match="one shape"):
        check(measured, theory)


def test_nothing_is_written_for_a_bad_call():
    with pytest.raises(ValueError, match="by must be"):
        check(100, by="eye")
    assert ledger.read() == []


def test_refused_inside_a_rank(monkeypatch):
    place = context.RankContext(0, 2, False, "", lambda payload: [payload])
    monkeypatch.setattr(context, "_current", place)
    with pytest.raises(RuntimeError, match="Return the number from the rank"):
        check(100)
    assert ledger.read() == []


def test_a_real_rank_is_told_where_to_check():
    with pytest.raises(lab.RankError, match=r"lab\.check was called inside a rank"):
        lab.run(lambda: lab.check("testing.sent_bytes", theory=1, measured=1, by="count"), 1)


def test_time_is_shown_and_not_asserted():
    row = check(2.0, 1.0, rtol=None, by="clock", formula="testing.step_seconds")
    assert "shown, not asserted" in str(row)
    assert str(row).startswith("·")
    assert ledger.read()[-1].rtol is None
    with pytest.raises(lab.CheckError, match="not finite"):
        check(math.nan, 1.0, rtol=None, by="clock", formula="testing.step_seconds")


# --- the row


def test_the_row_is_printed_once_and_reads_well(capsys):
    row = check(14 * 2**20 + 64_000, 14 * 2**20, rtol=0.01, by="wire")
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed == str(row)
    assert printed == (
        "✓ Bytes that somebody sends: predicted 14 MiB, measured 14.06 MiB, "
        "ratio 1.004 (allowed: ±0.01 of theory), by wire"
    )


@pytest.mark.parametrize(
    ("formula", "theory", "measured", "words"),
    [
        ("testing.sent_bytes", 100, 100, ("100 B", "ratio 1 ")),
        (
            "testing.sent_bytes",
            2**30,
            2**30 + 1,
            ("predicted 1 GiB, measured 1.00000000", "ratio 1 + 9e-10"),
        ),
        ("memory.roofline_flop_per_s", 60e9, 60.03e9, ("predicted 60 GFLOP/s, measured 60.03 GFLOP/s",)),
        ("testing.step_seconds", 0.001, 0.0010000001, ("predicted 1 ms, measured 1.0000001 ms",)),
        ("testing.step_seconds", 0.1, 0.1 + 2e-16, ("predicted 100 ms, measured 100 ms", "ratio 1 + 2e-15")),
        ("testing.num_steps", 123456, 123456, ("predicted 123,456",)),
        ("testing.num_steps", 0.1, 0.1, ("predicted 0.1",)),
    ],
)
def test_numbers_are_in_the_formulas_unit_and_told_apart(formula, theory, measured, words):
    row = check(measured, theory, rtol=1e-3, formula=formula)
    for each in words:
        assert each in str(row)


def test_html_row_is_escaped_and_complete():
    row = Row("a.b_bytes", "<b>x</b> & y", 1024, 2048, 2.0, "wire", 0.5, True)
    page = row._repr_html_()
    assert "&lt;b&gt;x&lt;/b&gt; &amp; y" in page
    for part in ("1 KiB", "2 KiB", "wire", "±50 %", "predicted", "measured"):
        assert part in page
    assert ">exact<" in lab.check("testing.num_steps", theory=3, measured=3, by="count")._repr_html_()
    assert ">to rounding<" in lab.check("testing.num_steps", theory=3, measured=3, by="count", rtol=1e-9)._repr_html_()
    assert "color:#" not in page  # colours come from the page, light or dark


def test_a_notebook_shows_the_row_exactly_once(tmp_path):
    import nbclient
    import nbformat

    setup = """
from dtlib import lab, theory
@theory.formula("testing.x_bytes", source="derived here", chapter="testing")
def x():
    "Bytes of x."
row = lab.check("testing.x_bytes", theory=1, measured=1, by="count")
row"""
    call = 'lab.check("testing.x_bytes", theory=2, measured=2, by="count")'
    sources = [setup, call, f"{call}\n{call}", f"{call};", "row"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=60).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert [len(each) for each in outputs] == [1, 1, 2, 1, 1]
    for cell in outputs:
        for output in cell:
            assert "<table" in output["data"]["text/html"]
            assert output["data"]["text/plain"].startswith("✓ Bytes of x: predicted")
    assert {line.where for line in ledger.read()} == {"interactive"}
