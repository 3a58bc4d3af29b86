"""Floor 3: data, the data sets that have a name. Imports: errors."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from .datasets import Dataset
from .digits import read_digits

NAMES = ("digits",)
SPLITS = ("train", "test")


def load(name: str, split: str = "train", root: str | Path | None = None, image_size: int | None = None) -> Dataset:
    if name not in NAMES:
        raise ConfigError("data set", expected=f"one of {', '.join(NAMES)}", got=repr(name))
    if split not in SPLITS:
        raise ConfigError("data set", where=name, expected=f"split {' or '.join(SPLITS)}", got=repr(split))
    return read_digits(split, image_size)
