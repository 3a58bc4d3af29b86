"""Where arrays lie in memory changes no bit: malloc finds them other places in every run, one right behind another.

LLVM gives a loop that stores two bodies, with and without vectors, and takes the one that is safe for these places.
"""

from itertools import permutations

import numpy as np
import pytest

from hpcdp import kernels

APART = 1000
"""Elements between arrays that lie far apart."""
GAPS = range(64)
"""Elements between two neighbors: up to more than LLVM takes at a time."""
SHAPES = [(1, 3, 4), (2, 3, 4), (2, 2, 8), (5, 3, 4), (1, 1, 16), (2, 1, 33)]  # batch, channels, positions


def placed(arrays, behind=None, first=None, gap=0):
    """Copies of ``arrays`` in one memory, far apart, or number ``behind`` so many elements behind number ``first``."""
    memory = np.zeros(sum(2 * APART + each.size for each in arrays), arrays[0].dtype)
    places = [APART + sum(2 * APART + each.size for each in arrays[:number]) for number in range(len(arrays))]
    if behind is not None:
        places[behind] = places[first] + arrays[first].size + gap
    copies = []
    for place, each in zip(places, arrays, strict=True):
        copies.append(memory[place : place + each.size].reshape(each.shape))
        copies[-1][...] = each
    return copies


def assert_same_bits_everywhere(call, arrays):
    """``call(*arrays)`` changes some of the arrays, to the same bits for each pair of neighbors and each gap."""
    expected = placed(arrays)
    call(*expected)
    for behind, first in permutations(range(len(arrays)), 2):
        for gap in GAPS:
            found = placed(arrays, behind, first, gap)
            call(*found)
            for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                assert ours.tobytes() == theirs.tobytes(), f"array {number}, {behind} lies {gap} behind {first}"


def sample(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    return [rng.standard_normal(shape).astype(dtype) for _ in range(2)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sums_for_the_bias_of_a_convolution(shape, dtype, relu):
    im2col = kernels.load("convolution.im2col")
    batch, channels, size = shape
    gy, out = sample(shape, dtype)
    product, sums = np.zeros(channels * batch * size, dtype), np.zeros(channels, dtype)
    steps = (size, batch * size)
    if relu:
        assert_same_bits_everywhere(
            lambda gy, out, g, sums: im2col._gather_through_relu(gy, out, g, steps, sums, (0, size)),
            [gy, out, product, sums],
        )
    else:
        assert_same_bits_everywhere(
            lambda gy, g, sums: im2col._gather(gy, g, steps, sums, (0, size)), [gy, product, sums]
        )


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_normalization(shape, dtype):
    batch_norm = kernels.load("networks")
    x, gy = sample(shape, dtype)
    scale, shift, mean, variance = np.random.default_rng(0).uniform(0.5, 2, (4, shape[1])).astype(dtype)
    out = np.zeros_like(x)
    assert_same_bits_everywhere(
        lambda x, scale, shift, out, mean, variance: batch_norm.batch_norm(
            x, scale, shift, out, (mean, variance), 1e-5
        ),
        [x, scale, shift, out, mean, variance],
    )
    assert_same_bits_everywhere(
        lambda gy, x, scale, mean, variance, dx, dscale, dshift: batch_norm.batch_norm_gradients(
            gy, x, scale, (mean, variance), (dx, dscale, dshift), 1e-5
        ),
        [gy, x, scale, mean, variance, out, shift, np.zeros_like(shift)],
    )
