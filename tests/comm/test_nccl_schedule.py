"""NCCL's calls on 2 to 8 GPUs: their order on all ranks, aborts, splits and the end, on the stand-in.

The stand-in reports as errors what hangs on GPUs: groups of calls in different orders, a kernel that waits for others
behind the kernel of another communicator, and a communicator that some ranks destroy and others abort.
"""

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
from pairs import in_turn
from parameters_on_gpus import show_gpus
from rows_on_gpus import write

from hpcdp.comm import gpu_buckets, thread_comm
from hpcdp.comm.communicator import wait_for
from hpcdp.comm.gpu_buckets.transport import GpuTransport, RowSize, parts_of
from hpcdp.comm.progress import TaskGroup, run_until_complete
from hpcdp.core.arrays import Streams, gpu
from hpcdp.errors import DeviceError, WorldAborted

F4 = np.dtype("f4")
COUNT = 24
"""Divisible by every number of ranks but 5 and 7, for which each part is a call of its own."""
STEPS = 2


@pytest.fixture(autouse=True)
def eight_gpus(gpus_on_host, monkeypatch):
    show_gpus(monkeypatch, 8)


def make(world, *counts):
    gpu(world.place).use()
    rows, way = gpu_buckets.make(world, Streams(gpu(world.place)), [RowSize(count, F4) for count in counts])
    assert way is GpuTransport.NCCL
    return list(rows)


def values(rank, row, step):
    return np.random.default_rng([rank, row, step]).integers(-9, 9, COUNT).astype(F4)


def sum_in_any_order(world, rows, step, ranks):
    """Sum all rows, by tasks that each rank starts in an order of its own, and compare them with the expected sums."""
    for number, row in enumerate(rows):
        write(row, values(ranks[world.rank], number, step))
    parts = parts_of(COUNT, world.size, world.size)

    def machine(row):
        yield from row.reduce_scatter(parts)
        yield from row.allgather(parts)

    chance = random.Random(100 * step + ranks[world.rank])
    TaskGroup([machine(row) for row in chance.sample(rows, len(rows))]).wait()
    rows[0].stream.synchronize()
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(row.mine.to_host(), sum(values(rank, number, step) for rank in ranks))


@pytest.mark.parametrize(("gpus_on_host", "n"), in_turn([0, 1], range(2, 9)), indirect=["gpus_on_host"])
def test_all_ranks_launch_the_same_groups_in_one_order(gpus_on_host, n):
    """The rows have one size, so calls of different rows are alike to NCCL, and a wrong order gives wrong sums."""

    def rank(world):
        rows = make(world, *[COUNT] * 4)
        for step in range(STEPS):
            sum_in_any_order(world, rows, step, range(n))
        return rows[0]._node._comm

    comms = thread_comm.run(n, rank)
    calls = comms[0]._clique.calls
    assert len(calls) == 2 * 4 * STEPS  # a reduce-scatter and an allgather for each row
    equal = COUNT % n == 0
    groups = {("reduceScatter",), ("allGather",)} if equal else {("reduce",) * n, ("broadcast",) * n}
    for of_ranks in calls.values():
        assert set(of_ranks) == set(range(n))
        (launched,) = {tuple(name for name, _ in alike) for alike, _ in of_ranks.values()}
        assert launched in groups
        if not equal:  # one call for each owner, in the order of the ranks
            (roots,) = {tuple(call[-1] for _, call in alike) for alike, _ in of_ranks.values()}
            assert roots == tuple(range(n))


@pytest.mark.parametrize(
    ("gpus_on_host", "n", "lost", "raises"),
    [(0, 2, 1, True), (1, 2, 0, False), (0, 5, 0, True), (1, 5, 2, False), (0, 8, 7, False), (1, 8, 3, True)],
    indirect=["gpus_on_host"],
)
def test_kernels_that_wait_for_a_lost_rank_are_aborted(gpus_on_host, n, lost, raises):
    """The lost rank has announced an operation, so the others launch it, and has not launched it itself."""
    launched = threading.Barrier(n, timeout=10)
    comms = {}

    def rank(world):
        (row,) = make(world, COUNT)
        node = row._node
        comms[world.rank] = node._comm
        if world.rank == lost:
            node.order.ready(row._number)
            wait_for(lambda: node.order.is_turn(row._number))
            launched.wait()
            if raises:
                raise ValueError("lost")
            node._comm.failed = True
            with pytest.raises(DeviceError):
                node.check()
            return
        run_until_complete(row.allreduce())
        done = node.streams.event()
        node.streams.record(done, row.stream)
        launched.wait()
        with pytest.raises(WorldAborted if raises else DeviceError):
            wait_for(lambda: row.check() or node.streams.query(done))

    if raises:
        with pytest.raises(ValueError, match="lost"):
            thread_comm.run(n, rank)
    else:
        thread_comm.run(n, rank)
    assert [comm.aborted for _, comm in sorted(comms.items())] == [not raises or rank != lost for rank in range(n)]
    assert not any(comm.destroyed for comm in comms.values())


@pytest.mark.parametrize(("gpus_on_host", "n"), [(0, 4), (1, 6), (0, 8)], indirect=["gpus_on_host"])
def test_splits_have_communicators_and_orders_of_their_own(gpus_on_host, n):
    """Sums of the whole world and of its parts take turns, as those of data and tensor parallelism."""

    def rank(world):
        part = world.split(world.rank % 2)
        mine = range(world.rank % 2, n, 2)
        of_all, of_part = make(world, COUNT, COUNT), make(part, COUNT, COUNT)
        for step in range(STEPS):
            sum_in_any_order(part, of_part, step, mine)
            sum_in_any_order(world, of_all, step, range(n))
        return of_all[0]._node._comm, of_part[0]._node._comm

    found = thread_comm.run(n, rank)
    assert len({id(whole._clique) for whole, _ in found}) == 1
    assert len({id(part._clique) for _, part in found}) == 2
    assert all(comm.destroyed and not comm.aborted for both in found for comm in both)


@pytest.mark.parametrize("gpus_on_host", [0], indirect=True)
def test_a_split_ends_its_communicator_when_it_is_closed(gpus_on_host):
    def rank(world):
        ended = []
        for _ in range(2):
            with world.split(world.rank % 2) as part:
                (row,) = make(part, COUNT)
                run_until_complete(row.allreduce())
                comm = row._node._comm
            ended.append(comm.destroyed)
            alive = weakref.ref(part)
            del part, row
            gc.collect()
            ended.append(alive() is None)
        return ended

    assert thread_comm.run(4, rank) == [[True] * 4] * 4


@pytest.mark.parametrize(("gpus_on_host", "n"), [(0, 2), (1, 5), (0, 8)], indirect=["gpus_on_host"])
def test_the_end_waits_for_all_work_and_destroys_each_communicator_once(gpus_on_host, n):
    """Ranks come to the end at different times, with sums that no rank has waited for."""

    def rank(world):
        rows = make(world, *[COUNT] * 3)
        TaskGroup([row.allreduce() for row in random.Random(world.rank).sample(rows, 3)]).wait()
        time.sleep(0.02 * ((7 * world.rank) % n) / n)
        return rows[0]._node._comm

    comms = thread_comm.run(n, rank)
    assert all(comm.destroyed and not comm.aborted for comm in comms)
    assert gpus_on_host.log.count("nccl allReduce") == 3 * n
