"""What formulas take, and how they refuse the rest: no list is repeated, no narrow integer overflows."""

from __future__ import annotations

import numpy as np
import pytest

from dtlib.theory import activations, collectives, dp, footprint, memory, models, valid, zero

LARGE = 2_000_000_000


def nodes(algorithm: str) -> dict[str, int]:
    """The option that one algorithm cannot do without."""
    return {"ranks_per_node": 8} if algorithm == "two_level_all_reduce" else {}


def test_numbers_of_numpy_count_as_far_as_those_of_python():
    assert collectives.ring_all_reduce_bytes(np.int32(LARGE), np.int32(4)) == 1.5 * LARGE
    assert collectives.tree_all_reduce_bytes(np.int32(LARGE), 8) == collectives.tree_all_reduce_bytes(LARGE, 8)
    assert memory.model_state_bytes(np.int32(LARGE), np.int8(16)) == 16 * LARGE
    assert dp.sent_bytes_per_step(np.int32(LARGE), 2, np.int8(100)) == 100 * LARGE
    assert zero.sent_bytes(np.uint32(LARGE), np.int8(2), 3) == 1.5 * LARGE
    wide = models.gpt("wide", num_layers=np.int16(300), hidden=np.int32(25600), num_heads=160, vocab=51200, seq=2048)
    same = models.gpt("wide", num_layers=300, hidden=25600, num_heads=160, vocab=51200, seq=2048)
    assert models.model_parameters(wide).total == models.model_parameters(same).total
    assert footprint.Setup(dp=np.int8(100), tp=np.int8(8)).world_size == 800


def test_lists_and_arrays_are_counted_one_by_one():
    assert memory.model_state_bytes([1, 2], 3).tolist() == [3, 6]
    sizes = np.array([LARGE, 2 * 2**20], np.int32)
    assert collectives.ring_all_reduce_bytes(sizes, 2).tolist() == [LARGE, 2 * 2**20]
    assert collectives.naive_all_reduce_bytes([1, 2], 3).tolist() == [2, 4]


@pytest.mark.parametrize("strange", ["12", b"12", None, True, np.True_, float("nan"), float("inf"), -1, [1, "a"], {}])
def test_what_is_no_amount_is_refused_by_name(strange: object):
    with pytest.raises(ValueError, match="num_params must be"):
        memory.model_state_bytes(strange)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, [10**400]])
def test_what_no_float_can_hold_is_refused(value: object):
    with pytest.raises(ValueError, match="size must be"):
        valid.amount("size", value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zero.traffic(-1, 2, 1), "grad_bytes"),
        (lambda: zero.sent_bytes(-1, 2, 1), "full_bytes"),
        (lambda: dp.sent_bytes_per_step(-1, 2), "grad_bytes"),
        (lambda: dp.blocking_step_seconds(1.0, -1, 2, 0.0, 1e9), "grad_bytes"),
        (lambda: dp.efficiency(1.0, -1, 2, 0.0, 1e9), "grad_bytes"),
        (lambda: dp.even_exposed_seconds(1.0, -1, 2, 1e-6, 1e9, 4), "grad_bytes"),
        (lambda: dp.best_world_size(1.0, float("inf"), 1e-6, 1e9), "grad_bytes"),
        (lambda: footprint.Setup(sequence_parallel="no"), "sequence_parallel must be True or False, not 'no'"),
        (lambda: footprint.Setup(dropout=0.5), "dropout must be True or False, not 0.5"),
        (lambda: activations.checkpoint_walk(2, None, -1, 1), "layer_bytes"),
        (lambda: activations.checkpoint_walk(2, None, 1, "many"), "input_bytes"),
        (lambda: models.model_parameters(7), "model must be an Architecture or the name"),
        (lambda: footprint.rank_memory("gtp2", footprint.Setup()), "name 'gtp2' of model is unknown"),
    ],
)
def test_bad_input_is_refused_in_words_that_name_the_argument(call, words):
    with pytest.raises(ValueError) as refused:
        call()
    assert words in str(refused.value)


def test_a_published_model_may_be_given_by_its_name():
    model, setup = models.model("llama3-8b"), footprint.Setup(dp=8, zero=3)
    assert footprint.rank_memory("llama3-8b", setup) == footprint.rank_memory(model, setup)
    assert models.model_parameters("llama3-8b") == models.model_parameters(model)
    assert models.tp_degrees("llama3-8b") == models.tp_degrees(model)


@pytest.mark.parametrize("layers", [1, 7, 24, 126, 500])
@pytest.mark.parametrize(("layer", "enters"), [(34, 2), (1, 1), (3, 7), (41.5, 2)])
def test_the_best_distance_of_checkpoints_is_that_of_the_search(layers: int, layer: float, enters: float):
    root = (layers * enters / layer) ** 0.5
    peaks = {k: activations.checkpointed_bytes(layers, k, layer, enters) for k in range(1, layers + 1)}
    assert activations.optimal_every(layers, layer, enters) == min(peaks, key=lambda k: (peaks[k], abs(k - root)))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_layers", lambda: activations.optimal_every(10**9, 4, 1)),
        ("num_layers", lambda: activations.checkpoint_walk(10**30, 2, 4, 1)),
        ("num_layers", lambda: activations.checkpoint_walk(10**30, None, 4, 1)),
        *[("n", lambda a=a: collectives.traffic(a, 1000, 4, 10**30, **nodes(a))) for a in collectives.ALGORITHMS],
        *[("n", lambda a=a: collectives.schedule(a, 1000, 10**6, **nodes(a))) for a in collectives.ALGORITHMS],
    ],
)
def test_what_would_take_for_ever_is_refused(name, call):
    with pytest.raises(ValueError, match=f"^{name} must be at most"):
        call()


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@pytest.mark.parametrize("length", [1000, 511, 1, 0])
def test_a_large_schedule_sends_what_its_traffic_counts(algorithm, length):
    n = 128
    sent = [0] * n
    for transfers in collectives.schedule(algorithm, length, n, **nodes(algorithm)):
        for transfer in transfers:
            sent[transfer.source] += transfer.stop - transfer.start
    assert collectives.traffic(algorithm, length, 1, n, **nodes(algorithm)).sent_bytes == tuple(sent)


def test_a_number_of_at_least_so_much():
    assert [valid.at_least("x", value, 1) for value in (1, 2.5, np.float64(3))] == [1, 2.5, 3]
    for value, rule in ((0.5, "1 or more"), (-1, "1 or more"), (float("nan"), "finite and 1"), ("2", "finite and 1")):
        with pytest.raises(ValueError, match=f"x must be {rule}"):
            valid.at_least("x", value, 1)
