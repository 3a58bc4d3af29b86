"""CUDA casts against their specification, to the bit, on this processor (`cupy_module`)."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from hpcdp.core.arrays import dtype_of, words
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels

SIZES = (0, 1, 2, 3, 31, 32, 33, 1031)


def halves(offset: int = 0) -> np.ndarray:
    return np.arange(offset, 1 << 16, dtype=np.uint16)


def floats(size: int) -> np.ndarray:
    """Of all magnitudes, ties of both formats and what is no number among them."""
    bits = np.random.default_rng(size).integers(0, 1 << 32, size, np.uint32)
    bits[1::3] &= 0xFFFF8000  # ties of bfloat16
    bits[2::3] = (bits[2::3] & 0x8FFFF000) | 0x38000000 | (bits[2::3] & 0x07FFF000)  # of float16
    x = bits.view(np.float32)
    x[: min(size, 6)] = [np.nan, np.inf, -np.inf, 65520, 1e-45, -5.9e-8][: min(size, 6)]
    return x


def same(cast: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    if cast == "to_float16":  # a NaN need only stay one
        np.testing.assert_array_equal(ours.view(np.float16), theirs.view(np.float16))
        ours, theirs = (np.where(np.isnan(x.view(np.float16)), 0, x) for x in (ours, theirs))
    np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.parametrize(("offset", "start"), [(0, 8), (0, 9), (1, 8)])
@pytest.mark.parametrize("cast", ["to_float16", "from_float16", "to_bfloat16", "from_bfloat16"])
def test_same_bits_as_the_reference(cast: str, offset: int, start: int, cupy: ModuleType) -> None:
    for size in SIZES:
        x = floats(size + offset) if cast.startswith("to") else halves(1 << 15)[: size + offset]
        expected = np.full(size + 16, 9, np.uint16 if cast.startswith("to") else np.float32)
        out = cupy.asarray(expected)
        getattr(kernels, cast)(cupy.asarray(x)[offset:], out[start : start + size])
        getattr(reference, cast)(x[offset:], expected[start : start + size])
        same(cast, out.to_host(), expected)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("start", [0, 1])
def test_copies_follow_as_of_the_reference(dtype: str, start: int, cupy: ModuleType) -> None:
    for size in SIZES:
        wide = floats(size)
        x = wide.astype(dtype_of(dtype))
        x[1::3] = 1.5
        ours = cupy.asarray(np.append(np.zeros(start, np.float32), wide))[start:]
        kernels.follow(ours, cupy.asarray(words(x)))
        reference.follow(wide, words(x))
        np.testing.assert_array_equal(ours.to_host(), wide)


@pytest.mark.parametrize("there", ["from_float16", "from_bfloat16"])
def test_every_half_there_and_back(there: str, cupy: ModuleType) -> None:
    x, wide, back = halves(), cupy.empty(1 << 16, np.float32), cupy.empty(1 << 16, np.uint16)
    getattr(kernels, there)(cupy.asarray(x), wide)
    getattr(kernels, there.replace("from", "to"))(wide, back)
    number = ~np.isnan(wide.to_host())
    np.testing.assert_array_equal(back.to_host()[number], x[number])
    assert np.isnan(wide.to_host()).sum() == {"from_float16": 2046, "from_bfloat16": 254}[there]


@pytest.mark.filterwarnings("ignore:overflow")
def test_float64_is_rounded_once(cupy: ModuleType) -> None:
    x = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-11, 1e300, -np.inf, np.nan])
    out, expected = cupy.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    kernels.to_float16(cupy.asarray(x), out)
    reference.to_float16(x, expected)
    same("to_float16", out.to_host(), expected)
    assert out.to_host()[0] == 0x3C01, "through float32 it would be a tie"


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_scale(dtype: str, cupy: ModuleType, flushed: Callable[[np.ndarray], np.ndarray]) -> None:
    kind = dtype_of(dtype)
    for size in SIZES:
        numbers = halves()[::63][:size].copy().view(kind) if kind.itemsize == 2 else floats(size).astype(kind)
        x = words(numbers)
        expected, out = np.zeros_like(x), cupy.asarray(np.zeros_like(x))
        kernels.scale_into(cupy.asarray(x), 0.3, out)
        reference.scale_into(words(flushed(numbers)), 0.3, expected)
        wanted = flushed(expected.view(kind))
        np.testing.assert_array_equal(out.to_host().view(kind).astype("f8"), wanted.astype("f8"))  # which knows a NaN
        kernels.scale(out, -2.0)
        np.testing.assert_array_equal(out.to_host().view(kind).astype("f8"), (wanted * kind.type(-2)).astype("f8"))
