import threading

import numpy as np
import standin

from hpcdp.kernels import empty

LARGE = (300, 401)


def test_what_is_asked_for_comes():
    for shape in ((), (0, 3), (5,), LARGE):
        for dtype in (np.float32, np.float64, np.int32):
            x = empty(shape, dtype)
            assert (x.shape, x.dtype) == (shape, dtype)
            assert x.flags.c_contiguous
            assert x.flags.writeable
            x[...] = 3
            assert (x == 3).all()
    assert empty(LARGE, np.float32).ctypes.data % 64 == 0
    assert isinstance(empty(LARGE, standin.float32, standin), standin.Array)


def test_memory_comes_back_when_the_last_view_is_gone():
    first = empty(LARGE, np.float64)
    place = first.ctypes.data
    view = first.reshape(-1)[7:].reshape(-1, 1)
    del first
    second = empty(LARGE, np.float64)
    assert not np.shares_memory(second, view)
    del view
    assert empty(LARGE, np.float64).ctypes.data == place


def test_arrays_that_live_never_share_memory():
    alive = [empty(LARGE, np.float32) for _ in range(5)]
    for number, x in enumerate(alive):
        x[...] = number
    del alive[2]
    alive.append(empty(LARGE, np.float32))
    alive[-1][...] = 9
    assert [x[0, 0] for x in alive] == [0, 1, 3, 4, 9]


def test_idle_memory_is_given_back():
    from hpcdp import kernels

    empty((123457,), np.float32)
    nbytes = 123457 * 4
    assert nbytes in kernels._blocks.of_size
    for _ in range(600):
        empty(LARGE, np.float32)
    kept = empty((200_003,), np.float32)
    assert nbytes not in kernels._blocks.of_size
    assert kept.nbytes in kernels._blocks.of_size


def test_threads_have_memory_of_their_own():
    seen = []

    def work():
        x = empty(LARGE, np.float64)
        seen.append(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(np.shares_memory(a, b) for i, a in enumerate(seen) for b in seen[:i])
