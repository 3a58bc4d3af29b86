"""Captures of CUDA graphs, and that their stand-in refuses what CUDA and CuPy do."""

import gc
import shutil
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_on_host import graphs as stand_in

from hpcdp.comm import thread_comm
from hpcdp.core.arrays import to_host
from hpcdp.kernels import reference
from hpcdp.kernels.cuda import Capturer, between, fill, kernels, matmul, numbers, warmed_up

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the stand-in for CuPy needs g++")


def ones(count=3):
    import cupy

    return cupy.asarray(np.ones(count, np.float32))


def test_a_graph_runs_when_it_is_launched(counted_graphs):
    x, y, found = ones(), ones(), []

    def work():
        z = x + y
        kernels.sgd(x, z, (0.5, 1.0, 0.0))
        found.append(z)

    work()
    capturer = Capturer()
    before = x.to_host()
    graph = capturer.capture(work)
    np.testing.assert_array_equal(x.to_host(), before)
    for _ in range(2):
        wanted = before + 1
        reference.sgd(before, wanted, (0.5, 1.0, 0.0))
        graph.launch()
        np.testing.assert_array_equal(x.to_host(), before)
        np.testing.assert_array_equal(found[-1].to_host(), wanted)
    assert capturer.nbytes >= found[-1].nbytes


def test_what_is_brought_is_made_by_each_launch(counted_graphs):
    import cupy

    out, numbers = ones(), iter(range(1, 10))

    def work():
        place, passing = cupy.empty(3, dtype=np.float32), cupy.empty(3, dtype=np.float32)
        passing += 1
        del passing  # its memory is free, and written by the graph after what is brought
        fill(place, lambda: np.full(3, next(numbers), np.float32))
        out[...] = place

    ones().__iadd__(1)
    graph = Capturer().capture(work)
    for wanted in (1, 2, 3):
        graph.launch()
        np.testing.assert_array_equal(out.to_host(), wanted)
    fill(out, lambda: np.full(3, 7, np.float32))
    np.testing.assert_array_equal(out.to_host(), 7)


def test_numbers_are_brought_where_they_have_changed(counted_graphs, monkeypatch):
    x, gradient, rate, brought = ones(), ones(), [0.5], []
    counted = SimpleNamespace(**{**vars(np), "array": lambda made: brought.append(made) or np.array(made)})
    monkeypatch.setattr("hpcdp.kernels.cuda.np", counted)
    kernels.sgd(x, gradient, (0.0, 0.0, 0.0))
    graph = Capturer().capture(lambda: kernels.sgd(x, gradient, numbers(lambda: (rate[0], 0.0, 1.0))))
    for wanted, new in ((0.5, 0.5), (0.0, 0.25), (-0.25, 0.25), (-0.5, 0.5)):
        graph.launch()
        np.testing.assert_array_equal(x.to_host(), wanted)
        rate[0] = new
    assert brought == [(0.5, 0.0, 1.0), (0.25, 0.0, 1.0)]


def test_numbers_that_a_gpu_may_still_read_are_kept(graphs_on_host, monkeypatch):
    import cupy

    class Event:
        done = False

        def __init__(self, **_):
            pass

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    x, gradient, rate, brought = ones(), ones(), [0.5], []

    def noted(made):
        x = np.array(made)
        brought.append(weakref.ref(x))
        return x

    monkeypatch.setattr("hpcdp.kernels.cuda.np", SimpleNamespace(**{**vars(np), "array": noted}))
    kernels.sgd(x, gradient, (0.0, 0.0, 0.0))
    graph = Capturer().capture(lambda: kernels.sgd(x, gradient, numbers(lambda: (rate[0], 0.0, 1.0))))
    for _ in range(3):
        graph.launch()
        rate[0] /= 2
    assert all(each() is not None for each in brought) and len(brought) == 3
    Event.done = True
    graph.launch()
    assert [each() is not None for each in brought] == [False, False, False, True]


def test_memory_is_used_again_in_a_graph_and_by_nobody_else(counted_graphs):
    import cupy

    x, found = ones(1000), []

    def work():
        y = x
        for _ in range(20):
            y = y * 2
        found.append(y)

    work()
    found.clear()
    capturer = Capturer()
    graph = capturer.capture(work)
    assert capturer.nbytes < 4 * 4096
    others = [cupy.full((1000,), 5, dtype=np.float32) for _ in range(30)]
    graph.launch()
    np.testing.assert_array_equal(found[0].to_host(), 2.0**20)
    assert all((each.to_host() == 5).all() for each in others)


def test_memory_of_a_graph_stays_where_the_next_one_finds_no_more(graphs_on_host):
    """A backward goes without a graph then, and its forward is launched on."""
    import cupy

    x, out = ones(1000), ones(1000)
    x * 2 + 1
    capturer = Capturer()
    graph = capturer.capture(lambda: out.__setitem__(..., x * 2 + 1))  # its product is free in the end
    graphs_on_host.room = 4096
    with pytest.raises((stand_in.CUDARuntimeError, MemoryError)):
        capturer.capture(lambda: cupy.empty(2000, dtype=np.float32))
    graphs_on_host.room = float("inf")
    others = cupy.full((4000,), 5, dtype=np.float32)
    graph.launch()
    np.testing.assert_array_equal(out.to_host(), 3)
    assert (others.to_host() == 5).all()


def test_memory_of_graphs_has_the_limit_of_cupys_pool(graphs_on_host, monkeypatch):
    import cupy

    def work():
        return cupy.zeros(1 << 20, dtype=np.float32)

    work()
    capturer = Capturer()
    capturer.capture(work)
    held = capturer.nbytes
    assert held >= 4 << 20
    monkeypatch.setattr(stand_in.MemoryPool, "get_limit", lambda pool: held)
    Capturer().capture(work)
    monkeypatch.setattr(stand_in.MemoryPool, "get_limit", lambda pool: held - 1)
    with pytest.raises(MemoryError, match=f"exceed CUPY_GPU_MEMORY_LIMIT={held - 1}"):
        Capturer().capture(work)


def test_a_capture_has_what_runs_without_a_graph_have_left(graphs_on_host):
    import cupy

    x = ones(1000)
    x * 2
    x * 2  # which is free in CuPy's pool
    capturer = Capturer()
    graphs_on_host.room = 100
    capturer.capture(lambda: x * 2).launch()
    assert capturer.nbytes == 4096 and cupy.get_default_memory_pool() is graphs_on_host.default_pool


@pytest.mark.parametrize("name", ["sum", "max"])
@pytest.mark.parametrize("axis", [None, 1])
def test_reductions_are_captured(counted_graphs, name, axis):
    """On a GPU they are CUB's, which CuPy takes by default; neither stand-in has it."""
    import cupy

    held = np.random.default_rng(3).standard_normal((300, 1000), np.float32)
    x, found = cupy.asarray(held), []

    def work():
        found.append(getattr(x, name)(axis=axis))

    work()
    graph = Capturer().capture(work)
    x *= 2
    graph.launch()
    wanted = getattr(2 * held, name)(axis=axis)
    np.testing.assert_allclose(found[-1].to_host(), wanted, rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(found[0].to_host(), wanted / 2, rtol=1e-5, atol=1e-2)


def test_a_graph_is_cut_where_the_host_has_something_to_do(counted_graphs):
    """Which finds what comes before, and nothing of what comes behind."""
    x, seen = ones(), []

    def work():
        x.__iadd__(1)
        between(lambda: seen.append(to_host(x).copy()))
        x.__imul__(3)
        between(lambda: seen.append(to_host(x).copy()))
        x.__iadd__(5)

    x += 1
    x *= 3
    x.fill(1)
    graph = Capturer().capture(work)
    assert not seen
    for _ in range(2):
        graph.launch()
    for found, wanted in zip([*seen, to_host(x)], (2, 6, 12, 36, 41), strict=True):
        np.testing.assert_array_equal(found, np.full(x.shape, wanted))


def test_memory_is_the_graphs_also_where_the_garbage_collector_frees_it_within_a_launch(counted_graphs):
    x, out = ones(), ones()

    def work():
        ring = [x * 2]
        ring.append(ring)
        between(gc.collect)
        out[...] = ring[0] + 1

    x * 2 + 1
    capturer = Capturer()
    gc.disable()
    try:
        capturer.capture(work).launch()
    finally:
        gc.enable()
    np.testing.assert_array_equal(out.to_host(), 3)


def test_an_error_ends_the_capture(graphs_on_host):
    x = ones()
    capturer = Capturer()
    with pytest.raises(RuntimeError, match="synchronous"):
        capturer.capture(lambda: float(x[0]))
    assert not graphs_on_host.captured
    x + x
    capturer.capture(lambda: x + x).launch()


def test_gpu_and_stream_that_launch(counted_graphs):
    import cupy

    capturer = Capturer()
    assert capturer.is_current()
    with cupy.cuda.Stream(non_blocking=True):
        assert not capturer.is_current() and Capturer().is_current()
    assert capturer.is_current()


def test_the_stand_in_refuses_what_cuda_and_cupy_do(graphs_on_host):
    import cupy

    x, stream = ones(), cupy.cuda.Stream(non_blocking=True)
    x + x
    with pytest.raises(stand_in.CUDARuntimeError, match="default stream"):
        cupy.cuda.get_current_stream().begin_capture()
    with stream:
        stream.begin_capture()
        for reads in (lambda: float(x[0]), x.to_host, lambda: bool(x[0]), x.tolist):
            with pytest.raises(RuntimeError, match="synchronous"):
                reads()
        with pytest.raises(RuntimeError, match="H2D"):
            cupy.asarray(np.ones(3))
        with pytest.raises(NotImplementedError, match="cuBLAS"):
            cupy.matmul(x, x)
        with pytest.raises(stand_in.CUDARuntimeError, match="compiled in a capture"):
            cupy.tanh(x)
        stream.end_capture()
        stream.begin_capture()
        with pytest.raises(stand_in.CUDARuntimeError, match="capturing"):
            stream.synchronize()
        with pytest.raises(stand_in.CUDARuntimeError, match="Invalidated"):
            stream.end_capture()
    with cupy.cuda.Stream() as waits:
        waits.begin_capture()
        null = graphs_on_host.null
        with null, pytest.raises(stand_in.CUDARuntimeError, match="Implicit"):
            x += 1
        waits.end_capture()


def test_on_the_stand_in_ranks_that_are_threads_capture_at_once(graphs_on_host):
    """Each what it launches itself, products as well, while another one computes."""
    import cupy

    def rank(world):
        a = cupy.full((3, 3), world.rank + 1, dtype=np.float32)
        with warmed_up():
            matmul(a, a) + 1
        found = []

        def work():
            world.barrier()
            product = matmul(a, a)
            world.barrier()
            found.append(product + 1)

        world.barrier()
        if world.rank == 2:
            with warmed_up():
                work()
        else:
            Capturer().capture(work).launch()
        return found[0].to_host()

    for number, found in enumerate(thread_comm.run(3, rank)):
        np.testing.assert_array_equal(found, np.full((3, 3), 3 * (number + 1) ** 2 + 1))


def test_the_stand_in_spoils_graphs_whose_memory_is_others(graphs_on_host):
    """Which shows that a graph without a pool of its own would fail in the tests of plans."""
    import cupy

    x, stream = ones(), cupy.cuda.Stream(non_blocking=True)
    x * 2 + 1
    with stream:
        stream.begin_capture()
        y = x * 2
        z = y + 1
        graph = stream.end_capture()
        graph.launch()
        np.testing.assert_array_equal(z.to_host(), 3)
        del y
        taken = cupy.full((3,), 9, dtype=np.float32)
        graph.launch()
    np.testing.assert_array_equal(taken.to_host(), 2)  # the graph has written over it
