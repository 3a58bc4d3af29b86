"""Rows of ranks of which several share a GPU, on several GPUs; here on streams that do things as late as they may."""

import random
import shutil
import sys

import numpy as np
import pytest
from pairs import in_turn
from parameters_on_gpus import show_gpus
from raises import raises
from rows_on_gpus import assert_summed, summed_and_brought_to_all, to_gpu

from hpcdp.comm import gpu_buckets, thread_comm
from hpcdp.comm.gpu_buckets.transport import GpuTransport, RowSize, parts_of
from hpcdp.comm.progress import TaskGroup
from hpcdp.core.arrays import Streams, dtype_of, gpu
from hpcdp.errors import DeviceError

COUNT = 1001
PLACES = {
    3: [[0, 1, 0], [0, 0, 1], [1, 0, 0]], 4: [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]],
    5: [[0, 1, 2, 0, 1], [2, 2, 0, 1, 1]], 6: [[0, 1, 2, 2, 1, 0]],
}  # fmt: skip
"""The GPU of each rank, by their number."""
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which compiles kernels for this processor")


@pytest.fixture(autouse=True)
def eight_gpus(gpus_on_host, monkeypatch):
    show_gpus(monkeypatch, 8)


def values(rank, count, dtype="f4"):
    """Small whole numbers: NCCL adds GPUs up in any order."""
    return np.random.default_rng([rank, count]).integers(-9, 9, count).astype(dtype_of(dtype))


def total(n, count, dtype="f4"):
    return sum(values(rank, count, "f8") for rank in range(n)).astype(dtype_of(dtype))


def make(world, places, *sizes):
    gpu(places[world.rank]).use()
    return gpu_buckets.make(world, Streams(gpu(places[world.rank])), sizes)


@pytest.mark.parametrize(
    ("gpus_on_host", "places", "dtype"),
    in_turn(
        [0, 1],  # in which streams take turns
        [each for of_n in PLACES.values() for each in of_n],
        ["f4", "f2", "bfloat16", "f8", "i4", "i8"],
    ),
    indirect=["gpus_on_host"],
)
def test_parts_are_summed_by_their_owners_and_brought_to_all(gpus_on_host, places, dtype):
    n = len(places)
    parts = parts_of(COUNT, n - 1, n)  # the last rank owns none

    def rank(world):
        (row,), way = make(world, places, RowSize(COUNT, dtype_of(dtype)))
        assert way is GpuTransport.GROUPS and not row.mine.to_host().any()
        return summed_and_brought_to_all(row, parts, world.rank, values(world.rank, COUNT, dtype))

    assert_summed(thread_comm.run(n, rank), parts, total(n, COUNT, dtype))
    assert not gpus_on_host.allocated and not gpus_on_host.mapped


@pytest.mark.parametrize(
    ("places", "count", "called"),
    [
        ([0, 0, 1, 1], 64, ["nccl reduceScatter", "nccl allGather"]),
        ([0, 1, 0, 1], 64, ["nccl reduce reduce reduce reduce", "nccl broadcast broadcast broadcast broadcast"]),
        ([0, 0, 0, 1], 64, ["nccl reduce reduce", "nccl broadcast broadcast"]),
        ([1, 0, 0, 1], 3, ["nccl reduce reduce", "nccl broadcast broadcast"]),
    ],
    ids=str,
)
def test_gpus_exchange_no_more_than_what_their_ranks_own(gpus_on_host, places, count, called):
    n = len(places)
    parts = parts_of(count, min(n, count), n)  # where there are three columns, the last rank owns none

    def rank(world):
        (row,), _ = make(world, places, RowSize(count, np.dtype("f4")))
        return summed_and_brought_to_all(row, parts, world.rank, values(world.rank, count))

    assert_summed(thread_comm.run(n, rank), parts, total(n, count))
    for each in called:
        assert gpus_on_host.log.count(each) == 2, "once by the first rank of each GPU"
    assert not any("allReduce" in each for each in gpus_on_host.log)


@pytest.mark.parametrize("places", [[0, 1, 0], [0, 0, 1, 1], [0, 1, 2, 0, 1]], ids=str)
def test_rows_are_written_and_summed_again_and_again_in_any_order(gpus_on_host, places):
    sizes = [RowSize(count, np.dtype("f4")) for count in (40, 0, 300, 1000)]
    n = len(places)

    def rank(world):
        chance = random.Random(world.rank)
        rows, _ = make(world, places, *sizes)
        streams = Streams(gpu(places[world.rank]))
        done = streams.event()
        for step in range(4):
            written = [to_gpu(step + values(world.rank, row.size.count)) for row in rows]
            for row, x in zip(rows, written, strict=True):
                streams.follow(row.stream)
                streams.copy_async(row.mine, x, row.stream)
            TaskGroup([rows[number].allreduce() for number in chance.sample(range(4), 4)]).wait()
            for row in rows:  # else the next step's gradients come too early
                streams.record(done, row.stream)
                streams.wait_event(streams.current(), done)
            for row in rows:
                np.testing.assert_array_equal(row.mine.to_host(), n * step + total(n, row.size.count))

    thread_comm.run(n, rank)
    assert not gpus_on_host.allocated and not gpus_on_host.mapped


def test_nodes_go_the_way_of_each(gpus_on_host):
    """One whose ranks have GPUs of their own, one whose ranks share one, one with both, one rank alone."""
    places, nodes = [0, 1, 2, 2, 3, 4, 3, 5], (2, 2, 3, 1)

    def rank(world):
        (row,), way = make(world, places, RowSize(10, np.dtype("f4")))
        parts = parts_of(10, world.num_rails, world.local_size)
        found = summed_and_brought_to_all(row, parts, world.local_rank, values(world.rank, 10))
        return way, found[1].tolist()

    found = thread_comm.run(8, rank, nodes)
    assert [way for way, _ in found] == [GpuTransport.NCCL] * 2 + [GpuTransport.CUDA_IPC] * 2 + [
        GpuTransport.GROUPS
    ] * 3 + [GpuTransport.ALONE]
    for first, last in ((0, 2), (2, 4), (4, 7), (7, 8)):
        wanted = sum(values(rank, 10) for rank in range(first, last)).tolist()
        assert all(each == wanted for _, each in found[first:last])


def test_rows_that_nobody_has_are_given_back_when_others_are_made(gpus_on_host):
    def rank(world):
        places = [0, 1, 0]
        for _ in range(3):
            rows, _ = make(world, places, RowSize(10, np.dtype("f4")), RowSize(20, np.dtype("f8")))
            TaskGroup([row.allreduce() for row in rows]).wait()
            del rows
        kept, _ = make(world, places, RowSize(10, np.dtype("f4")))
        world.barrier()
        found = len(gpus_on_host.allocated), kept[0].size.count
        world.barrier()  # before a rank that ends gives back what it has
        return found

    assert thread_comm.run(3, rank) == [(3, 10)] * 3


@pytest.mark.parametrize("full", [0, 1])
def test_a_gpu_without_room_is_told_on_all_ranks(gpus_on_host, monkeypatch, full):
    """Those of other GPUs, which have room, do not wait for it."""
    runtime, here = sys.modules["cupy.cuda.runtime"], gpus_on_host.of_thread
    malloc = runtime.malloc

    def full_there(size):
        if here.device == full:
            raise runtime.CUDARuntimeError(2)
        return malloc(size)

    monkeypatch.setattr(runtime, "malloc", full_there)

    def rank(world):
        with raises(DeviceError, operation="CUDA IPC", expected=["bytes", "GPU"]):
            make(world, [0, 1, 0], RowSize(10, np.dtype("f4")))
        return "told"

    assert thread_comm.run(3, rank) == ["told"] * 3
    assert not gpus_on_host.allocated


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_gives_up_ends_the_others(gpus_on_host, gone):
    """The first one of a GPU that two share, the only one of another, and one that is no first one."""

    class GivesUp(Exception):
        pass

    def rank(world):
        (row,), _ = make(world, [0, 1, 0], RowSize(10, np.dtype("f4")))
        if world.rank == gone:
            raise GivesUp
        TaskGroup([row.allreduce()]).wait()

    with pytest.raises((GivesUp, DeviceError)):
        thread_comm.run(3, rank)
