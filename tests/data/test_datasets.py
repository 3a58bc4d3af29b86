import numpy as np
import pytest
from raises import raises

from hpcdp.data import ArrayDataset, ImageDataset
from hpcdp.errors import ConfigError, DataError


def test_arrays_by_number_slice_and_array() -> None:
    x, y = np.arange(12).reshape(4, 3), np.array([5, 6, 7, 8])
    dataset = ArrayDataset(x, y)
    assert len(dataset) == 4 and dataset.sample_shape == (3,)
    np.testing.assert_array_equal(dataset[2][0], [6, 7, 8])
    assert dataset[2][1] == 7
    picked = dataset[np.array([3, 0, 3])]
    np.testing.assert_array_equal(picked[0], x[[3, 0, 3]])
    np.testing.assert_array_equal(picked[1], [8, 5, 8])
    assert len(dataset[np.array([], int)][0]) == 0
    with pytest.raises(IndexError):
        dataset[np.array([4])]
    with raises(DataError, operation="ArrayDataset", got=[(4, 3), (3,)]):
        ArrayDataset(x, y[:3])
    with pytest.raises(DataError):
        ArrayDataset(np.array(1), np.array(1))


def test_classes_are_counted_where_labels_are_classes() -> None:
    x = np.zeros((3, 1))
    assert ArrayDataset(x, np.array([0, 4, 1], np.uint8)).num_classes == 5
    for labels in (np.array([0.5, 1, 2]), np.array([-1, 0, 1]), np.zeros((3, 2), int)):
        assert ArrayDataset(x, labels).num_classes is None
    assert ArrayDataset(x[:0], np.zeros(0, int)).num_classes is None
    assert ImageDataset(np.zeros((2, 1, 4, 4), np.uint8), np.array([2, 0])).num_classes == 3


def test_images_become_float32_when_read() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 6, 6), np.uint8)
    labels = np.arange(5, dtype=np.uint8)
    dataset = ImageDataset(images, labels)
    x, y = dataset[np.array([4, 1])]
    assert x.dtype == np.float32 and y.dtype == np.int64 and y.tolist() == [4, 1]
    np.testing.assert_allclose(x, images[[4, 1]] / 255, rtol=1e-6)
    assert x.max() <= 1.0
    one, label = dataset[3]
    assert one.shape == (3, 6, 6) and label == 3
    large = ImageDataset(images, labels, 8)
    np.testing.assert_array_equal(large[1:3][0][:, :, 1:7, 1:7], dataset[1:3][0])
    assert large.sample_shape == (3, 8, 8)
    with raises(ConfigError, operation="resize", where="image_size", expected=6, got=5):
        ImageDataset(images, labels, 5)
    with raises(DataError, operation="ImageDataset"):
        ImageDataset(images, labels[:4])


@pytest.mark.parametrize(
    ("images", "labels", "got"),
    [("f4", "i8", "float32 and int64"), ("i2", "i8", "int16 and int64"), ("u1", "f4", "uint8 and float32")],
)
def test_images_and_labels_that_would_be_cut_or_scaled_wrongly_are_refused(images: str, labels: str, got: str) -> None:
    with raises(DataError, operation="ImageDataset", expected="uint8", got=got):
        ImageDataset(np.ones((2, 1, 4, 4), images), np.ones(2, labels))
    assert ImageDataset(np.ones((2, 1, 4, 4), np.uint8), [0, 1]).num_classes == 2
