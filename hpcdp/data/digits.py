"""Floor 3: data, the digits set that ships with the package. Imports: errors.

Optical Recognition of Handwritten Digits: E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0; 1,438 training and 359 test images of 8 x 8 pixels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .datasets import ArrayDataset
from .hdf5 import open_hdf5
from .images import resize
from .visiting import trust

PATH = Path(__file__).parent / "sets" / "digits.h5"
_SPLITS = {"train": 0, "test": 1}


def read_digits(split: str, image_size: int | None = None) -> ArrayDataset:
    """One part of the digits set.

    Args:
        split: "train" or "test".
        image_size: None for 8 x 8 images, or a larger size, see `images.resize`.

    Returns:
        Images of shape ``(n, 1, image_size, image_size)``, float32 in [0, 1], with int64 labels of shape ``(n,)``.

    Raises:
        DataError: the file is damaged.
        ConfigError: the size is less than 8.
    """
    trust(PATH)  # the package's own
    with open_hdf5(PATH, ("split", "images", "labels")) as file:
        members = file["split"][:] == _SPLITS[split]
        images, labels = file["images"][:][members], file["labels"][:][members]
    pixels = np.divide(images[:, None], np.float32(16), dtype=np.float32)
    return ArrayDataset(resize(pixels, image_size), labels.astype(np.int64))
