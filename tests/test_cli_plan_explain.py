"""``dtlib explain``: every term has its law and its chapter, sums are the plan's, and a file that is not is refused."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from dtlib import course, theory
from dtlib.cli import main
from dtlib.theory import hardware, models, planner
from dtlib.theory.planner import Plan, laws
from dtlib.theory.units import format_bytes


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("plans") / "PLAN.json"
    result = run("plan", "llama3-8b", "--gpus", 16, "--batch", 64, "--pp", 2, "--keep", 2, "--json")
    file.write_text(result.output, encoding="utf-8")
    return file


def test_the_terms_add_up_to_the_total_to_the_bit_and_are_all_told(written):
    said = json.loads(written.read_text(encoding="utf-8"))
    for number in (1, 2):
        terms = json.loads(run("explain", written, "--plan", number, "--json").output)
        shown = run("explain", written, "--plan", number).output
        for kind in ("seconds", "bytes"):
            found = said["plans"][number - 1][kind]
            assert sum(each["value"] for each in terms[kind]) == found["total"]
            there = {name.replace("_", " "): value for name, value in found.items() if value and name != "total"}
            assert {each["name"]: each["value"] for each in terms[kind]} == there
            assert sum(each["share"] for each in terms[kind]) == pytest.approx(1)
            for each in terms[kind]:
                assert (
                    f"{each['formula']}\n    {each['meaning']}: {each['number']} (chapter {each['chapter']})" in shown
                )
        assert terms["plan"] == said["plans"][number - 1]["plan"]


def test_every_term_has_a_law_of_the_ledger_and_its_chapter_is_a_chapter():
    known, stems = theory.formulas(), {chapter.stem for chapter in course.CHAPTERS}
    for parts, told in ((planner.StepTime, laws.OF_TIME), (planner.PlanMemory, laws.OF_MEMORY)):
        assert set(told) == {each.name for each in dataclasses.fields(parts)}
        for law in told.values():
            assert known[law.formula].chapter in stems


def test_what_a_law_says_of_a_plan_by_hand():
    """b = 2, s = 4096 in two parts, h = 8192; eight stages of 1F1B, 16 micro-batches; tp 4, dp · cp = 4."""
    model = models.model("llama3-70b")
    plan = Plan(dp=2, cp=2, tp=4, pp=8, zero=1, micro_batch=2, micro_batches=16, seq=4096, recompute="full")

    def number(of, term):
        return of[term].number(model, plan)

    assert number(laws.OF_TIME, "tensor_parallel").startswith(f"{6 * 2 * 2048 * 8192:,} elements")
    assert number(laws.OF_TIME, "bubble") == "as long idle as 7 of 16 micro-batches take"
    assert number(laws.OF_TIME, "pipeline_messages").startswith(f"{2 * 7 * 16 * 2 * 2048 * 8192:,} elements")
    assert number(laws.OF_TIME, "recompute").startswith("1.33 times the operations")
    assert number(laws.OF_MEMORY, "states").startswith(f"{18 - 12 + 12 / 4:.4g} bytes")
    assert number(laws.OF_MEMORY, "logits").startswith(f"{2 * 2048 * 128256 // 4:,} scores")
    tokens = 2 * 2 * 16 * 4096
    per_token = 6 * models.active_parameters(model).total
    assert number(laws.OF_TIME, "matmuls").startswith(f"{per_token * tokens / 128 / 1e12:,.1f} TFLOP")


def test_what_a_law_says_where_a_part_is_computed_again_or_adapters_are_trained():
    """Of the 8 layers of a stage 2 again: ZB-H1's idle time has a quarter of a forward pass for them."""
    model, plan = models.model("llama3-8b"), Plan(pp=4, tp=2, micro_batches=8, schedule="ZB-H1", recompute="full")
    partly = plan.changed(recompute_layers=2)
    idle = theory.pp.idle_seconds("ZB-H1", 4, 1, 1.25, 1, 1) / 3.25
    assert laws.OF_TIME["bubble"].number(model, partly) == f"as long idle as {idle:.3g} of 8 micro-batches take"
    for law in (laws.OF_TIME["tensor_parallel"], laws.OF_MEMORY["activations"]):
        none, some, full = (law.number(model, each) for each in (plan.changed(recompute="none"), partly, plan))
        assert some.startswith(full.split(" a layer")[0])
        assert none.split(" elements")[0].split(" a layer")[0] in some
        assert none.split(" elements")[0].split(" a layer")[0] not in full
    lora = Plan(dp=8, zero=1, adapters=models.Adapters(8))
    assert laws.OF_TIME["data_parallel"].number(model, lora) == "gradients of adapters alone, 8 ranks, ZeRO 1"
    said = laws.OF_TIME["data_parallel"].number(model, lora.changed(zero=3, shard=4))
    assert said == "gradients of adapters and all weights, 2 groups of 4, ZeRO 3"


def test_what_a_plan_has_of_its_own_is_in_its_first_line(tmp_path):
    file = tmp_path / "PLAN.json"
    flags = ("--lora", 8, "--offload", "--precision", "fp8", "--attention", "matrix", "--tp-overlap", "--tp", 2)
    said = run("plan", "llama3-8b", "--gpus", 8, "--batch", 64, "--seq", 2048, *flags, "--keep", 1, "--json").output
    file.write_text(said, encoding="utf-8")
    first = run("explain", file).output.splitlines()[0]
    for words in (
        "adapters of rank 8 trained alone", "optimizer states on the host", "products in fp8", "attention as a matrix",
        "messages of tp behind products",
    ):  # fmt: skip
        assert words in first


def test_experts_and_what_is_gathered_are_explained(tmp_path):
    model, card = models.model("deepseek-v2-lite"), hardware.accelerator("H100")
    machine = planner.Machine(accelerator=card, gpus=32)
    best = planner.search(model, machine, seq=4096, degrees={"ep": 8}, space=planner.Space(zero=(3,)), keep=1).best
    terms = laws.explained(best.time, model, best.plan, laws.OF_TIME)
    assert "expert parallel" in {each.name for each in terms}
    terms = laws.explained(best.memory, model, best.plan, laws.OF_MEMORY)
    assert {"all to all", "gathered"} <= {each.name for each in terms}
    assert sum(each.value for each in terms) == best.memory.total


def test_a_file_that_is_not_an_answer_is_refused_with_what_is_wrong(written, tmp_path):
    said = json.loads(written.read_text(encoding="utf-8"))

    def refused(changed, *more):
        file = tmp_path / "other.json"
        file.write_text(changed if isinstance(changed, str) else json.dumps(changed), encoding="utf-8")
        result = run("explain", file, *more)
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    first = said["plans"][0]
    assert "cannot be read as JSON" in refused("{")
    assert "cannot be read as JSON" in " ".join(run("explain", tmp_path / "none.json").output.split())
    for foreign in ({}, [], 3, {"model": 1}):
        assert "it is not what dtlib plan --json writes: it has no" in refused(foreign)
    assert "--plan must be from 1 to 2, the plans of the file, not 3" in refused(said, "--plan", 3)
    assert "plans must be a list, not 3" in refused(said | {"plans": 3})
    assert "plan 1 must have its plan, seconds and bytes" in refused(said | {"plans": [{}]})
    assert "model must be an object, not 'x'" in refused(said | {"model": "x"})
    assert "model.depth is unknown" in refused(said | {"model": said["model"] | {"depth": 3}})
    assert "machine is damaged: gpus must be at least 1, not 0" in refused(
        said | {"machine": said["machine"] | {"gpus": 0}}
    )
    deep = said | {"model": said["model"] | {"num_layers": 10**9}}
    assert "model.num_layers must be at most 1,000 here" in refused(deep)
    fewer = {name: value for name, value in said["model"].items() if name != "hidden"}
    assert "model is damaged" in refused(said | {"model": fewer})
    for kind, term in (("seconds", "matmuls"), ("bytes", "states"), ("seconds", "total")):
        more = first | {kind: first[kind] | {term: 1.01 * first[kind][term]}}
        assert f"its {kind} of {term} are" in refused(said | {"plans": [more]})
    other = first | {"plan": first["plan"] | {"recompute": "full"}}
    assert "it was changed, or written by another version" in refused(said | {"plans": [other]})
    assert "plan is damaged: schedule must be one of" in refused(
        said | {"plans": [first | {"plan": first["plan"] | {"schedule": "GPipe"}}]}
    )


def test_saves_and_a_goal_are_explained_where_the_file_has_them(tmp_path):
    asked = ("llama3-8b", "--gpus", 16, "--batch", 64, "--tp", 2, "--keep", 2, "--mtbf", 10, "--storage", 2)
    said = json.loads(run("plan", *asked, "--critical-batch", 2e6, "--json").output)
    file = tmp_path / "PLAN.json"
    file.write_text(json.dumps(said), encoding="utf-8")
    shown, kept = run("explain", file).output, said["keeping"]
    found = json.loads(run("explain", file, "--json").output)
    assert [each["formula"] for each in found["saves"]] == [
        "reliability.save_bytes", "reliability.best_interval", "reliability.goodput", "reliability.background_goodput",
    ]  # fmt: skip
    assert found["saves"][0]["amount"] == format_bytes(14 * 8_030_261_248, digits=3)
    assert found["saves"][2]["amount"] == f"{kept['goodput']:.2%}"
    share = 64 * 8192 / 2e6
    assert [each["amount"] for each in found["goal"]] == [f"{1 + share:.3g}×", f"{1 + 1 / share:.3g}×"]
    for each in (*found["saves"], *found["goal"]):
        assert f"{each['meaning']}: {each['number']} (chapter {each['chapter']})" in shown
        assert each["chapter"] in ("reliability", "batch")
    assert {"saves", "goal"} & set(json.loads(run("explain", file, "--plan", 2, "--json").output)) == {"goal"}
    for change in (
        {"goodput": 0.1}, {"save_seconds": 0}, {"steps": "x"}, {"steps": 10**400}, {"save_bytes": 10**400},
    ):  # fmt: skip
        file.write_text(json.dumps(said | {"keeping": kept | change}), encoding="utf-8")
        assert "its keeping is counted otherwise" in " ".join(run("explain", file).output.split())
    for goals in (None, [], [{"batch_share": 0.0, "most_cards": 1}] * 2):
        file.write_text(json.dumps(said | {"goals": goals}), encoding="utf-8")
        assert "Error: PLAN.json" in run("explain", file).output


@pytest.mark.parametrize("more", [(), ("--min-tokens", 1e12)])
def test_a_goal_that_was_changed_is_refused(more, tmp_path):
    asked = ("llama3-8b", "--gpus", 16, "--batch", 64, "--tp", 2, "--keep", 2, "--critical-batch", 2e6, *more)
    said = json.loads(run("plan", *asked, "--json").output)
    file = tmp_path / "PLAN.json"

    def explained(changed):
        file.write_text(json.dumps(changed), encoding="utf-8")
        return " ".join(run("explain", file, "--plan", 2).output.split())

    first, second = said["goals"]
    assert "over the least of the goal" in explained(said)
    for name in second:
        for value in (0.9, None if second[name] else 7, 10**400, "x"):
            assert "its goals are counted otherwise" in explained(said | {"goals": [first, second | {name: value}]})
    for change in (
        {"critical_batch": 4e6},
        {"critical_batch": None},
        {"critical_batch": 10**400},
        {"min_tokens": 3e12},
    ):
        assert "its goals are counted otherwise" in explained(said | change)
