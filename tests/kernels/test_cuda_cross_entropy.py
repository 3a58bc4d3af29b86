"""Softmax and cross-entropy in CUDA against their specification, on this processor (`cupy_module`)."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from placed import beginning_at
from raises import raises

from hpcdp import autograd, nn
from hpcdp.core.arrays import dtype_of, is_half
from hpcdp.errors import UnsupportedError
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import kernels

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def given(rows: int, classes: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Logits, labels, and gradients of losses, which are float32 where logits have 16 bits."""
    rng = np.random.default_rng(classes)
    logits = (rng.standard_normal((rows, classes)) * 20).astype(dtype_of(dtype))
    logits[: min(rows, 2), 0] = [np.nan, -np.inf][: min(rows, 2)]
    if rows > 2:
        logits[2] = 3e4  # of which no sum of exponentials is finite
    return logits, rng.integers(0, classes, rows), rng.standard_normal(rows).astype(wide(logits).dtype)


def wide(x: Any) -> Any:
    return x.astype(np.float32) if is_half(x) else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_the_same_numbers(
    dtype: str, offset: int, cupy: ModuleType, flushed: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Of rows that threads share, that a block has to itself, that it does not keep, and that begin anywhere."""
    for rows, classes in ((0, 3), (1, 1), (9, 2), (65, 10), (7, 12), (33, 101), (3, 1500), (4, 1028), (3, 9001)):
        logits, labels, gy = given(rows, classes, dtype)
        chances, losses = np.empty_like(wide(logits)), np.empty_like(gy)
        reference.softmax_cross_entropy(wide(logits), labels, chances, losses)
        x, on_device = (beginning_at(offset, cupy.asarray(each)) for each in (logits, chances))
        dx = cupy.asarray(np.ones_like(logits))
        numbers, found = cupy.asarray(labels), cupy.asarray(np.empty_like(gy))
        kernels.softmax_cross_entropy(x, numbers, on_device, found)
        few = 1e-13 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(on_device.to_host(), chances, rtol=few, atol=1e-30)
        np.testing.assert_allclose(found.to_host(), losses, rtol=few, atol=few / 10)  # small ones are differences
        expected = np.empty_like(chances)
        kernels.softmax_cross_entropy_gradient(cupy.asarray(gy), numbers, on_device, dx)
        reference.softmax_cross_entropy_gradient(gy, labels, on_device.to_host(), expected)
        np.testing.assert_array_equal(wide(dx.to_host()), wide(flushed(expected).astype(dx.dtype)))


def test_sums_depend_neither_on_the_place_nor_on_the_grid(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, _ = given(300, 15, "float32")
    results = []
    for offset, blocks in ((0, 100), (1, 100), (0, 2)):
        monkeypatch.setattr("hpcdp.kernels.cuda.MAX_BLOCKS", blocks)
        x = cupy.asarray(np.append(np.zeros(offset, np.float32), logits))[offset:].reshape(300, 15)
        chances, losses = cupy.asarray(np.empty_like(logits)), cupy.asarray(np.empty(300, np.float32))
        kernels.softmax_cross_entropy(x, cupy.asarray(labels), chances, losses)
        results.append((chances.to_host(), losses.to_host()))
    for chances, losses in results[1:]:
        np.testing.assert_array_equal(chances, results[0][0])
        np.testing.assert_array_equal(losses, results[0][1])


def test_a_label_that_is_no_class_makes_its_row_nan(cupy: ModuleType) -> None:
    logits = np.ones((4, 6), np.float32)
    chances, losses = cupy.asarray(np.empty_like(logits)), cupy.asarray(np.empty(4, np.float32))
    labels = cupy.asarray(np.array([5, 6, -1, 0]))
    kernels.softmax_cross_entropy(cupy.asarray(logits), labels, chances, losses)
    np.testing.assert_array_equal(np.isnan(losses.to_host()), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(chances.to_host()).all(axis=1), [False, True, True, False])


def test_what_the_kernels_cannot_read_is_refused(cupy: ModuleType) -> None:
    x, losses = (cupy.asarray(np.ones(shape, np.float32)) for shape in ((4, 6), 4))
    with raises(UnsupportedError, operation="softmax_cross_entropy", expected=[4, "int64"], got=[3, "int64"]):
        kernels.softmax_cross_entropy(x, cupy.asarray(np.ones(3, np.int64)), x, losses)
    with raises(
        UnsupportedError, operation="softmax_cross_entropy_gradient", where="dtype", expected="int64", got="int32"
    ):
        kernels.softmax_cross_entropy_gradient(losses, cupy.asarray(np.ones(4, np.int32)), x, x)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_a_loss_and_its_gradient_by_them(dtype: type, cupy: ModuleType) -> None:
    logits, labels, _ = given(8, 10, "float64")
    logits, labels = logits[3:], labels[3:].astype(dtype)
    found = []
    for x, y in ((logits, labels), (cupy.asarray(logits), cupy.asarray(labels)), (cupy.asarray(logits), labels)):
        tensor = autograd.Tensor(x)
        tensor.attach_grad()
        with autograd.record():
            loss = nn.functional.softmax_cross_entropy(tensor, y)
        loss.backward()
        found.append((loss.data, tensor.grad))
    for loss, gradient in found[1:]:
        np.testing.assert_allclose(loss.to_host(), found[0][0], rtol=1e-13)
        np.testing.assert_allclose(gradient.to_host(), found[0][1], rtol=1e-13, atol=1e-16)
