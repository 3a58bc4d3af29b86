"""Copies past the caches."""

import numpy as np
import pytest

from hpcdp import kernels


@pytest.mark.parametrize("nbytes", [1, 255, 256, 300, 5000, 40_000])
def test_bytes_are_copied_past_the_caches_from_and_to_any_address(nbytes):
    copies = kernels.load("copies")
    rng = np.random.default_rng(0)
    for first in (0, 1, 63):
        for start in (0, 1, 8, 63):
            x = rng.integers(0, 256, nbytes + 64).astype(np.uint8)[first : first + nbytes]
            room, kept = np.zeros(nbytes + 128, np.uint8), np.zeros(nbytes + 128, np.uint8)
            for name, arrays in (("copy_bytes", 1), ("stream_bytes", 1), ("stream_and_keep_bytes", 2)):
                room[:] = kept[:] = 7
                places = [room[start : start + nbytes], kept[start : start + nbytes]][:arrays]
                getattr(copies, name)(*places, x)
                for whole, place in zip((room, kept), places, strict=False):
                    assert (place == x).all()
                    assert (whole[:start] == 7).all() and (whole[start + nbytes :] == 7).all()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 100, 5000])
def test_floats_are_scaled_past_the_caches(count):
    stream_scaled, factor = kernels.load("copies").stream_scaled, np.float32(1 / 3)
    x = np.random.default_rng(0).standard_normal(count + 3).astype(np.float32)[3:]
    for start in (0, 1, 15):
        room = np.full(count + 32, 7, np.float32)
        stream_scaled(room[start : start + count], x, factor)
        assert (room[start : start + count] == x * factor).all()
        assert (room[:start] == 7).all() and (room[start + count :] == 7).all()
