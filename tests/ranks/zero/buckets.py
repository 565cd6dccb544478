"""Which parameters are gathered and reduced together: units of modules in stage 3, buckets in stages 1 and 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtlib.theory.dp import plan_buckets
from dtlib.theory.units import MiB
from dtlib.theory.valid import whole


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie end to end and are cut into N chunks: their number of elements by name, in their order, and
    their `positions` among all parameters.

    `unit` is the module that they are gathered for (``""`` is the outermost), where that matters.
    """

    unit: str
    params: Mapping[str, int]
    positions: Sequence[int]
    frozen: bool = False

    @property
    def num_elements(self) -> int:
        """The elements of all of them."""
        return sum(self.params.values())


def unit_buckets(params: Mapping[str, int], units: Iterable[str], *, frozen: Iterable[str] = ()) -> list[Bucket]:
    """How stage 3 groups `params` (elements by name, tied ones once, in the order of registration).

    A bucket for each of `units`, the names of modules, with what is in it and in no unit inside it; what is in no unit
    belongs to the outermost. `frozen` ones have buckets of their own. In the order in which gradients are reduced at
    the end of a step: the last unit first. ``ValueError`` for a size below 0, or a frozen name that is none of
    `params`.
    """
    names, still = ["", *units], _among(params, frozen)
    unit = {param: max((n for n in names if not n or param.startswith(n + ".")), key=len) for param in params}
    sizes = {param: whole("params", size, 0) for param, size in params.items()}
    members: dict[str, dict[bool, dict[str, int]]] = {name: {} for name in names}
    for param in sorted(params, key=still.__contains__):
        members[unit[param]].setdefault(param in still, {})[param] = sizes[param]
    position = {param: i for i, param in enumerate(params)}
    return [
        Bucket(name, kind, [position[param] for param in kind], is_frozen)
        for name, kinds in reversed(members.items())
        for is_frozen, kind in kinds.items()
    ]


def reduction_buckets(
    params: Mapping[str, int],
    *,
    width: int = 4,
    frozen: Iterable[str] = (),
    bucket_bytes: int = 25 * MiB,
    first_bucket_bytes: int | None = MiB,
) -> list[Bucket]:
    """How stages 1 and 2 group `params` (elements by name, tied ones once, in the order of registration).

    Backwards, up to `bucket_bytes` in each and `first_bucket_bytes` in the first: `dp.plan_buckets`. `width` is bytes
    of an element. `frozen` ones are in a bucket of their own, which no gradient passes. Errors are those of
    `plan_buckets`.
    """
    still, position = _among(params, frozen), {param: i for i, param in enumerate(params)}
    order = [param for param in params if param not in still][::-1]
    sizes = [width * params[param] for param in order]
    plan = plan_buckets(sizes, bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    groups = [[order[i] for i in each] for each in plan]
    kept = [[param for param in params if param in still]] if still else []
    return [
        Bucket("", {param: params[param] for param in group}, [position[param] for param in group], group in kept)
        for group in groups + kept
    ]


def _among(params: Mapping[str, int], frozen: Iterable[str]) -> set[str]:
    names = set(frozen)
    for name in sorted(names - set(params)):
        raise ValueError(f"frozen must hold names of params, and {name!r} is none")
    return names
