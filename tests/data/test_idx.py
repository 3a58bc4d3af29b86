import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp.data import read_idx
from hpcdp.errors import DataError

CODES = {0x08: "u1", 0x09: "i1", 0x0B: "i2", 0x0C: "i4", 0x0D: "f4", 0x0E: "f8"}


def encode(values: np.ndarray, code: int) -> bytes:
    header = bytes([0, 0, code, values.ndim]) + b"".join(struct.pack(">I", length) for length in values.shape)
    return header + values.astype(">" + CODES[code]).tobytes()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_every_type_plain_and_compressed(tmp_path: Path, code: int, compress: bool) -> None:
    values = (np.random.default_rng(code).random((5, 3, 4)) * 200 - 70).astype(CODES[code])
    data = encode(values, code)
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(data) if compress else data)
    result = read_idx(path)
    assert result.dtype == np.dtype(CODES[code]) and result.dtype.isnative and result.flags.writeable
    np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize("shape", [(0,), (7,), (0, 28, 28), (1, 1, 1, 1, 2)])
def test_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    (tmp_path / "x").write_bytes(encode(values, 8))
    np.testing.assert_array_equal(read_idx(tmp_path / "x"), values)


GOOD = encode(np.arange(12, dtype=np.int16).reshape(3, 4), 0x0B)
ABSURD = bytes([0, 0, 0x0E, 4]) + b"\xff" * 16
FAULTS = {
    "empty": (b"", {"got": "empty"}),
    "wrong magic": (b"\1" + GOOD[1:], {"expected": "00 00", "got": "01 00 0b 02"}),
    "wrong type": (GOOD[:2] + b"\x0a" + GOOD[3:], {"got": "00 00 0a 02"}),
    "no dimension": (GOOD[:3] + b"\0" + GOOD[4:], {"expected": [1, 32], "got": "00 00 0b 00"}),
    "too many dimensions": (GOOD[:3] + b"\xff" + GOOD[4:], {"got": "00 00 0b ff"}),
    "short header": (GOOD[:9], {"expected": 2, "got": "header"}),
    "truncated": (GOOD[:-1], {"expected": 36}),
    "trailing": (GOOD + b"\0", {"expected": 36}),
    "absurd": (ABSURD + bytes(100), {"expected": "float64"}),
    "absurd but empty": (bytes([0, 0, 8, 9]) + b"\xff" * 32 + bytes(4), {"expected": "address"}),
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_file_and_what_was_expected(tmp_path: Path, fault: str, compress: bool) -> None:
    data, fields = FAULTS[fault]
    path = tmp_path / "labels-idx1"
    path.write_bytes(gzip.compress(data) if compress else data)
    if compress and fault in ("truncated", "trailing"):
        fields = {"expected": 24}
    with raises(DataError, operation="read idx", where=path, **fields) as caught:
        read_idx(path)
    assert "labels-idx1" in str(caught.value) and "expected" in str(caught.value)


def test_absurd_dimensions_allocate_nothing(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("allocated")

    for data in (ABSURD + bytes(100), gzip.compress(ABSURD + bytes(100))):
        (tmp_path / "x").write_bytes(data)
        monkeypatch.setattr(np, "empty", refuse)
        with pytest.raises(DataError):
            read_idx(tmp_path / "x")


def test_damaged_gzip(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    data = gzip.compress(encode(values, 8))
    path = tmp_path / "x.gz"
    flipped = bytearray(data)
    flipped[2500] ^= 0x10
    for damaged in (data[:-9], data[:1000], bytes(flipped), data[:5], data + b"garbage"):
        path.write_bytes(damaged)
        with raises(DataError, operation="read idx", where=path):
            read_idx(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with raises(DataError, operation="read idx", where=tmp_path / "nothing"):
        read_idx(tmp_path / "nothing")
    with raises(DataError, operation="read idx", where=tmp_path):
        read_idx(tmp_path)


@given(data=st.binary(max_size=60), where=st.integers(0, len(GOOD) - 1), compress=st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_input_does_worse_than_an_error(tmp_path_factory, data: bytes, where: int, compress: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    for content in (data, GOOD[:where] + data[:1] + GOOD[where + 1 :]):
        packed = gzip.compress(content) if compress else content
        path.write_bytes(packed[:where] + data[:1] + packed[where + 1 :] if len(data) % 2 else packed)
        try:
            result = read_idx(path)
        except DataError:
            continue
        assert result.ndim >= 1
