import numpy as np
import pytest

from hpcdp.data import ArrayDataset, ShardedSampler
from hpcdp.errors import ConfigError
from hpcdp.train.augment import ShiftedImages, ShiftedLoader

IMAGES = np.random.default_rng(2).uniform(1, 2, size=(40, 3, 9, 7)).astype(np.float32)
DATASET = ArrayDataset(IMAGES, np.arange(40))


def shift_of(image: np.ndarray, shifted: np.ndarray, pixels: int) -> tuple[int, int]:
    """The only shift that turns ``image`` into ``shifted``, found by trying all."""
    found = []
    for down in range(-pixels, pixels + 1):
        for right in range(-pixels, pixels + 1):
            expected = np.zeros_like(image)
            rows, columns = image.shape[1:]
            for row in range(rows):
                for column in range(columns):
                    if 0 <= row - down < rows and 0 <= column - right < columns:
                        expected[:, row, column] = image[:, row - down, column - right]
            if np.array_equal(expected, shifted):
                found.append((down, right))
    assert len(found) == 1
    return found[0]


def test_every_image_is_shifted_whole_and_shifts_differ():
    x, y = ShiftedImages(DATASET, 2, seed=1)[np.arange(40)]
    shifts = {shift_of(image, shifted, 2) for image, shifted in zip(IMAGES, x, strict=True)}
    assert len(shifts) > 12
    assert {s for shift in shifts for s in shift} == {-2, -1, 0, 1, 2}
    np.testing.assert_array_equal(y, np.arange(40))


def test_a_shift_of_0_changes_nothing():
    np.testing.assert_array_equal(ShiftedImages(DATASET, 0)[np.arange(40)][0], IMAGES)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_see_what_one_reader_sees_and_epochs_differ(parts):
    def read(num_parts: int, epoch: int) -> dict[int, bytes]:
        seen = {}
        for part in range(num_parts):
            loader = ShiftedLoader(ShiftedImages(DATASET, 2, seed=5), ShardedSampler(40, 16, num_parts, part, seed=5))
            loader.set_epoch(epoch)
            for x, y in loader:
                seen |= {int(label): image.tobytes() for image, label in zip(x, y, strict=True)}
        return seen

    assert read(parts, epoch=1) == read(1, epoch=1)
    assert read(1, epoch=1) != read(1, epoch=2)


def test_a_loop_that_goes_on_sees_the_shifts_of_its_epoch():
    def make() -> ShiftedLoader:
        return ShiftedLoader(ShiftedImages(DATASET, 2, seed=5), ShardedSampler(40, 16, seed=5))

    first = make()
    first.set_epoch(2)
    images = iter(first)
    next(images)
    second = make()
    second.load_state_dict(first.state_dict())
    for (x, _), (again, _) in zip(images, second, strict=True):
        np.testing.assert_array_equal(again, x)


def test_one_sample_loses_its_axis_and_none_are_fine():
    images = ShiftedImages(DATASET, 2, seed=3)
    np.testing.assert_array_equal(images[7][0], images[np.array([7])][0][0])
    assert images[np.zeros(0, np.int64)][0].shape == (0, 3, 9, 7)


def test_a_shift_as_large_as_the_image_and_samples_that_are_no_images_are_refused():
    with pytest.raises(ConfigError, match="larger than 7 pixels"):
        ShiftedImages(DATASET, 7)
    with pytest.raises(ConfigError, match="larger than 1 pixels"):
        ShiftedImages(ArrayDataset(np.zeros((4, 9)), np.zeros(4)), 1)
