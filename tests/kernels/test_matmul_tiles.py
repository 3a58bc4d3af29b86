"""Products in tiles are the products, whatever way the matrices lie; tiles are of sizes that BLAS does not pack."""

import llvmlite.binding
import numpy as np
import pytest
import standin
from pairs import pairs
from threadpoolctl import threadpool_limits

from hpcdp.kernels import matmul

SHAPES = [  # m, k, n, of which the first ones are known to be tiled where matrices lie as they are read
    (16, 2048, 320), (32, 320, 1024), (64, 512, 320), (128, 576, 256), (65, 999, 130), (17, 333, 777), (333, 17, 777),
    (2048, 16, 256), (50, 500, 500), (1, 2048, 2048), (2048, 1, 2048), (3, 2000, 1000), (64, 1031, 600),
    (64, 15626, 64), (8, 25088, 128), (33, 16007, 70), (16, 130001, 9), (100, 20000, 9),  # a tile is not as deep
]  # fmt: skip


@pytest.fixture
def tiles(monkeypatch):
    """All that a test multiplies in tiles, as (rows, columns, parts), on a core that packs slowly."""
    yield from taken_on(monkeypatch, are_fast=False)


@pytest.fixture
def tiles_on_fast_cores(monkeypatch):
    yield from taken_on(monkeypatch, are_fast=True)


def taken_on(monkeypatch, are_fast):
    taken = []
    monkeypatch.setattr(matmul, "_has_small_kernels", lambda: True)
    monkeypatch.setattr(matmul, "_cores_are_fast", lambda: are_fast)
    matmul._tile_of.cache_clear()
    by_tiles = matmul._by_tiles

    def recorded(a, b, out, rows, columns):
        taken.append((rows, columns, a.shape[-1]))
        by_tiles(a, b, out, rows, columns)

    monkeypatch.setattr(matmul, "_by_tiles", recorded)
    yield taken
    matmul._tile_of.cache_clear()


def operands(m, k, n, orders, dtype=np.float32, stack=()):
    rng = np.random.default_rng(m + k + n)
    shapes = [(*stack, m, k), (*stack, k, n), (*stack, m, n)]
    a, b, out = (
        np.ascontiguousarray(rng.standard_normal(shape).astype(dtype).swapaxes(-1, -2)).swapaxes(-1, -2)
        if order == "F" else rng.standard_normal(shape).astype(dtype)
        for shape, order in zip(shapes, orders, strict=True)
    )  # fmt: skip
    return a, b, out


@pytest.mark.parametrize(("shape", "of_a", "of_b", "of_out"), pairs(SHAPES, "CF", "CF", "CF"), ids=str)
def test_a_product_in_tiles_is_the_product(shape, of_a, of_b, of_out, tiles):
    a, b, out = operands(*shape, of_a + of_b + of_out)
    matmul.multiply(a, b, out)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out, expected, atol=2e-6 * np.sqrt(shape[1]) * np.abs(expected).max())
    assert all(rows * columns * depth <= matmul.MOST for rows, columns, depth in tiles)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_large_products_of_few_rows_are_tiled(shape, tiles):
    matmul.multiply(*operands(*shape, "CCC"))
    assert tiles


@pytest.mark.parametrize(
    ("shape", "orders", "are_tiled"),
    [
        ((2048, 16, 256), "FCC", True), ((2048, 64, 256), "FCC", True),
        ((16, 2048, 320), "CFC", True), ((64, 512, 320), "CFC", True), ((128, 256, 576), "CFC", False),
        ((32, 320, 1024), "CCC", True), ((16, 2048, 320), "CCC", False), ((16, 700, 1024), "CCC", True),
        ((512, 27, 1024), "CCC", True), ((512, 192, 576), "CCC", False),
    ],
)  # fmt: skip
def test_on_fast_cores_few_rows_are_tiled(shape, orders, are_tiled, tiles_on_fast_cores):
    a, b, out = operands(*shape, orders)
    matmul.multiply(a, b, out)
    assert bool(tiles_on_fast_cores) == are_tiled
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out, expected, atol=2e-6 * np.sqrt(shape[1]) * np.abs(expected).max())


@pytest.mark.parametrize(("name", "are"), [("znver4", False), ("znver5", True), ("sapphirerapids", True)])
def test_which_cores_are_fast(name, are, monkeypatch):
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: name)
    assert matmul._cores_are_fast.__wrapped__() is are


@pytest.mark.parametrize("orders", ["CCC", "CFC", "FCC", "CFF"])
@pytest.mark.parametrize("stack", [(2,), (3,), (2, 2)], ids=str)
def test_stacks_of_matrices(stack, orders, tiles):
    a, b, out = operands(96, 128, 200, orders, stack=stack)
    matmul.multiply(a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), atol=2e-3)
    assert tiles


def test_one_matrix_times_a_stack(tiles):
    a, _, _ = operands(96, 128, 200, "CCC")
    _, b, out = operands(96, 128, 200, "CCC", stack=(4,))
    matmul.multiply(a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), atol=2e-3)
    assert tiles


def test_rows_far_apart_in_memory(tiles):
    a, b, out = operands(32, 320, 1024, "CCC")
    wide, into = np.zeros((320, 1040), np.float32), np.full((32, 1030), np.nan, np.float32)
    wide[:, :1024] = b
    matmul.multiply(a, wide[:, :1024], into[:, :1024])
    matmul.multiply(a, b, out)
    np.testing.assert_array_equal(into[:, :1024], out)
    assert np.isnan(into[:, 1024:]).all()


def test_infinities_and_nan_stay_where_they_are(tiles):
    a, b, out = operands(16, 2048, 320, "CCC")
    a[3, 100], b[7, 40] = np.nan, np.inf
    matmul.multiply(a, b, out)
    assert np.isnan(out[3]).all()
    assert np.isinf(out[:3, 40]).all()
    assert np.isfinite(np.delete(out, 3, 0)[:, :40]).all()


@pytest.mark.parametrize("change", [{"dtype": np.float64}, {"threads": 2}, {"core": "Haswell"}], ids=str)
def test_other_arrays_threads_and_processors_have_the_whole(change, monkeypatch):
    class Library:
        architecture = change.get("core", "SkylakeX")

        def get_num_threads(self):
            return change.get("threads", 1)

    libraries = [Library()] if Library.architecture in matmul._CORES else []
    monkeypatch.setattr(matmul, "_openblas", lambda: libraries)
    monkeypatch.setattr(matmul, "_by_tiles", None)  # calling it would raise
    a, b, out = operands(32, 320, 1024, "CCC", change.get("dtype", np.float32))
    matmul.multiply(a, b, out)
    np.testing.assert_array_equal(out, np.matmul(a, b))


def test_numpy_s_own_library_is_asked():
    with threadpool_limits(1, user_api="blas"):
        one = matmul._has_small_kernels()
    with threadpool_limits(2, user_api="blas"):
        assert not matmul._has_small_kernels()
    assert one == bool(matmul._openblas())


@pytest.mark.parametrize("rows", [1, 2, 64, 65])
@pytest.mark.parametrize("shape", [(300, 4000), (2048, 700)], ids=str)
def test_without_small_kernels_a_transposed_matrix_comes_first(rows, shape, monkeypatch):
    monkeypatch.setattr(matmul, "_has_small_kernels", lambda: False)
    a, b, out = operands(rows, *shape, "CFC")
    matmul.multiply(a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), atol=1e-3)


def test_arrays_of_other_namespaces_are_multiplied_by_these():
    a, b, out = operands(3, 4, 5, "CCC")
    on_device = standin.asarray(out)
    matmul.multiply(standin.asarray(a), standin.asarray(b), on_device)
    np.testing.assert_array_equal(on_device.to_host(), a @ b)
