"""CUDA codecs of 2 bits and 1 bit against their specification, to the bit, on this processor (`cupy_module`)."""

from types import ModuleType

import numpy as np
import pytest

from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels

pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_same_bits_as_the_reference(dtype: type, bits: int, threshold: float, cupy: ModuleType) -> None:
    name = {1: "one_bit", 2: "two_bit"}[bits]
    for size in (0, 1, 15, 16, 17, 31, 32, 33, 48, 49, 1031):
        rng = np.random.default_rng(size)
        grad, residual = rng.standard_normal((2, size)).astype(dtype)
        grad[::5], residual[::5] = dtype(threshold), 0  # just at the threshold
        grad[: min(size, 3)] = [np.nan, np.inf, -np.inf][: min(size, 3)]
        if dtype == np.float16:
            grad, residual = grad.view(np.uint16), residual.view(np.uint16)
        words = np.full(-(-size * bits // 32) + 1, 7, np.uint32)
        given, kept, sent = grad, residual.copy(), words.copy()
        for _ in range(2):
            getattr(reference, f"pack_{name}")(grad, residual, threshold, 0.7, words[:-1])
        for offset in (0, 1):
            on_device = [cupy.asarray(np.append(x[:1], x))[1:] if offset else cupy.asarray(x) for x in (given, kept)]
            found = cupy.asarray(sent)
            for _ in range(2):
                packed = found[:-1]
                getattr(kernels, f"pack_{name}")(*on_device, threshold, 0.7, packed)
            np.testing.assert_array_equal(found.to_host(), words)
            of_floats = np.float16 if dtype == np.float16 else dtype
            np.testing.assert_array_equal(on_device[1].to_host().view(of_floats), residual.view(of_floats))
        for offset in (0, 1):
            out = cupy.asarray(np.full(size + 2, 7, grad.dtype))
            expected = np.full(size + 2, 7, grad.dtype)
            getattr(kernels, f"unpack_{name}")(packed, 0.7, out[offset : offset + size])
            getattr(reference, f"unpack_{name}")(words[:-1], 0.7, expected[offset : offset + size])
            np.testing.assert_array_equal(out.to_host(), expected)
