"""Files of arrays: written whole or not at all, and nothing else is read."""

import builtins
import errno
import gc
import io
import os
import struct
import threading
import time
import zipfile

import numpy as np
import pytest
from raises import raises

from hpcdp.core import files
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import DataError

FIELDS = {"steps": int, "name": str}


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "file.npz"
    arrays = {"a/b": np.arange(6.0).reshape(2, 3), "none": np.zeros((0, 2), "f2")}
    arrays["brain"] = np.array([[1.5], [np.inf]], dtype_of("bfloat16"))
    files.write("save", path, "header", {"steps": 3, "name": "x", "more": None}, arrays)
    header, found = files.read("load", path, "header", FIELDS, "save()")
    assert header == {"steps": 3, "name": "x", "more": None}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    assert list(tmp_path.iterdir()) == [path]


def test_threads_read_at_once(tmp_path):
    """What CPython's parser counts is shared by the threads; collections amid it let another thread in."""
    path = tmp_path / "file.npz"
    files.write("save", path, "header", {"steps": 1, "name": "x"}, {"a": np.zeros((2, 3)), "b": np.zeros(4)})
    failures = []

    def read():
        try:
            for _ in range(50):
                files.read("load", path, "header", FIELDS, "save()")
        except BaseException as error:
            failures.append(error)

    def let_others_in(_phase, _info):
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(let_others_in)
    gc.set_threshold(5)
    try:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_in)
    assert not failures


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.npz"
    files.write("save", path, "header", {"steps": 1}, {})
    before = path.read_bytes()
    path.with_name("file.npz.part").mkdir()
    with raises(DataError, operation="save", where=path):
        files.write("save", path, "header", {"steps": 2}, {})
    assert path.read_bytes() == before


@pytest.mark.parametrize("header", [{"steps": "3", "name": "x"}, {"steps": 3}, [3], 3, {"steps": True, "name": "x"}])
def test_another_header_is_refused(header, tmp_path):
    path = tmp_path / "file.npz"
    files.write("save", path, "header", header, {})
    with raises(DataError, operation="load", where=path, expected="save()"):
        files.read("load", path, "header", FIELDS, "save()")


def test_objects_are_not_unpickled(tmp_path):
    path = tmp_path / "file.npz"
    with open(path, "wb") as file:
        np.savez(file, header=np.array('{"steps": 1, "name": "x"}'), bad=np.array([{}], object))
    with raises(DataError, operation="load", where=path):
        files.read("load", path, "header", FIELDS, "save()")


def test_what_is_wrong_is_said_without_advice_of_others(tmp_path):
    for name, content in (("junk", b"junk" * 100), ("empty", b""), ("array.npy", None)):
        path = tmp_path / name
        if content is None:
            np.save(path, np.zeros(3))
        else:
            path.write_bytes(content)
        with raises(DataError, operation="load", where=path, expected="save()"):
            files.read("load", path, "header", FIELDS, "save()")
    with raises(DataError, operation="load", where=tmp_path / "none"):
        files.read("load", tmp_path / "none", "header", FIELDS, "save()")
    os.mkfifo(tmp_path / "pipe")
    with raises(DataError, operation="load", where=tmp_path / "pipe"):
        files.read("load", tmp_path / "pipe", "header", FIELDS, "save()")


@pytest.mark.parametrize(
    ("descr", "shape", "got"),
    [
        ("'<f8'", "(10**12,)", "a damaged NumPy header of 'a.npy'"),
        ("'<f8'", "(" * 5000 + ")" * 5000, "a damaged NumPy header of 'a.npy'"),
        ("'<f8'", "(" + "9" * 5000 + ",)", "a damaged NumPy header of 'a.npy'"),
        ("'<q99'", "(3,)", "a damaged NumPy header of 'a.npy'"),
        ("'|O'", "(3,)", "'a.npy' of shape (3,) and dtype object"),
        ("'<f8'", "(-1, -3)", "'a.npy' of shape (-1, -3) and dtype float64"),
        ("'<f8'", "(10000000,)", "24 bytes for 'a.npy' of shape (10000000,) and dtype float64"),
        (None, None, "a damaged NumPy header of 'a.npy'"),
    ],
)
def test_a_crafted_array_is_named(descr, shape, got, tmp_path):
    path = tmp_path / "file.npz"
    files.write("save", path, "header", {"steps": 1, "name": "x"}, {})
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    array = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(24) if descr else b"anything"
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("a.npy", array)
    with pytest.raises(DataError) as caught:
        files.read("load", path, "header", FIELDS, "save()")
    assert caught.value.got == got


def test_what_the_system_refuses_is_said_as_it_says_it(tmp_path, monkeypatch):
    with raises(DataError, operation="load", where=tmp_path, expected="save()"):
        files.read("load", tmp_path, "header", FIELDS, "save()")
    path = tmp_path / "file.npz"
    files.write("save", path, "header", {"steps": 1, "name": "x"}, {})

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:  # no longer: pytest itself opens files when a test has ended
        for module in (builtins, io):
            patch.setattr(module, "open", refused)
        with raises(DataError, operation="load", where=path, expected="save()"):
            files.read("load", path, "header", FIELDS, "save()")


def npy(header, values=b""):
    """The bytes of an array file whose header says what it likes."""
    text = header.encode("latin1") + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + values


def described(shape, descr="'<f8'"):
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}", bytes(64))


@pytest.mark.parametrize(
    "member",
    [
        described((10**12,)), described((10**7,)), described((3,)), described((2**40, 2**40)), described((-8,)),
        described("(8,)", "'|O'"), described("(8,)", "'<f8'*1000"), described("(8.0,)"), described(10**4000 * 99),
        npy("(" * 5000), npy("-" * 5000 + "1"), npy("[" * 90 + "1" * 5000), npy("{'descr': '<f8'}"), npy("\xff\0'"),
        b"x",
    ],
    ids=range(15),
)  # fmt: skip
def test_an_array_that_says_what_is_not_so_is_one_line(member, tmp_path):
    path = tmp_path / "file.npz"
    files.write("save", path, "header", {"steps": 1, "name": "x"}, {})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("a.npy", member)
    require_refused(path)


def test_an_archive_that_grows_when_it_is_read_is_one_line(tmp_path):
    path = tmp_path / "file.npz"
    np.savez_compressed(path, header=np.array('{"steps": 1, "name": "x"}'), x=np.zeros(10**6))
    assert "compressed" in require_refused(path)
    files.write("save", path, "header", {"steps": 1, "name": "x"}, {"x": np.zeros(100)})
    with zipfile.ZipFile(path, "a") as file:
        file.filelist += file.filelist[-1:] * 20  # one array's bytes under many entries of the directory
        file.writestr("y", b"")
    assert "arrays of more bytes than" in require_refused(path)


def require_refused(path):
    with raises(DataError, operation="load", where=path, expected="save()") as info:
        files.read("load", path, "header", FIELDS, "save()")
    assert len(str(info.value).splitlines()) == 1
    return str(info.value)


@pytest.mark.parametrize(("place", "value"), [(6, 200), (8, 0x01), (8, 0x20), (8, 0x40), (10, 8), (10, 99)])
def test_bytes_that_are_damaged_are_no_error_of_zipfile(tmp_path, place, value):
    path = tmp_path / "file.npz"
    files.write("save", path, "header", {"steps": 1, "name": "x"}, {"x": np.arange(5)})
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"PK\x01\x02") + place] = value
    path.write_bytes(damaged)
    with raises(DataError, operation="load", where=path, expected="save()"):
        files.read("load", path, "header", FIELDS, "save()")
