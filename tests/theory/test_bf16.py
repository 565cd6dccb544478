"""bf16 in numpy against torch, bit for bit, and the bounds against every number of a binade."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory.memory import bf16

floats = st.floats(width=32, allow_nan=False)


def torch_bits(x):
    return torch.tensor(x, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()


@given(st.lists(floats, min_size=1, max_size=50))
def test_rounding_is_torchs_bit_for_bit(values):
    x = np.array(values, dtype=np.float32)
    np.testing.assert_array_equal(bf16.encode(x), torch_bits(x))


def test_every_sixteen_bits_survive_the_way_to_fp32_and_back():
    bits = np.arange(2**16, dtype=np.uint16)
    values = bf16.decode(bits)
    np.testing.assert_array_equal(
        values.view(np.uint32), torch.tensor(bits).view(torch.bfloat16).float().numpy().view(np.uint32)
    )
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(bf16.encode(values)[numbers], bits[numbers])
    assert np.isnan(bf16.decode(bf16.encode(values[~numbers]))).all()


@pytest.mark.parametrize("low", [0, 2**31])
def test_every_tie_and_its_neighbours_in_both_signs(low):
    """The 65 536 patterns half-way between two numbers, and one bit to each side: where a wrong rule shows."""
    halves = (np.arange(2**15, dtype=np.uint32) << 16) + np.uint32(low) + np.uint32(0x8000)
    x = np.concatenate([halves - 1, halves, halves + 1]).view(np.float32)
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(bf16.encode(x), torch_bits(x))
    cut = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert (bf16.encode(x) != cut).mean() > 0.4, "cutting off would be another rule"


def test_the_bytes_in_memory_are_torchs():
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    torchs = torch.tensor(x).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert bf16.stored_bytes(x) == torchs
    assert bf16.stored_bytes(1.0) == b"\x80\x3f", "1.0 is 0x3f80, the lower byte first"


def test_the_largest_error_of_a_whole_binade_is_one_in_257():
    x = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)  # all fp32 numbers from 1 up to 2
    error = np.abs(bf16.rounded(x).astype(np.float64) - x) / x
    assert error.max() == bf16.rounding_error() == 1 / 257 < 2**-8
    assert x[error.argmax()] == 1 + 2**-8


# On its way from fp64 to bf16 torch passes fp32, which moves a sum by up to 2⁻²⁴ of itself; a sum that is nearer than
# that to the middle of two bf16 numbers may become the middle. The bound is 2⁻⁹ of the weight or more, and a ten
# thousandth of it 3 · 2⁻²⁴: a share of 0.9999 is out of reach.
@given(st.floats(2**-100, 2**100, width=32), st.floats(0, 0.9999))
def test_an_update_below_the_bound_is_lost_and_one_above_is_not(weight, share):
    w = float(bf16.rounded(weight))
    bound = bf16.lost_update(w)
    assert 2**-9 < bound / w <= 2**-8
    with_torch = torch.tensor(w, dtype=torch.bfloat16)
    assert with_torch.double().add(share * bound).to(torch.bfloat16) == with_torch
    assert with_torch.double().add(1.001 * bound).to(torch.bfloat16) > with_torch
    assert (-with_torch.double()).sub(share * bound).to(torch.bfloat16) == -with_torch


def test_below_a_power_of_two_numbers_lie_twice_as_dense():
    one, bound = torch.tensor(1.0, dtype=torch.float64), bf16.lost_update(1.0)
    assert (one - 0.6 * bound).to(torch.bfloat16) < 1
    assert (one + 0.6 * bound).to(torch.bfloat16) == 1


@pytest.mark.parametrize("value", [1.0, 1.5, -3.0, 1e-3, 2.0**-126, 2.0**-130])
def test_spacing_is_the_way_to_the_next_number(value):
    bits = bf16.encode(abs(value))
    assert bf16.spacing(value) == float(bf16.decode(bits + np.uint16(1))) - float(bf16.decode(bits))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_has_no_neighbour_is_refused(value):
    with pytest.raises(ValueError, match="value must be finite and positive"):
        bf16.spacing(value)
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        bf16.rounding_error(0)
