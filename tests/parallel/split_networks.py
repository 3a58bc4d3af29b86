"""Networks whole and split, for tests that compare them."""

import numpy as np

from hpcdp import nn
from hpcdp.parallel import ColumnConv2D, ColumnDense, RowConv2D, RowDense


def normal(seed, dtype="f4"):
    return lambda shape: np.random.default_rng(seed).normal(0, 0.3, shape).astype(dtype)


def whole_numbers(seed, dtype="f4"):
    """Of which sums and products are exact, in whatever order."""
    return lambda shape: np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def mlp(parts, draw=normal, features=6, classes=4):
    """Of some features, 10 and 7 channels, some classes; ``parts`` None: whole."""
    if parts is None:
        return nn.Sequential(
            nn.Dense(features, 10, activation="relu", weight_init=draw(1)),
            nn.Dense(10, 7, activation="relu", weight_init=draw(2)),
            nn.Dense(7, classes, weight_init=draw(3)),
        )
    return nn.Sequential(
        ColumnDense(features, 10, parts, activation="relu", weight_init=draw(1)),
        RowDense(10, 7, parts, activation="relu", weight_init=draw(2)),
        ColumnDense(7, classes, parts, weight_init=draw(3), gather=True),
    )


def convolutions(parts, draw=normal, classes=4):
    """Of images of 8 x 8; ``parts`` None: whole. 5 maps go on split, 6 are whole."""
    same = {"padding": 1, "activation": "relu"}
    if parts is None:
        return nn.Sequential(
            nn.Conv2D(1, 5, 3, weight_init=draw(1), **same), nn.MaxPool2D(2),
            nn.Conv2D(5, 6, 3, weight_init=draw(2), **same), nn.Conv2D(6, 7, 3, weight_init=draw(3), **same),
            nn.Conv2D(7, 6, 3, weight_init=draw(4), **same),
            nn.MaxPool2D(2), nn.Flatten(), nn.Dense(24, classes, weight_init=draw(5)),
        )  # fmt: skip
    return nn.Sequential(
        ColumnConv2D(1, 5, 3, parts, weight_init=draw(1), **same), nn.MaxPool2D(2),
        RowConv2D(5, 6, 3, parts, weight_init=draw(2), **same),
        RowConv2D(6, 7, 3, parts, weight_init=draw(3), scatter=True, **same),
        ColumnConv2D(7, 6, 3, parts, weight_init=draw(4), **same),
        nn.MaxPool2D(2), nn.Flatten(), RowDense(24, classes, parts, weight_init=draw(5), channels=6),
    )  # fmt: skip


def own(whole, param):
    """Of an array of the unsplit network, the part that ``param`` is of it."""
    if param.cut is None:
        return whole
    at = slice(param.cut.first, param.cut.first + param.shape[param.cut.axis])
    return whole[(slice(None),) * param.cut.axis + (at,)]
