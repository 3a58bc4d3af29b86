"""Every codec, compiled and plain: what is sent and what is kept make what was given, in the bytes that it says."""

import ml_dtypes
import numpy as np
import pytest

from hpcdp import kernels
from hpcdp.compression import BFloat16, Float16, OneBit, TopK, TwoBit
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError
from hpcdp.kernels import reference

CODECS = [Float16(), BFloat16(), TwoBit(), TwoBit(0.5), OneBit(), OneBit(0.25), TopK(), TopK(0.3), TopK(1.0)]
SIZES = [0, 1, 2, 31, 33, 255, 256, 257, 10007]
DTYPES = [dtype_of(name).type for name in ("float16", "bfloat16", "float32", "float64")]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def data(size, dtype=np.float32, seed=0):
    return np.random.default_rng([size, seed]).standard_normal(size).astype(dtype)


def coded(codec, x, residual):
    """What arrives, what is kept, and the wire."""
    kept, out = residual.copy(), np.full_like(x, 7)
    wire = np.full(codec.nbytes(x.size, x.dtype), 0xA5, np.uint8)
    codec.encode(x, kept, wire)
    codec.decode(wire, out)
    return out, kept, wire


@each_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_what_arrives_and_what_is_kept_make_what_was_given(codec, size, dtype):
    x, residual = data(size, dtype), data(size, dtype, seed=1) / dtype(8)
    before = x.copy()
    out, kept, _ = coded(codec, x, residual)
    np.testing.assert_array_equal(x, before)
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps) * (1 + abs(x.astype("f8")).max(initial=0))
    np.testing.assert_allclose(out.astype("f8") + kept.astype("f8"), x.astype("f8") + residual, rtol=0, atol=tolerance)
    if size > 200:
        assert out.any()


@each_codec
@pytest.mark.parametrize("size", SIZES)
def test_compiled_and_plain_codecs_agree(codec, size, monkeypatch):
    x, residual = data(size), data(size, seed=1) / 8
    x[::7] = x[:1] if size else x[::7]  # equal magnitudes, of which the first are sent
    fast = coded(codec, x, residual)
    monkeypatch.setattr("hpcdp.compression._kernels", lambda x: reference)
    plain = coded(codec, x, residual)
    if isinstance(codec, TwoBit | OneBit) and codec.threshold is None:  # scales are sums in another order
        assert (abs(fast[0] - plain[0]) < 1e-5).mean() > 0.999 if size else True
    else:
        for found, wanted in zip(fast, plain, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_on_the_wire(size):
    blocks = -(-size // 256)
    f4, f8 = np.dtype("f4"), np.dtype("f8")
    assert Float16().nbytes(size, f4) == BFloat16().nbytes(size, f8) == 2 * size
    assert TwoBit().nbytes(size, f4) == TwoBit(0.5).nbytes(size, f8) == 4 * blocks + 4 * ((size + 15) // 16)
    assert OneBit().nbytes(size, f4) == 4 * blocks + 4 * ((size + 31) // 32)
    sent = min(size, max(1, round(0.1 * size)))
    assert TopK(0.1).nbytes(size, f4) == 8 * sent
    assert TopK(0.1).nbytes(size, f8) == 12 * sent


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_bits_with_a_fixed_threshold_follow_the_sequence_of_the_store(dtype):
    """0.4 sends nothing, 0.1 more sends 0.5, 0.2 nothing, 0.3 more 0.5 (PARITY, row 14)."""
    residual = np.zeros(33, dtype)
    for value, sent in ((0.4, 0), (0.1, 0.5), (0.2, 0), (0.3, 0.5)):
        out, residual, _ = coded(TwoBit(0.5), np.full(33, value, dtype), residual)
        assert (out == dtype(sent)).all(), value


def test_one_bit_sends_one_or_minus_one_with_a_threshold_and_the_mean_magnitude_without():
    x = np.array([3.0, -1.0, 0.5, -0.5], "f4")
    out, kept, _ = coded(OneBit(threshold=0.6), x, np.zeros(4, "f4"))
    assert out.tolist() == [1, -1, -1, -1]
    assert kept.tolist() == [2, 0, 1.5, 0.5]
    out, kept, _ = coded(OneBit(), x, np.zeros(4, "f4"))
    assert out.tolist() == [1.25, -1.25, 1.25, -1.25]


def test_two_bits_send_the_mean_of_what_reaches_the_threshold_of_each_block():
    x = np.concatenate([np.full(256, 2.0, "f4"), np.full(256, 1e-6, "f4"), np.zeros(10, "f4")])
    x[:256:2] *= -1
    x[:3] = 8.0, -0.5, 0.0  # the root mean square is about 2
    out, kept, _ = coded(TwoBit(), x, np.zeros_like(x))
    mean = (8 + 253 * 2) / 254
    np.testing.assert_allclose(out[:5], [mean, 0, 0, 2 * mean / 2, -mean], rtol=1e-5)
    np.testing.assert_allclose(out[256:], x[256:], rtol=1e-5)
    np.testing.assert_allclose(kept, x - out, atol=1e-6)


def test_the_largest_are_sent_and_of_equal_ones_the_first():
    x = np.array([0.5, -3, 1, 3, -1, 1, 0, 1], "f4")
    out, kept, _ = coded(TopK(0.5), x, np.zeros(8, "f4"))
    assert out.tolist() == [0, -3, 1, 3, -1, 0, 0, 0]
    assert kept.tolist() == [0.5, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("size", [5, 1000, 9999])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_against_a_sort(size, k):
    x = data(size, seed=k) * np.exp2(np.random.default_rng(k).integers(-140, 100, size)).astype("f4")  # subnormals, too
    indices, values, kept = np.zeros(k, "u4"), np.zeros(k, "f4"), np.zeros(size, "f4")
    kernels.load("gradients").encode_top_k(x, kept, indices, values)
    wanted = np.sort(np.argsort(-abs(x), kind="stable")[:k])
    assert indices.tolist() == wanted.tolist()
    np.testing.assert_array_equal(values, x[wanted])
    assert not kept[wanted].any()


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_arrives_as_such_and_is_not_kept(codec, bad, dtype):
    x = data(9000, dtype)
    x[5000] = bad
    out, kept, _ = coded(codec, x, np.zeros_like(x))
    assert not np.isfinite(out[5000])
    assert np.isfinite(kept).all()
    again, kept, _ = coded(codec, data(9000, dtype, seed=3), kept)
    assert np.isfinite(again).all()


@pytest.mark.filterwarnings("error")
def test_float16_of_a_float64_is_rounded_once():
    x = np.array([1 + 2**-11 + 2**-40, 65519.9999999, 2**-25 + 2**-60, 7e4])
    residual, wire = np.zeros(4), np.zeros(8, np.uint8)
    Float16().encode(x, residual, wire)
    assert wire.view(np.float16).tolist() == [1 + 2**-10, 65504, 2**-24, np.inf]
    assert residual[:3].tolist() == (x - wire.view(np.float16))[:3].tolist()


def test_float16_overflows_to_an_infinity():
    out, kept, _ = coded(Float16(), np.array([1e6, 2.0], "f4"), np.zeros(2, "f4"))
    assert out.tolist() == [np.inf, 2.0]
    assert kept.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TwoBit(0), "2bit [threshold]: expected a number > 0, got 0"),
        (lambda: TwoBit(-1.0), "got -1.0"),
        (lambda: OneBit(float("nan")), "1bit [threshold]"),
        (lambda: TopK(0), "topk [ratio]: expected a number in (0, 1]"),
        (lambda: TopK(1.5), "got 1.5"),
    ],
)
def test_settings_without_sense_are_refused(make, named):
    with pytest.raises(ConfigError) as caught:
        make()
    assert named in str(caught.value)


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_of_what_is_not_finite_everywhere_nothing_is_kept(codec, bad, dtype):
    out, kept, _ = coded(codec, np.full(3000, bad, dtype), np.zeros(3000, dtype))
    assert not np.isfinite(out).all()
    assert np.isfinite(kept).all()


@pytest.mark.parametrize("codec", [TwoBit(), OneBit()])
def test_what_no_scale_can_be_is_not_kept(codec):
    out, kept, _ = coded(codec, np.full(300, 1e50), np.zeros(300))
    assert np.isnan(out).all()
    assert not kept.any()


@pytest.mark.parametrize("size", [1e19, 1e-25])
def test_two_bits_of_very_large_and_very_small_gradients(size, monkeypatch):
    x = data(300) * np.float32(size)
    fast = coded(TwoBit(), x, np.zeros_like(x))
    monkeypatch.setattr("hpcdp.compression._kernels", lambda x: reference)
    plain = coded(TwoBit(), x, np.zeros_like(x))
    np.testing.assert_allclose(fast[0], plain[0], rtol=1e-5)
    assert (fast[0] == 0).any() and fast[0].any()


def test_bits_of_elements_that_do_not_exist_are_zero():
    _, _, wire = coded(TwoBit(), np.zeros(195, "f4"), np.zeros(195, "f4"))
    assert wire[-4:].tolist() == [7, 0, 7, 0]


def test_a_nan_is_sent_before_an_infinity(monkeypatch):
    x = np.array([np.inf, 1.0, np.nan], "f4")
    for _ in range(2):
        out, kept, _ = coded(TopK(0.3), x, np.zeros(3, "f4"))
        assert np.isnan(out[2]) and out[0] == 0
        assert kept.tolist() == [0, 1, 0]
        monkeypatch.setattr("hpcdp.compression._kernels", lambda x: reference)
