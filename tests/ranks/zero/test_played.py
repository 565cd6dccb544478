"""A step of ZeRO played event by event: worked out by hand, and against what must hold for any model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlib.theory import zero

from .buckets import reduction_buckets, unit_buckets
from .played import Held, Rules, Span, play


def span(event, name="", activations=0, temporary=0, full=0):
    """What the work holds: `full` is temporary too, for a moment."""
    rest = {"weights": 0, "gradients": 0, "optimizer": 0, "gathered_weights": 0, "unsharded_gradients": 0}
    held = Held(**rest, activations=activations, temporary=temporary)
    return Span(event, name, held, Held(**rest, activations=activations, temporary=temporary + full))


def passes(layers, saved=0):
    """Layers "0", "1", ... of one parameter "0.w", each keeping `saved` bytes."""
    inside = range(layers)
    return [
        span("begin"),
        span("forward"),
        *(each for i in inside for each in (
            span("forward", str(i), saved * i), span("forward done", str(i), saved * (i + 1)),
        )),
        span("forward done", "", saved * layers),
        *(each for i in reversed(inside) for each in (
            span("backward", str(i), saved * (i + 1)), span("gradient", f"{i}.w", saved * i),
            span("backward done", str(i), saved * i),
        )),
        span("end"),
    ]  # fmt: skip


def column(played, part, moment="fullest"):
    return [getattr(getattr(each, moment), part) for each in played]


def test_stage_3_worked_out_by_hand():
    """Two layers of 8 and 4 elements on 2 ranks, 4 bytes each, none prefetched: D is 32 and 16 bytes."""
    buckets = unit_buckets({"0.w": 8, "1.w": 4}, ["0", "1"])
    played = play(buckets, passes(2, 10), 2, 3, rules=Rules(prefetch=0, scalar_bytes=0))
    assert [(each.event, each.name) for each in played] == [
        ("begin", ""), ("forward", ""), ("forward", "0"), ("forward done", "0"), ("forward", "1"),
        ("forward done", "1"), ("forward done", ""), ("backward", "1"), ("gradient", "1.w"), ("backward done", "1"),
        ("backward", "0"), ("gradient", "0.w"), ("backward done", "0"), ("step", ""), ("step done", ""), ("end", ""),
    ]  # fmt: skip
    assert column(played, "weights") == [24] * 16
    assert column(played, "optimizer") == [48] * 16
    assert column(played, "gathered_weights", "held") == [0, 0, 32, 0, 16, 0, 0, 0, 16, 0, 0, 32, 0, 0, 0, 0]
    # The buffer of layer 1 stays while its reduction is under way: until that of layer 0 begins.
    assert column(played, "unsharded_gradients", "held") == [0] * 8 + [16, 16, 16, 32, 32, 0, 0, 0]
    # One other rank, so one part, which is there when the gradients of the next layer are.
    assert column(played, "exchange", "held") == [0] * 8 + [8, 8, 8, 16, 16, 0, 0, 0]
    assert column(played, "gradients", "held") == [0] * 11 + [8, 8, 24, 24, 24]
    # In the hook: weights 32, the gradient twice (copied to its buffer), and before that the buffer of layer 1.
    in_the_hook = played[10].fullest
    assert (in_the_hook.gathered_weights, in_the_hook.unsharded_gradients, in_the_hook.exchange) == (32, 64, 0)
    # The step: twice the piece of 16 bytes, and the 8 bytes that are left of the piece before; or the other way round.
    assert column(played, "temporary")[13] == 2 * 8 + 16
    assert column(played, "activations", "held") == [0, 0, 0, 10, 10, 20, 20, 20, 10, 10, 10, 0, 0, 0, 0, 0]


def test_prefetch_gathers_what_comes_next():
    buckets = unit_buckets({"0.w": 8, "1.w": 4, "2.w": 2}, ["0", "1", "2"])
    ahead = play(buckets, passes(3), 2, 3, rules=Rules(prefetch=1))
    gathered = {(each.event, each.name): each.fullest.gathered_weights for each in ahead}
    assert [gathered["forward", name] for name in "012"] == [4 * 12, 4 * 6, 4 * 2]
    assert [gathered["backward", name] for name in "210"] == [4 * 6, 4 * 12, 4 * 8]
    stays = play(buckets, passes(3), 2, 3, rules=Rules(prefetch=0, reshard_after_forward=False))
    gathered = {(each.event, each.name): each.held.gathered_weights for each in stays}
    assert [gathered["forward done", name] for name in "012"] == [4 * 8, 4 * 12, 4 * 14]
    assert [gathered["backward done", name] for name in "210"] == [4 * 12, 4 * 8, 0]


def test_stages_1_and_2_worked_out_by_hand():
    buckets = reduction_buckets({"0.w": 8, "1.w": 4}, bucket_bytes=16, first_bucket_bytes=None)
    assert [list(bucket.params) for bucket in buckets] == [["1.w"], ["0.w"]]
    one, two = (play(buckets, passes(2), 2, stage) for stage in (1, 2))
    assert set(column(one, "weights") + column(two, "weights")) == {48}
    assert [each.held.gradients for each in one if each.event in ("gradient", "step")] == [0, 0, 48]
    assert [each.held.gradients for each in two if each.event in ("gradient", "step")] == [0, 8, 24]
    assert [each.held.exchange for each in one if each.event == "gradient"] == [8, 16]  # two may be under way
    assert [each.held.exchange for each in two if each.event == "gradient"] == [8, 16]


def test_without_sync_the_gradient_stays_whole():
    buckets = unit_buckets({"0.w": 8, "1.w": 4}, ["0", "1"])
    quiet = play(buckets, passes(2), 4, 3, micro_batches=2, no_sync=True)
    assert max(column(quiet, "unsharded_gradients", "held")) == 48
    loud = play(buckets, passes(2), 4, 3, micro_batches=2)
    assert max(column(loud, "unsharded_gradients", "held")) == 32 < 48
    assert column(loud, "gradients", "held")[-1] == column(quiet, "gradients", "held")[-1] == 12


def test_what_is_in_no_unit_is_one_bucket():
    params = {"embedding.w": 16384, "norm.w": 4, "scale": 1, "blocks.0.w": 8, "blocks.0.mlp.w": 2, "head.w": 16383}
    found = unit_buckets(params, ["blocks.0"], frozen=["blocks.0.mlp.w"])
    assert [(bucket.unit, list(bucket.params), bucket.frozen) for bucket in found] == [
        ("blocks.0", ["blocks.0.w"], False),
        ("blocks.0", ["blocks.0.mlp.w"], True),
        ("", ["embedding.w", "norm.w", "scale", "head.w"], False),
    ]
    assert [list(bucket.positions) for bucket in found] == [[3], [4], [0, 1, 2, 5]]
    kept = reduction_buckets(params, frozen=["norm.w"])
    assert [(list(bucket.params), bucket.frozen) for bucket in kept][-1] == (["norm.w"], True)


def test_weights_stay_until_the_gradients_of_the_inputs_are_there():
    buckets = unit_buckets({"0.w": 8, "0.frozen": 8, "1.w": 4}, ["0", "1"], frozen=["0.frozen"])
    played = play(buckets, passes(2), 2, 3, rules=Rules(prefetch=0))
    assert [each.held.gathered_weights for each in played if each.name in ("0.w", "0")][-3:] == [0, 64, 0]
    work = [each for each in passes(2) if each.event != "backward done"]  # no input needs one
    played = play(buckets, work, 2, 3, rules=Rules(prefetch=0))
    assert [each.held.gathered_weights for each in played if each.event in ("gradient", "step")] == [16, 80, 0]


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=5)


@settings(deadline=None)
@given(sizes=sizes, n=st.integers(1, 9), stage=st.sampled_from([1, 2, 3]), data=st.data())
def test_what_holds_for_any_model(sizes, n, stage, data):
    """States at rest are exact, nothing is left over or negative, and whole units have room."""
    rank = data.draw(st.integers(0, n - 1))
    params = {f"{i}.w": size for i, size in enumerate(sizes)}
    names = [str(i) for i in range(len(sizes))]
    buckets = unit_buckets(params, names) if stage == 3 else reduction_buckets(params, bucket_bytes=80)
    played = play(buckets, passes(len(sizes), 7), n, stage, rank=rank, rules=Rules(scalar_bytes=0))
    flats = [(bucket.num_elements,) for bucket in buckets]
    expected = zero.states_of_rank(flats, n, stage, rank, "fp32")
    end = played[-1].held
    assert (end.weights, end.gradients, end.optimizer) == (expected.weights, expected.gradients, expected.optimizer)
    assert end.total == expected.total
    for each in played:
        assert all(value >= 0 for value in each.held.parts.values())
        assert each.fullest.total >= each.held.total
    if stage == 3:  # a unit's weights and its gradient are whole at one time, beside shards and states
        least = end.weights + end.optimizer + 2 * 4 * max(sizes)
        assert max(each.fullest.total for each in played) >= least


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: play([], [], 0, 3), "n must be at least 1, not 0"),
        (lambda: play([], [], 2, 0), "stage must be 1, 2 or 3 to be played, not 0"),
        (lambda: play([], [], 2, 4), "stage must be 0, 1, 2 or 3, not 4"),
        (lambda: play([], [], 2, 3, rank=2), "rank must be below the number of ranks, 2, not 2"),
        (lambda: play([], [], 2, 3, micro_batches=0), "micro_batches must be at least 1, not 0"),
        (lambda: play([], passes(1), 2, 3), "work has the gradient of '0.w', which no bucket holds"),
        (lambda: unit_buckets({"w": -1}, []), "params must be at least 0, not -1"),
        (lambda: unit_buckets({"w": 1}, [], frozen=["v"]), "frozen must hold names of params, and 'v' is none"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
