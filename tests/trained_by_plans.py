"""What tests of plans under trainers share: a network, and the ways to train it that must give the same bits."""

import numpy as np

from hpcdp import nn


def convolutional(seed):
    return nn.Sequential(
        nn.Conv2D(1, 4, 3, padding=1, weight_init=nn.init.Xavier(seed)), nn.BatchNorm(4), nn.ReLU(), nn.AvgPool2D(2),
        nn.Flatten(), nn.Dropout(0.3, seed=5), nn.Dense(36, 8, activation="relu", weight_init=nn.init.Xavier(seed)),
        nn.Dense(8, 3, weight_init=nn.init.Xavier(seed)),
    )  # fmt: skip


OPTIONS = {
    "buckets": {},
    "overlap": {"overlap": True, "bucket_cap_mb": 0.001},
    "every rank updates": {"owner": "rank"},
    "accumulation": {"accumulate": True},
    "store": {"kvstore": "dist_sync"},
    "reproducible": {"reproducible": True, "virtual_shards": 4},
    "statistics of all ranks": {"sync": True},
}
"""By name: ``accumulate`` and ``sync`` are for the test, the others for the trainer."""


def require_same_bits(found, expected):
    """Of the lists of arrays that the ranks have returned."""
    for own, others in zip(found, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            np.testing.assert_array_equal(a, b)
