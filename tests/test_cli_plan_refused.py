"""What `dtlib plan` refuses, and how."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dtlib.cli import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--offload", "--card", "GB200"], "--host-link must be given on GB200-186GB"),
        (["--offload", "--card", "GB200", "--host-link", "200"], "--host-memory must be given on GB200-186GB, changed"),
        (["--precision", "mxfp8"], "--precision must be one of bf16, fp8, not 'mxfp8'"),
        (["--precision", "fp8", "--card", "A100"], "--precision must be bf16 on A100-80GB-SXM"),
        (["--lora", "0"], "--lora must be at least 1"),
        (["--lora", "5000"], "--lora must be at most 4096, the shortest side of an adapted matrix, not 5000"),
        (["--lora", "8", "--lora-modules", "qkv,qkv"], "--lora-modules must name each once, not qkv,qkv"),
        (["--lora-modules", "up"], "--lora must be given where --lora-modules is"),
        (["--host-link", "10"], "--offload must be given where --host-link is"),
        (["--host-memory", "10"], "--offload must be given where --host-memory is"),
        (["--recompute", "33"], "--recompute must be below the 32 layers, all of which are full"),
        (["--recompute", "none,selective"], "flash attention leaves selective nothing to save"),
        (["--sequence-parallel", "keep", "--tp", "1"], "--sequence-parallel must name none with --tp=1, not keep"),
        (["--schedule", "ZB-H1", "--pp", "1"], "--schedule must name 1F1B with --pp=1, not ZB-H1"),
        (["--tp-overlap", "--tp", "1"], "--tp-overlap must be absent with --tp=1: a rank alone sends nothing"),
        (["--gpus", "1", "--tp", "2"], "--tp must be 1 with --gpus=1, not 2"),
        (["--zero", "-1"], "--zero '-1' is unknown; did you mean 1?"),
        (["--zero", " - 1"], "--zero ' - 1' is unknown; there are 0, 1, 2, 3"),
        (["--tokens", "3"], "--tokens must be at least those of a step, 4,194,304, not 3"),
        (["--tokens", "1e300"], "--tokens must be at most 1e+18, not 1e+300"),
        (["--critical-batch", "1e19"], "--critical-batch must be at most 1e+18, not 1e+19"),
        (["--measured", "none.csv"], "--measured none.csv cannot be read: No such file or directory"),
        (["--imbalance", "-1"], "--imbalance must be 1 or more, not -1"),
        (["--imbalance", "inf"], "--imbalance must be finite and 1 or more, not inf"),
        (["--imbalance", "2"], "--imbalance must be 1 for a model without experts, not 2"),
        (["--batch", "9" * 30], "--batch must be at most 1,000,000,000, not 9999"),
        (["--seq", "9" * 30], "--seq must be at most 1,000,000,000, not 9999"),
        (["--gpus", "8" + "0" * 30], "--gpus must be at most 10,000,000, not 8000"),
        (["--heads", "0"], "--heads must be at least 1, not 0"),
        (["--hidden", "-1"], "--hidden must be at least 1, not -1"),
        (["--kv-heads", "3"], "--kv-heads must divide --heads=32; 3 does not"),
        (["--lora", "8", "--lora-modules", "gate"], "--lora-modules 'gate' is unknown; there are qkv, out, up, down"),
    ],
)
def test_what_is_not_planned_is_refused_by_name(flags, said):
    result = CliRunner().invoke(main, ["plan", "llama3-8b", "--gpus", "8", *flags])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-71b", "--gpus", 8], "did you mean"),
        (["llama3-8b", "--gpus", 0], "--gpus must be at least 1, not 0"),
        (["lama3", "--gpus", 8], "MODEL 'lama3' is unknown; did you mean llama2-13b"),
        (["llama3-8b", "--gpus", 12], "--gpus must be a multiple of --node=8, not 12: 8 or 16, or 12 with --node=6"),
        (["llama3-8b", "--gpus", 101], "--gpus must be a multiple of --node=8, not 101: 96 or 104"),
        (["llama3-8b", "--gpus", 8, "--card-memory", 2], "--card must have room beside the runtime's 2 GiB"),
        (["llama3-8b", "--gpus", 1], "; 3 do (dp 1, tp 1, pp 3"),
        (["llama3-70b", "--gpus", 8], "; 24 do (dp"),
        (["llama3-8b", "--gpus", 8, "--card", "H1000"], "--card 'H1000' is unknown"),
        (["llama3-8b", "--gpus", 8, "--ep", 2], "--ep must be 1 for a model without experts, not 2"),
        (["olmoe", "--gpus", 8, "--batch", 7, "--ep", 2], "--ep must be 1 with --gpus=8 and a batch of 7, not 2"),
        (["llama3-8b", "--gpus", 8, "--card", "x"], "--card 'x' is unknown; there are V100-32GB-SXM"),
        (["llama3-8b", "--gpus", 8, "--network", "8"], "--network '8' is unknown; there are NVLink 2"),
        (["llama3-8b", "--gpus", 8, "--network", "string"], "--network 'string' is unknown"),
        (["llama3-8b", "--gpus", 8, "--recipe", "13"], "--recipe '13' is unknown"),
        (["llama3-8b", "--gpus", 8, "--zero", "1,4"], "--zero '4' is unknown; there are 0, 1, 2, 3"),
        (["llama3-8b", "--gpus", 8, "--shard", "nod"], "--shard 'nod' is unknown; did you mean node?"),
        (["llama3-8b", "--gpus", 8, "--shard", "3"], "--shard=3 does not go together with --gpus=8"),
        (
            ["llama3-8b", "--gpus", 8, "--shard", "0"],
            "--shard '0' is unknown; there are all, node, or a number above 0",
        ),
        (["llama3-8b", "--gpus", 8, "--shard", "node"], "no ranks that share states are on several nodes"),
        (
            ["llama3-8b", "--gpus", 8, "--framework", "jax"],
            "--framework 'jax' is unknown; there are megatron, nanotron,",
        ),
        (
            ["llama3-8b", "--gpus", 8, "--framework", "fsdp", "--zero", "1"],
            "--zero must be some of 0, 2, 3 with --framework=fsdp, not 1",
        ),
        (
            ["llama3-8b", "--gpus", 8, "--framework", "nanotron", "--recompute", "5"],
            "--recompute must be some of none, selective, full with --framework=nanotron, not 5",
        ),
        (
            ["llama3-8b", "--gpus", 8, "--framework", "nanotron", "--lora", 8],
            "--lora must be absent with --framework=nanotron",
        ),
        (
            ["llama3-8b", "--gpus", 8, "--framework", "deepspeed", "--cp", 2],
            "--cp must be 1 with --framework=deepspeed: Ulysses is not planned",
        ),
        (
            ["llama3-8b", "--gpus", 8, "--framework", "deepspeed", "--pp", 2, "--zero", 3],
            "--framework=deepspeed and --zero=3 do not go together with --gpus=8",
        ),
        (["llama3-8b", "--gpus", 8, "--zero", ""], "--zero '' is unknown"),
        (["llama3-8b", "--gpus", 8, "--schedule", "GPipe"], "--schedule 'GPipe' is unknown; there are 1F1B"),
        (["llama3-8b", "--gpus", 8, "--recompute", "ful"], "--recompute 'ful' is unknown; did you mean full?"),
        (["llama3-8b", "--gpus", 8, "--recompute", "selective"], "flash attention leaves selective nothing to save"),
        (["llama3-8b", "--gpus", 8, "--sequence-parallel", "1"], "--sequence-parallel '1' is unknown; there are none"),
        (["llama2-13b", "--gpus", 8, "--dp", 8, "--zero", "0"], "without --zero held fixed others do (dp 8"),
        (["llama3-8b", "--gpus", 8, "--batch", 0], "--batch must be at least 1, not 0"),
        (["llama3-8b", "--gpus", 8, "--price", 2], "--tokens must be given where --price or --watts is"),
        (["llama3-8b", "--gpus", 8, "--tokens", 0], "--tokens must be finite and positive, not 0"),
        (["llama3-8b", "--gpus", 8, "--min-tokens", 1], "--critical-batch must be given where --min-tokens is"),
        (["llama3-8b", "--gpus", 8, "--critical-batch", 0], "--critical-batch must be finite and positive, not 0"),
        (["llama3-8b", "--gpus", 8, "--mtbf", 9], "--storage must be given where --mtbf is"),
        (["llama3-8b", "--gpus", 8, "--storage", 9], "--mtbf must be given where --storage is"),
        (["llama3-8b", "--gpus", 8, "--mtbf", 0, "--storage", 1], "--mtbf must be finite and positive, not 0"),
        (["llama3-8b", "--gpus", 8, "--mtbf", 1, "--storage", -1], "--storage must be finite and positive, not -1"),
        (["llama3-8b", "--gpus", 8, "--card-memory", -1], "--card-memory must be finite and positive, not -1"),
        (["llama3-8b", "--gpus", 8, "--heads", 3], "--hidden must be a multiple of --heads=3, not 4096"),
        (["gpt2-124m", "--gpus", 2, "--seq", 2048], "learned positions"),
        (["llama3-8b", "--gpus", 8, "--hidden", 10**30], "--hidden must be at most 1,000,000,000, not 1000000"),
        (["llama3-8b", "--gpus", 8, "--layers", 10**9], "--layers must be at most 1,000 here"),
        (["llama3-8b", "--gpus", 8, "--card-memory", 1e300], "--card-memory must be at most 1,000,000,000, not 1e+300"),
        (["llama3-8b", "--gpus", 8, "--network-rate", 1e300], "--network-rate must be at most 1,000,000,000, not"),
        (["none.json", "--gpus", 8], "MODEL none.json cannot be read as JSON"),
        (
            ["llama3-70b", "--gpus", 8],
            "llama3-70b fits on --gpus=8 (H100-80GB-SXM, 79.1 GiB each): the least is",
        ),
    ],
)
def test_what_is_not_possible_is_refused_with_what_is(arguments, message):
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize("command", [["plan", "--gpus", "8"], ["memory"], ["explain"]])
def test_a_file_nested_too_deep_is_refused(command, tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 200_000)
    result = CliRunner().invoke(main, [*command, str(file)])
    assert result.exit_code == 2
    assert "cannot be read as JSON" in result.output
