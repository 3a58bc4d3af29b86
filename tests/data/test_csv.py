import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raises import raises

from hpcdp.data import read_csv
from hpcdp.errors import ConfigError, DataError


def test_samples_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,2.5,7\n3,-4e1,8\n")
    dataset = read_csv(path, skip_rows=1)
    x, y = dataset[:]
    np.testing.assert_array_equal(x, np.array([[1, 2.5], [3, -40]], np.float32))
    assert x.dtype == np.float32 and y.dtype == np.int64 and y.tolist() == [7, 8]
    x, y = read_csv(path, label_column=1, skip_rows=1, label_dtype=np.float32)[:]
    assert y.dtype == np.float32 and y.tolist() == [2.5, -40] and x.tolist() == [[1, 7], [3, 8]]
    assert read_csv(path, label_column=0, skip_rows=1, sample_shape=(1, 2))[1][0].shape == (1, 2)
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write("1;2\n")
    assert read_csv(tmp_path / "t.csv.gz", delimiter=";")[0][1] == 2


@pytest.mark.parametrize(
    ("text", "args", "fields"),
    [
        ("", {}, {"expected": "row"}),
        ("1,2\n3\n", {}, {"expected": [2, "first"], "got": [1, 2]}),
        ("a,b\n1,2\n\n3,4,5\n", {"skip_rows": 1}, {"got": [3, 4]}),
        ("1,2\n3,0.5\n4,1.5\n", {}, {"expected": "2**53", "got": [0.5, 2]}),
        ("1,2\n3,nan\n", {}, {"got": ["nan", 2]}),
        ("a,b\n1,2\n\n0.5,4\n", {"skip_rows": 1, "label_column": 0}, {"got": [0.5, 4, 1]}),
        ("a,b\n1,2\n3,4\n5,0.5\n", {"skip_rows": 1, "num_parts": 2, "part_index": 1}, {"got": [0.5, 4, 2]}),
        (f"1,{2**53 - 1}\n1,{2**53 + 1}\n", {}, {"got": [9007199254740992, 2]}),
        ("1,-99999999999999999999\n", {}, {"got": [1, 2, "-1e+20"]}),
        ("1,2\n3,\n", {}, {"expected": 2, "got": [2, "number"]}),
        ("1,2\n3,four\n", {}, {"got": ["four", 2]}),
        ("a,b\n1,2\n\n3,x\n", {"skip_rows": 1}, {"got": ["x", 4, 2]}),
        ("1,2\n3,1_0\n", {}, {"got": ["1_0", 2]}),
        ("1,2\n3," + "x" * 99 + "\n", {}, {"expected": 2, "got": [2, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"]}),
        ("1,2\n", {"label_column": 2}, {"expected": ["label_column", -2, 1, 2], "got": 2}),
        ("1\n2\n", {}, {"expected": "column", "got": 1}),
        ("a,b,c,d\n1,2,3,4\n", {}, {"expected": 1, "got": ["a", "b", "c", 1]}),
        ("about\na,b\n1,2\n", {"skip_rows": 1}, {"got": ["a", "b"], "remedy": "skip_rows=2"}),
        ("a,b\n1,2\n", {"num_parts": 2}, {"remedy": "skip_rows=1"}),
        ("\ufeffa,b\n1,2\n", {}, {"got": ["a", "b"], "remedy": "skip_rows=1"}),
        ("1;2\n", {}, {"got": "1;2"}),
        ("1,2\n1e39,2\n", {}, {"expected": ["float32", "3.4e38"], "got": ["'1e39'", 2, 1]}),
        ("1,inf,2\n1,-1e400,2\n", {}, {"got": ["'-1e400'", 2]}),
        ("1,3e39\n", {"label_dtype": np.float32}, {"got": ["'3e39'", 1, 2]}),
        ("about\n1,2\n1e39,2\n", {"skip_rows": 1, "num_parts": 1}, {"got": ["'1e39'", 3, 1]}),
        ("1e39,2\n", {"num_parts": 2}, {"got": ["'1e39'", 1]}),
        ("1,1e39\n", {}, {"expected": "2**53"}),
        ("1,2,3\n", {"sample_shape": (3,)}, {"expected": [3, (3,)], "got": 2}),
    ],
)
def test_faults_name_the_file(tmp_path: Path, text: str, args: dict, fields: dict[str, object]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with raises(DataError, operation="read csv", where=path, **fields):
        read_csv(path, **args)


def test_what_is_written_as_infinite_is_so(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("inf,-Infinity,3.4028235e38,nan,1\n")
    x = read_csv(tmp_path / "t.csv").x
    np.testing.assert_array_equal(x, np.array([[np.inf, -np.inf, 3.4028235e38, np.nan]], np.float32))


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("skip_rows", [0, 1])
def test_a_byte_order_mark_is_no_part_of_the_first_field(tmp_path: Path, num_parts: int, skip_rows: int) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbf" + b"a,b\n" * skip_rows + b"1,2\n3,4\n")
    parts = [read_csv(path, skip_rows=skip_rows, num_parts=num_parts, part_index=i) for i in range(num_parts)]
    assert [label for part in parts for label in part.y.tolist()] == [2, 4]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.int64, np.float32, "float32"])
def test_labels_have_one_dtype_on_all_parts(tmp_path: Path, num_parts: int, dtype: type) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"1,2\n3,{4 if dtype is np.int64 else 0.5}\n")
    for i in range(num_parts):
        assert read_csv(path, num_parts=num_parts, part_index=i, label_dtype=dtype).y.dtype == dtype


def test_large_labels_are_exact(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(f"1,{2**53 - 1}\n1,{1 - 2**53}\n")
    assert read_csv(tmp_path / "table.csv").y.tolist() == [2**53 - 1, 1 - 2**53]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"skip_rows": -1}, {"where": "skip_rows", "expected": 0, "got": -1}),
        ({"skip_rows": 1.5}, {"where": "skip_rows", "expected": 0, "got": 1.5}),
        ({"label_dtype": np.int32}, {"where": "label_dtype", "expected": ["int64", "float32"], "got": "int32"}),
        ({"label_dtype": "word"}, {"where": "label_dtype", "expected": ["int64", "float32"], "got": "word"}),
    ],
)
def test_arguments_that_are_none(tmp_path: Path, args: dict, fields: dict[str, object]) -> None:
    (tmp_path / "table.csv").write_text("1,2\n")
    with raises(ConfigError, operation="read csv", **fields):
        read_csv(tmp_path / "table.csv", **args)


def test_a_label_by_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with raises(ConfigError, operation="read csv", where="label_column", got="b"):
        read_csv(tmp_path / "table.csv", label_column="b", skip_rows=1)


def test_the_number_of_a_column_may_be_one_of_numpys(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("1,2\n")
    assert read_csv(tmp_path / "table.csv", label_column=np.int64(0)).y.tolist() == [1]
    with raises(ConfigError, operation="read csv", where="label_column", got=True):
        read_csv(tmp_path / "table.csv", label_column=True)


def test_a_row_ends_where_its_line_ends_in_parts_too(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("1\x1c,2\n3,4\n5,0.5\n")
    assert read_csv(tmp_path / "table.csv", num_parts=2).y.tolist() == [2, 4]
    with raises(DataError, operation="read csv", where=tmp_path / "table.csv", got=[0.5, 3, 2]):
        read_csv(tmp_path / "table.csv", num_parts=2, part_index=1)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with raises(DataError, operation="read csv", where=tmp_path / "missing.csv"):
        read_csv(tmp_path / "missing.csv")
    (tmp_path / "x.csv").write_bytes(bytes(range(256)))
    with raises(DataError, operation="read csv", where=tmp_path / "x.csv"):
        read_csv(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_bytes("1,2\n3,4\n\u00fc5,6\n".encode("latin-1"))
    with raises(DataError, operation="read csv", where=tmp_path / "x.csv", got=["'\ufffd5'", 3, 1]):
        read_csv(tmp_path / "x.csv")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"1,2\n" * 100)[:20])
    with raises(DataError, operation="read csv", where=tmp_path / "x.csv.gz"):
        read_csv(tmp_path / "x.csv.gz")


@pytest.mark.parametrize("rows", [1, 2, 5, 23])
@pytest.mark.parametrize("num_parts", [2, 3, 7])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_parts_together_are_the_table(tmp_path: Path, rows: int, num_parts: int, end: str) -> None:
    path = tmp_path / "table.csv"
    table = np.random.default_rng(rows).integers(0, 10**6, (rows, 3))
    lines = [",".join(map(str, row)) for row in table]
    path.write_text("name,of,columns\n" + (end or "\n").join(lines) + end, newline="")
    parts = [
        read_csv(path, skip_rows=1, num_parts=num_parts, part_index=i, sample_shape=(2,)) for i in range(num_parts)
    ]
    np.testing.assert_array_equal(np.concatenate([part.x for part in parts]), table[:, :2])
    np.testing.assert_array_equal(np.concatenate([part.y for part in parts]), table[:, 2])


@pytest.mark.parametrize("packed", [bz2, gzip, lzma])
def test_a_damaged_compressed_file_is_told_as_such(tmp_path: Path, packed) -> None:
    path = tmp_path / f"table.{ {bz2: 'bz2', gzip: 'gz', lzma: 'xz'}[packed] }"
    whole = packed.compress("".join(f"{i},{i * i % 97},{i % 3}\n" for i in range(2000)).encode())
    path.write_bytes(whole)
    assert len(read_csv(path)) == 2000
    middle = len(whole) // 2
    for damaged in (whole[:middle], whole[:middle] + b"\0" * 20 + whole[middle + 20 :], b"1,2,0\n"):
        path.write_bytes(damaged)
        with raises(DataError, operation="read csv", where=path):
            read_csv(path)


def test_parts_that_there_are_not(tmp_path: Path) -> None:
    path = tmp_path / "table.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("1,2\n3,4\n")
    with raises(ConfigError, operation="read csv", where=path, expected="num_parts=1", got=2):
        read_csv(path, num_parts=2, part_index=1)
    path = tmp_path / "table.csv"
    path.write_text("1,2\n3,x\n")
    with raises(ConfigError, operation="read csv", where="part_index", expected=[0, 1], got=2):
        read_csv(path, num_parts=2, part_index=2)
    assert read_csv(path, num_parts=2, part_index=0).y.tolist() == [2]
    with raises(DataError, operation="read csv", where=path, got=["x", 2]):
        read_csv(path, num_parts=2, part_index=1)


@pytest.mark.parametrize("skip_rows", [0, 1])
def test_parts_of_a_file_whose_lines_end_otherwise_are_refused_on_all(tmp_path: Path, skip_rows: int) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"0,0,0\r1,0,0\r2,1,1\r3,2,0\r4,3,1\r")
    assert len(read_csv(path, skip_rows=skip_rows)) == 5 - skip_rows
    for part in range(3):
        with raises(DataError, operation="read csv", where=path, remedy="num_parts=1"):
            read_csv(path, skip_rows=skip_rows, num_parts=3, part_index=part)


def test_parts_know_the_columns_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1,2,0\n")
    empty = read_csv(path, num_parts=3, part_index=2)
    assert empty.x.shape == (0, 2) and empty.y.shape == (0,)
    path.write_text("1,2,0\n" * 10 + "1,2,3,0\n" * 10)
    with raises(DataError, operation="read csv", where=path, expected=3, got=[4, 11]):
        read_csv(path, num_parts=2, part_index=1)
    path.write_text("")
    with raises(DataError, operation="read csv", where=path, expected="row"):
        read_csv(path, num_parts=2, part_index=1)


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ({"num_parts": "2"}, {"where": "num_parts", "expected": 1, "got": "'2'"}),
        ({"part_index": -1}, {"where": "part_index", "expected": 0, "got": -1}),
        ({"delimiter": ";;"}, {"where": "delimiter", "got": "';;'"}),
        ({"delimiter": "\n"}, {"where": "delimiter", "got": "'\\n'"}),
        ({"sample_shape": 5}, {"where": "sample_shape", "expected": "tuple", "got": 5}),
        ({"sample_shape": (2, 1.0)}, {"where": "sample_shape", "expected": 1, "got": 1.0}),
        ({"sample_shape": ("a",)}, {"where": "sample_shape", "expected": 1, "got": "a"}),
        ({"sample_shape": (-1, 1)}, {"where": "sample_shape", "expected": 1, "got": -1}),
    ],
)
def test_arguments_that_cannot_be(wrong: dict[str, Any], fields: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1,2,0\n")
    with raises(ConfigError, operation="read csv", **fields):
        read_csv(path, **wrong)
