"""zero.3: parameters of any shape as one shard a rank, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_memory import EXPORTED, grown, held_like, inspect_at_most
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import FLOAT_BYTES, TWO_RANKS
from dtlib.grading.compare import any_of, close, compare, compare_ranks, each_rank, gives, right_only_if
from dtlib.grading.drawn import factor, shard, weights
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .own import inspect_needed, needed_like, own_work

_SLACK_BYTES = 4096


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    def whole(low: int, high: int) -> int:
        return int(rng.integers(low, high))

    def last(before: int, n: int, left: int) -> int:
        """A length after which `left` elements are left over where N divides all."""
        return n * whole(2000, 3000) + (left - before) % n

    three, four = [whole(150, 200), whole(250, 300)], [whole(120, 160), 301]
    drawn = (
        (2, [[2 * whole(100, 150), 256], [2 * whole(100, 200)]]),
        (3, [three, [7], [1], [2, 3, whole(90, 120)], [last(three[0] * three[1] + 8, 3, 1)]]),
        (4, [[1], four, [], [last(four[0] * four[1] + 2, 4, whole(1, 3))]]),
        (4, [[1, 2]]),
    )
    cases = []
    for n, shapes in drawn:
        words = f"{n} ranks, shapes {', '.join('×'.join(map(str, shape)) or '()' for shape in shapes)}"
        cases.append({"world_size": n, "split_shapes": shapes, "seed": whole(0, 2**31), "words": words})
    return cases


def _flat(case: Case) -> Any:
    return np.concatenate([each.reshape(-1) for each in weights(case)])


def _full_bytes(case: Case) -> int:
    return FLOAT_BYTES * int(_flat(case).size)


def _is_large(case: Case) -> bool:
    return _full_bytes(case) > 2**16


def _ends_together(case: Case) -> bool:
    """Whether padding stands at the very end only, where cutting it off does no harm."""
    n, size = case["world_size"], _flat(case).size
    return size < n or size % n in (0, n - 1)


def _shards(case: Case) -> list[Any]:
    return [shard(_flat(case), case["world_size"], rank) for rank in range(case["world_size"])]


def _rebuilt(case: Case, scale: Callable[[int], float] = factor) -> list[Any]:
    """The parameters, after each rank has multiplied its shard."""
    flat = np.concatenate([scale(rank) * each for rank, each in enumerate(_shards(case))])
    shapes = [each.shape for each in weights(case)]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def _inspect_shard(run: Run) -> Finding | None:
    return compare_ranks(run, "shard", _shards(run.case))


def _ceiling_shards(case: Case) -> list[Any]:
    n, flat = case["world_size"], _flat(case)
    length = -(-flat.size // n)
    return [flat[rank * length : (rank + 1) * length] for rank in range(n)]


def _padded_shards(case: Case) -> list[Any]:
    n = case["world_size"]
    length = -(-_flat(case).size // n)
    return [np.pad(each, (0, length - each.size)) for each in _ceiling_shards(case)]


def _floor_shards(case: Case) -> list[Any]:
    n, flat = case["world_size"], _flat(case)
    length = flat.size // n
    return [flat[rank * length : (rank + 1) * length if rank < n - 1 else None] for rank in range(n)]


def _dropped_shards(case: Case) -> list[Any]:
    n, flat = case["world_size"], _flat(case)
    length = flat.size // n
    return [flat[rank * length : (rank + 1) * length] for rank in range(n)]


def _each_by_itself(case: Case) -> list[Any]:
    n = case["world_size"]
    return [np.concatenate([shard(each, n, rank) for each in weights(case)]) for rank in range(n)]


def _shard_is(wrong: Callable[[Case], list[Any]]) -> Any:
    return gives(each_rank("shard"), wrong)


def _inspect_rebuilt(run: Run) -> Finding | None:
    expected = _rebuilt(run.case)
    for rank, data in enumerate(run.ranks):
        where = f"on rank {rank}; {describe_case(run.case)}"
        seen = data["rebuilt"]
        if not isinstance(seen, list) or len(seen) != len(expected):
            count = f"a list of {len(seen)}" if isinstance(seen, list) else "no list"
            return Finding(count, f"a list of {len(expected)} tensors", where)
        for number, (one, two) in enumerate(zip(seen, expected, strict=True)):
            found = compare(one, two if two.ndim else two.item(), f"parameter {number} {where}")
            if found:
                return found
    return None


def _rebuilt_is(wrong: Callable[[Case, int], list[Any]]) -> Any:
    """Recognise: in every failing run, each rank's elements in their order are those of ``wrong(case, rank)``."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            close(_line(data["rebuilt"]), _line(wrong(run.case, rank)))
            for run in back
            for rank, data in enumerate(run.ranks)
        )

    return fits


def _line(parameters: Any) -> Any:
    return np.concatenate([np.asarray(each, np.float64).reshape(-1) for each in parameters])


def _shard_bytes(case: Case, rank: int) -> int:
    return FLOAT_BYTES * int(_shards(case)[rank].size)


def _kept(data: Any) -> float:
    """What is kept of the parameters once they are gone."""
    return grown("given", "kept")(data)


def _theory(case: Case) -> float:
    return (case["world_size"] - 1) * _full_bytes(case)


def _most(case: Case, rank: int) -> float:
    return _shard_bytes(case, rank) - _full_bytes(case) + _SLACK_BYTES


SPLIT = Exercise(
    id="zero.3",
    function="split",
    title="One shard a rank, and back",
    harness="zero.split",
    draw=_draw,
    checks=(
        own_work("split"),
        Check(
            "shard",
            "value",
            2,
            "the shard holds this rank's elements, whatever the shapes",
            _inspect_shard,
            mistakes=(
                mistake(
                    "padded",
                    _shard_is(_padded_shards),
                    "Some shards end in zeros that belong to no parameter. Is padding something that a rank has to "
                    "keep, or something that only travels?",
                ),
                mistake(
                    "chunk for tensor_split",
                    _shard_is(_ceiling_shards),
                    "The first ranks have rounded up and the last one gets what is left, or nothing. By how many "
                    "elements may two shards differ here?",
                ),
                mistake(
                    "the rest to the last rank",
                    _shard_is(_floor_shards),
                    "All that is left over goes to the last rank. By how many elements may two shards differ here?",
                ),
                mistake(
                    "the rest is lost",
                    _shard_is(_dropped_shards),
                    "Add up the lengths of all shards. Who has the last elements?",
                ),
                mistake(
                    "each parameter by itself",
                    _shard_is(_each_by_itself),
                    "Every parameter was cut by itself. What does the task cut?",
                ),
                mistake(
                    "the whole as a shard",
                    _shard_is(lambda case: [_flat(case)] * case["world_size"]),
                    "Every rank has all elements. Which of them are its own?",
                ),
                mistake(
                    "the next rank's shard",
                    _shard_is(lambda case: [*_shards(case)[1:], _shards(case)[0]]),
                    "Each rank holds another rank's share. From which number do ranks count?",
                ),
                TWO_RANKS,
                mistake(
                    "right for divisible lengths only",
                    right_only_if(lambda case: _flat(case).size % case["world_size"] == 0),
                    "It goes wrong where N does not divide the number of elements. Which ranks hold one more?",
                ),
                mistake(
                    "right for enough elements only",
                    right_only_if(lambda case: _flat(case).size >= case["world_size"]),
                    "It goes wrong where there are fewer elements than ranks. What is the shard of a rank that gets "
                    "none?",
                ),
            ),
        ),
        Check(
            "rebuilt",
            "value",
            2,
            "`unshard()` gives the parameters that the shards hold now",
            _inspect_rebuilt,
            mistakes=(
                mistake(
                    "an old copy",
                    _rebuilt_is(lambda case, rank: weights(case)),
                    "These are the parameters as they were. The shards have changed since: where do these numbers come "
                    "from?",
                ),
                mistake(
                    "only the own shard is new",
                    _rebuilt_is(
                        lambda case, rank: _rebuilt(case, lambda other: factor(other) if other == rank else 1.0)
                    ),
                    "The own shard is up to date, and the others are as they were at the start. Who knows what they "
                    "are now?",
                ),
                TWO_RANKS,
                mistake(
                    "right for divisible lengths only",
                    right_only_if(_ends_together),
                    "It goes wrong where shards have different lengths. What do the ranks send that hold one element "
                    "less, and what becomes of it at the other end?",
                ),
                mistake(
                    "right for enough elements only",
                    right_only_if(lambda case: _flat(case).size >= case["world_size"]),
                    "It goes wrong where some ranks have no elements. Do they come to the collective too?",
                ),
                mistake(
                    "flat, not in shape",
                    _rebuilt_is(lambda case, rank: _rebuilt(case)),
                    "The elements are right and in order. Which shapes did the parameters have?",
                ),
            ),
        ),
        Check(
            "memory",
            "memory",
            2,
            "when the parameters are gone, a rank keeps 1/N of their bytes",
            inspect_at_most(_kept, _most, "more than before, with the parameters gone"),
            mistakes=(
                EXPORTED,
                mistake(
                    "everything is kept",
                    held_like(_kept, lambda case, rank: -_SLACK_BYTES, lambda case, rank: _SLACK_BYTES),
                    "A rank keeps as many bytes as all parameters have. A view of a shard keeps the whole tensor "
                    "behind it alive, and a function that knows a tensor keeps it too. What is still known here, and "
                    "to whom?",
                ),
                mistake(
                    "the whole and the shard",
                    held_like(_kept, lambda case, rank: _SLACK_BYTES),
                    "A rank keeps the shard and beside it as much as all parameters. Who still knows the whole?",
                ),
            ),
            applies=_is_large,
        ),
        Check(
            "traffic",
            "traffic",
            1,
            "the ranks send one all-gather of the shards, and nothing else",
            inspect_needed(_theory),
            mistakes=(
                mistake(
                    "an all-reduce of zeros and a shard",
                    needed_like(lambda case: 2 * _theory(case)),
                    "Twice the bytes. If every rank adds its shard to zeros elsewhere, what do the zeros cost?",
                ),
                mistake(
                    "nothing sent",
                    needed_like(lambda case: 0.0),
                    "Nothing was sent. How does a rank learn what the others have done to their shards?",
                ),
                mistake(
                    "whole buffers gathered",
                    any_of(
                        needed_like(lambda case: case["world_size"] * _theory(case)),
                        needed_like(lambda case: (case["world_size"] + 1) * _theory(case)),
                    ),
                    "Every rank sends a whole buffer to all others. Which part of it does nobody else know?",
                ),
            ),
            applies=_is_large,
        ),
    ),
)
