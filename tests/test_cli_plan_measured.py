"""``dtlib plan --measured``: a machine's constants are found again from its runs; what is no run is told."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from dtlib.cli import main, told
from dtlib.theory import hardware, models, planner
from dtlib.theory.calibration import fitting, measured, published
from dtlib.theory.planner import FITTED, Machine, Plan

MODEL = models.model("llama3-8b")
MACHINE = Machine(accelerator=hardware.accelerator("H100"), gpus=8)
TRUE = replace(FITTED, matmul_share=0.6, attention_share=0.25, inside_share=0.6, across_share=0.4)


def rows(constants, number=12, seed=0, precision="bf16"):
    """Runs of a machine with these constants, of degrees and batches drawn at random, as a table has them."""
    random, found = np.random.default_rng(seed), []
    while len(found) < number:
        gpus, tp, pp, mbs, grad_acc = (
            int(2 ** random.integers(*each)) for each in ((3, 8), (0, 4), (0, 3), (0, 3), (1, 6))
        )
        seq, zero, keeps = int(2 ** random.integers(11, 15)), int(random.integers(4)), bool(random.integers(2))
        if gpus % (tp * pp):
            continue
        plan = Plan(
            dp=gpus // tp // pp, tp=tp, pp=pp, zero=zero, micro_batch=mbs, micro_batches=grad_acc, seq=seq,
            sequence_parallel=tp > 1, keep_gathered=keeps, precision=precision,
        )  # fmt: skip
        seconds = planner.step_time(MODEL, plan, replace(MACHINE, gpus=gpus), constants).total
        split = ("keep" if keeps else "again") if tp > 1 else ""
        row = {"gpus": gpus, "tp": tp, "pp": pp, "mbs": mbs, "grad_acc": grad_acc, "seq": seq, "zero": zero,
               "sequence_parallel": split, "tok_s_gpu": plan.sequences * seq / gpus / seconds}  # fmt: skip
        found.append({name: str(value) for name, value in row.items()})
    return found


def written(file, table):
    with file.open("w", encoding="utf-8", newline="") as lines:
        into = csv.DictWriter(lines, list(table[0]))
        into.writeheader()
        into.writerows(table)
    return file


def run(*arguments):
    return CliRunner().invoke(main, ["plan", "llama3-8b", "--gpus", "8", "--batch", "32", *map(str, arguments)])


def test_another_machines_constants_are_found_again_from_its_runs():
    found = measured.refitted(measured.read(rows(TRUE), MODEL, MACHINE))
    assert found.runs == 12
    assert {"matmul_share", "attention_share", "inside_share", "across_share"} <= set(found.moved)
    assert found.before > 0.15 > 10 * found.after
    for name in ("matmul_share", "attention_share", "inside_share", "across_share"):
        old, new = found.moved[name]
        assert old == getattr(FITTED, name)
        assert new == getattr(found.constants, name) == pytest.approx(getattr(TRUE, name), rel=0.05)
    assert found.after <= found.left_out < found.before
    assert set(found.moved) | set(found.kept) == set(fitting.TIME_CONSTANTS)
    for name in found.kept:
        assert getattr(found.constants, name) == getattr(FITTED, name)


def test_what_no_run_had_is_not_decided_and_stays():
    """Runs on one card each send nothing: links and overlap are named, and the fit leaves them as they were."""
    plans = [
        Plan(micro_batch=b, micro_batches=m, seq=s)
        for b, m, s in ((1, 4, 2048), (2, 8, 4096), (4, 4, 8192), (1, 2, 1024))
    ]
    one = replace(MACHINE, gpus=1)
    runs = [published.Run(MODEL, (p,), one, planner.step_time(MODEL, p, one, TRUE).total) for p in plans]
    found = measured.refitted(runs)
    assert {"inside_share", "across_share", "overlap_share", "contention_share"} <= set(found.kept)
    assert found.moved["matmul_share"][1] == pytest.approx(TRUE.matmul_share, rel=0.1)
    few = measured.refitted(runs[:3])
    assert (few.constants, few.moved, few.before) == (FITTED, {}, few.after)


def test_runs_as_the_planner_tells_them_change_nothing():
    found = measured.refitted(measured.read(rows(FITTED, number=5), MODEL, MACHINE))
    assert found.before < 1e-9
    assert all(new == pytest.approx(old) for old, new in found.moved.values())


def test_runs_in_fp8_are_read_as_such(tmp_path):
    file = written(tmp_path / "runs.csv", rows(TRUE, precision="fp8"))
    found = {}
    for precision in ("fp8", "bf16"):
        result = run("--measured", file, "--precision", precision, "--json")
        assert result.exit_code == 0, result.output
        found[precision] = json.loads(result.output)["measured"]
    assert found["fp8"]["constants"]["matmul_share"] == pytest.approx(TRUE.matmul_share, rel=0.05)
    assert found["bf16"]["constants"]["matmul_share"] > 1.2 * TRUE.matmul_share


def test_the_plan_is_made_with_the_constants_found(tmp_path):
    file = written(tmp_path / "runs.csv", rows(TRUE, number=6))
    result = run("--measured", file, "--json")
    assert result.exit_code == 0, result.output
    said, refit = json.loads(result.output), measured.refitted(measured.read(rows(TRUE, number=6), MODEL, MACHINE))
    assert said["constants"] == said["measured"]["constants"] == vars(refit.constants)
    assert said["measured"]["after"] == refit.after < said["measured"]["before"]
    machine = replace(MACHINE, gpus=8)
    answer = planner.search(MODEL, machine, sequences=32, constants=refit.constants)
    best = answer.best
    assert [each["seconds"]["total"] for each in said["plans"]] == [each.time.total for each in answer.plans]
    assert best.time.total > planner.search(MODEL, machine, sequences=32).best.time.total  # a slower machine
    shown = " ".join(run("--measured", file).output.split())
    assert " ".join(told.of_refit(refit).split()) in shown
    few = " ".join(run("--measured", written(tmp_path / "few.csv", rows(TRUE, number=3))).output.split())
    assert "3 runs decide no constant: 4 at least are wanted. The mean error of their step times is" in few


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: text.upper().replace(",", ", ").replace("KEEP", "keep").replace("AGAIN", "again"),
        lambda text: "\n".join(",".join(f'"{each}"' for each in line.split(",")) for line in text.splitlines()),
    ],
)
def test_a_table_as_spreadsheets_write_it_is_read(tmp_path, change):
    file = written(tmp_path / "runs.csv", rows(TRUE, number=4))
    plain = run("--measured", file, "--json").output
    file.write_text(change(file.read_text(encoding="utf-8").replace("\r", "")), encoding="utf-8", newline="")
    assert json.loads(run("--measured", file, "--json").output) == json.loads(plain)


def test_a_rate_above_the_cards_is_no_measurement(tmp_path):
    row = {"gpus": 8, "mbs": 1, "grad_acc": 4, "tok_s_gpu": 989e12 / 6 / 7.4e9}
    said = " ".join(run("--measured", written(tmp_path / "runs.csv", [row])).output.split())
    most = 989e12 / 6 / (8_030_261_248 - 128_256 * 4096)
    assert f"row 1: tok_s_gpu must be at most {most:,.0f}, with products at the card's full rate, not 22274.8" in said


def test_a_run_on_more_cards_than_are_planned_is_on_whole_nodes():
    one = Machine(accelerator=MACHINE.accelerator, gpus=2)
    table = [{"gpus": "16", "mbs": "1", "grad_acc": "1", "tok_s_gpu": "9000"}]
    assert measured.read(table, MODEL, one, node=8)[0].machine.node == 8
    assert measured.read(table, MODEL, MACHINE)[0].machine == replace(MACHINE, gpus=16)


def test_help_names_the_columns():
    said = " ".join(CliRunner().invoke(main, ["plan", "--help"], env={"COLUMNS": "300"}).output.split())
    columns = said.partition("--measured FILE has a row")[2].partition("A constant")[0]
    assert all(name in columns for name in measured.COLUMNS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": "1"}, "column 'batch' is unknown; there are gpus, mbs"),
        ({"mbs": None}, "column 'mbs' is missing: sequences of a micro-batch"),
        ({"gpus": "x"}, "row 1: gpus must be a whole number, not 'x'"),
        ({"gpus": ""}, "row 1: gpus must be a whole number, not ''"),
        ({"gpus": "6", "tp": "4"}, "row 1: gpus must be a multiple of tp·pp·cp=4, not 6"),
        ({"gpus": "12", "tp": "4"}, "row 1: gpus must be a multiple of --node=8, not 12"),
        ({"tp": "0"}, "row 1: gpus must be a multiple of tp·pp·cp=0, not 8"),
        ({"tok_s_gpu": "-3"}, "row 1: tok_s_gpu must be finite and positive, not '-3'"),
        ({"tok_s_gpu": "fast"}, "row 1: tok_s_gpu must be finite and positive, not 'fast'"),
        ({"recompute": "some"}, "row 1: recompute must be one of none, selective, full, not 'some'"),
        ({"sequence_parallel": "1"}, "row 1: name '1' of sequence_parallel is unknown; there are none, again, keep"),
        ({"model": "lama3"}, "row 1: name 'lama3' of model is unknown; did you mean"),
        ({"zero": "4"}, "row 1: zero must be"),
        ({"tok_s_gpu": None}, "column 'tok_s_gpu' is missing: tokens a second of one card, as measured"),
        ({"gpus": "8" + 20 * "0"}, "row 1: gpus must have at most 9 digits, not 21"),
        ({"model": 200_000 * "x"}, "cannot be read: field larger than field limit (131072)"),
    ],
)
def test_what_is_no_run_is_told_with_its_row(tmp_path, change, message):
    row = {"gpus": "8", "tp": "1", "mbs": "1", "grad_acc": "4", "tok_s_gpu": "9000"} | change
    file = written(tmp_path / "runs.csv", [{name: value for name, value in row.items() if value is not None}])
    result = run("--measured", file)
    assert result.exit_code == 2, result.output
    assert f"--measured {file}: {message}".replace(": cannot", " cannot") in result.output


@pytest.mark.parametrize("name", ["gpus", " GPUS"])
def test_a_column_that_is_there_twice_is_told(tmp_path, name):
    """Told by the file's heading, which rows as dicts no longer have where both names are one."""
    file = written(tmp_path / "runs.csv", rows(TRUE, number=2))
    heading, *lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([f"{heading},{name}", *(f"{line},8" for line in lines)]), encoding="utf-8")
    result = run("--measured", file)
    assert result.exit_code == 2
    assert "column 'gpus' must be there once, not 2 times" in " ".join(result.output.split())


def test_a_file_without_runs_is_told(tmp_path):
    assert "cannot be read" in run("--measured", tmp_path / "none.csv").output
    empty = tmp_path / "empty.csv"
    empty.write_text("gpus,mbs,grad_acc,tok_s_gpu\n", encoding="utf-8")
    assert "runs must be at least one, not none" in run("--measured", empty).output
