"""Plain data: the only thing that crosses from the process that runs a learner's code to the one that judges it.

Plain data are None, booleans, numbers, strings, numpy arrays of numbers, and lists and dictionaries of these. They
travel as one npz archive (JSON beside arrays, never pickle), so reading them runs nobody's code.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import zipfile
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

MAX_BYTES = 64 * 2**20
_MAX_ITEMS = 4096
_MAX_DEPTH = 6
_MAX_TEXT = 2000
_NUMBER_KINDS = "biuf"
_ARRAY_NAME = re.compile(r"array\d+\.npy")


def simplify(value: Any, depth: int = 0) -> Any:
    """`value` as plain data, whatever it is: what has no plain form becomes ``{"not_plain": type name, "text": ...}``.

    Tensors become arrays (bfloat16 as float32) and single numbers become Python numbers. Never raises on account of
    what it was given; long strings, long lists and deep nesting are cut, which the marker says.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**127) < value < 2**127 else _not_plain(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)[:_MAX_TEXT]
    try:
        if isinstance(value, Fraction | Decimal):
            return float(value)
        array = _as_array(value)
        if array is not None:
            return array.item() if array.ndim == 0 else array
        if depth < _MAX_DEPTH and isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
            return [simplify(each, depth + 1) for each in value]
        if depth < _MAX_DEPTH and isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
            return {str(key)[:_MAX_TEXT]: simplify(each, depth + 1) for key, each in value.items()}
    except Exception:
        return _not_plain(value)
    return _not_plain(value)


def pack(data: Any) -> bytes:
    """`data`, made plain by `simplify`, as the bytes of an npz archive. Raises ``ValueError`` above `MAX_BYTES`."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    text = json.dumps(_take_arrays_out(simplify(data), arrays))
    size = len(text) + sum(array.nbytes for array in arrays.values())
    if size > MAX_BYTES:
        raise ValueError(f"data must be at most {MAX_BYTES} bytes, not {size}")
    buffer = io.BytesIO()
    np.savez(buffer, json=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(packed: bytes, max_bytes: int = 2 * MAX_BYTES, max_text_bytes: int = MAX_BYTES) -> Any:
    """The data that `pack` packed. ``ValueError`` for anything else.

    So it does for an archive that holds more than `max_bytes`, or more than `max_text_bytes` beside its arrays.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        text_bytes = sum(size for name, size in sizes.items() if not _ARRAY_NAME.fullmatch(name))
        for what, size, limit in (("", sum(sizes.values()), max_bytes), (" of text", text_bytes, max_text_bytes)):
            if size > limit:
                raise ValueError(f"packed holds {size} bytes{what}, and at most {limit} are read")
        with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return _put_arrays_back(json.loads(arrays.pop("json").tobytes().decode()), arrays)
    except Exception as error:  # whatever a forged archive may bring about
        raise ValueError(f"packed is no archive of plain data: {type(error).__name__}: {error}") from None


def is_number(value: Any) -> bool:
    """Whether `value` is a finite plain number (booleans are not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in _NUMBER_KINDS


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
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


def _take_arrays_out(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"__array__": name}
    if isinstance(value, list):
        return [_take_arrays_out(each, arrays) for each in value]
    if isinstance(value, dict):
        return {key: _take_arrays_out(each, arrays) for key, each in value.items()}
    return value


def _put_arrays_back(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, list):
        return [_put_arrays_back(each, arrays) for each in value]
    if isinstance(value, dict):
        if set(value) == {"__array__"}:
            return arrays[value["__array__"]]
        return {key: _put_arrays_back(each, arrays) for key, each in value.items()}
    return value
