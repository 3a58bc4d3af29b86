import gzip
import hashlib
import io
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from raises import raises

from hpcdp import data
from hpcdp.data import catalog
from hpcdp.errors import ConfigError, DataError


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch) -> tuple[Path, np.ndarray, np.ndarray]:
    """A set of the same form put by hand into the folder, with its own checksums and addresses that do not answer."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (6, 28, 28), np.uint8), rng.integers(0, 10, 6, np.uint8)
    files = {"train-images-idx3-ubyte.gz": idx(images), "train-labels-idx1-ubyte.gz": idx(labels)}
    (tmp_path / "mnist").mkdir()
    sums = {}
    for name, content in files.items():
        packed = gzip.compress(content)
        (tmp_path / "mnist" / name).write_bytes(packed)
        sums[name] = hashlib.md5(packed).hexdigest()
    monkeypatch.setitem(catalog._MD5, "mnist", {**catalog._MD5["mnist"], **sums})
    monkeypatch.setattr(catalog, "_ADDRESSES", {name: ("http://127.0.0.1:9/",) for name in catalog._ADDRESSES})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path, images, labels


def test_unknown_names_list_the_valid_ones() -> None:
    with raises(ConfigError, operation="data set", expected=["cifar10", "fashion_mnist"], got="minst"):
        data.load("minst")
    with raises(ConfigError, operation="data set", where="digits", got="valid"):
        data.load("digits", "valid")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_files_put_by_hand_are_used(small_mnist, monkeypatch, how: str) -> None:
    root, images, labels = small_mnist
    monkeypatch.setenv("HPCDP_DATA_DIR", str(root) if how == "environment" else "/nowhere")
    dataset = data.load("mnist", "train", root=root if how == "argument" else None)
    x, y = dataset[:]
    assert x.shape == (6, 1, 28, 28) and x.dtype == np.float32 and y.dtype == np.int64
    np.testing.assert_allclose(x[:, 0], images / 255, rtol=1e-6)
    np.testing.assert_array_equal(y, labels)
    assert dataset.num_classes == data.load("digits").num_classes == 10
    assert data.load("mnist", "train", root=root, image_size=32).sample_shape == (1, 32, 32)


def test_unpacked_files_are_used_too(small_mnist) -> None:
    root, images, _ = small_mnist
    for path in list((root / "mnist").glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(data.load("mnist", root=root)) == len(images)


def test_missing_files_say_where_they_belong(small_mnist) -> None:
    root = small_mnist[0]
    with raises(DataError, operation="download", where="t10k-images-idx3-ubyte.gz") as caught:
        data.load("mnist", "test", root=root)
    assert str(root / "mnist") in str(caught.value) and "\n" not in str(caught.value)
    with raises(DataError, operation="download", where="cifar-10-binary.tar.gz"):
        data.load("cifar10", root=root)


def test_other_content_than_published_is_refused(small_mnist) -> None:
    root, _, labels = small_mnist
    path = root / "mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(labels[::-1].copy())))
    with raises(DataError, operation="checksum", where=path, expected="MD5"):
        data.load("mnist", root=root)
    path.unlink()
    path.with_suffix("").write_bytes(idx(labels[:5]))
    with raises(DataError, operation="read idx", where=root / "mnist", expected=6, got=5):
        data.load("mnist", root=root)
    path.with_suffix("").write_bytes(idx(labels[:, None]))
    with raises(
        DataError,
        operation="read idx",
        where=root / "mnist/train-labels-idx1-ubyte",
        expected=["1-D", "uint8"],
        got=["2-D", "uint8"],
    ):
        data.load("mnist", root=root)


@pytest.mark.parametrize(
    ("count", "label", "fields"),
    [
        (0, 0, {"got": (0, 28, 28)}),
        (3, 10, {"expected": [0, 9], "got": 10}),
    ],
)
def test_a_pair_that_cannot_be_trained_on(tmp_path: Path, count: int, label: int, fields: dict[str, object]) -> None:
    (tmp_path / "mnist").mkdir()
    for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
        (tmp_path / "mnist" / f"train-{kind}-ubyte").write_bytes(idx(np.full(shape, label, np.uint8)))
    with raises(DataError, operation="read idx", **fields):
        data.load("mnist", "train", root=tmp_path)


def test_cifar10_is_unpacked_once(tmp_path: Path, monkeypatch) -> None:
    record = {
        name: bytes([i]) + bytes([40 * i]) * 3072 for i, name in enumerate(catalog.CIFAR10_TRAIN + catalog.CIFAR10_TEST)
    }
    folder = tmp_path / "cifar10"
    folder.mkdir()
    with tarfile.open(folder / catalog.CIFAR10_ARCHIVE, "w:gz") as tar:
        for name, content in record.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with raises(DataError, operation="checksum", where=tar.name):
        data.load("cifar10", root=tmp_path)
    md5 = hashlib.md5((folder / catalog.CIFAR10_ARCHIVE).read_bytes()).hexdigest()
    monkeypatch.setitem(catalog._MD5, "cifar10", {catalog.CIFAR10_ARCHIVE: md5})
    x, y = data.load("cifar10", "train", root=tmp_path)[:]
    assert x.shape == (5, 3, 32, 32) and y.tolist() == [0, 1, 2, 3, 4]
    (folder / catalog.CIFAR10_ARCHIVE).unlink()
    x, y = data.load("cifar10", "test", root=tmp_path)[:]
    assert y.tolist() == [5] and np.allclose(x, 200 / 255)


def test_a_cifar10_batch_that_lacks_records_or_a_file_is_named(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for i, name in enumerate(catalog.CIFAR10_TRAIN):
        (folder / name).write_bytes((bytes([i]) + bytes(3072)) * (3 if i == 1 else 10))
    with raises(
        DataError,
        operation="read CIFAR-10",
        where=folder / "data_batch_2.bin",
        expected=[30730, "data_batch_1.bin"],
        got=9219,
    ):
        data.load("cifar10", "train", root=tmp_path)
    (folder / "data_batch_4.bin").unlink()
    monkeypatch.setattr(catalog, "_ADDRESSES", {"cifar10": ("http://127.0.0.1:9/",)})
    with raises(DataError, operation="download", where="cifar-10-binary.tar.gz", expected="data_batch_4.bin") as caught:
        data.load("cifar10", "train", root=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch) -> None:
    for variable in ("HPCDP_DATA_DIR", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    with raises(ConfigError, operation="HPCDP_DATA_DIR"):
        data.load("mnist")
