"""Plain data survive the way as they are, and whatever is written in their place is refused in bounded work."""

from __future__ import annotations

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.grading.exercises import plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**120), 2**120) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


def head(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<8sQ", b"dtlib\x00\x00\x02", len(text) if length is None else length) + text


@given(VALUES)
def test_values_come_back_as_they_were(value: object):
    told = plain.simplify(value)
    assert plain.unpack(plain.pack(value)) == told
    assert plain.simplify(told) == told


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "?", "<u2"])
def test_arrays_come_back_to_the_bit_and_are_nobody_elses(dtype: str):
    array = np.arange(24).astype(dtype).reshape(2, 3, 4)
    packed = plain.pack({"a": [array, array[:, ::2]], "none": np.zeros((0, 3))})
    back = plain.unpack(packed)
    np.testing.assert_array_equal(back["a"][0], array)
    np.testing.assert_array_equal(back["a"][1], array[:, ::2])
    assert (back["a"][0].dtype, back["none"].shape) == (array.dtype, (0, 3))
    back["a"][0][:] = 0


def test_what_has_no_plain_form_is_named():
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    assert plain.simplify(Odd()) == {"not_plain": "Odd", "text": "(its repr raises)"}
    assert plain.simplify([{1, 2}])[0]["not_plain"] == "set"
    assert plain.simplify(list(range(5000)))["not_plain"] == "list"


HOSTILE = {
    "nothing": b"",
    "another beginning": b"PK\x03\x04" + bytes(100),
    "no end": head(b"{}", 2**60),
    "half of the text": head(b'{"a": 1', 200),
    "no JSON": head(b"{"),
    "nested deeply": head(b"[" * 100_000 + b"]" * 100_000),
    "many values": head(b"[" + b"0," * 200_000 + b"0]"),
    "many keys": head(json.dumps({str(k): 0 for k in range(120_000)}).encode()),
    "a number of many digits": head(b"9" * 100_000),
    "an array that is cut off": head(b'{"__array__": ["<f8", [1000]]}') + bytes(10),
    "an array of objects": head(b'{"__array__": ["|O", [1]]}') + bytes(8),
    "an array of huge shape": head(b'{"__array__": ["<f8", [1048576, 1048576, 1048576]]}'),
    "an array of negative shape": head(b'{"__array__": ["<f8", [-1]]}'),
    "an array of wide entries": head(b'{"__array__": ["(1000000,)f8", [1]]}') + bytes(8),
    "an array without a shape": head(b'{"__array__": ["<f8"]}'),
    "an array of no kind": head(b'{"__array__": [5, [1]]}'),
    "no text": head(b"\xff\xfe"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_else_is_written_is_refused(what: str):
    with pytest.raises(ValueError, match="no plain data"):
        plain.unpack(HOSTILE[what], plain.MAX_TEXT_BYTES)


@given(st.binary(max_size=300) | st.binary(max_size=300).map(head))
def test_no_bytes_make_it_raise_anything_else(packed: bytes):
    with contextlib.suppress(ValueError):
        plain.unpack(packed, plain.MAX_TEXT_BYTES)


def test_text_beyond_the_bound_is_not_read():
    packed = plain.pack(["x" * 1000] * 10)
    assert len(plain.unpack(packed)) == 10
    with pytest.raises(ValueError, match="bytes of text"):
        plain.unpack(packed, 5000)
    with pytest.raises(ValueError, match="at most"):
        plain.pack([np.zeros(plain.MAX_BYTES // 16)] * 3)
