import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
from raises import raises

from hpcdp.data import ArrayDataset, Augmentation, DataLoader, RandomCrop, RandomFlip, ShardedSampler
from hpcdp.errors import ConfigError

IMAGES = np.random.default_rng(2).uniform(1, 2, size=(40, 3, 9, 7)).astype(np.float32)
DATASET = ArrayDataset(IMAGES, np.arange(40))
ALL = np.arange(40)


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


def test_crops_with_padding_shift_an_image_whole():
    x = Augmentation(RandomCrop(padding=2), seed=1)(IMAGES, ALL, 0)
    shifts = {shift_of(image, shifted, 2) for image, shifted in zip(IMAGES, x, strict=True)}
    assert len(shifts) > 12
    assert {s for shift in shifts for s in shift} == {-2, -1, 0, 1, 2}


def test_crops_are_windows_of_a_size():
    x = Augmentation(RandomCrop(size=4), seed=1)(IMAGES, ALL, 0)
    assert x.shape == (40, 3, 4, 4) and x.dtype == np.float32
    places = set()
    for image, window in zip(IMAGES, x, strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(image, (3, 4, 4))[0]
        (place,) = np.argwhere((windows == window).all(axis=(2, 3, 4))).tolist()
        places.add(tuple(place))
    assert {down for down, _ in places} == set(range(6)) and {right for _, right in places} == set(range(4))


@pytest.mark.parametrize("axis", [-1, -2])
def test_about_half_of_the_images_are_flipped(axis):
    x = Augmentation(RandomFlip(axis), seed=1)(IMAGES, ALL, 0)
    flipped = [np.array_equal(after, np.flip(image, axis)) for image, after in zip(IMAGES, x, strict=True)]
    assert 10 < sum(flipped) < 30
    for image, after, was in zip(IMAGES, x, flipped, strict=True):
        assert was or np.array_equal(after, image)


def test_functions_of_ones_own_come_in_their_order():
    x = Augmentation(lambda sample, rng: sample + 1, lambda sample, rng: sample * 2)(IMAGES, ALL, 0)
    np.testing.assert_array_equal(x, (IMAGES + 1) * 2)
    np.testing.assert_array_equal(Augmentation()(IMAGES, ALL, 0), IMAGES)


def test_functions_of_ones_own_draw_each_for_itself():
    drawn = []

    def draw(sample, rng):
        drawn.append(rng.random())
        return sample

    Augmentation(draw, RandomFlip(), draw)(IMAGES, ALL, 0)
    assert len(set(drawn)) == 80


def test_what_a_sample_gets_does_not_depend_on_the_others_of_its_batch():
    """Also where samples have other shapes on their way, and far from each other."""

    def narrower(image, rng):
        return image[:, :, : rng.integers(5, 8)]

    for changes in ((narrower, RandomCrop(size=4), RandomFlip()), (RandomCrop(padding=2), RandomFlip())):
        augment = Augmentation(*changes, seed=3)
        numbers = ALL * 1009
        whole = augment(IMAGES, numbers, 1)
        for rows in ([0], [7], [3, 39, 11], list(range(40))[::-1]):
            np.testing.assert_array_equal(augment(IMAGES[rows], numbers[rows], 1), whole[rows])
    assert (
        len({image.tobytes() for image in Augmentation(RandomCrop(padding=4))(IMAGES[:1].repeat(40, 0), ALL, 0)}) > 20
    )


@pytest.mark.parametrize("change", [RandomCrop(padding=1), RandomCrop(4), RandomFlip()])
def test_an_image_alone_is_changed_by_a_generator(change):
    rng, seen = np.random.default_rng(0), set()
    for _ in range(40):
        image = change(IMAGES[0], rng)
        assert image.shape == ((3, 4, 4) if getattr(change, "size", None) else (3, 9, 7))
        seen.add(image.tobytes())
    assert len(seen) == (2 if isinstance(change, RandomFlip) else 9 if change.padding else len(seen)) and len(seen) > 1


def test_every_place_is_as_likely():
    places = np.arange(35, dtype=np.float32).reshape(1, 1, 5, 7).repeat(20000, 0)
    found = Augmentation(RandomCrop(size=3), seed=2)(places, np.arange(20000), 0)[:, 0, 0, 0].astype(int)
    counts = np.bincount(found)[[row * 7 + column for row in range(3) for column in range(5)]]
    assert counts.sum() == 20000
    assert ((counts - 20000 / 15) ** 2 / (20000 / 15)).sum() < 36, "chi-squared of 14 degrees, one in a thousand"


def make(num_parts=1, part=0, prefetch=2) -> DataLoader:
    change = Augmentation(RandomCrop(padding=2), RandomFlip(), seed=5)
    return DataLoader(DATASET, ShardedSampler(40, 16, num_parts, part, seed=5), prefetch, augment=change)


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_see_what_one_reader_sees_and_epochs_differ(parts, prefetch):
    def read(num_parts: int, epoch: int) -> dict[int, bytes]:
        seen = {}
        for part in range(num_parts):
            loader = make(num_parts, part, prefetch)
            loader.set_epoch(epoch)
            for x, y in loader:
                seen |= {int(label): image.tobytes() for image, label in zip(x, y, strict=True)}
        return seen

    assert read(parts, epoch=1) == read(1, epoch=1)
    assert read(1, epoch=1) != read(1, epoch=2)


def test_a_loop_that_goes_on_sees_the_pixels_of_its_epoch():
    first = make()
    first.set_epoch(2)
    images = iter(first)
    next(images)
    second = make()
    second.load_state_dict(first.state_dict())
    for (x, _), (again, _) in zip(images, second, strict=True):
        np.testing.assert_array_equal(again, x)


def test_what_is_read_ahead_is_of_the_epoch_in_which_the_loop_began():
    first, other = make(prefetch=0), make(prefetch=0)
    first.set_epoch(2)
    other.set_epoch(2)
    loop = iter(first)
    before = [x for x, _ in islice(loop, 1)]
    first.set_epoch(3)
    for x, (whole, _) in zip(before + [x for x, _ in loop], other, strict=True):
        np.testing.assert_array_equal(x, whole)


def test_transforms_see_augmented_samples_and_no_samples_have_their_shape():
    def halve(x, y):
        return x / 2, y

    augment = Augmentation(RandomCrop(size=5), seed=1)
    loader = DataLoader(DATASET, ShardedSampler(40, 16, seed=1), transform=halve, augment=augment)
    numbers = next(iter(loader.sampler))
    np.testing.assert_array_equal(next(iter(loader))[0], augment(IMAGES[numbers], numbers, 0) / 2)
    x, y = loader.read(np.zeros(0, np.int64))
    assert x.shape == (0, 3, 5, 5) and x.dtype == np.float32 and y.shape == (0,)


def forgets(image, rng):
    image[:] = 0


def shrinks(image, rng):
    return image[:, : rng.integers(1, 9)]


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: RandomCrop(padding=-1), {"operation": "RandomCrop", "where": "padding", "expected": 0, "got": -1}),
        (lambda: RandomCrop(0), {"operation": "RandomCrop", "where": "size", "expected": 1, "got": 0}),
        (lambda: RandomFlip(0), {"operation": "RandomFlip", "where": "axis", "expected": [-1, -2], "got": 0}),
        (lambda: Augmentation(2), {"operation": "Augmentation", "where": "changes", "got": 2}),
        (lambda: Augmentation(seed=-1), {"operation": "Augmentation", "where": "seed", "expected": 0, "got": -1}),
        (lambda: Augmentation(RandomCrop(padding=7))(IMAGES, ALL, 0), {"operation": "RandomCrop", "expected": 7}),
        (
            lambda: Augmentation(RandomCrop(8))(IMAGES, ALL, 0),
            {"operation": "RandomCrop", "where": "size", "expected": 8, "got": (3, 9, 7)},
        ),
        (
            lambda: Augmentation(RandomFlip())(np.zeros((4, 9)), np.arange(4), 0),
            {"operation": "RandomFlip", "got": (9,)},
        ),
        (
            lambda: Augmentation(forgets)(IMAGES.copy(), ALL, 0),
            {"operation": "Augmentation", "where": "forgets", "got": "NoneType"},
        ),
        (
            lambda: Augmentation(shrinks)(IMAGES, ALL, 0),
            {"operation": "Augmentation", "got": (3, 1, 7)},
        ),
        (
            lambda: DataLoader(DATASET, ShardedSampler(40, 16), augment=RandomFlip()),
            {"operation": "DataLoader", "where": "augment", "expected": "Augmentation"},
        ),
    ],
)
def test_what_cannot_be_is_refused(make, fields):
    with raises(ConfigError, **fields):
        make()


def test_threads_may_augment_at_the_same_time():
    def noisy(image, rng):
        first = rng.random()
        time.sleep(1e-4)
        return image + np.float32(first + rng.random())

    augment = Augmentation(noisy, RandomCrop(padding=1), seed=1)
    wanted = augment(IMAGES, ALL, 0)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: augment(IMAGES, ALL, 0), range(8)):
            np.testing.assert_array_equal(found, wanted)
