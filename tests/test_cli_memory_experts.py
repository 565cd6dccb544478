"""``dtlib memory`` of models with experts: what is told equals the theory, and what is not counted says so."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.theory import ep, footprint, models, planner, threed, units
from dtlib.theory.footprint import Setup

from .test_cli_memory import invoke, is_refused, told
from .theory.hub_experts import EXPERTS

V3 = ("deepseek-v3", "--pp", 16, "--dp", 128, "--ep", 64, "--zero", 1, "--seq", 4096)


def test_671_billion_parameters_on_2048_cards():
    data = told(*V3, "--card", "H100", "--recompute", "full", "--imbalance", 1.5)
    setup = Setup(dp=128, pp=16, ep=64, zero=1, seq=4096, recompute="full", imbalance=1.5, recipe="18-byte")
    found = footprint.rank_memory("deepseek-v3", setup)
    assert data["bytes"] == found.parts
    assert data["total_bytes"] == found.total
    assert (data["num_params"], data["active_params"]) == (671_026_404_352, 37_552_282_624)
    assert (data["world_size"], data["setup"]["ep"], data["setup"]["imbalance"]) == (2048, 64, 1.5)
    assert data["planned"]["total_bytes"] == planner.plan_memory("deepseek-v3", planner.Plan(
        dp=128, pp=16, ep=64, zero=1, seq=4096, recompute="full", imbalance=1.5, micro_batches=16
    )).total  # fmt: skip
    assert "experts" in data["planned"]["fit"]["outside"]
    assert data["device"]["verdict"] == "unknown"
    assert data["device"]["largest_micro_batch"] == 0


def test_the_table_says_what_is_active_what_is_assumed_and_what_is_not_counted():
    said = invoke(*V3).output
    assert (
        "deepseek-v3: 671,026,404,352 parameters, 37,552,282,624 active (with both embeddings), on 2,048 ranks" in said
    )
    assert (
        "(dp 128 × tp 1 × pp 16, experts over ep 64 of dp), ZeRO stage 1, 1 × 4,096 tokens in a micro-batch, 18-byte"
        in said
    )
    assert "The busiest rank of ep is taken to get as many tokens as each other one: --imbalance 1. No token is" in said
    assert "This one has more than 512 ranks, experts, latent attention and a model of another size: its error" in said
    assert "all to all " in said
    assert "taken to get 2.5 times the mean of tokens: --imbalance 2.5." in invoke(*V3, "--imbalance", 2.5).output
    alone = invoke("mixtral-8x7b").output
    assert "busiest" not in alone
    assert "all to all" not in alone
    dense = invoke("llama3-8b", "--mtp", 1).output
    assert "251,678,720 of them in modules that predict further tokens, on 1 rank (" in dense
    dense = invoke("llama3-8b").output
    assert "llama3-8b: 8,030,261,248 parameters on 1 rank (" in dense
    assert "active" not in dense
    assert "experts" not in dense


def test_tp_splits_experts_and_says_so():
    one, two = (told("mixtral-8x7b", "--tp", tp)["bytes"]["weights"] for tp in (1, 2))
    layer = models.layer_parameters("mixtral-8x7b")
    repeated = 32 * (layer.router + layer.norms) + 4096
    assert one - two == 2 * (models.model_parameters("mixtral-8x7b").total - repeated) / 2
    words = "Each expert is split over tp 2, as other matrices: none is whole on a rank."
    assert words in invoke("mixtral-8x7b", "--tp", 2).output
    for without in (("mixtral-8x7b",), ("llama3-8b", "--tp", 2)):
        assert "Each expert" not in invoke(*without).output


@pytest.mark.parametrize(("name", "top_k"), [("mixtral-8x7b", 2), ("qwen3-30b-a3b", 8)])
def test_the_exchange_is_counted_with_a_copy_an_expert_and_called_an_upper_bound(name, top_k):
    arguments = (name, "--dp", 4, "--ep", 4, "--seq", 1024)
    sent = 2 * 1024 * models.model(name).hidden  # bytes of one copy of each token
    assert told(*arguments)["bytes"]["all_to_all"] == 2 * top_k * sent
    experts = models.model(name).experts.num_experts
    assert sent * ep.expected_visits(experts, top_k, 4) < top_k * sent  # what a copy a rank would be
    words = f"The all-to-all is an upper bound: {top_k} copies of a token, one for each of its experts."
    assert words in invoke(*arguments).output
    assert "upper bound: " not in invoke(name).output


def test_what_a_layer_keeps_is_said_in_both_ways_of_keeping_it():
    """Written out, as it is counted, and as the ranks of the course keep it, which is measured to the byte."""
    arguments = ("mixtral-8x7b", "--dp", 4, "--ep", 4, "--seq", 1024)
    model, setup = models.model("mixtral-8x7b"), Setup(dp=4, ep=4, seq=1024)
    written_out, ours = told(*arguments)["bytes"]["layer_activations"] / 32, threed.layer_bytes(model, setup, True)
    dense = threed.layer_bytes(dataclasses.replace(model, experts=None, ffn_hidden=1), setup, False)
    kept = ep.kept_bytes(1024, 4096, 14336, 8, 2, 4).total
    assert ours == pytest.approx(dense + kept, rel=1e-3)  # but for a width of 1
    assert ours < 0.7 * written_out
    said = invoke(*arguments).output
    assert f"plainly written: {units.format_bytes(written_out)} a micro-batch" in said
    assert f"computes what follows the activation again: {units.format_bytes(ours)}." in said
    assert "plainly written" not in invoke(*arguments, "--recompute", "full").output


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ep_leaves_all_but_the_experts_as_it_is(ranks):
    one, more = (told("qwen3-30b-a3b", "--dp", 8, "--ep", n, "--zero", 0)["bytes"] for n in (1, ranks))
    experts = models.model_parameters("qwen3-30b-a3b").experts
    assert one["weights"] - more["weights"] == pytest.approx(2 * (experts - experts / ranks))
    assert one["layer_activations"] == more["layer_activations"]


def test_modules_of_further_tokens_are_counted_where_asked_for(tmp_path):
    plain, more = told(*V3), told(*V3, "--mtp", 1, "--pipeline-stage", 15)
    assert more["num_params"] - plain["num_params"] == more["parameters"]["mtp"] == 11_610_067_968
    model = dataclasses.replace(models.model("deepseek-v3"), mtp_modules=1)
    setup = Setup(dp=128, pp=16, ep=64, zero=1, seq=4096, recipe="18-byte")
    assert more["bytes"] == footprint.rank_memory(model, setup, 15).parts
    assert (
        "parameters, 11,610,067,968 of them in modules that predict further tokens, 38,"
        in invoke(*V3, "--mtp", 1).output
    )
    assert told(*V3, "--mtp", 0) == plain
    file = tmp_path / "v3.json"
    file.write_text(json.dumps(EXPERTS["DeepSeek-V3"]), encoding="utf-8")
    assert told(file, *V3[1:])["bytes"] == plain["bytes"]


def test_sizes_that_flags_change():
    data = told("deepseek-v3", "--layers", 4, "--pp", 1)
    assert data["model"] == "deepseek-v3, changed"
    one = models.layer_parameters("deepseek-v3", with_experts=True).total
    three = 3 * models.layer_parameters("deepseek-v3", with_experts=False).total
    assert data["num_params"] == one + three + 2 * 129280 * 7168 + 7168


def test_the_list_has_what_is_active():
    lines = [line.split() for line in invoke("--list").output.splitlines()]
    assert ["deepseek-v3", "671,026,404,352", "37,552,282,624", "61", "7,168", "128"] in lines
    assert ["llama3-8b", "8,030,261,248", "8,030,261,248", "32", "4,096", "32"] in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mixtral-8x7b", "--ep", 2), "--ep must divide --dp=1, whose ranks share the experts; 2 does not"),
        (("mixtral-8x7b", "--dp", 6, "--ep", 3), "--ep of mixtral-8x7b must divide its 8 experts; 3 does not"),
        (("llama3-8b", "--dp", 2, "--ep", 2), "--ep of llama3-8b must be 1, since it has no experts, not 2"),
        (("mixtral-8x7b", "--ep", 0), "--ep must be at least 1, not 0"),
        (
            ("mixtral-8x7b", "--dp", 8, "--ep", 8, "--imbalance", 9),
            "--imbalance must be from 1 to --ep=8, all tokens on one rank, not 9",
        ),
        (("mixtral-8x7b", "--imbalance", 2), "--imbalance must be from 1 to --ep=1"),
        (("mixtral-8x7b", "--imbalance", "nan"), "--imbalance must be finite and 1 or more, not nan"),
        (("mixtral-8x7b", "--imbalance", -1), "--imbalance must be 1 or more, not -1.0"),
        (("mixtral-8x7b", "--mtp", -1), "--mtp must be at least 0, not -1"),
        (("mixtral-8x7b", "--ffn", 64), "--ffn must be absent, since all layers of mixtral-8x7b have experts in place"),
        (("deepseek-v3", "--head-dim", 128), "--head-dim must be nope_dim + rope_dim=192, not 128"),
        (("deepseek-v3", "--tp", 3), "--tp of deepseek-v3 must be one of 1, 2, 4, 8, 16, 32, 64, 128"),
    ],
)
def test_what_is_impossible_says_what_is_possible(arguments, message):
    is_refused(arguments, message)


def test_a_plan_says_its_ep_and_that_no_run_was_held_to_it():
    asked = ["plan", "qwen3-30b-a3b", "--gpus", "16", "--seq", "4096", "--batch", "256", "--imbalance", "1.5"]
    spread = CliRunner().invoke(main, [*asked, "--ep", "8"], env={"COLUMNS": "100"})
    said = " ".join(spread.output.split())
    assert "dp tp pp cp ep ZeRO" in said
    assert "is taken to get up to 1.5 times the mean of tokens; nothing hides the exchange of tokens" in said
    told = json.loads(CliRunner().invoke(main, [*asked, "--ep", "8", "--json"]).output)
    assert {each["plan"]["ep"] for each in told["plans"]} == {8}
    assert all(each["seconds"]["expert_parallel"] > 0 for each in told["plans"])
    refused = CliRunner().invoke(main, [*asked, "--ep", "5"])
    assert refused.exit_code == 2
    assert "--ep must be one of 1, 2, 4, 8, 16" in refused.output
    module = json.loads(CliRunner().invoke(main, [*asked, "--mtp", "1", "--json"]).output)
    assert module["model"]["mtp_modules"] == 1
