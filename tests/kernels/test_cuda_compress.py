"""Gradients encoded by CUDA against the specification, on this processor (`cupy_module`)."""

import os
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from raises import raises

from hpcdp.compression import BFloat16, Float16, OneBit, TopK, TwoBit
from hpcdp.core.arrays import dtype_of, is_bfloat16
from hpcdp.errors import UnsupportedError
from hpcdp.kernels import cuda, reference
from hpcdp.kernels.cuda import kernels

CODECS = [Float16(), BFloat16(), TwoBit(), TwoBit(0.5), OneBit(), OneBit(0.25), TopK(0.1), TopK(1.0)]
DTYPES = [dtype_of(name).type for name in ("float16", "bfloat16", "float32", "float64")]
SIZES = (0, 1, 2, 31, 33, 255, 256, 257, 1031)
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def given(size: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    x, residual = rng.standard_normal((2, size)).astype(dtype)
    x[::5], residual[::5] = x[:1] if size else x[::5], dtype(0)  # equal ones, of which top-k sends the first
    x[5::7] *= dtype(1e-3)
    return x, residual


def coded(codec: Any, x: Any, residual: Any, wire: Any) -> tuple[Any, Any, Any]:
    """What arrives, what is kept, and the wire."""
    out = x.copy()
    codec.encode(x, residual, wire)
    codec.decode(wire, out)
    return out, residual, wire


def plain(x: np.ndarray) -> np.ndarray:
    """In a dtype of which NumPy itself knows what is a NaN."""
    return x.astype(np.float32) if is_bfloat16(x) else x


def same(ours: Any, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(plain(ours.to_host()), plain(theirs))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codecs_on_a_device_send_what_the_specification_sends(
    codec: Any, dtype: type, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in SIZES:
        x, residual = given(size, dtype)
        wire = np.full(codec.nbytes(size, np.dtype(dtype)), 0xA5, np.uint8)
        found = coded(codec, *(cupy.asarray(each) for each in (x, residual, wire)))
        with monkeypatch.context() as patched:
            patched.setattr("hpcdp.compression._kernels", lambda x: reference)
            expected = coded(codec, x, residual, wire)
        if isinstance(codec, TwoBit | OneBit) and codec.threshold is None:  # scales are sums in another order
            largest = abs(expected[0].astype(np.float64)).max(initial=0)
            error = 4 * float(ml_dtypes.finfo(dtype).eps) * largest
            for ours, theirs in zip(found[:2], expected[:2], strict=True):
                np.testing.assert_allclose(plain(ours.to_host()), plain(theirs), rtol=0, atol=error)
        else:
            for ours, theirs in zip(found, expected, strict=True):
                same(ours, theirs)


@pytest.mark.parametrize("codec", [TwoBit(), OneBit()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_do_not_depend_on_where_elements_begin(codec: Any, dtype: type, cupy: ModuleType) -> None:
    x, residual = given(600, dtype)
    wire = np.zeros(codec.nbytes(600, np.dtype(dtype)), np.uint8)
    found = [
        coded(codec, *(cupy.asarray(np.append(y[:offset], y))[offset:] for y in (x, residual)), cupy.asarray(wire))
        for offset in (0, 1)
    ]
    for ours, theirs in zip(*found, strict=True):
        same(ours, theirs.to_host())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_sent_and_not_kept(codec: Any, dtype: type, bad: float, cupy: ModuleType) -> None:
    for places in ([300], [0, 7, 299, 300, 512, 599]):
        x, residual = given(600, dtype)
        x[places] = bad
        wire = np.zeros(codec.nbytes(600, np.dtype(dtype)), np.uint8)
        out, kept, _ = coded(codec, *(cupy.asarray(each) for each in (x, residual, wire)))
        assert not np.isfinite(out.to_host()[places[0]])
        assert np.isfinite(kept.to_host()).all()


def sent_alike(cupy: ModuleType, x: np.ndarray, residual: np.ndarray, k: int) -> tuple[tuple[Any, ...], ...]:
    """Indices and values of the k largest by the device, and by the specification, which leave the same."""
    expected = np.empty(k, np.uint32), np.empty(k, x.dtype)
    found = tuple(cupy.asarray(each) for each in expected)
    kept = cupy.asarray(residual)
    kernels.encode_top_k(cupy.asarray(x), kept, *found)
    reference.encode_top_k(x, residual, *expected)
    for ours, theirs in zip((*found, kept), (*expected, residual), strict=True):
        same(ours, theirs)
    return found, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 2, 1056])
def test_top_k(dtype: type, blocks: int, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few blocks have many elements each, and NaNs, infinities, zeros and subnormals among them."""
    monkeypatch.setattr("hpcdp.kernels.cuda.MAX_BLOCKS", blocks)
    monkeypatch.setattr("hpcdp.kernels.cuda.MAX_PARTS", blocks)
    few = (1, 1), (3, 0), (2, 1), (257, 1), (257, 2), (257, 256), (257, 257)
    for size, k in (*few, (2003, 70), (2003, 1900), (9001, 90)):
        x, residual = given(size, dtype)
        x[: size // 2] *= dtype(2.0**-14)  # among them subnormals of float16
        x[3::11], x[4::13] = 0, -0.0
        x[5:6], x[9:40:3], x[8:60:5] = np.nan, np.nan, -np.inf
        x[6:7] = -x[5:6]
        found, expected = sent_alike(cupy, x, residual, k)
        out, whole = cupy.asarray(np.full(size, 7, dtype)), np.full(size, 7, dtype)
        kernels.decode_top_k(*found, out)
        reference.decode_top_k(*expected, whole)
        same(out, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [1, 10**9])
def test_top_k_where_the_sample_misleads(
    dtype: type, wanted: int, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A floor that fewer than k elements reach, and one that all do."""
    monkeypatch.setattr(kernels, "_sample", lambda packs, chosen_of_pack: (3, wanted))
    x, residual = given(9001, dtype)
    sent_alike(cupy, x, residual, 90)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates each launch that collects has left."""
    found: list[int] = []

    def launch(file: str, name: str, grid: int, *args: Any) -> None:
        cuda_launch(file, name, grid, *args)
        if name.startswith("collect"):
            found.append(int(args[8].to_host().sum()))

    cuda_launch = cuda.launch
    monkeypatch.setattr(cuda, "launch", launch)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stretches", [1, 1056])
def test_top_k_of_sparse_gradients_sets_no_more_zeros_aside_than_are_sent(
    dtype: type, stretches: int, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, numbers: list[int]
) -> None:
    monkeypatch.setattr("hpcdp.kernels.cuda.MAX_PARTS", stretches)
    for count in (0, 1, 89, 90, 91, 150):  # are not zero
        x, residual = np.zeros(9001, dtype), np.zeros(9001, dtype)
        at = np.random.default_rng(count).choice(9001, count, replace=False)
        x[at], residual[:200:3] = np.arange(1, count + 1), -0.0
        sent_alike(cupy, x, residual, 90)
        assert max(90, count) <= numbers[-1] <= 90 + count


def test_top_k_sets_few_candidates_aside(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    """In step after step: what is kept gathers just below what is sent."""
    monkeypatch.setattr(kernels, "_SAMPLED_PACKS", 1 << 13)
    x = np.random.default_rng(3).standard_normal(1 << 17).astype(np.float32)
    k = x.size // 100
    grad, residual = cupy.asarray(x), cupy.asarray(np.zeros_like(x))
    for _ in range(12 if os.environ.get("HPCDP_TEST_THOROUGH") else 5):
        sent = cupy.asarray(np.empty(k, np.uint32)), cupy.asarray(np.empty(k, np.float32))
        kernels.encode_top_k(grad, residual, *sent)
        assert k <= numbers[-2] == numbers[-1] <= 2 * k  # the second time nothing was done


@pytest.mark.parametrize("bits", [1, 2])
def test_more_blocks_than_are_launched(bits: int, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdp.kernels.cuda.MAX_BLOCKS", 2)
    codec = {1: OneBit(0.25), 2: TwoBit(0.5)}[bits]
    x, residual = given(5003, np.float32)
    wire = np.zeros(codec.nbytes(5003, x.dtype), np.uint8)
    found = coded(codec, *(cupy.asarray(each) for each in (x, residual, wire)))
    for ours, theirs in zip(found, coded(codec, x, residual, wire), strict=True):
        same(ours, theirs)


def test_an_index_out_of_range_is_dropped(cupy: ModuleType) -> None:
    out = cupy.asarray(np.ones(3, np.float32))
    arrays = np.array([1, 3, 2**32 - 1], np.uint32), np.array([5, 6, 7], np.float32)
    kernels.decode_top_k(*(cupy.asarray(each) for each in arrays), out)
    same(out, np.array([0, 5, 0], np.float32))


def test_a_wire_that_begins_between_words_is_refused(cupy: ModuleType) -> None:
    x = cupy.asarray(np.ones(16, np.float32))
    wire = cupy.asarray(np.zeros(9 + TwoBit().nbytes(16, np.dtype("f4")), np.uint8))
    with raises(UnsupportedError, operation="decode_two_bit", where="alignment", expected=4):
        TwoBit().decode(wire[1:9], x)
