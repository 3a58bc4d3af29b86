"""Products in a CUDA graph, by cuBLAS itself, against NumPy's."""

import itertools
import shutil

import numpy as np
import pytest
from pairs import in_turn
from raises import raises

from hpcdp.core.arrays import dtype_of
from hpcdp.errors import UnsupportedError
from hpcdp.kernels.cuda import Capturer, dot_of, matmul, matmul_of, warmed_up

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the stand-in for CuPy needs g++")

SHAPES = [
    ((3, 4), (4, 5)), ((1, 4), (4, 5)), ((3, 1), (1, 5)), ((3, 4), (4, 1)), ((1, 1), (1, 1)), ((4,), (4, 5)),
    ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)), ((0, 4), (4, 5)), ((3, 0), (0, 5)),
]  # fmt: skip
LAYOUTS = ("rows", "columns", "padded")


def laid_out(x, layout):
    """``x`` on the device, with its last axes by rows, by columns, or in a larger array."""
    import cupy

    if layout == "columns" and x.ndim > 1:
        return cupy.asarray(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
    if layout == "padded":
        wide = cupy.zeros((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype)
        wide[..., : x.shape[-1]] = cupy.asarray(x)
        return wide[..., : x.shape[-1]]
    return cupy.asarray(x)


def captured(a, b, out=None):
    """The product by a graph."""
    found = []
    with warmed_up():
        matmul(a, b, out)
    capturer = Capturer()
    graph = capturer.capture(lambda: found.append(matmul(a, b, out)))
    graph.launch()
    return found[0].to_host()


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    in_turn(["float32", "float64", "float16", "bfloat16"], SHAPES),
    ids=str,
)
def test_every_layout_is_numpys_product(counted_graphs, shapes, dtype):
    rng = np.random.default_rng(0)
    kind = dtype_of(dtype)
    x, y = (rng.standard_normal(each).astype(kind) for each in shapes)
    wide = np.float64 if dtype == "float64" else np.float32
    wanted = np.matmul(x.astype(wide), y.astype(wide)).astype(kind)
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        a, b = laid_out(x, left), laid_out(y, right)
        a.copy(), b.copy(), a.astype("float32"), b.astype("float32"), a.astype("float32").astype(kind)  # compiled
        whole, strided = np.zeros_like(wanted), np.zeros((*wanted.shape, 1), kind)
        for place in (None, laid_out(whole, "rows"), laid_out(strided, "padded")[..., 0]):
            found = captured(a, b, place)
            assert found.dtype == wanted.dtype and found.shape == wanted.shape
            error = {"float16": 1e-2, "bfloat16": 1e-2}.get(dtype, 1e-5)
            np.testing.assert_allclose(found.astype(wide), wanted.astype(wide), rtol=error, atol=1e-6)
            if place is not None:
                np.testing.assert_array_equal(place.to_host(), found)


def test_a_launch_takes_the_values_of_now(counted_graphs):
    a, b, out = (laid_out(np.ones((3, 3), np.float32), "rows") for _ in range(3))
    with warmed_up():
        matmul(a, b)
    graph = Capturer().capture(lambda: matmul(a, b, out))
    np.testing.assert_array_equal(out.to_host(), 1)  # nothing has run
    a *= 2
    graph.launch()
    np.testing.assert_array_equal(out.to_host(), 6)


def test_types_that_cublas_has_not(counted_graphs):
    a = laid_out(np.ones((2, 2), np.int32), "rows")
    with raises(
        UnsupportedError,
        operation="matmul",
        where="dtype",
        expected=["float16", "bfloat16", "float32", "float64"],
        got="int32",
    ):
        captured(a, a)
    b = laid_out(np.ones((2, 3), np.float32), "rows")
    with raises(UnsupportedError, operation="matmul", expected="(.., n, k)", got=(2, 3)):
        captured(b, b)


def test_stacks_of_bfloat16_are_multiplied_in_float32(counted_graphs):
    """Which CuPy 14.2 refuses."""
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(dtype_of("bfloat16"))
    a, wanted = laid_out(x, "rows"), np.matmul(x.astype("f4"), x.astype("f4").swapaxes(1, 2)).astype(x.dtype)
    for place in (None, laid_out(np.zeros_like(wanted), "rows")):
        found = matmul(a, a.swapaxes(1, 2), place)
        assert found.dtype == x.dtype and (place is None or found is place)
        np.testing.assert_array_equal(found.to_host(), wanted)


def test_without_a_capture_each_namespace_has_its_own(counted_graphs):
    x = np.ones((2, 3), np.float32)
    assert matmul_of(np) is np.matmul and dot_of(x) == x.dot
    a = laid_out(x, "rows")
    np.testing.assert_array_equal(matmul(a, a.T).to_host(), 3)
    np.testing.assert_array_equal(dot_of(a)(a.T).to_host(), 3)
