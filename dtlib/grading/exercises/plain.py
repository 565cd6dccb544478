"""Plain data: the only thing that crosses from the process that runs a learner's code to the one that judges it.

Plain data are None, booleans, numbers, strings, numpy arrays of numbers, and lists and dictionaries of these. They
travel as one piece of JSON with the bytes of the arrays behind it, never as pickle, so reading them runs nobody's code;
and whatever was written in their place, reading takes bounded time and memory.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

MAX_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 2**18  # of JSON, when it comes from a submission
MAX_ANSWER_BYTES, MAX_ANSWER_TEXT_BYTES = 2**18, 2**15  # of an answer on paper, and of the JSON in it
_MAX_VALUES = 100_000  # numbers, texts, lists and dictionaries together
_MAX_ITEMS = 4096
_MAX_DEPTH = 7
_MAX_CHARS = 2000
_MAX_DIGITS = 40
_NUMBER_KINDS = "biuf"
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"dtlib\x00\x00\x02"
_ARRAY = "__array__"


def simplify(value: Any, depth: int = 0) -> Any:
    """`value` as plain data, whatever it is: what has no plain form becomes ``{"not_plain": type name, "text": ...}``.

    Tensors become arrays (bfloat16 as float32), bytes arrays of uint8, single numbers Python numbers. Never raises on
    account of what it was given; long strings, long lists and deep nesting are cut, which the marker says.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**127) < value < 2**127 else _not_plain(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)[:_MAX_CHARS]
    try:
        if isinstance(value, Fraction | Decimal):
            return float(value)
        array = _as_array(value)
        if array is not None:
            return array.item() if array.ndim == 0 else array
        if depth < _MAX_DEPTH and isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
            return [simplify(each, depth + 1) for each in value]
        if depth < _MAX_DEPTH and isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
            return {str(key)[:_MAX_CHARS]: simplify(each, depth + 1) for key, each in value.items()}
    except Exception:
        return _not_plain(value)
    return _not_plain(value)


def pack(data: Any) -> bytes:
    """`data`, made plain by `simplify`, as bytes. Raises ``ValueError`` above `MAX_BYTES`."""
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_take_arrays_out(simplify(data), arrays)).encode()
    size = len(text) + sum(array.nbytes for array in arrays)
    if size > MAX_BYTES:
        raise ValueError(f"data must be at most {MAX_BYTES} bytes, not {size}")
    return b"".join([_HEAD.pack(_MAGIC, len(text)), text, *(array.tobytes() for array in arrays)])


def short(value: Any) -> Any:
    """`value` as plain data, or its name alone where it is larger than any answer on paper."""
    told = simplify(value)
    arrays: list[np.ndarray[Any, Any]] = []
    text = len(json.dumps(_take_arrays_out(told, arrays)))
    fits = text <= MAX_ANSWER_TEXT_BYTES // 2 and sum(each.nbytes for each in arrays) <= MAX_ANSWER_BYTES // 2
    return told if fits else _not_plain(value)


def unpack(packed: bytes, max_text_bytes: int = MAX_BYTES) -> Any:
    """The data that `pack` packed, of which at most `max_text_bytes` stand beside the arrays.

    Raises ``ValueError`` for anything else. The arrays are copies, and nobody else's.
    """
    try:
        magic, length = _HEAD.unpack_from(packed)
        text = packed[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or len(text) != length:
            raise ValueError("the beginning is another")
        if length > max_text_bytes or text.count(b",") + text.count(b"[") + text.count(b"{") > _MAX_VALUES:
            raise ValueError(f"{length} bytes of text, or too many values in them")
        reader = _Arrays(packed, _HEAD.size + length)
        return reader.put_back(json.loads(text, parse_int=_integer))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError, struct.error) as error:
        raise ValueError(f"packed holds no plain data: {type(error).__name__}: {str(error)[:200]}") from None


def is_number(value: Any) -> bool:
    """Whether `value` is a finite plain number (booleans are not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in _NUMBER_KINDS


class _Arrays:
    """The arrays behind the text: each stands where the one before it ends."""

    def __init__(self, packed: bytes, start: int) -> None:
        self.packed, self.next = packed, start

    def put_back(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.put_back(each) for each in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {_ARRAY}:
            return self._array(*value[_ARRAY])
        return {key: self.put_back(each) for key, each in value.items()}

    def _array(self, kind: str, shape: list[int]) -> np.ndarray[Any, Any]:
        dtype = np.dtype(kind)
        if dtype.kind not in _NUMBER_KINDS or not 1 <= len(shape) <= 8 or not all(0 <= each < 2**40 for each in shape):
            raise ValueError(f"an array of {kind!r} and shape {shape!r}")
        count = math.prod(shape)
        end = self.next + count * dtype.itemsize
        if end > len(self.packed):
            raise ValueError("an array is cut off")
        array = np.frombuffer(self.packed, dtype, count, self.next).reshape(shape).copy()
        self.next = end
        return array


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, bytes | bytearray | memoryview):
        value = np.frombuffer(bytes(value), np.uint8)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float64, torch.float16):
            tensor = tensor.float()
        value = tensor.contiguous().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        return None
    array = np.array(value)
    return array if array.dtype.kind in _NUMBER_KINDS and array.nbytes <= MAX_BYTES else None


def _not_plain(value: Any) -> dict[str, str]:
    try:
        text = repr(value)
        text = text if type(text) is str else ""
    except Exception:
        text = "(its repr raises)"
    return {"not_plain": type(value).__name__[:200], "text": text[:200]}


def _take_arrays_out(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: [value.dtype.str, list(value.shape)]}
    if isinstance(value, list):
        return [_take_arrays_out(each, arrays) for each in value]
    if isinstance(value, dict):
        return {key: _take_arrays_out(each, arrays) for key, each in value.items()}
    return value
