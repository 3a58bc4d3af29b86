import gzip

import numpy as np
import pytest
from raises import raises

from hpcdp import data
from hpcdp.data import datasets
from hpcdp.errors import ConfigError, DataError


def test_a_sample_is_followed_by_its_labels():
    dataset = data.TextDataset("abcabcabcabca", context=4)
    assert (len(dataset), dataset.num_classes, dataset.sample_shape) == (3, 3, (4,))
    x, y = dataset[np.array([2, 0])]
    assert x.shape == y.shape == (2, 4) and x.dtype == y.dtype == np.int64
    assert [dataset.decode(row) for row in x] == ["cabc", "abca"]
    assert [dataset.decode(row) for row in y] == ["abca", "bcab"]
    one, following = dataset[-1]
    np.testing.assert_array_equal(one, x[0])
    np.testing.assert_array_equal(following, y[0])
    assert dataset[1:][0].shape == (2, 4)
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize(("length", "pieces"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_only_whole_pieces_count(length, pieces):
    assert len(data.TextDataset("a" * length, 4)) == pieces


def test_the_text_that_ships():
    train, test = data.load("shakespeare"), data.load("shakespeare", "test")
    assert (len(train), len(test)) == (2817, 313)
    assert train.num_classes == test.num_classes == 62
    assert train.decode(train[0][0]).startswith("First Citizen:\nBefore we proceed any further")
    whole = gzip.decompress(datasets.PATH.read_bytes()).decode()
    assert set(whole) == set(train.characters)
    last, _ = train[len(train) - 1]
    first, _ = test[0]
    assert whole.index(train.decode(last)) + train.context < whole.index(test.decode(first))


def test_what_is_wrong_is_said(monkeypatch, tmp_path):
    for context in (0, 2.5, "2", True):
        with raises(ConfigError, operation="TextDataset", where="context", expected=1):
            data.TextDataset("abc", context=context)
    with raises(ConfigError, operation="TextDataset", where="text", expected="str", got="abc"):
        data.TextDataset(b"abc", 2)
    with raises(DataError, operation="encode", expected="ab", got="c"):
        data.TextDataset("abc", 2, characters="ab")
    with raises(ConfigError, operation="data set", where="shakespeare", expected="image_size", got=28):
        data.load("shakespeare", image_size=28)
    monkeypatch.setattr(datasets, "PATH", tmp_path / "torn.gz")
    for content in (b"", gzip.compress(b"abc" * 99)[:20], b"\x1f\x8b" + bytes(30), gzip.compress(b"\xff")):
        datasets.PATH.write_bytes(content)
        with raises(DataError, operation="read text", where=tmp_path / "torn.gz"):
            data.load("shakespeare")
