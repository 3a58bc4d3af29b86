"""The kernels of networks on sequences against their specification."""

import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.kernels import reference

DTYPES = [np.float32, np.float64]
TOLERANCE = {np.float32: {"rtol": 2e-5, "atol": 1e-5}, np.float64: {"rtol": 1e-11, "atol": 1e-12}}


def assert_alike(call, arrays, dtype):
    """``call(module, *copies)`` changes the copies alike in both modules; a module's own are told by name."""
    results = []
    for number in range(2):
        copies = [np.array(each) for each in arrays]
        call(number, *copies)
        results.append(copies)
    for place, (expected, found) in enumerate(zip(*results, strict=True)):
        np.testing.assert_allclose(found, expected, **TOLERANCE[dtype], err_msg=f"array {place}")


@pytest.fixture(params=DTYPES)
def draw(request):
    rng = np.random.default_rng(3)
    return request.param, lambda *shape: (2 * rng.standard_normal(shape)).astype(request.param)


@pytest.mark.parametrize(("batch", "time", "size"), [(1, 1, 1), (3, 4, 5), (2, 3, 33), (0, 2, 4)])
def test_steps_of_an_lstm(draw, batch, time, size):
    dtype, normal = draw
    modules = [kernels.reference, kernels.load("networks")]
    features = 3
    for t in range(time):
        arrays = [
            normal(4 * size), normal(batch, 4 * size), normal(time, batch, 4 * size), normal(time + 1, batch, size),
            normal(time + 1, batch, features + size),
        ]  # fmt: skip
        assert_alike(lambda n, b, product, *each, t=t: modules[n].lstm_step(b, product, t, *each), arrays, dtype)
        arrays = [
            normal(batch, time, size), normal(time + 1, batch, features + size), normal(batch, size),
            np.tanh(normal(time, batch, 4 * size)), normal(time + 1, batch, size), normal(time, batch, 4 * size),
            normal(4 * size),
        ]  # fmt: skip
        assert_alike(
            lambda n, gy, di, dc, *each, t=t: modules[n].lstm_step_gradients(gy, di, dc, t, *each), arrays, dtype
        )


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (4, 65), (0, 3)])
def test_layer_norm(draw, shape):
    dtype, normal = draw
    modules = [kernels.reference, kernels.load("networks")]
    x, gy, scale, shift = normal(*shape), normal(*shape), normal(shape[1]), normal(shape[1])
    assert_alike(
        lambda n, out, mean, inverse: modules[n].layer_norm(x, scale, shift, out, (mean, inverse), 1e-3),
        [normal(*shape), normal(shape[0]), normal(shape[0])],
        dtype,
    )
    saved = normal(shape[0]), np.abs(normal(shape[0]))
    assert_alike(
        lambda n, dx, dscale, dshift: modules[n].layer_norm_gradients(gy, x, scale, saved, (dx, dscale, dshift)),
        [normal(*shape), normal(shape[1]), normal(shape[1])],
        dtype,
    )


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 17), (0, 3)])
def test_gelu(draw, shape):
    dtype, normal = draw
    modules = [kernels.reference, kernels.load("networks")]
    x, gy = 3 * normal(*shape), normal(*shape)
    assert_alike(lambda n, out: modules[n].gelu(x, out), [normal(*shape)], dtype)
    assert_alike(lambda n, dx: modules[n].gelu_gradient(gy, x, dx), [normal(*shape)], dtype)


@pytest.mark.parametrize(("matrices", "time"), [(1, 1), (3, 2), (2, 19), (0, 4)])
def test_causal_softmax(draw, matrices, time):
    dtype, normal = draw
    modules = [reference, kernels.load("networks")]

    def softmax(n, scores):
        modules[n].causal_shift(scores, 0.3)
        np.exp(scores, out=scores)
        modules[n].normalize_rows(scores)

    scores = 20 * normal(matrices, time, time)
    assert_alike(softmax, [scores], dtype)
    chances, later = scores.copy(), np.triu(np.ones((time, time), bool), 1)
    softmax(1, chances)
    assert not chances[:, later].any()
    np.testing.assert_allclose(chances.sum(axis=-1), 1, rtol=1e-5)
    assert_alike(lambda n, g: modules[n].softmax_gradient(chances, g, 0.3), [normal(matrices, time, time)], dtype)


def test_what_is_not_finite_stays_so():
    module = kernels.load("networks")
    for bad in (np.nan, np.inf):
        shapes = (32,), (1, 32), (1, 1, 32), (2, 1, 8), (2, 1, 9)
        bias, product, gates, cells, inputs = (np.zeros(shape, np.float32) for shape in shapes)
        cells[0, 0, 3] = bad
        module.lstm_step(bias, product, 0, gates, cells, inputs)
        assert np.isfinite(inputs[1, 0, 1:]).sum() == (7 if np.isnan(bad) else 8)
        assert not np.isfinite(cells[1, 0, 3])
    scores = np.ones((1, 3, 3), np.float32)
    scores[0, 1, 1] = np.nan
    kernels.load("networks").causal_shift(scores, 1.0)
    assert np.isnan(scores[0, 1]).any()
    assert not np.isnan(scores[0, 0]).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_that_come_more_than_once_are_added_in_their_order(dtype):
    rng, rows = np.random.default_rng(3), np.array([3, 0, 3, 3, 1])
    table, values = rng.standard_normal((4, 7)).astype(dtype), rng.standard_normal((5, 7)).astype(dtype)
    expected = table.copy()
    reference.add_rows(expected, rows, values)
    kernels.load("networks").add_rows(table, rows, values)
    np.testing.assert_array_equal(table, expected)
