"""``dtlib plan``: what it prints is what the planner says, and what is impossible says what is possible."""

import json
import re

import click
import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.cli import told as in_words
from dtlib.cli.plan import plan
from dtlib.cli.space import DEGREES
from dtlib.theory import footprint, hardware, planner, reliability
from dtlib.theory.memory import RECIPES
from dtlib.theory.models import MODULES
from dtlib.theory.timing.space import OPEN
from dtlib.theory.units import GB, GiB, format_seconds

SMALL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def invoke(*arguments):
    return CliRunner().invoke(plan, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def told(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def answer(model="llama3-8b", gpus=16, **given):
    machine = planner.Machine(accelerator=hardware.accelerator("H100"), gpus=gpus)
    return planner.search(model, machine, **given)


def test_it_is_a_command_of_dtlib():
    assert main.commands["plan"] is plan
    result = CliRunner().invoke(main, ["plan", "-h"])
    assert result.exit_code == 0
    assert "--tokens" in result.output


def test_a_degree_can_be_held_fixed():
    found = told("llama3-8b", "--gpus", 16, "--batch", 64, "--tp", 2, "--pp", 2)
    assert {(each["plan"]["tp"], each["plan"]["pp"]) for each in found["plans"]} == {(2, 2)}
    best = answer(sequences=64, degrees={"tp": 2, "pp": 2}).best
    assert found["plans"][0]["seconds"]["total"] == best.time.total
    result = invoke("llama3-8b", "--gpus", 16, "--tp", 3)
    assert result.exit_code == 2
    assert "--tp must be one of 1, 2, 4, 8, 16 with --gpus=16, not 3" in result.output
    result = invoke("llama3-8b", "--gpus", 16, "--tp", 8, "--pp", 4)
    assert "--tp=8 and --pp=4 do not go together with --gpus=16" in result.output


def test_choices_can_be_left_out():
    asked = ["llama3-8b", "--gpus", 16, "--batch", 64]
    found = told(*asked, "--zero", "1,3", "--schedule", "1f1b", "--recompute", "full", "--sequence-parallel", "keep")
    space = planner.Space(zero=(1, 3), schedule=("1F1B",), recompute=("full",), sequence_parallel=("keep",))
    same = answer(sequences=64, space=space)
    assert [each["seconds"]["total"] for each in found["plans"]] == [each.time.total for each in same.plans]
    assert found["looked_at"] == same.looked_at < answer(sequences=64).looked_at
    said = " ".join(CliRunner().invoke(main, ["plan", "--help"], env={"COLUMNS": "300"}).output.split())
    for name in OPEN:
        flag = f"--{name.replace('_', '-')} NAME[,NAME]"
        known = ", ".join(map(str, getattr(planner.Space(), name)))
        assert f"{known}." in said.partition(flag)[2].partition(" --")[0]


def test_degrees_are_those_of_the_theory():
    assert DEGREES == footprint.DEGREES
    assert set(footprint.DEGREES) == {*footprint.AXES, "ep"}


def test_hybrid_shards_are_asked_for_and_told():
    found = told("llama3-8b", "--gpus", 16, "--batch", 64, "--shard", "node, 4")
    assert {each["plan"]["shard"] for each in found["plans"]} <= {4, 8, 2}
    out = invoke("llama3-8b", "--gpus", 16, "--batch", 64, "--shard", "4", "--zero", 3).output
    assert " 3/4 " in out
    assert "ZeRO 3 among 4 ranks each (hybrid)" in " ".join(out.split())
    assert "not held to anything like this: megatron" in " ".join(out.split())


def test_some_layers_are_computed_again_where_that_is_asked_for():
    asked = ["llama3-8b", "--gpus", 4, "--batch", 32, "--pp", 4, "--seq", 8192]
    found = told(*asked)["plans"][0]["plan"]
    assert (found["recompute"], found["recompute_layers"]) == ("full", 3)
    assert {each["plan"]["recompute_layers"] for each in told(*asked, "--recompute", "3,full")["plans"]} <= {3, None}
    assert told(*asked, "--recompute", "some")["plans"][0]["plan"] == found
    out = " ".join(invoke(*asked).output.split())
    assert "the first 3 layers of each chunk computed again" in out
    assert "not held to anything like this: megatron, a pipeline, some layers computed again" in out


def test_attention_as_a_matrix_lets_a_selective_recompute_save():
    asked = ["llama3-8b", "--gpus", 8, "--batch", 32, "--tp", 2, "--pp", 4, "--seq", 8192, "--attention", "matrix"]
    out = " ".join(invoke(*asked).output.split())
    assert "each core of attention computed again" in out
    assert "attention as a matrix" in out
    assert told(*asked, "--recompute", "selective,full")["plans"] == told(*asked)["plans"]


def test_where_not_all_layers_may_be_computed_again_the_least_plan_leaves_out_one():
    asked = ["llama3-8b", "--gpus", 2, "--batch", 32, "--pp", 2, "--seq", 65536, "--recompute", "some"]
    assert "recompute 15 layers)" in " ".join(invoke(*asked).output.split()).partition("; ")[0]
    one = " ".join(invoke("tiny", "--gpus", 2, "--pp", 2, "--recompute", "some").output.split())
    assert "--recompute must not be some alone where no piece of tiny has two layers" in one


def test_messages_of_tp_behind_products_are_asked_for():
    asked = ["llama3-8b", "--gpus", 8, "--batch", 64, "--tp", 4]
    plain, behind = told(*asked)["plans"][0], told(*asked, "--tp-overlap")["plans"][0]
    assert (plain["plan"]["tp_overlap"], behind["plan"]["tp_overlap"]) == (False, True)
    assert behind["seconds"]["total"] < plain["seconds"]["total"]
    assert " behind products, pp" in " ".join(invoke(*asked, "--tp-overlap").output.split())


def test_the_table_has_the_best_plans_and_fits_80_columns():
    result = invoke("llama3-8b", "--gpus", 16, "--batch", 64, "--tokens", 1e12, "--price", 2)
    assert result.exit_code == 0, result.output
    found = answer(sequences=64)
    lines = result.output.splitlines()
    assert "16 × H100-80GB-SXM, 8 a node, InfiniBand NDR between nodes" in lines
    assert lines[0] == "llama3-8b: 8,030,261,248 parameters, 18-byte recipe"
    assert max(len(line) for line in lines) <= 80
    for each in found.shown:
        row = f"{each.plan.micro_batch}×{each.plan.micro_batches}"
        assert any(row in line and format_seconds(each.time.total) in line for line in lines)
    for term in found.best.time.table():
        assert any(line.startswith(term.name) and format_seconds(term.value) in line for line in lines)
    assert "±" in result.output
    said = " ".join(result.output.split())
    assert "is the error that nine of ten stay within of 259 runs of one framework on H100-80GB-SXM, of models" in said
    assert "This plan has sequences of another length: its error is unknown." in said
    seen = " ".join(invoke("llama3-8b", "--gpus", 16, "--batch", 64, "--seq", 4096).output.split())
    assert "This plan has" not in seen
    other = " ".join(invoke("llama3-8b", "--gpus", 64, "--batch", 64, "--seq", 4096, "--card", "A100").output.split())
    assert "another card: its error is unknown." in other
    cut = " ".join(invoke("llama3-8b", "--gpus", 16, "--batch", 64, "--pp", 2).output.split())
    has = answer(sequences=64, degrees={"pp": 2}).best.fit.outside
    assert len(has) > 1
    assert f"This plan has {', '.join(has[:-1])} and {has[-1]}: its error is unknown." in cut
    assert f"days at an MFU of {found.mfu(found.best):.1%}" in " ".join(result.output.split())
    assert "MWh" in result.output


@pytest.mark.parametrize("command", ["plan", "memory"])
def test_help_lists_the_cards_and_the_recipes_that_there_are(command):
    said = " ".join(CliRunner().invoke(main, [command, "--help"], env={"COLUMNS": "300"}).output.split())
    assert ", ".join(hardware.ACCELERATORS) in said.replace("- ", "-")  # where a line ends
    assert ", ".join(list(RECIPES)[:-1]) + f" or {list(RECIPES)[-1]}" in said
    assert f"Matrices with adapters: {','.join(MODULES)}." in said
    if command == "plan":
        assert f"with its constants: {', '.join(planner.PROFILES)} (torchtitan is fsdp)." in said
        assert set(planner.FRAMEWORKS) == set(planner.PROFILES)
        for name in planner.FRAMEWORKS:
            assert f" {name} {in_words.of_framework(name)}" in said.replace("- ", "-")
        kinds = {name for name in hardware.LINKS if name.startswith(("InfiniBand", "Ethernet"))}
        assert kinds == {f"InfiniBand {each}" for each in ("EDR", "HDR", "NDR", "XDR")} | {
            f"Ethernet {each}G" for each in (1, 10, 25, 100, 200, 400, 800)
        }
        assert "InfiniBand EDR, HDR, NDR or XDR or Ethernet 1G to 800G" in said


@pytest.mark.parametrize("command", ["plan", "memory"])
def test_help_has_every_option_under_a_heading(command):
    one = main.commands[command]
    assert {*one.headings} < {each.name for each in one.params}
    sections = CliRunner().invoke(main, [command, "--help"], env={"COLUMNS": "300"}).output.split("\n\n")
    listed = [each.split(":\n", 1) for each in sections if ":\n  -" in each]
    assert [heading for heading, _ in listed] == ["Options", *one.headings.values()]
    flags = [re.findall(r"^  (-[\w-]+)", lines, re.MULTILINE) for _, lines in listed]
    assert [each for some in flags for each in some] == [
        "-h",
        *(each.opts[0] for each in one.params if isinstance(each, click.Option)),
    ]
    assert max(map(len, flags)) <= 15


def test_a_plan_of_adapters_in_fp8_is_told_and_explained(tmp_path):
    flags = ("llama3-8b", "--gpus", 8, "--batch", 64, "--keep", 2, "--lora", 8, "--lora-modules", "down,qkv",
             "--precision", "fp8")  # fmt: skip
    data = told(*flags)
    plan = data["plans"][0]["plan"]
    assert (plan["precision"], plan["adapters"]) == ("fp8", {"rank": 8, "modules": ["down", "qkv"]})
    assert data["plans"][0]["interval"]["low"] is None
    said = " ".join(CliRunner().invoke(main, ["plan", *map(str, flags)]).output.split())
    assert "adapters of rank 8 on down and qkv trained alone" in said
    assert "of the rate in bf16, products in fp8" in said
    assert "Its time is not held to anything like this" in said
    assert "adapters alone trained" in said
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    explained = CliRunner().invoke(main, ["explain", str(file)])
    assert explained.exit_code == 0
    for term in ("casts to fp8", "products of adapters", "weights of layers in fp8"):
        assert term in explained.output


def test_a_host_is_told_and_changed():
    flags = ("llama3-8b", "--gpus", 8, "--batch", 16, "--keep", 1, "--offload")
    whole, slow = told(*flags), told(*flags, "--host-link", 6.3, "--host-memory", 61.44)
    first, second = (each["plans"][0]["seconds"] for each in (whole, slow))
    assert second["host_link"] > 8 * first["host_link"]
    assert second["host_update"] > 8 * first["host_update"]
    said = " ".join(CliRunner().invoke(main, ["plan", *map(str, flags)]).output.split())
    assert "The host keeps " in said
    assert "in a node of 8." in said
    memory = CliRunner().invoke(main, ["memory", "llama3-8b", "--dp", "8", "--zero", "1", "--offload", "--json"])
    found = json.loads(memory.output)
    lora = CliRunner().invoke(main, ["memory", "llama3-8b", "--lora", "16", "--lora-modules", "out"])
    assert f"Trained are adapters of rank 16: {32 * 16 * (4096 + 4096):,} parameters." in lora.output
    assert found["host_bytes"] == pytest.approx(12 * found["num_params"] / 8)


def test_json_is_the_answer():
    found = answer(sequences=64, keep=3)
    said = told("llama3-8b", "--gpus", 16, "--batch", 64, "--keep", 3, "--tokens", 1e12, "--price", 2)
    assert [each["seconds"]["total"] for each in said["plans"]] == [each.time.total for each in found.plans]
    assert said["plans"][0]["bytes"] == {**found.best.memory.parts, "total": found.best.memory.total}
    assert said["plans"][0]["fit"]["verdict"] == found.best.fit.verdict
    assert said["buys_seconds"] == found.buys
    # money, time and energy by hand
    steps = 1e12 / (64 * 8192)
    seconds = steps * found.best.time.total
    assert said["training"]["steps"] == pytest.approx(steps)
    assert said["training"]["seconds"] == pytest.approx(seconds)
    assert said["training"]["cost"] == pytest.approx(2 * 16 * seconds / 3600)
    assert said["training"]["energy_joules"] == pytest.approx(700 * 16 * seconds)


def test_a_critical_batch_is_told_beside_an_answer_that_it_leaves_alone():
    asked = ["llama3-8b", "--gpus", 16, "--batch", 64, "--tp", 2, "--keep", 2]
    goal = ["--critical-batch", 2e6, "--min-tokens", 1e12]
    plain, said = told(*asked), told(*asked, *goal)
    goals = said.pop("goals")
    assert said == plain | {"critical_batch": 2e6, "min_tokens": 1e12}
    found = answer(sequences=64, degrees={"tp": 2}, keep=2)
    assert goals == [vars(planner.toward_goal(found, each, 2e6, 1e12)) for each in found.plans]
    before, after = invoke(*asked), invoke(*asked, *goal)
    assert after.output.startswith(before.output)
    words = in_words.of_goal(found, [planner.toward_goal(found, each, 2e6, 1e12) for each in found.shown])
    assert " ".join(after.output[len(before.output) :].split()) == " ".join(words)
    assert told(*asked, "--critical-batch", 2e6)["goals"][0]["seconds"] is None


def test_saves_are_told_beside_an_answer_that_they_leave_alone():
    asked = ["llama3-8b", "--gpus", 16, "--batch", 64, "--tp", 2, "--keep", 2]
    failing = ["--mtbf", 10, "--storage", 2]
    plain, said = told(*asked), told(*asked, *failing)
    kept = said.pop("keeping")
    assert said == plain
    found = answer(sequences=64, degrees={"tp": 2}, keep=2)
    assert kept == vars(planner.keeping(found, 10 * 3600, 2 * GB))
    before, after = invoke(*asked), invoke(*asked, *failing)
    assert after.output.startswith(before.output)
    words = in_words.of_keeping(found, planner.keeping(found, 10 * 3600, 2 * GB))
    assert " ".join(after.output[len(before.output) :].split()) == words


def test_saves_of_a_plan_by_hand():
    """8,030,261,248 parameters, 14 bytes of each but for the gradient, two nodes that fail each 10 hours."""
    found = answer(sequences=64, degrees={"tp": 2}, keep=2)
    kept, step = planner.keeping(found, 10 * 3600, 2 * GB), found.best.time.total
    assert (kept.mtbf, kept.save_bytes) == (5 * 3600, 14 * 8_030_261_248)
    assert kept.save_seconds == pytest.approx(kept.save_bytes / 2e9)

    def share(steps, save, write=0.0):
        times = {"restart": kept.save_seconds, "write": write, "seed": 1}
        return reliability.simulate(40_000 * step, steps * step, save, kept.mtbf, **times).goodput

    shares = {steps: share(steps, kept.save_seconds) for steps in (kept.steps, kept.steps // 5, 5 * kept.steps)}
    assert max(shares, key=lambda steps: shares[steps]) == kept.steps
    assert kept.goodput == pytest.approx(shares[kept.steps], abs=0.03)
    assert (kept.behind_steps - 1) * step < kept.save_seconds <= kept.behind_steps * step  # one after another
    assert kept.behind_goodput == pytest.approx(share(kept.behind_steps, 0.0, kept.save_seconds), abs=0.02)
    assert kept.behind_goodput > kept.goodput
    for failing in (planner.keeping(found, 60, 2 * GB), planner.keeping(found, 1, GB / 1000)):
        assert failing.goodput < 0.01  # it fails before a save is done
        assert failing.behind_goodput < 0.2


def test_a_share_is_told_as_neither_none_nor_all():
    found = answer(sequences=64, degrees={"tp": 2}, keep=2)
    for hours, rate, words in ((1e9, 2 * GB, "more than 99.9% of"), (1, GB / 1000, "less than 0.1% of")):
        said = in_words.of_keeping(found, planner.keeping(found, hours * 3600, rate))
        assert f" {words} the time is lasting work" in said
        assert "100.0%" not in said
    assert planner.keeping(found, 1e9, 1e15).steps >= 1


def test_a_model_by_its_file(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL), encoding="utf-8")
    said = told(file, "--gpus", 2)
    assert (said["model"]["name"], said["model"]["num_layers"], said["model"]["tied"]) == ("small", 16, True)
    assert told(file, "--gpus", 2, "--layers", 8)["plans"][0]["seconds"]["total"] < said["plans"][0]["seconds"]["total"]


def test_a_card_and_a_network_of_ones_own():
    base = told("llama3-8b", "--gpus", 16, "--batch", 64)
    own = told(
        "llama3-8b", "--gpus", 16, "--batch", 64, "--card-memory", 40, "--card-link", 100, "--network-rate", 10,
        "--card-rate", 400, "--card-memory-rate", 1.5, "--tokens", 1e12,
    )  # fmt: skip
    assert own["training"]["energy_joules"] == pytest.approx(700 * 16 * own["training"]["seconds"])
    card = own["machine"]["accelerator"]
    assert card["memory_bytes"] == 40 * GiB
    assert card["link"]["link_bytes_per_s"] == 100 * GB
    assert own["machine"]["network"]["link_bytes_per_s"] == 10 * GB
    assert own["plans"][0]["bytes"]["total"] <= 40 * GiB < base["plans"][0]["bytes"]["total"]
    assert own["plans"][0]["seconds"]["total"] > base["plans"][0]["seconds"]["total"]


def test_a_framework_has_its_constants_and_its_intervals():
    asked = ["llama3-8b", "--gpus", 16, "--batch", 64, "--seq", 4096, "--pp", 1]
    found = told(*asked, "--framework", "nanotron")
    same = answer(sequences=64, seq=4096, degrees={"pp": 1}, framework="nanotron")
    first = same.best
    assert found["framework"] == "nanotron"
    assert found["constants"] == vars(planner.PROFILES["nanotron"])
    assert found["plans"][0]["seconds"]["total"] == first.time.total
    assert found["plans"][0]["interval"]["high"] == first.interval.high > first.time.total > first.interval.low
    assert [each["ties"] for each in found["plans"]] == [same.best.ties(each) for each in same.plans]
    assert (found["simpler"] is None) == (same.simpler is None)
    said = " ".join(invoke(*asked, "--framework", "nanotron").output.split())
    assert in_words.of_interval(same.best) in said
    assert "80% would lie between" in said
    piped = " ".join(invoke(*asked[:-1], 2, "--framework", "nanotron", "--schedule", "1F1B").output.split())
    assert "Of more such runs 23% stalled, each message between stages held up: then between " in piped
    unlike = " ".join(invoke("llama3-8b", "--gpus", 16, "--batch", 64, "--cp", 2, "--card", "A100").output.split())
    assert "Its time is not held to anything like this: " in unlike


@pytest.mark.parametrize("name", planner.FRAMEWORKS)
def test_a_framework_leaves_the_plans_that_it_runs(name):
    asked, space = ["llama3-8b", "--gpus", 16, "--batch", 64], planner.FRAMEWORKS[name]
    found = told(*asked, "--framework", name.upper())
    same = answer(sequences=64, framework=name, space=space)
    assert [each["seconds"]["total"] for each in found["plans"]] == [each.time.total for each in same.plans]
    assert found["looked_at"] == same.looked_at < told(*asked)["looked_at"]
    assert found["space"]["framework"] == name
    said = " ".join(invoke(*asked, "--framework", name).output.split())
    assert f"{same.looked_at:,} plans looked at; with {name} {in_words.of_framework(name)}" in said
    for each in planner.every_plan("llama3-8b", same.machine, sequences=64, seq=8192, space=space):
        plans = [each.plan(row) for row in range(len(each.seconds))]
        assert all(plan.zero <= space.staged_zero for plan in plans if plan.pp > 1)
        assert all(plan.zero >= space.hybrid_zero for plan in plans if plan.shard is not None)
        assert "cp" not in space.without or each.mesh.cp == 1


def test_a_rank_alone_has_no_stage_of_zero_but_one_that_was_asked_for():
    asked = ["llama3-8b", "--gpus", 8, "--batch", 64, "--framework", "fsdp", "--cp", 1]
    for dp, zero, stages in ((1, "", {0}), (1, "2,3", {2}), (8, "0", {0}), (8, "", {2, 3})):
        more = ["--recipe", "16-byte", "--lora", 8] if zero == "0" else []  # else copies do not fit
        found = told(*asked, *more, "--dp", dp, *(["--zero", zero] if zero else []))
        assert {each["plan"]["zero"] for each in found["plans"]} <= stages
        assert found["plans"]


def test_deepspeed_has_messages_behind_products():
    found = told("llama3-8b", "--gpus", 8, "--batch", 64, "--framework", "deepspeed", "--tp", 2, "--tp-overlap")
    assert all(each["plan"]["tp_overlap"] for each in found["plans"])


def test_who_asks_for_no_framework_sees_every_plan():
    found = told("llama3-8b", "--gpus", 16, "--batch", 64)
    assert (found["framework"], found["space"]["framework"]) == ("megatron", "")
    assert told("llama3-8b", "--gpus", 16, "--framework", "torchtitan")["framework"] == "fsdp"


def test_a_card_whose_power_nobody_published_has_no_energy():
    asked = ["llama3-8b", "--gpus", 64, "--node", 64, "--seq", 4096, "--batch", 512, "--card", "TPU v5p"]
    own = told(*asked, "--tokens", 1e12, "--price", 4)
    assert own["training"]["energy_joules"] is None
    assert own["training"]["cost"] > 0
    assert told(*asked, "--tokens", 1e12, "--watts", 500)["training"]["energy_joules"] > 0


def test_a_file_that_cannot_be_counted_is_named(tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(SMALL | {"hidden_size": 2050}), encoding="utf-8")
    result = invoke(file, "--gpus", 2)
    assert result.exit_code == 2
    assert f"MODEL {file}: hidden must be a multiple of num_heads=32, not 2050" in result.output.replace("\n", "")
