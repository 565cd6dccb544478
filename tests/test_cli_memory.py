"""``dtlib memory``: what it prints is what the theory says, and what is impossible says what is possible."""

import dataclasses
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.cli.memory import memory
from dtlib.theory import footprint, hardware, models, planner
from dtlib.theory.footprint import Setup
from dtlib.theory.units import format_bytes


def invoke(*arguments):
    return CliRunner().invoke(memory, [str(argument) for argument in arguments])


def told(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def is_refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_it_is_a_command_of_dtlib():
    assert main.commands["memory"] is memory
    result = CliRunner().invoke(main, ["memory", "-h"])
    assert result.exit_code == 0
    assert "--recompute" in result.output


def test_the_table_has_every_part_and_the_total():
    result = invoke("--model", "llama3-70b", "--dp", 64, "--zero", 3)
    found = footprint.rank_memory(models.model("llama3-70b"), Setup(dp=64, zero=3, recipe="18-byte"))
    assert result.exit_code == 0
    assert "llama3-70b: 70,553,706,496 parameters on 64 ranks (dp 64 × tp 1 × pp 1), ZeRO stage 3" in result.output
    lines = result.output.splitlines()
    for part in found.table():
        (line,) = [line for line in lines if line.startswith(part.name + "  ")]
        assert f"{format_bytes(part.value)} " in line
        assert line.rstrip().endswith(f"{part.share:.1%}")
    (total,) = [line for line in lines if line.startswith("total ")]
    assert format_bytes(found.total) in total
    assert f"{found.total / 1e9:.1f} GB" in total


def test_json_has_the_bytes_of_the_theory():
    data = told(
        "--model", "gpt3", "--dp", 4, "--zero", 1, "--tp", 8, "--sequence-parallel", "--pp", 8, "--chunks", 3,
        "--recipe", 18, "--micro-batch", 2, "--micro-batches", 16, "--seq", 1024, "--recompute", "selective",
        "--attention", "matrix", "--dropout",
    )  # fmt: skip
    setup = Setup(
        dp=4, zero=1, tp=8, sequence_parallel=True, pp=8, chunks=3, recipe="18", micro_batch=2, micro_batches=16,
        seq=1024, recompute="selective", attention="matrix", dropout=True,
    )  # fmt: skip
    found = footprint.rank_memory(models.model("gpt3"), setup)
    assert data["bytes"] == found.parts
    assert data["total_bytes"] == found.total == sum(data["bytes"].values())
    assert data["states_bytes"] + data["activations_bytes"] + data["transient_bytes"] == pytest.approx(found.total)
    assert data["model"] == "gpt3-175b"
    assert sum(data["parameters"].values()) == data["num_params"] == 174_604_259_328
    assert data["world_size"] == 256
    assert data["setup"]["micro_batches"] == 16
    assert data["setup"]["seq"] == 1024


def test_the_fullest_stage_unless_another_is_named():
    options = ("--model", "llama3-405b", "--dp", 64, "--tp", 8, "--pp", 16, "--micro-batches", 16)
    assert told(*options)["pipeline_stage"] == 1
    stages = footprint.memory_by_stage(
        models.model("llama3-405b"), Setup(dp=64, tp=8, pp=16, micro_batches=16, recipe="18-byte")
    )
    last = told(*options, "--pipeline-stage", 15)
    assert last["pipeline_stage"] == 15
    assert last["total_bytes"] == stages[15].total
    assert "on a rank of pipeline stage 15" in invoke(*options, "--pipeline-stage", 15).output


H100 = hardware.accelerator("h100")
SPLIT = ("llama2-7b", "--dp", 8, "--zero", 1, "--tp", 4, "--sequence-parallel")


def surely_fits(batch):
    plan = planner.Plan(dp=8, zero=1, tp=4, sequence_parallel=True, micro_batch=batch)
    return planner.plan_memory("llama2-7b", plan).total * (1 + planner.FITTED.margin) <= H100.memory_bytes


def test_a_gpu_says_whether_it_fits():
    most = max(batch for batch in range(1, 33) if surely_fits(batch))
    data = told(*SPLIT, "--gpu", "h100")
    assert data["device"] == {
        "name": "H100-80GB-SXM", "memory_bytes": H100.memory_bytes, "fullest_stage": 0,
        "fullest_bytes": data["total_bytes"], "verdict": "yes", "largest_micro_batch": most,
    }  # fmt: skip
    said = f"The largest micro-batch that fits H100-80GB-SXM with the margin has {most} sequences."
    assert said in invoke(*SPLIT, "--gpu", "h100").output
    assert told(*SPLIT, "--gpu", "h100", "--micro-batch", most + 1)["device"]["verdict"] == "unsure"
    crowded = invoke("--model", "llama3-70b", "--gpu", "h100")
    assert crowded.exit_code == 0
    states = told("--model", "llama3-70b", "--gpu", "h100")["states_bytes"]
    assert f"it does not fit, its states alone are {states / H100.memory_bytes:.1f} times the card" in crowded.output
    assert "largest micro-batch" not in crowded.output
    assert told("--model", "llama3-70b", "--gpu", "h100")["device"]["largest_micro_batch"] == 0
    assert "device" not in told(*SPLIT)


@pytest.mark.parametrize(
    "flags", [(), ("--schedule", "ZB-H1", "--pp", "4"), ("--schedule", "interleaved", "--pp", "4")]
)
def test_both_commands_have_one_recipe_and_one_verdict(flags):
    asked = ["plan", "llama2-7b", "--gpus", "32", "--batch", "512", "--zero", "1", "--json", *flags]
    found = json.loads(CliRunner().invoke(main, asked).output)["plans"]
    assert len(found) > 1
    assert not flags or {each["plan"]["schedule"] for each in found} == {flags[1]}
    for each in found:
        plan = each["plan"]
        flags = [f"--{name.replace('_', '-')}" for name in ("sequence_parallel", "keep_gathered") if plan[name]]
        sizes = [
            f"--{name.replace('_', '-')}={plan[name]}"
            for name in ("dp", "tp", "pp", "cp", "zero", "chunks", "micro_batch", "micro_batches", "recompute")
        ]
        data = told("llama2-7b", *flags, *sizes, "--schedule", plan["schedule"], "--card", "H100")
        assert data["setup"]["recipe"] == plan["recipe"]
        assert data["planned"]["bytes"] == {name: value for name, value in each["bytes"].items() if name != "total"}
        assert data["planned"]["fit"] == each["fit"]
        assert data["device"]["verdict"] == each["fit"]["verdict"]


def test_a_late_stage_of_zb_h1_keeps_as_much_as_the_first():
    asked = ("llama2-7b", "--pp", 4, "--micro-batches", 8, "--card", "H100", "--pipeline-stage")
    plain, late = told(*asked, 2), told(*asked, 2, "--schedule", "zb-h1")
    assert late["setup"]["schedule"] == "ZB-H1"
    assert late["bytes"]["layer_activations"] == 4 * plain["bytes"]["layer_activations"] / 2
    out = invoke(*asked, 2, "--schedule", "zb-h1").output
    assert "(dp 1 × tp 1 × pp 4, ZB-H1)" in out
    assert "recipe, for H100-80GB-SXM" in out


def test_what_is_kept_is_counted_where_it_is_asked_for():
    again, keeps = (told(*SPLIT, *flag)["planned"]["bytes"]["activations"] for flag in ((), ("--keep-gathered",)))
    more = 32 * 2 * 2 * 4096 * 4096 * (1 - 1 / 4)  # two inputs of two bytes, of which a rank has a quarter anyway
    assert keeps - again == pytest.approx(planner.FITTED.activation_factor * more)


def test_the_fullest_stage_decides_whichever_is_shown():
    degrees = ("--tp", 8, "--pp", 16, "--dp", 64, "--zero", 2, "--sequence-parallel")
    options = ("--model", "llama3-405b", *degrees, "--gpu", "H100")
    shown = told(*options, "--pipeline-stage", 15)
    assert shown["pipeline_stage"] == 15
    assert shown["total_bytes"] < shown["device"]["fullest_bytes"]
    assert shown["device"] == told(*options)["device"]


@pytest.mark.parametrize(("batch", "verdict"), [(1, "yes"), (2, "unsure"), (3, "no")])
def test_the_planner_says_a_number_with_its_margin(batch, verdict):
    options = ("llama2-7b", "--dp", 64, "--zero", 1, "--micro-batch", batch)
    plan = planner.Plan(dp=64, zero=1, micro_batch=batch)
    needed = planner.plan_memory("llama2-7b", plan)
    data, room = told(*options, "--card", "H100"), hardware.accelerator("H100").memory_bytes
    margin = planner.FITTED.margin * needed.total
    assert data["device"]["memory_bytes"] == room
    assert data["planned"]["bytes"] == needed.parts
    assert data["planned"]["total_bytes"] == needed.total > data["total_bytes"]
    assert data["planned"]["fit"] == {
        "needed_bytes": needed.total, "usable_bytes": room, "margin_bytes": margin,
        "free_bytes": room - needed.total, "verdict": verdict, "states_bytes": needed.states,
        "outside": [],
    }  # fmt: skip
    said = f"expects {format_bytes(needed.total, digits=3)} ± {format_bytes(margin, digits=3)}"
    words = {"yes": "it fits with", "no": "it does not fit even with", "unsure": "the margin decides"}[verdict]
    assert f"{said} of {format_bytes(room, digits=3)}: {words}" in invoke(*options, "--card", "H100").output
    assert f"{said}. The margin, 21%, is the error that nine of ten stay within of 259 runs" in invoke(*options).output
    assert "without a pipeline, tp up to 8.\n" in invoke(*options).output
    assert "fit" not in told(*options)["planned"]


def test_what_no_run_of_the_margin_had_is_unknown():
    """Llama 3's own plan ran on this card: the verdict is not no."""
    degrees = ("--tp", 8, "--pp", 16, "--dp", 128, "--zero", 1, "--micro-batches", 16)
    options = ("llama3-405b", *degrees, "--card", "H100")
    said = invoke(*options).output
    assert "whether it fits is unknown" in said
    has = [
        "tensor parallelism alone", "more than 512 ranks", "a model of another size", "sequences of another length",
    ]  # fmt: skip
    assert f"This one has {', '.join(has[:-1])} and {has[-1]}: its error is unknown." in said
    assert "does not fit" not in said
    data = told(*options)
    assert data["device"]["verdict"] == data["planned"]["fit"]["verdict"] == "unknown"
    assert data["planned"]["fit"]["outside"] == has
    many = invoke("llama3-8b", "--zero", 3, "--dp", 8, "--cp", 2, "--recompute", "full", "--dropout")
    many, has = many.output, "context parallelism, ZeRO 2 or 3, recompute, dropout and sequences of another length"
    assert f"This one has {has}" in many
    long = invoke("llama2-13b", "--seq", 32768, "--tp", 8, "--dp", 8, "--zero", 1, "--card", "A100").output
    assert "whether it fits is unknown" in long
    assert "and another card: its error is unknown." in long
    other = invoke("llama2-7b", "--recipe", "16-byte").output
    assert "This one has another recipe of states: its error is unknown." in other
    split = invoke("llama2-7b", "--tp", 4, "--pp", 2, "--sequence-parallel", "--dp", 8, "--card", "H100").output
    assert "of 425 runs" in split
    assert "with a pipeline, tp up to 8.\n" in split
    assert "sequences of another length: its error" in invoke("llama2-7b", "--seq", 32768).output
    chosen = invoke("llama2-7b", "--tp", 4, "--sequence-parallel", "--card-memory", 500).output
    assert "another card" in chosen
    assert "whether it fits is unknown" in chosen
    assert "it does not fit, its states alone are 7.5 times" in invoke("llama3-70b", "--pp", 2, "--card", "H100").output


def test_what_is_far_too_large_does_not_fit_though_no_run_was_like_it():
    """By the count alone: more than runs that ran were counted at, on cards as large."""
    for batch, verdict, said in ((4, "unknown", "unknown, the count is 2.6"), (6, "no", "not fit, the count is 3.5")):
        asked = ("llama3-8b", "--tp", 2, "--micro-batch", batch, "--card", "H100")
        assert told(*asked)["device"]["verdict"] == verdict
        assert told(*asked)["planned"]["fit"]["states_bytes"] < H100.memory_bytes
        assert f"{said} times the card." in invoke(*asked).output


def test_a_model_by_its_file_or_by_flags(tmp_path):
    file = tmp_path / "own.json"
    sizes = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256}
    file.write_text(json.dumps(sizes | heads), encoding="utf-8")
    data = told(file)
    assert data["model"] == "own"
    # a layer: queries and output 2·512², keys and values 2·512·256, three of the MLP, two norms; tables, last norm
    layer = 3 * 512**2 + 3 * 512 * 1408 + 2 * 512
    assert data["num_params"] == 4 * layer + 2 * 1000 * 512 + 512
    assert data == told("--model", file)
    upper = tmp_path / "own.JSON"
    upper.write_bytes(json.dumps(sizes | heads).encode("utf-16"))  # as a shell of Windows writes it
    assert data == told(upper)
    folder = invoke(tmp_path)
    assert folder.exit_code == 2
    assert f"MODEL must be a file, such as {tmp_path / 'config.json'}, not a folder" in " ".join(folder.output.split())
    (tmp_path / "long").mkdir()
    long = invoke(tmp_path / "long" / ("n" * 300))  # which no path may have: Path.exists raises
    assert long.exit_code == 2
    assert "cannot be read as JSON: File name too long" in " ".join(long.output.split())
    upper.write_text(json.dumps(sizes | heads | {"num_hidden_layers": 10**6}), encoding="utf-8-sig")
    assert f"MODEL {upper}: layers must be at most 1,000" in " ".join(invoke(upper).output.split())
    flags = ("--layers", 4, "--hidden", 512, "--heads", 8, "--kv-heads", 4, "--ffn", 1408, "--vocab", 1000)
    same = told("llama2-7b", *flags, "--seq", 256)
    assert same["model"] == "llama2-7b, changed"
    assert {key: same[key] for key in ("num_params", "bytes")} == {key: data[key] for key in ("num_params", "bytes")}


def test_a_size_that_is_said_again_changes_nothing():
    """Heads of 128 entries on a width of 5120: they keep theirs, whatever their number."""
    plain = told("qwen3-32b")
    assert told("qwen3-32b", "--heads", 64) == told("qwen3-32b", "--hidden", 5120, "--head-dim", 128) == plain
    fewer = models.model_parameters(dataclasses.replace(models.model("qwen3-32b"), num_heads=32)).total
    assert told("qwen3-32b", "--heads", 32)["num_params"] == fewer
    narrow = dataclasses.replace(models.model("llama3-8b"), num_heads=16, head_dim=256)
    assert told("llama3-8b", "--heads", 16)["num_params"] == models.model_parameters(narrow).total
    narrow = dataclasses.replace(models.model("llama3-8b"), head_dim=64)
    assert told("llama3-8b", "--head-dim", 64)["num_params"] == models.model_parameters(narrow).total


def test_a_context_group_shares_sequences_and_states():
    options = ("llama3-8b", "--dp", 2, "--zero", 3, "--card", "H100")
    data = told(*options, "--cp", 4)
    found = footprint.rank_memory("llama3-8b", Setup(dp=8, zero=3, seq=2048, recipe="18-byte"))
    assert data["bytes"] == found.parts
    assert (data["world_size"], data["setup"]["dp"], data["setup"]["cp"], data["setup"]["seq"]) == (8, 2, 4, 8192)
    assert "on 8 ranks (dp 2 × tp 1 × pp 1 × cp 4), ZeRO stage 3" in invoke(*options, "--cp", 4).output
    assert data["planned"]["total_bytes"] < told(*options)["planned"]["total_bytes"]


def test_what_changes_nothing_is_said():
    said = "--recompute selective changes nothing here: flash attention keeps no matrix."
    assert said in invoke("--model", "tiny", "--recompute", "selective").output
    assert said not in invoke("--model", "tiny", "--recompute", "selective", "--attention", "matrix").output
    assert "on 1 rank (dp 1" in invoke("--model", "tiny").output


def test_the_list_has_every_model_and_its_source():
    result = invoke("--list")
    assert result.exit_code == 0
    for name in models.MODELS:
        assert any(line.split()[:1] == [name] for line in result.output.splitlines()), name
    assert "405,853,388,800" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model is missing; --list shows the 86 that there are"),
        (("abacus",), "MODEL 'abacus' is unknown; there are tiny, 25m, gpt2-124m"),
        (("--model", "abacus"), "--model 'abacus' is unknown; there are tiny, 25m, gpt2-124m"),
        (("--model", "70b"), "--model '70b' fits llama2-70b, llama3-70b, mpt-70b"),
        (("--model", "lama3"), "--model 'lama3' is unknown; did you mean llama2-13b or llama3-8b or llama3-70b?"),
        (("--model", "llama3-70b", "--tp", 3), "--tp of llama3-70b must be one of 1, 2, 4, 8, 16, 32, 64"),
        (("--model", "llama3-70b", "--pp", 81), "--pp of llama3-70b must be from 1 to 80"),
        (
            ("--model", "llama3-70b", "--pp", 4, "--chunks", 21),
            "--chunks must be at most 20 with num_layers=80 on --pp=4",
        ),
        (("--model", "llama3-70b", "--dp", 0), "--dp must be at least 1, not 0"),
        (("--model", "llama3-70b", "--zero", 4), "--zero must be 0, 1, 2 or 3, not 4"),
        (("--model", "llama3-70b", "--recipe", 17), "--recipe '17' is unknown; there are 12-byte, 16-byte"),
        (("--model", "llama3-70b", "--recompute", "some"), "--recompute must be one of none, selective, full"),
        (("--model", "llama3-70b", "--attention", "no"), "--attention must be one of matrix, flash"),
        (("--model", "llama3-70b", "--gpu", "abacus"), "--gpu 'abacus' is unknown; there are V100"),
        (("--model", "llama3-70b", "--pp", 2, "--pipeline-stage", 2), "--pipeline-stage must be from 0 to 1, not 2"),
        (("--model", "gpt3", "--seq", 4096), "--seq of gpt3-175b must be at most 2048"),
        (("--model", "llama3-70b", "--gpu", ""), "--gpu '' is unknown; there are V100"),
        (
            ("--model", "tiny", "--tp", 2, "--seq", 63, "--sequence-parallel"),
            "of --tp=2 with --sequence-parallel, not 63",
        ),
        (
            ("--model", "gpt3", "--pp", 4, "--chunks", 2, "--micro-batches", 6),
            "--micro-batches must be a multiple of --pp=4 where --chunks=2 are interleaved",
        ),
        (("tiny", "--model", "25m"), "MODEL or --model must be given, not both: 'tiny' and '25m'"),
        (("tiny", "--card", "H100", "--gpu", "A100"), "--card or --gpu must be given, not both: 'H100' and 'A100'"),
        (("tiny", "--card", "abacus"), "--card 'abacus' is unknown; there are V100"),
        (("tiny", "--precision", "fp8", "--card", "A100"), "--precision must be bf16 on A100-80GB-SXM, not 'fp8'"),
        (("tiny", "--recompute", "full", "--recompute-layers", 3), "--recompute-layers must be at most 2, a piece's"),
        (("llama3-8b", "--seq", 10**12), "--seq must be at most 1,000,000,000, not 1000000000000"),
        (("llama3-8b", "--dp", 10**40), "--dp must be at most 1,000,000,000, not 1000000"),
        (("tiny", "--card", "x"), "--card 'x' is unknown; there are V100"),
        (("tiny", "--recipe", 8), "--recipe '8' is unknown; there are 12-byte"),
        (("tiny", "--schedule", "GPipe"), "--schedule 'GPipe' is unknown; there are 1F1B, interleaved, ZB-H1"),
        (("tiny", "--schedule", "zb-h1"), "--schedule must be 1F1B with --pp=1, not ZB-H1"),
        (("tiny", "--schedule", "interleaved"), "--schedule must be 1F1B with --pp=1, not interleaved"),
        (
            ("gpt3", "--schedule", "interleaved", "--pp", 4, "--micro-batches", 8),
            "--chunks must be above 1 with --schedule=interleaved, not 1",
        ),
        (
            ("gpt3", "--schedule", "1F1B", "--pp", 4, "--chunks", 2),
            "--schedule must be interleaved with --chunks=2, not 1F1B",
        ),
        (
            ("gpt3", "--schedule", "ZB-H1", "--pp", 4, "--micro-batches", 2),
            "--micro-batches must be 4 or more with --pp=4",
        ),
        (("tiny", "--card-memory", 0), "--card-memory must be finite and positive, not 0"),
        (("tiny", "--card-memory", 1e300), "--card-memory must be at most 1,000,000,000, not 1e+300"),
        (("tiny", "--layers", 10**9), "--layers must be at most 1,000 here"),
        (("none.json",), "MODEL none.json cannot be read as JSON"),
        (("llama3-8b", "--layers", 0), "--layers must be at least 1, not 0"),
        (("llama3-8b", "--heads", 3), "--hidden must be a multiple of --heads=3, not 4096"),
        (("llama3-8b", "--kv-heads", 5), "--kv-heads must divide --heads=32; 5 does not"),
        (("llama3-8b", "--tp", 2, "--keep-gathered"), "--sequence-parallel must be given where --keep-gathered is"),
        (("llama3-8b", "--cp", 0), "--cp must be at least 1, not 0"),
        (("llama3-8b", "--cp", 3), "--seq must be a multiple of 2·cp=6 (zig-zag), not 8192"),
        (("llama3-8b", "--pp", 2, "--micro-batches", 0), "--micro-batches must be at least 1, not 0"),
        (
            ("llama3-8b", "--cp", 3, "--tp", 8, "--sequence-parallel", "--seq", 126),
            "--seq must be a multiple of cp·tp=24 with --sequence-parallel, not 126",
        ),
        (("--model", "tiny", "--dp", "many"), "'many' is not a valid integer"),
    ],
)
def test_what_is_impossible_says_what_is_possible(arguments, message):
    is_refused(arguments, message)


def test_help_needs_neither_numpy_nor_rich():
    code = (
        "import sys\nfrom dtlib.cli.memory import memory\n"
        "try:\n    memory(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--zero" in done.stdout
