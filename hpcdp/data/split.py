"""Floor 3: data, one batch cut into parts. Imports: errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..arrays import Array
from ..devices import Device, require_devices
from ..errors import ConfigError, is_number, whole_number


def piece_bounds(count: int, num_parts: int, weights: Sequence[float] | None = None) -> list[int]:
    """Where ``count`` items are cut into consecutive parts; part ``i`` is ``bounds[i]:bounds[i + 1]``.

    Args:
        count: number of items, >= 0.
        num_parts: number of parts, >= 1; without weights their sizes differ by at most one, and may be 0.
        weights: one positive number a part; ``[3, 1]`` cuts 256 into 192 and 64. Sizes are off by less than one.

    Returns:
        ``num_parts + 1`` increasing numbers from 0 to ``count``.

    Raises:
        ConfigError: a number of parts below 1, weights of another number or not positive.
    """
    whole_number("split", "num_parts", num_parts, 1)
    if weights is None:
        return [count * i // num_parts for i in range(num_parts + 1)]
    if not isinstance(weights, Sequence | np.ndarray) or len(weights) != num_parts or not all(map(_is_share, weights)):
        raise ConfigError("split", where="weights", expected=f"{num_parts} positive numbers", got=repr(weights))
    ends = list(itertools.accumulate((Fraction(float(weight)) for weight in weights), initial=Fraction(0)))
    return [math.floor(count * end / ends[-1]) for end in ends]


def _is_share(weight: object) -> bool:
    try:
        return is_number(weight) and 0 < float(weight) < math.inf
    except OverflowError:  # an integer may be larger than all floats
        return False


def split_batch(x: Array, k: int, even_split: bool = True) -> list[Array]:
    """``x`` cut along axis 0 into ``k`` consecutive views, e.g. one for each device of this process.

    Args:
        x: shape ``(count, ...)``, any namespace; not copied.
        k: number of parts.
        even_split: refuse a count that ``k`` does not divide; if False, sizes differ by at most one.

    Raises:
        ConfigError: uneven although ``even_split``, ``k`` below 1, or ``x`` has no axis.
    """
    if not getattr(x, "shape", ()):
        expected = "an array of samples along axis 0"
        raise ConfigError("split_batch", where="x", expected=expected, got=f"{type(x).__name__} {x!r}")
    count = x.shape[0]
    bounds = piece_bounds(count, k)
    if even_split and count % k:
        raise ConfigError(
            "split_batch",
            expected=f"a number of samples that {k} divides",
            got=count,
            remedy="pass even_split=False, or discard the last batch",
        )
    return [x[start:stop] for start, stop in itertools.pairwise(bounds)]


def split_and_load(x: Array, devices: Sequence[Device], even_split: bool = True) -> list[Array]:
    """`split_batch` into a part for each device, and each part copied there.

    Args:
        devices: at least one.

    Raises:
        ConfigError: as `split_batch`, or ``devices`` are none.
        DeviceError: the machine does not have one of the devices; a RuntimeError.
    """
    devices = require_devices("split_and_load", devices)
    parts = split_batch(x, len(devices), even_split)
    return [device.put(part) for device, part in zip(devices, parts, strict=True)]
