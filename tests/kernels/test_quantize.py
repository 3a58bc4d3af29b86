"""2 bits and 1 bit an element: MXNet's formulas element by element, and what a residual must remember."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.core.arrays import words
from hpcdp.kernels import reference

SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 64, 997]
DTYPES = [np.float16, np.float32, np.float64]


def modules():
    return [reference, kernels.load("gradients")]


def data(size, dtype, seed=0):
    rng = np.random.default_rng(1000 * seed + size)
    x = rng.standard_normal(size)
    x[::5] = rng.choice([-0.5, 0.5, 0.0], x[::5].size)  # on the threshold to the bit
    return x.astype(dtype)


def two_bit(grad, residual, threshold, magnitude):
    """What is sent, the rest, and the words; one element after the other."""
    limit, rest, sent = residual.dtype.type(threshold), residual.copy(), np.zeros_like(residual)
    packed = np.zeros(-(-grad.size // 16), np.uint32)
    for i in range(grad.size):
        rest[i] += grad[i]
        if rest[i] >= limit:
            sent[i] = magnitude
            packed[i // 16] |= np.uint32(1 << i % 16)
        elif rest[i] <= -limit:
            sent[i] = -magnitude
            packed[i // 16] |= np.uint32(1 << (16 + i % 16))
        rest[i] -= sent[i]
    return sent, rest, packed


def one_bit(grad, residual, threshold, magnitude):
    """As `two_bit`."""
    rest, sent = residual.copy(), np.zeros_like(residual)
    packed = np.zeros(-(-grad.size // 32), np.uint32)
    for i in range(grad.size):
        rest[i] += grad[i]
        sent[i] = magnitude if rest[i] > residual.dtype.type(threshold) else -magnitude
        packed[i // 32] |= np.uint32((sent[i] > 0) << i % 32)
        rest[i] -= sent[i]
    return sent, rest, packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("threshold", "magnitude"), [(0.5, 0.5), (0.3, 0.3), (0.5, 0.7)])
def test_two_bit(size, dtype, threshold, magnitude):
    magnitude = dtype(magnitude)
    grad, residual = data(size, dtype), data(size, dtype, seed=1) / dtype(4)
    sent, rest, packed = two_bit(grad, residual, threshold, magnitude)
    if size > 60:
        assert {-1.0, 0.0, 1.0} == set(np.sign(sent).tolist())
    for module in modules():
        found, kept, out = np.full(packed.size, 77, np.uint32), residual.copy(), np.full(size, np.nan, dtype)
        module.pack_two_bit(words(grad), words(kept), threshold, float(magnitude), found)
        np.testing.assert_array_equal(found, packed)
        np.testing.assert_array_equal(kept, rest)
        module.unpack_two_bit(found, float(magnitude), words(out))
        np.testing.assert_array_equal(out, sent)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("threshold", "magnitude"), [(0.0, 1.0), (0.5, 1.0), (-0.25, 0.3)])
def test_one_bit(size, dtype, threshold, magnitude):
    magnitude = dtype(magnitude)
    grad, residual = data(size, dtype), data(size, dtype, seed=1)
    sent, rest, packed = one_bit(grad, residual, threshold, magnitude)
    for module in modules():
        found, kept, out = np.full(packed.size, 77, np.uint32), residual.copy(), np.full(size, np.nan, dtype)
        module.pack_one_bit(words(grad), words(kept), threshold, float(magnitude), found)
        np.testing.assert_array_equal(found, packed)
        np.testing.assert_array_equal(kept, rest)
        module.unpack_one_bit(found, float(magnitude), words(out))
        np.testing.assert_array_equal(out, sent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_below_the_threshold_adds_up(dtype):
    """0.4 sends nothing, 0.1 more sends 0.5, 0.2 nothing, 0.3 more 0.5: in float16 only if the residual is one too."""
    for module in modules():
        residual, packed, out = np.zeros(33, dtype), np.empty(3, np.uint32), np.empty(33, dtype)
        for value, sent in ((0.4, 0), (0.1, 0.5), (0.2, 0), (0.3, 0.5)):
            module.pack_two_bit(words(np.full(33, value, dtype)), words(residual), 0.5, 0.5, packed)
            module.unpack_two_bit(packed, 0.5, words(out))
            assert (out == sent).all(), (module, value)


@pytest.mark.parametrize("sign", [1, -1])
def test_everything_sent_and_the_residual_make_the_gradients(sign):
    for module in modules():
        residual, total, out = np.zeros(500, np.float32), np.zeros(500), np.empty(500, np.float32)
        packed = np.empty(32, np.uint32)
        pushed = np.zeros(500)
        for step in range(50):
            grad = sign * data(500, np.float32, seed=step) / 8
            pushed += grad
            module.pack_two_bit(grad, residual, 0.5, 0.5, packed)
            module.unpack_two_bit(packed, 0.5, out)
            total += out
        np.testing.assert_allclose(total + residual, pushed, atol=1e-5)
        assert abs(total).max() > 0.5


def test_a_nan_is_kept_to_itself():
    for module in modules():
        grad, residual = np.full(40, 0.75, np.float32), np.zeros(40, np.float32)
        packed, out = np.empty(3, np.uint32), np.empty(40, np.float32)
        grad[20] = np.nan
        module.pack_two_bit(grad, residual, 0.5, 0.5, packed)
        module.unpack_two_bit(packed, 0.5, out)
        assert np.flatnonzero(out != 0.5).tolist() == [20]
        assert out[20] == 0
        assert np.flatnonzero(np.isnan(residual)).tolist() == [20]


@pytest.mark.parametrize("bits", ["two", "one"])
def test_arrays_that_do_not_fit_are_refused(bits):
    quantize = kernels.load("gradients")
    grad, packed = np.zeros(65, "f4"), np.zeros(2, "u4")
    pack, unpack = getattr(quantize, f"pack_{bits}_bit"), getattr(quantize, f"unpack_{bits}_bit")
    with pytest.raises(ValueError, match="bit field"):
        pack(grad, grad.copy(), 0.5, 0.5, packed)
    with pytest.raises(ValueError, match="as many elements"):
        pack(grad, np.zeros(64, "f4"), 0.5, 0.5, np.zeros(9, "u4"))
    with pytest.raises(ValueError, match="bit field"):
        unpack(packed, 0.5, grad)
