import numpy as np
import pytest
from raises import raises

from hpcdp.data.datasets import resize
from hpcdp.errors import ConfigError


def bilinear(image: np.ndarray, factor: int) -> np.ndarray:
    """Pixel by pixel: the value at a position between pixel centers, the border repeated."""
    size = image.shape[0]
    out = np.empty((size * factor, size * factor))
    for i in range(size * factor):
        for j in range(size * factor):
            y, x = ((k + 0.5) / factor - 0.5 for k in (i, j))
            y, x = np.clip(y, 0, size - 1), np.clip(x, 0, size - 1)
            top, left = int(np.floor(y)), int(np.floor(x))
            bottom, right = min(top + 1, size - 1), min(left + 1, size - 1)
            a, b = y - top, x - left
            upper = (1 - b) * image[top, left] + b * image[top, right]
            lower = (1 - b) * image[bottom, left] + b * image[bottom, right]
            out[i, j] = (1 - a) * upper + a * lower
    return out


@pytest.mark.parametrize(("old", "new", "before"), [(8, 28, 2), (8, 24, 0), (28, 32, 2), (5, 14, 2), (1, 3, 0)])
def test_enlarged_and_padded(old: int, new: int, before: int) -> None:
    images = np.random.default_rng(0).random((3, 2, old, old), dtype=np.float32)
    result = resize(images, new)
    assert result.shape == (3, 2, new, new) and result.dtype == np.float32
    inner = old * (new // old)
    expected = np.zeros((new, new))
    expected[before : before + inner, before : before + inner] = bilinear(images[1, 1], new // old)
    np.testing.assert_allclose(result[1, 1], expected, atol=1e-6)


def test_as_torch_interpolates() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its interpolation is not compared")
    images = np.random.default_rng(1).random((2, 1, 8, 8), dtype=np.float32)
    peer = torch.nn.functional.interpolate(torch.from_numpy(images), scale_factor=3, mode="bilinear")
    np.testing.assert_allclose(resize(images, 24), peer.numpy(), atol=1e-6)


def test_unchanged_or_refused() -> None:
    images = np.zeros((1, 8, 8), np.float32)
    assert resize(images, None) is images and resize(images, 8) is images
    assert resize(images, np.int64(28)).shape == (1, 28, 28)
    for size in (7, 0, -3, 28.5, np.float32(28), True, "28"):
        with raises(ConfigError, operation="resize", where="image_size", expected=8):
            resize(images, size)
    with raises(ConfigError, operation="resize", where="images", got=[8, 9]):
        resize(np.zeros((1, 8, 9), np.float32), 28)
