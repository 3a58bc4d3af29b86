import threading
import time

import numpy as np
from numba import njit

from hpcdp import kernels


def test_a_post_is_seen_and_a_missing_one_times_out():
    sync = kernels.load("shm_exchange")
    counters = np.zeros(2 * sync.STRIDE, np.int32)
    sync.post(counters, 1, np.int32(5))
    assert counters[sync.STRIDE] == 5
    assert sync.wait(counters, 1, np.int32(5), 10, 0)
    began = time.monotonic()
    assert not sync.wait(counters, 1, np.int32(6), 10, 20_000_000)
    assert 0.015 < time.monotonic() - began < 5
    assert not sync.wait_all(counters, 2, np.int32(5), 10, 0)


def test_a_sleeper_is_woken_long_before_its_timeout():
    sync = kernels.load("shm_exchange")
    counters = np.zeros(sync.STRIDE, np.int32)
    threading.Timer(0.05, lambda: sync.post(counters, 0, np.int32(1))).start()
    began = time.monotonic()
    assert sync.wait(counters, 0, np.int32(1), 0, 30_000_000_000)
    assert time.monotonic() - began < 10
    assert counters[1] == 0  # nobody is counted as sleeping any more


def test_counters_wrap_around():
    sync = kernels.load("shm_exchange")
    counters = np.full(sync.STRIDE, np.int32(-(2**31)))  # one past the largest
    assert sync.wait(counters, 0, np.int32(2**31 - 1), 0, 0)


def test_a_barrier_of_threads_keeps_step_over_many_rounds():
    sync, n, rounds = kernels.load("shm_exchange"), 3, 300
    counters, board, torn = np.zeros(n * sync.STRIDE, np.int32), np.zeros(n, np.int64), []

    def rank(me):
        for number in range(1, rounds + 1):
            board[me] = number
            sync.post(counters, me, np.int32(2 * number - 1))
            while not sync.wait_all(counters, n, np.int32(2 * number - 1), 50, 10**7):
                pass
            if not (board == number).all():
                torn.append((me, number))
            sync.post(counters, me, np.int32(2 * number))
            while not sync.wait_all(counters, n, np.int32(2 * number), 50, 10**7):
                pass

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not torn
    assert (board == rounds).all()


def test_kernels_find_the_data_of_arrays_like_those_of_the_first_call():
    module = kernels.load("shm_repeated")
    arrays_at = module.arrays_at
    address_of = njit(lambda table, x: arrays_at(table, x, x)[0])
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    read_only, aligned = x.copy(), np.zeros(97, np.uint8)
    read_only.flags.writeable = False
    others = [
        x[:, ::2], x.T, np.zeros(0, np.float32), np.zeros((4, 5), np.float32), x.astype(np.float64), x.astype(np.int32),
        x.astype(x.dtype.newbyteorder()), np.ma.masked_array(x), x.view(np.recarray), read_only,
        aligned[1:].view(np.float32).reshape(4, 6), np.float32(1), None, 24, "x", [x], [],
    ]  # fmt: skip
    table = module.table_of((x.dtype, 24, (4, 6)), None, module.ANY, [0])
    assert address_of(table, id(x)) == x.ctypes.data
    for other in [*others, x.reshape(-1), x.reshape(6, 4), x.reshape(4, 6, 1)]:
        assert address_of(table, id(other)) == -1
    table = module.table_of((x.dtype, 24, None), None, module.ANY, [0])
    for same in (x, x.reshape(-1), x.reshape(3, 2, 4), x[np.newaxis]):
        assert address_of(table, id(same)) == x.ctypes.data
    for other in others:
        assert address_of(table, id(other)) == -1
    marked = x.astype(np.dtype(np.float32, metadata={"unit": "m"}))  # a dtype that goes with its array
    table = module.table_of((marked.dtype, 24, (4, 6)), None, module.ANY, [0])
    assert address_of(table, id(marked)) == -1 and address_of(table, id(x)) == x.ctypes.data
    one = module.table_of((x.dtype, 1, ()), None, module.ANY, [0])
    assert address_of(one, id(x[0, 0].copy())) == -1 and address_of(one, id(np.zeros((), x.dtype))) > 0
