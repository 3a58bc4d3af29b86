"""Collectives in a node's memory: nothing is sent."""

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest
from raises import raises

from hpcdp.collectives import (
    Monoid,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    gather,
    iallgather,
    iallreduce,
    ialltoall,
    ibarrier,
    ibroadcast,
    igather,
    ireduce,
    ireduce_scatter,
    iscatter,
    reduce,
    reduce_scatter,
    scatter,
    sendrecv,
)
from hpcdp.comm import init, thread_comm
from hpcdp.core.state import refusing
from hpcdp.errors import ConfigError, HpcdpError, MismatchError, UnsupportedError


def test_nothing_is_sent():
    def rank(world):
        allreduce(np.zeros(1000, np.float32), "sum", world, "shared")
        allgather(np.zeros(1000), world, "shared")
        broadcast(np.zeros(1000), 1, world, "shared")
        reduce(np.zeros(1000), "sum", 1, world, "shared")
        return world.comm.traffic.nbytes + world.node_comm.traffic.nbytes

    assert thread_comm.run(3, rank) == [0, 0, 0]


def test_several_nodes_are_refused_by_name():
    with raises(UnsupportedError, operation="collective", where="algorithm='shared'", got=2):
        thread_comm.run(4, lambda world: allreduce(np.zeros(3), world=world, algorithm="shared"), ranks_per_node=2)


def test_a_dtype_without_a_kernel_is_told():
    with raises(UnsupportedError, operation="allreduce", where="algorithm='shared'", expected=[8, 32, 64], got="int16"):
        thread_comm.run(2, lambda world: allreduce(np.zeros(3, "i2"), world=world, algorithm="shared"))


def test_a_call_that_is_repeated_is_still_checked():
    """After its first call an allreduce of one shape and dtype goes directly to its kernel."""

    def rank(world):
        part, n = world.split(0), world.size
        x = np.full((2, 3), world.rank + 1.0)
        for _ in range(3):
            assert allreduce(x, world=part) is x
            x /= n
        with raises(UnsupportedError, operation="allreduce", got="read-only"):
            allreduce(np.broadcast_to(1.0, (2, 3)), world=part)
        with (
            raises(HpcdpError, operation="allreduce", got="one that others read"),
            refusing([x], "one that others read"),
        ):
            allreduce(x, world=part)
        strided = np.full((4, 6), world.rank + 1.0)[::2, ::2]
        assert (allreduce(strided, world=part) == n * (n + 1) / 2).all()
        request = iallreduce(later := np.full((2, 3), 1.0), "sum", part, "ring")
        assert (allreduce(np.ones((2, 3)), world=part) == n).all()
        assert request.test() and (later == n).all()  # a blocking call completes what has been started
        other = Monoid(np.fmax, name="sum")
        assert (allreduce(np.full((2, 3), world.rank), other, part) == n - 1).all()
        with raises(MismatchError, got=["op 'max'", f"rank {n - 1}"]):
            allreduce(np.ones((2, 3)), "max" if world.rank == n - 1 else "sum", part)
        assert (allreduce(np.ones((2, 3)), world=part) == n).all()
        part.close()
        with raises(ConfigError, operation="allreduce", got="close()"):
            allreduce(x, world=part)

    for n in (2, 3):
        thread_comm.run(n, rank)


def test_a_repeated_call_gives_way_to_meetings():
    """Such as the rounds of a store, whose methods must run before a collective."""
    seen = []

    class Store:
        @contextlib.contextmanager
        def aside(self):
            seen.append(1)
            yield

    def rank(world):
        store, x = Store(), np.ones(4)
        for _ in range(2):
            allreduce(x, world=world)
        world.meetings.add(store.aside)
        allreduce(x, world=world)
        return x.tolist()

    assert thread_comm.run(2, rank) == [[8.0] * 4] * 2
    assert seen == [1, 1]


def test_a_repeated_call_takes_other_arrays_in_the_usual_way():
    """Its kernel knows arrays by the dtype, size, layout and memory of those of the first call."""

    def rank(world):
        n, me, dtypes = world.size, world.rank, ("f4", "i8", "i2", "?", "c8")
        for dtype, count in itertools.product(dtypes, (n, 3 * n + 1)):
            lo, hi = count * me // n, count * (me + 1) // n
            whole = (np.arange(count) % 5).astype(dtype)
            total = np.add.reduce([whole] * n, dtype=dtype)
            wide = np.zeros((count, 2), dtype)
            wide[:, 0] = whole
            frozen = whole.copy()
            frozen.flags.writeable = False
            for x in (whole.copy(), whole.copy(), wide[:, 0], frozen, whole.reshape(1, -1), whole.copy()):
                shard, every, swapped = np.zeros(hi - lo, dtype), np.zeros((1, count), dtype), np.zeros_like(wide)[:, 0]
                assert (reduce_scatter(x, world=world, out=shard) == total[lo:hi]).all()
                assert (allgather(x.reshape(-1)[lo:hi], world, out=every) == whole).all()
                assert (allgather(x.reshape(-1)[lo:hi], world, out=every.reshape(-1)) == whole).all()
                result = reduce(x, world=world, out=swapped.reshape(x.shape) if me == 0 else None)
                assert (result == (total if me == 0 else whole)).all()
                assert (x.reshape(-1) == whole).all()
                gathered = gather(x, 0, world, np.zeros(7) if me else None)
                assert gathered is None if me else (gathered.reshape(n, -1) == whole).all()
                assert (scatter(np.tile(x, (n, 1, 1)) if me == 0 else None, 0, world).reshape(-1) == whole).all()
                assert (alltoall(np.tile(x, (n, 1)), None, world).reshape(-1, count) == whole).all()
            with raises(UnsupportedError, operation="alltoall", where="out"):
                alltoall(np.tile(whole, (n, 1)), None, world, np.zeros(n * count, dtype))
            inside = whole.copy()
            assert (reduce_scatter(inside, world=world, out=inside[lo:hi]) == total[lo:hi]).all()
            inside, behind = np.zeros(count + 1, dtype), me == 0 and n > 1
            inside[:count] = whole
            result = reduce(inside[:count], world=world, out=inside[1:] if behind else None)
            assert (result == (total if behind or n == 1 else whole)).all()

    for n in (1, 2, 3):
        thread_comm.run(n, rank)


def _starts(world):
    """Return functions that start each nonblocking collective of short arrays, and the results that follow."""
    n, me = world.size, world.rank
    x, total = np.arange(n * 3.0).reshape(n, 3), np.zeros((n, 3))
    every, shard, mine = np.zeros((n, 3)), np.zeros(3), np.full(3, float(me))

    def summed():
        total[...] = x
        return iallreduce(total, world=world)

    ranks = np.repeat(np.arange(float(n))[:, None], 3, 1)
    return [
        (summed, n * x),
        (lambda: ireduce_scatter(x, world=world, out=shard), n * x[me]),
        (lambda: iallgather(mine, world, out=every), ranks),
        (lambda: ibroadcast(np.full(3, float(me)), n - 1, world), np.full(3, n - 1.0)),
        (lambda: ireduce(mine.copy(), "max", n - 1, world), np.full(3, n - 1.0) if me == n - 1 else mine),
        (lambda: ireduce(mine.copy(), "sum", 0, world), ranks.sum(0) if me == 0 else mine),
        (lambda: ialltoall(np.repeat(x[:1], n, 0) + me, None, world), x[:1] + ranks),
        (lambda: igather(mine, 0, world), ranks.reshape(-1) if me == 0 else None),
        (lambda: iscatter(x if me == 0 else None, 0, world), x[me : me + 1]),
        (lambda: ibarrier(world), None),
    ]


def _is_right(result, expected):
    return result is expected or (result == expected).all()


def _repeated_nonblocking_calls(world):
    starts = _starts(world)
    for _ in range(3):  # one at a time, and then all under way
        for start, expected in starts:
            assert _is_right(start().wait(), expected)
    for _ in range(3):
        operations = [start() for start, _ in starts]
        order = reversed(range(len(starts))) if world.rank % 2 else range(len(starts))
        for number in order:
            assert _is_right(operations[number].wait(), starts[number][1])
        world.barrier()
    for start, expected in starts:  # the lane ends what nobody asks for
        operation, until = start(), time.monotonic() + 20
        while not operation.is_over and time.monotonic() < until:
            time.sleep(0.001)
        assert operation.is_over and _is_right(operation.wait(), expected)
        assert (allreduce(np.ones(2), world=world) == world.size).all()
    for start, expected in starts:  # a blocking call ends what was started
        operation = start()
        world.barrier()
        assert operation.test() and _is_right(operation.wait(), expected)


def test_repeated_nonblocking_calls():
    for n in (1, 2, 3, 4):
        thread_comm.run(n, _repeated_nonblocking_calls)


@pytest.mark.mpi
def test_real_ranks_repeat_nonblocking_calls():
    _repeated_nonblocking_calls(init())


def test_an_array_that_is_frozen_before_the_end_is_an_error():
    has_begun = threading.Event()

    def rank(world):
        x = np.ones(4)
        for _ in range(3):
            iallreduce(x, world=world).wait()
        if world.rank:
            assert has_begun.wait(60)
            assert (iallreduce(np.ones(4), world=world).wait() == 9).all()
            return
        operation = iallreduce(x, world=world)
        x.flags.writeable = False
        has_begun.set()
        with raises(UnsupportedError, operation="iallreduce", got="changed"):
            operation.wait()

    thread_comm.run(2, rank)


def _calls_that_differ(world):
    part = world.split(0)
    n, me = part.size, part.rank
    x = np.ones(4)
    for _ in range(20):
        assert (iallreduce(x.copy(), world=part).wait() == n).all()
        assert (ibroadcast(x.copy(), 0, part).wait() == 1).all()
        part.barrier()
    if n > 1:
        is_last = me == n - 1
        with raises(MismatchError, got=["ibroadcast", f"rank {n - 1}"]):
            (ibroadcast(x, 0, part) if is_last else iallreduce(x, world=part)).wait()
        with raises(MismatchError, operation="iallreduce", got=["(2, 2)", f"rank {n - 1}"]):
            iallreduce(x.reshape(2, 2) if is_last else x, world=part).wait()
        with raises(MismatchError, operation="barrier", got=["allreduce", f"rank {n - 1}"]):
            allreduce(x, world=part) if is_last else part.barrier()
    with raises(UnsupportedError, operation="broadcast", where="root", got="True"):
        broadcast(x, True, part)
    assert (iallreduce(x, world=part).wait() == n).all()
    part.barrier()
    part.close()
    with raises(ConfigError, operation="barrier", got="close()"):
        part.barrier()


def test_repeated_calls_that_differ():
    for n in (1, 2, 3):
        thread_comm.run(n, _calls_that_differ)


@pytest.mark.mpi
def test_real_ranks_repeat_calls_that_differ():
    _calls_that_differ(init())


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("length", [10, 2000, 70_000])
def test_memory_that_receives_may_overlap_what_is_sent(n, length):
    """Each call, the first one and repeated ones, gives what it gives with memory of its own."""

    def rank(world):
        me, at = world.rank, 3
        mine, whole = np.arange(length) + 1000.0 * me, np.arange(length * n) + 1000.0 * me

        def beside(x, out_size, call):
            memory = np.zeros(x.size + out_size + at)
            memory[at : at + x.size] = x
            call(memory[at : at + x.size], out := memory[:out_size])
            return out

        def once():
            shift = (me + 1) % n, (me - 1) % n
            return [
                beside(mine, n * length, lambda x, out: allgather(x, world, out=out)),
                beside(whole, n * length, lambda x, out: alltoall(x, world=world, out=out)),
                beside(mine, n * length, lambda x, out: gather(x, 0, world, out=out if me == 0 else None)),
                beside(whole, length, lambda x, out: scatter(x if me == 0 else None, 0, world, out=out)),
                beside(mine, length, lambda x, out: sendrecv(x, *shift, out, 0, world)),
                beside(mine, n * length, lambda x, out: iallgather(x, world, out=out).wait()),
                beside(whole, n * length, lambda x, out: ialltoall(x, world=world, out=out).wait()),
            ]

        return [once() for _ in range(3)]

    mine = [np.arange(length) + 1000.0 * r for r in range(n)]
    whole = [np.arange(length * n) + 1000.0 * r for r in range(n)]
    for me, calls in enumerate(thread_comm.run(n, rank)):
        gathered, block = np.concatenate(mine), slice(me * length, (me + 1) * length)
        moved = np.concatenate([x[block] for x in whole])
        for allgathered, exchanged, at_root, part, passed, later, later_moved in calls:
            np.testing.assert_array_equal(allgathered, gathered)
            np.testing.assert_array_equal(exchanged, moved)
            np.testing.assert_array_equal(at_root, gathered if me == 0 else at_root)
            np.testing.assert_array_equal(part, whole[0][block])
            np.testing.assert_array_equal(passed, mine[(me - 1) % n])
            np.testing.assert_array_equal(later, gathered)
            np.testing.assert_array_equal(later_moved, moved)
