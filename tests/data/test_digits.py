import h5py
import numpy as np
import pytest
from raises import raises

from hpcdp import data
from hpcdp.data import catalog
from hpcdp.errors import ConfigError, DataError


def test_the_split_is_stratified_fixed_and_whole() -> None:
    train, test = data.load("digits", "train"), data.load("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.sample_shape == (1, 8, 8)
    (x, y), (x_test, y_test) = train[:], test[:]
    assert x.dtype == np.float32 and y.dtype == np.int64
    assert x.min() == 0.0 and x.max() == 1.0 and (x * 16 == np.round(x * 16)).all()
    for digit in range(10):
        share = (y_test == digit).sum() / ((y == digit).sum() + (y_test == digit).sum())
        assert 0.18 < share < 0.22
    assert not {image.tobytes() for image in x} & {image.tobytes() for image in x_test}


def test_the_pictures_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed: its copy is not compared")
    source = datasets.load_digits()
    with h5py.File(catalog.PATH, "r") as file:
        np.testing.assert_array_equal(file["images"][:], source.images)
        np.testing.assert_array_equal(file["labels"][:], source.target)


def test_the_file_says_where_it_comes_from() -> None:
    with h5py.File(catalog.PATH, "r") as file:
        assert "10.24432/C50P49" in file.attrs["citation"] and "Alpaydin" in file.attrs["citation"]
        assert "CC BY 4.0" in file.attrs["licence"]
        assert all(file[name].chunks is None for name in ("images", "labels", "split"))
    notice = (catalog.PATH.parent / "LICENSE-digits.txt").read_text()
    assert "10.24432/C50P49" in notice and "CC BY 4.0" in notice


def test_the_labels_fit_the_pictures() -> None:
    """A nearest-centroid classifier is right for nine in ten, which labels in a wrong order would not allow."""
    (x, y), (x_test, y_test) = data.load("digits", "train")[:], data.load("digits", "test")[:]
    centroids = np.stack([x[y == digit].mean(axis=0).ravel() for digit in range(10)])
    distance = ((x_test.reshape(-1, 1, 64) - centroids) ** 2).sum(axis=2)
    assert (distance.argmin(axis=1) == y_test).mean() > 0.85


def test_enlarged_for_the_documents_lenet() -> None:
    small, large = data.load("digits", "test"), data.load("digits", "test", image_size=28)
    x, y = large[np.array([5, 3])]
    assert x.shape == (2, 1, 28, 28) and x.dtype == np.float32 and x.max() <= 1.0
    np.testing.assert_array_equal(y, small[np.array([5, 3])][1])
    assert not x[..., :2, :].any() and not x[..., -2:].any()
    with raises(ConfigError, operation="resize", where="image_size", expected=8, got=7):
        data.load("digits", image_size=7)


def test_damage_is_named(tmp_path, monkeypatch) -> None:
    damaged = tmp_path / "digits.h5"
    damaged.write_bytes(catalog.PATH.read_bytes()[:5000])
    monkeypatch.setattr(catalog, "PATH", damaged)
    with raises(DataError, operation="read HDF5", where=damaged):
        data.load("digits")
