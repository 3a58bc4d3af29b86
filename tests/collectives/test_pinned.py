"""Collectives of arrays on GPUs go through pinned memory; streams and copies are those of a stand-in."""

import importlib

import numpy as np
import pytest

from hpcdp.collectives import allgather, allreduce, broadcast, iallreduce, reduce, reduce_scatter
from hpcdp.comm import threads
from hpcdp.devices import gpu


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7)])
def test_arrays_on_gpus_go_through_pinned_memory(gpus_on_host, monkeypatch, shape):
    cupy = importlib.import_module("cupy")
    if 0 not in shape:
        monkeypatch.setattr(cupy.Array, "get", lambda x: pytest.fail("pageable memory"), raising=False)

    def rank(world):
        gpu(0).use()
        own = np.full(shape, world.rank + 1.0, np.float32)
        x, late, root, moved = (cupy.asarray(own) for _ in range(4))
        assert allreduce(x, world=world) is x
        iallreduce(late, world=world).wait()
        reduce(root, root=1, world=world)
        broadcast(moved, 2, world)
        gathered, part = allgather(cupy.asarray(own), world), reduce_scatter(cupy.asarray(own), world=world)
        return [each.to_host() for each in (x, late, root, moved, gathered, part)]

    for number, (x, late, root, moved, gathered, part) in enumerate(threads.run(3, rank)):
        assert (x == 6).all() and (late == 6).all() and (moved == 3).all() and x.shape == shape
        assert (root == (6 if number == 1 else number + 1)).all()
        assert gathered.shape == (3, *shape) and (part == 6).all()
        for each in range(3):
            assert (gathered[each] == each + 1).all()
    assert ("copy" in gpus_on_host.log) == (0 not in shape)


def test_an_array_that_is_not_contiguous_is_summed_too(gpus_on_host):
    def rank(world):
        gpu(0).use()
        whole = importlib.import_module("cupy").asarray(np.arange(12, dtype=np.float32).reshape(4, 3))
        allreduce(whole[:, 1], world=world)
        return whole.to_host()

    expected = np.arange(12, dtype=np.float32).reshape(4, 3)
    expected[:, 1] *= 2
    for found in threads.run(2, rank):
        np.testing.assert_array_equal(found, expected)
