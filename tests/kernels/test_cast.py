"""Casts to the 16-bit formats are IEEE's, checked over all 16-bit numbers and what lies between two of them."""

from fractions import Fraction

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.core.arrays import dtype_of, is_half, words
from hpcdp.kernels import reference

SIZES = [0, 1, 7, 31, 2048, 2049, 5003]


@pytest.fixture(params=["reference", "numba"])
def module(request):
    return reference if request.param == "reference" else kernels.load("networks")


def every_float16():
    return np.arange(1 << 16, dtype=np.uint16)


def bfloat16_value(word):
    """The number that bits of bfloat16 stand for, by their definition; finite ones only."""
    sign, exponent, fraction = -1 if word >> 15 else 1, word >> 7 & 0xFF, word & 0x7F
    if exponent == 0:
        return sign * Fraction(fraction, 128) * Fraction(1, 2**126)
    return sign * (1 + Fraction(fraction, 128)) * Fraction(2) ** (exponent - 127)


def nearest_bfloat16(x):
    """The bits of the bfloat16 that is nearest to a finite float32, found by comparing exact differences."""
    down = int(np.float32(x).view(np.uint32)) >> 16
    below, above = (abs(Fraction(float(x)) - _with_overflow(word)) for word in (down, down + 1))
    if below == above:
        return down + (down & 1)
    return down if below < above else down + 1


def _with_overflow(word):
    """As `bfloat16_value`; an infinity counts as the power of two that would follow the largest number."""
    if word & 0x7FFF == 0x7F80:
        return (-1 if word >> 15 else 1) * Fraction(2) ** 128
    return bfloat16_value(word)


def test_every_float16_comes_back(module):
    words, wide, back = every_float16(), np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    module.from_float16(words, wide)
    np.testing.assert_array_equal(wide, words.view(np.float16).astype(np.float32))
    module.to_float16(wide, back)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(back[~nan], words[~nan])
    assert np.isnan(back[nan].view(np.float16)).all()


def test_float16_rounds_to_nearest_even(module):
    """The middle of each pair of neighbors goes to the even one, a hair beside it to the nearer one."""
    low = np.arange(0x7BFF, dtype=np.uint16)
    a, b = (words.view(np.float16).astype(np.float64) for words in (low, low + np.uint16(1)))
    middle = ((a + b) / 2).astype(np.float32)  # exact: a float32 has more than one bit more
    for sign, bit in ((1, 0), (-1, 0x8000)):
        out = np.empty(low.size, np.uint16)
        module.to_float16(sign * middle, out)
        np.testing.assert_array_equal(out, (low + (low & 1)) | bit)
        module.to_float16(sign * np.nextafter(middle, np.float32(0)), out)
        np.testing.assert_array_equal(out, low | bit)
        module.to_float16(sign * np.nextafter(middle, np.float32(np.inf)), out)
        np.testing.assert_array_equal(out, (low + 1) | bit)


@pytest.mark.filterwarnings("ignore:overflow")
def test_float16_overflow_and_underflow(module):
    x = np.array([65519.996, 65520.0, -1e30, np.inf, -np.inf, 2.0**-25, 2.0**-25 * 1.01, -1e-40], np.float32)
    out = np.empty(x.size, np.uint16)
    module.to_float16(x, out)
    assert out.tolist() == [0x7BFF, 0x7C00, 0xFC00, 0x7C00, 0xFC00, 0, 1, 0x8000]


def test_every_bfloat16_comes_back(module):
    words, wide, back = every_float16(), np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    module.from_bfloat16(words, wide)
    finite = (words & 0x7F80) != 0x7F80
    some = np.flatnonzero(finite)[::97]
    assert [Fraction(float(wide[word])) for word in some] == [bfloat16_value(int(word)) for word in some]
    module.to_bfloat16(wide, back)
    nan = np.isnan(wide)
    assert nan.sum() == 2 * 127
    np.testing.assert_array_equal(back[~nan], words[~nan])
    np.testing.assert_array_equal(back[nan], words[nan] | 0x40)


def test_bfloat16_rounds_to_nearest_even(module):
    """Ties, their neighbors, subnormals, overflow and random numbers, against exact fractions."""
    rng = np.random.default_rng(3)
    upper = np.concatenate([rng.integers(0, 0x7F80, 200), [0, 1, 2, 0x7F, 0x80, 0x7F7E, 0x7F7F]]).astype(np.uint32)
    bits = np.concatenate([(upper << 16) | part for part in (0x7FFF, 0x8000, 0x8001, 1, 0xFFFF)])
    bits = np.concatenate([bits, bits | np.uint32(1 << 31)]).astype(np.uint32)
    x = bits.view(np.float32)
    out = np.empty(x.size, np.uint16)
    module.to_bfloat16(x, out)
    assert out.tolist() == [nearest_bfloat16(each) for each in x]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFF8000, 0x7FC00000])
@pytest.mark.parametrize("at", [0, 2047, 2048, 4999])
def test_a_nan_stays_one_and_its_neighbors_are_rounded(module, bits, at):
    x = np.linspace(-3, 3, 5000, dtype=np.float32)
    expected, out = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    module.to_bfloat16(x, expected)
    x.view(np.uint32)[at] = bits
    x[(at + 5) % x.size] = np.inf
    x[(at + 9) % x.size] = -np.inf
    module.to_bfloat16(x, out)
    expected[[at, (at + 5) % x.size, (at + 9) % x.size]] = bits >> 16 | 0x40, 0x7F80, 0xFF80
    np.testing.assert_array_equal(out, expected)
    module.to_float16(x, out)
    assert np.isnan(out.view(np.float16)).sum() == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cast", ["to_float16", "to_bfloat16", "from_float16", "from_bfloat16"])
def test_any_size_gives_the_bits_of_the_reference(cast, size):
    rng = np.random.default_rng(size)
    x = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 5, size)).astype(np.float32)
    if cast.startswith("from"):
        x = x.astype(np.float16).view(np.uint16)
    out, expected = (np.empty(size + 2, np.uint16 if cast.startswith("to") else np.float32) for _ in range(2))
    out[:] = expected[:] = 7
    getattr(kernels.load("networks"), cast)(x, out[1:-1])
    getattr(reference, cast)(x, expected[1:-1])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_scale(size, dtype):
    x = np.random.default_rng(size).standard_normal(size).astype(dtype_of(dtype))
    factor = 1 / 3
    wide = x.astype(np.float32) if is_half(x) else x
    expected = (wide * wide.dtype.type(factor)).astype(x.dtype)
    for module in (reference, kernels.load("networks")):
        out, inside = np.full_like(x, np.nan), x.copy()
        module.scale_into(words(x), factor, words(out))
        module.scale(words(inside), factor)
        np.testing.assert_array_equal(words(out), words(expected))
        np.testing.assert_array_equal(words(inside), words(expected))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_copies_follow_only_where_they_are_not_rounded_to_it(dtype, module):
    for size in SIZES:
        rng = np.random.default_rng(size)
        wide = (rng.standard_normal(size) * 10.0 ** rng.integers(-9, 9, size)).astype(np.float32)
        wide[: min(size, 2)] = [np.inf, np.nan][: min(size, 2)]
        x, before, set_by_hand = wide.astype(dtype_of(dtype)), wide.copy(), np.arange(size) % 3 == 1
        module.follow(wide, words(x))
        np.testing.assert_array_equal(wide, before)
        x[set_by_hand] = rng.standard_normal(set_by_hand.sum())
        module.follow(wide, words(x))
        np.testing.assert_array_equal(wide, np.where(set_by_hand, x.astype(np.float32), before))


@pytest.mark.parametrize("name", ["to_float16", "from_float16", "to_bfloat16", "from_bfloat16"])
def test_arrays_of_different_sizes_are_refused(name):
    cast = kernels.load("networks")
    kinds = ("f4", "u2") if name.startswith("to") else ("u2", "f4")
    for sizes in ((64, 8), (8, 64)):
        with pytest.raises(ValueError, match="as many elements as x"):
            getattr(cast, name)(np.zeros(sizes[0], kinds[0]), np.zeros(sizes[1], kinds[1]))
