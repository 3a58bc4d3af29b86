"""The script that wrote digits.h5 from the copy in scikit-learn.

Run once, where scikit-learn is installed: ``python export_digits.py digits.h5``. The package never imports this file.
"""

import sys

import h5py  # type: ignore[import-untyped]
import numpy as np

TEST_SHARE = 0.2
SEED = 1998
CITATION = (
    "E. Alpaydin and C. Kaynak (1998). Optical Recognition of Handwritten Digits [Dataset]. "
    "UCI Machine Learning Repository. https://doi.org/10.24432/C50P49"
)
LICENCE = "Creative Commons Attribution 4.0 International (CC BY 4.0), https://creativecommons.org/licenses/by/4.0/"


def stratified_split(labels: np.ndarray) -> np.ndarray:
    """0 for training and 1 for test samples, shape and order of ``labels``; the same share of every class is test."""
    split = np.zeros(len(labels), np.uint8)
    rng = np.random.default_rng(SEED)
    for digit in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == digit))
        split[members[: round(TEST_SHARE * len(members))]] = 1
    return split


def main(path: str) -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-not-found]

    source = load_digits()
    images = source.images.astype(np.uint8)
    if not np.array_equal(images, source.images) or images.max() > 16:
        raise SystemExit("the source has other values than the integers 0 to 16")
    labels = source.target.astype(np.uint8)
    with h5py.File(path, "w", libver=("earliest", "v110"), track_order=True) as file:
        file.attrs["title"] = "Optical Recognition of Handwritten Digits, the 1797 images that scikit-learn ships"
        file.attrs["citation"] = CITATION
        file.attrs["licence"] = LICENCE
        file.attrs["changes"] = "pixels stored as uint8; a train/test split was added"
        for name, values, meaning in (
            ("images", images, "shape (1797, 8, 8), ink from 0 (none) to 16"),
            ("labels", labels, "shape (1797,), the digit 0 to 9"),
            ("split", stratified_split(labels), "shape (1797,), 0 = train, 1 = test; stratified by label, fixed"),
        ):
            file.create_dataset(name, data=values, track_times=False).attrs["meaning"] = meaning


if __name__ == "__main__":
    main(sys.argv[1])
