"""Collectives in a node's memory: nothing is sent."""

import contextlib
import itertools

import numpy as np
from raises import raises

from hpcdp.collectives import (
    Monoid,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    gather,
    iallreduce,
    reduce,
    reduce_scatter,
    scatter,
)
from hpcdp.comm import thread_comm
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
