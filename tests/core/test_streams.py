"""Streams are ordered by events and by nothing else."""

import importlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from raises import raises

from hpcdp.core.arrays import Streams, gpu
from hpcdp.errors import DeviceError, UnsupportedError


@pytest.fixture
def streams(gpus_on_host):
    return Streams(gpu(1))


def of(values):
    """An array that is there."""
    cupy = importlib.import_module("cupy")
    made = cupy.asarray(np.array(values, "f4"))
    cupy.cuda.get_current_stream().synchronize()
    return made


def wait_for(streams, event):
    while not streams.query(event):
        pass


def test_pinned_memory_that_is_forgotten_stays_until_it_is_copied(streams, gpus_on_host):
    """Then it is given back, when some is asked for."""
    stream, x = streams.stream(), of([0, 0, 0])
    there = streams.pinned(12, stream).view("f4")
    there[:] = [1, 2, 3]
    streams.copy_async(x, there, stream)
    memory = gpus_on_host.once_pinned[-1]
    del there
    streams.pinned(12)
    streams.synchronize(stream)
    np.testing.assert_array_equal(x.to_host(), [1, 2, 3])
    streams.pinned(12)
    assert (memory == 0xA5).all()


def test_a_copy_is_done_later_and_its_event_tells(streams):
    stream, event = streams.stream(), streams.event()
    x, there = of([1, 2, 3]), streams.pinned(12).view("f4")
    there[:] = 0
    streams.copy_async(there, x, stream)
    streams.record(event, stream)
    assert not there.any()
    wait_for(streams, event)
    assert there.tolist() == [1, 2, 3]
    streams.copy_async(x[1:], there[:2], stream)
    stream.synchronize()
    assert x.tolist() == [1, 1, 2]


def test_the_default_stream_is_late_too(streams):
    cupy = importlib.import_module("cupy")
    x = cupy.asarray(np.ones(2, "f4"))
    assert not (x._held == 1).any()
    y = x + 1
    assert (x._held == 1).all() and not (y._held == 2).any()
    assert y.tolist() == [2, 2]


def test_a_default_stream_of_each_thread_is_refused(streams, monkeypatch):
    """A lane that records an event there, or waits for one, would do so on its own."""
    cuda = importlib.import_module("cupy").cuda
    monkeypatch.setattr(cuda, "get_current_stream", lambda: SimpleNamespace(ptr=cuda.runtime.streamPerThread))
    with raises(UnsupportedError, operation="stream", where="gpu(1)", got="CUDA"):
        streams.current()


def test_one_stream_waits_for_another_by_an_event(streams, gpus_on_host):
    first, second = streams.stream(), streams.stream()
    event, last = streams.event(), streams.event()
    x, y, z = of([1, 2]), of([0, 0]), of([0, 0])
    gpus_on_host.log.clear()
    streams.copy_async(y, x, first)
    streams.record(event, first)
    streams.wait_event(second, event)
    streams.copy_async(z, y, second)
    streams.record(last, second)
    wait_for(streams, last)
    assert z.tolist() == [1, 2]
    assert gpus_on_host.log == ["copy", "event", "wait", "copy", "event"]


def test_a_wait_for_an_event_that_is_not_recorded_waits_for_nothing(streams):
    stream, event = streams.stream(), streams.event()
    assert streams.query(event)
    streams.wait_event(stream, event)
    stream.synchronize()


def test_the_current_stream_is_that_of_operations(streams):
    assert streams.current().ptr == 0
    with streams.on_device(), streams.stream() as stream:
        assert streams.current().ptr == stream.ptr


def test_arrays_that_one_copy_cannot_bring_are_refused(streams):
    stream, x = streams.stream(), of([1, 2, 3, 4])
    with raises(UnsupportedError, operation="copy", expected=8, got=8):
        streams.copy_async(x[:2], x[::2], stream)
    with raises(UnsupportedError, operation="copy", got=12):
        streams.copy_async(x[:2], x[1:], stream)
    streams.copy_async(x[:0], x[4:], stream)


def test_what_has_failed_on_the_gpu_is_raised_where_somebody_asks(streams, monkeypatch):
    runtime = importlib.import_module("cupy.cuda.runtime")
    monkeypatch.setattr(runtime, "eventQuery", lambda event: 700)
    with raises(DeviceError, operation="wait for a GPU", where="gpu(1)", got="cudaError700"):
        streams.query(streams.event())


def test_threads_of_lanes_make_no_context_on_other_gpus(streams, gpus_on_host):
    gpu(1).use()
    gpus_on_host.contexts.clear()

    def lane():
        stream, event, x = streams.stream(), streams.event(), of([1, 2])
        host = streams.pinned(8).view("f4")
        streams.copy_async(host, x, stream)
        streams.record(event, stream)
        wait_for(streams, event)
        for awaited in (event, stream):
            streams.synchronize(awaited)
        streams.follow(stream)
        streams.wait_events(stream, [event])

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    assert gpus_on_host.contexts == {1}


def test_a_later_thread_with_the_ident_of_the_maker_is_another_one(gpus_on_host):
    made = []

    def on_thread(act):
        def noted():
            ident.append(threading.get_ident())
            act()

        ident = []
        thread = threading.Thread(target=noted)
        thread.start()
        thread.join()
        return ident[0]

    first = on_thread(lambda: made.append(Streams(gpu(1))))
    gpus_on_host.contexts.clear()
    for _ in range(100):
        if on_thread(lambda: made[0].query(made[0].event())) == first:
            break
    else:
        pytest.skip("no later thread has had the ident of the first one")
    assert gpus_on_host.contexts == {1}


def test_the_thread_that_makes_streams_keeps_its_current_device(streams, gpus_on_host):
    gpu(2).use()
    assert streams.query(streams.event()) and streams.pinned(8).nbytes == 8
    assert streams.current_device() == gpu(2)


def test_a_stream_follows_what_the_current_one_was_given(streams):
    x, y, z = of([1, 2]), of([0, 0]), of([0, 0])
    first, second = streams.stream(), streams.stream()
    with streams.on_device(), first:
        streams.copy_async(y, x, first)
        streams.follow(second)
    streams.copy_async(z, y, second)
    second.synchronize()
    assert z.tolist() == [1, 2]


def test_a_device_becomes_the_current_one_of_its_thread(gpus_on_host):
    gpu(3).use()
    assert gpus_on_host.of_thread.device == 3
    with raises(DeviceError, operation="device", where="gpu(8)", expected=8):
        gpu(8).use()
