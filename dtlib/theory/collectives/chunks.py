"""How a buffer is cut into chunks, and the powers of two that the doubling algorithms live on."""

from __future__ import annotations

from dtlib.theory import valid


def chunk_bounds(num_elements: int, n: int) -> list[int]:
    """The n+1 places where a buffer of `num_elements` is cut into `n` chunks, from 0 to `num_elements`.

    Chunk i is ``buffer[bounds[i]:bounds[i + 1]]``. The first ``num_elements % n`` chunks are one element
    longer than the rest, as ``numpy.array_split`` and ``torch.tensor_split`` cut; chunks are empty when there
    are fewer elements than ranks. Raises ``ValueError`` for a negative length or n below 1.
    """
    num_elements, n = valid.whole("num_elements", num_elements, 0), valid.ranks(n)
    return [chunk_start(num_elements, n, i) for i in range(n + 1)]


def chunk_start(num_elements: int, n: int, index: int) -> int:
    """Where chunk `index` of `n` starts; chunk n would start at the end."""
    size, longer = divmod(num_elements, n)
    return index * size + min(index, longer)


def chunk_elements(num_elements: int, n: int, index: int) -> int:
    """The number of elements in chunk `index` (taken modulo n) of a buffer cut as `chunk_bounds` cuts."""
    num_elements, n = valid.whole("num_elements", num_elements, 0), valid.ranks(n)
    size, longer = divmod(num_elements, n)
    return size + (index % n < longer)


def ceil_log2(n: int) -> int:
    """⌈log₂ n⌉: how often a set must double before it holds `n`."""
    return (n - 1).bit_length()


def floor_log2(n: int) -> int:
    """⌊log₂ n⌋."""
    return n.bit_length() - 1


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, 8, …"""
    return n & (n - 1) == 0
