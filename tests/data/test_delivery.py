"""Batches come to a GPU on a stream of their own; here on one that is late, as is the stream that computes."""

import importlib

import numpy as np
import pytest
from gpu_on_host import pinned_nbytes
from raises import raises

from hpcdp import data
from hpcdp.core.arrays import Streams, cpu, gpu
from hpcdp.errors import ConfigError, DeviceError

N = 37


def dataset():
    return data.ArrayDataset(np.arange(N * 6, dtype="f4").reshape(N, 2, 3), np.arange(N, dtype="i8"))


def loader(prefetch, device=None, batch_size=5, **settings):
    return data.DataLoader(dataset(), data.ShardedSampler(N, batch_size, seed=3), prefetch, device=device, **settings)


def on_host(batches):
    return [(x.copy(), y.copy()) for x, y in batches]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_on_a_gpu_are_those_of_the_host(gpus_on_host, prefetch):
    cupy = importlib.import_module("cupy")
    streams, wanted = Streams(gpu(1)), on_host(loader(prefetch))
    gpu(1).use()
    with streams.stream() as compute:
        for _ in range(2):
            # The loop gives up each batch, whose memory others get, and waits for nothing.
            found = [(cupy.zeros(x.shape, "f4"), cupy.zeros(y.shape, "i8")) for x, y in wanted]
            compute.synchronize()
            for (x, y), targets in zip(loader(prefetch, gpu(1)), found, strict=True):
                assert type(x).__module__ == "cupy" and y.dtype == np.int64
                streams.copy_async(targets[0], x, compute)  # what the loop computes, later
                streams.copy_async(targets[1], y, compute)
            compute.synchronize()
            for batch, theirs in zip(found, wanted, strict=True):
                for mine, its in zip(batch, theirs, strict=True):
                    np.testing.assert_array_equal(mine.to_host(), its)


def test_copies_begin_before_the_loop_asks_for_them(gpus_on_host):
    batches = iter(loader(3, gpu(0)))
    next(batches)
    gpus_on_host.wait_until(lambda: gpus_on_host.log.count("copy") >= 3 * 2)
    batches.close()


def test_threads_that_read_ahead_make_no_context_on_other_gpus(gpus_on_host):
    gpu(1).use()
    gpus_on_host.contexts.clear()
    assert len(list(loader(3, gpu(1)))) == len(loader(3))
    assert gpus_on_host.contexts == {1}


def test_batches_that_grow_and_ones_that_are_empty(gpus_on_host):
    sampler = [np.arange(count) for count in (1, 0, 20, 3, 37, 37, 2)]
    for x, y in data.DataLoader(dataset(), sampler, 2, device=gpu(0)):
        np.testing.assert_array_equal(x.to_host(), dataset()[np.arange(len(y))][0])


def test_a_batch_whose_images_are_a_power_of_two_takes_no_more_pinned_memory_than_they_do(gpus_on_host, monkeypatch):
    asked = []
    cuda = importlib.import_module("cupy").cuda
    monkeypatch.setattr(cuda, "alloc_pinned_memory", lambda size: asked.append(size) or np.zeros(size, np.uint8))
    images = data.ArrayDataset(np.zeros((64, 64), "f4"), np.zeros(64, "i8"))
    for x, _ in data.DataLoader(images, [np.arange(64)], 0, device=gpu(0)):
        assert sum(map(pinned_nbytes, asked)) <= x.nbytes + 4 * 512


def test_a_loop_that_is_left_waits_for_the_copies_and_can_be_gone_on_with(gpus_on_host):
    first = loader(0, gpu(0))
    with Streams(gpu(0)).stream():
        for number, _ in enumerate(first):
            if number == 2:
                break
    assert gpus_on_host.log.count("copy") == 3 * 2
    second = loader(2, gpu(0))
    second.load_state_dict(first.state_dict())
    rest = [y.to_host() for _, y in second]
    np.testing.assert_array_equal(np.concatenate(rest), np.concatenate([y for _, y in on_host(loader(2))[3:]]))


def test_an_error_of_the_data_set_comes_where_its_batch_is_asked_for(gpus_on_host):
    def broken(x, y):
        if 11 in y:
            raise ValueError("sample 11")
        return x, y

    with pytest.raises(ValueError, match="sample 11"):
        list(loader(2, gpu(0), transform=broken))


def test_the_host_is_no_device_to_bring_batches_to():
    for (x, y), (x_there, y_there) in zip(loader(1), loader(1, cpu(0)), strict=True):
        np.testing.assert_array_equal(x, x_there)
        np.testing.assert_array_equal(y, y_there)


def test_what_is_no_device_or_not_there(monkeypatch):
    monkeypatch.setitem(importlib.import_module("sys").modules, "cupy", None)
    with raises(ConfigError, operation="DataLoader", where="device", expected="hpcdp.gpu(i)", got="cuda"):
        loader(1, "cuda")
    with raises(DeviceError, operation="device", where="gpu(0)", expected=["CuPy", "GPU"]):
        next(iter(loader(1, gpu(0))))
