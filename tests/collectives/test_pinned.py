"""Collectives of arrays on GPUs go through pinned memory; streams and copies are those of a stand-in."""

import importlib

import numpy as np
import pytest

from hpcdp.collectives import allgather, allreduce, broadcast, iallreduce, reduce, reduce_scatter
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import Device, cpu, gpu, to_host


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
        gathered, part = allgather(cupy.asarray(own[None]), world), reduce_scatter(cupy.asarray(own), world=world)
        return [each.to_host() for each in (x, late, root, moved, gathered, part)]

    for number, (x, late, root, moved, gathered, part) in enumerate(thread_comm.run(3, rank)):
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
    for found in thread_comm.run(2, rank):
        np.testing.assert_array_equal(found, expected)


def on_another(world, whole):
    """Sums into arrays on GPU 1, while 0 is current; all are on it."""
    import cupy

    gpu(0).use()
    strided, part = gpu(1).put(whole), gpu(1).put(np.zeros(6, np.float32))
    out = gpu(1).put(np.zeros_like(whole))
    allreduce(strided[:, 1], world=world)
    assert allreduce(gpu(1).put(whole), world=world, out=out) is out
    reduce_scatter(gpu(1).put(whole), world=world, out=part)
    own, late = gpu(1).put(whole), gpu(1).put(np.zeros_like(whole))
    iallreduce(own, world=world, out=late).wait()
    assert isinstance(out, cupy.Array)
    return [strided, out, part, late]


def test_arrays_on_another_gpu_than_the_current_one_are_written_there(gpus_on_host):
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    column = whole.copy()
    column[:, 1] *= 2
    for number, found in enumerate(thread_comm.run(2, lambda world: on_another(world, whole))):
        assert {Device.of(each) for each in found} == {gpu(1)}
        wanted = [column, 2 * whole, 2 * whole.reshape(-1)[6 * number : 6 * number + 6], 2 * whole]
        for mine, each in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine.to_host(), each)


@pytest.mark.parametrize("places", [(gpu(1), cpu(0)), (cpu(0), gpu(1)), (gpu(1), gpu(2))])
def test_results_may_go_elsewhere_than_the_operands_are(gpus_on_host, places):
    def rank(world):
        gpu(0).use()
        own = np.full((4, 3), world.rank + 1.0, np.float32)
        x, *outs = (places[0].put(own), *(places[1].put(np.zeros_like(own)) for _ in range(3)))
        part = places[1].put(np.zeros(4, np.float32))
        allreduce(x, world=world, out=outs[0])
        iallreduce(x, world=world, out=outs[1]).wait()
        reduce(x, root=1, world=world, out=outs[2])
        reduce_scatter(x, world=world, out=part)
        assert (to_host(x) == own).all()
        return [to_host(each) for each in (*outs, part)]

    for number, (at_once, late, root, part) in enumerate(thread_comm.run(3, rank)):
        assert (at_once == 6).all() and (late == 6).all() and (part == 6).all()
        assert (root == (6 if number == 1 else 0)).all()
