"""Rows of ranks that share a GPU, summed by the first of them; here on streams that do things as late as they may."""

import random
import shutil
import threading

import numpy as np
import pytest
from raises import raises
from rows_on_gpus import assert_summed, summed_and_brought_to_all, to_gpu

from hpcdp.comm import gpu_buckets, thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets.cuda_ipc import CudaIpc
from hpcdp.comm.gpu_buckets.transport import GpuTransport, RowSize, parts_of
from hpcdp.comm.progress import TaskGroup
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import Streams, dtype_of, gpu
from hpcdp.errors import DeviceError, UnsupportedError

COUNT = 1001
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which compiles kernels for this processor")


def values(rank, count, dtype):
    return np.random.default_rng([rank, count]).standard_normal(count).astype(dtype_of(dtype))


def summed(n, count, dtype):
    """In the order of the ranks, as the kernel does."""
    kind = dtype_of(dtype)
    wide = np.dtype("f4") if kind.itemsize == 2 else kind
    return sum((values(rank, count, dtype).astype(wide) for rank in range(n)), np.zeros(count, wide)).astype(kind)


def make(world, *sizes):
    return CudaIpc(world.node_comm, world.node_memory, Streams(gpu(0)), sizes)


@pytest.mark.parametrize("dtype", ["f4", "f2", "bfloat16", "f8", "i4", "i8"])
@pytest.mark.parametrize(("n", "owners"), [(1, 1), (2, 2), (3, 2), (4, 4)])
def test_parts_are_summed_by_their_owners_and_brought_to_all(gpus_on_host, n, owners, dtype):
    def rank(world):
        parts = parts_of(COUNT, owners, n)
        group = make(world, RowSize(COUNT, dtype_of(dtype)))
        (row,) = group.rows
        assert not row.mine.to_host().any()
        found = summed_and_brought_to_all(row, parts, world.rank, values(world.rank, COUNT, dtype))
        group.close()
        return found

    assert_summed(thread_comm.run(n, rank), parts_of(COUNT, owners, n), summed(n, COUNT, dtype))
    assert not gpus_on_host.allocated and not gpus_on_host.mapped


def test_rows_are_written_and_summed_again_and_again_in_any_order(gpus_on_host):
    sizes = [RowSize(count, np.dtype("f4")) for count in (40, 0, 300, 1000)]

    def rank(world):
        chance = random.Random(world.rank)
        streams = Streams(gpu(0))
        group = CudaIpc(world.node_comm, world.node_memory, streams, sizes)
        done = streams.event()
        for step in range(4):
            written = [to_gpu(step + values(world.rank, row.size.count, "f4")) for row in group.rows]
            for row, x in zip(group.rows, written, strict=True):
                streams.follow(row.stream)
                streams.copy_async(row.mine, x, row.stream)
            TaskGroup([group.rows[number].allreduce() for number in chance.sample(range(4), 4)]).wait()
            for row in group.rows:  # else the next step's gradients come too early
                streams.record(done, row.stream)
                streams.wait_event(streams.current(), done)
            for row in group.rows:
                wanted = sum(step + values(each, row.size.count, "f4") for each in range(3))
                np.testing.assert_array_equal(row.mine.to_host(), wanted.astype("f4"))

    thread_comm.run(3, rank)


def test_rows_are_cleared_before_others_read_them(gpus_on_host):
    def rank(world):
        streams = Streams(gpu(0))
        with streams.stream() as current:
            if world.rank == 2:  # which clears its row later
                gpus_on_host.push(current.ptr, lambda: None, others_ask.is_set)
            (row,) = CudaIpc(world.node_comm, world.node_memory, streams, [RowSize(COUNT, np.dtype("f4"))]).rows
        summing = TaskGroup([row.allreduce()])
        too_early = any(summing.test() for _ in range(200))
        world.barrier()
        others_ask.set()
        summing.wait()
        return too_early, row.mine.to_host().any()

    others_ask = threading.Event()
    assert thread_comm.run(3, rank) == [(False, False)] * 3


def test_a_sum_has_ended_when_it_is_there_and_others_give_the_gpu_nothing_for_it(gpus_on_host):
    def rank(world):
        (row,) = make(world, RowSize(COUNT, np.dtype("f4"))).rows
        streams = Streams(gpu(0))
        given = streams.event()
        with streams.on_device():
            mine = to_gpu(values(world.rank, COUNT, "f4"))
            streams.follow(row.stream)
            streams.copy_async(row.mine, mine, row.stream)
            streams.record(given, streams.current())
        streams.synchronize(row.stream)
        streams.synchronize(given)
        world.barrier()
        begun = len(gpus_on_host.log)
        world.barrier()
        TaskGroup([row.allreduce([given])]).wait()
        world.barrier()
        done = list(gpus_on_host.log[begun:])
        world.barrier()
        np.testing.assert_array_equal(row.mine.to_host(), summed(3, COUNT, "f4"))
        return done

    assert thread_comm.run(3, rank) == [["wait", "kernel"]] * 3, "the first rank's alone"


def test_memory_that_cupy_keeps_for_arrays_is_given_back_where_rows_need_it(gpus_on_host):
    gpus_on_host.room = 1 << 20
    thread_comm.run(2, lambda world: make(world, RowSize(3, np.dtype("f4"))))
    assert len(gpus_on_host.allocated) == 2


def test_a_gpu_without_room_is_told_on_all_ranks(gpus_on_host, monkeypatch):
    import cupy

    malloc = cupy.cuda.runtime.malloc

    def refused(size):
        if gpus_on_host.process() == "rank-1":
            raise cupy.cuda.runtime.CUDARuntimeError(2)
        return malloc(size)

    monkeypatch.setattr(cupy.cuda.runtime, "malloc", refused)
    with raises(DeviceError, operation="CUDA IPC", expected=[2097152, "bytes", "GPU"], got="cudaError2"):
        thread_comm.run(2, lambda world: make(world, RowSize(3, np.dtype("f4"))))
    assert not gpus_on_host.allocated, "what others have taken is given back"


def test_memory_is_given_back_when_nobody_has_a_view_of_a_row(gpus_on_host, monkeypatch):
    monkeypatch.setattr(comm_world, "visible", lambda: (Gpu(0, "NVIDIA A", "0000:00:00.0", "a"),))

    def rank(world):
        streams, sizes = Streams(gpu(0)), [RowSize(3, np.dtype("f4"))] * 2
        rows, way = gpu_buckets.make(world, streams, sizes)
        assert way is GpuTransport.CUDA_IPC
        view = rows[1].mine[1:].reshape(2, 1)
        mine = rows[0].mine.data.ptr
        block = gpus_on_host.allocated[mine]  # nothing else gets its address
        del rows
        gpu_buckets.make(world, streams, sizes)
        kept = mine in gpus_on_host.allocated
        view.to_host()
        del view
        world.barrier()
        gpu_buckets.make(world, streams, sizes)
        return kept, gpus_on_host.allocated.get(mine) is block

    assert thread_comm.run(3, rank) == [(True, False)] * 3
    assert not gpus_on_host.allocated


def test_what_no_kernel_sums_is_refused_by_name(gpus_on_host):
    with raises(UnsupportedError, operation="CUDA IPC", where="dtype", expected=["float16", "bfloat16"], got="int8"):
        thread_comm.run(1, lambda world: make(world, RowSize(3, np.dtype("int8"))))


def test_processes_that_do_not_see_each_other_are_told_so_on_all_ranks(gpus_on_host, monkeypatch):
    import cupy

    def refused(handle, flags=1):
        raise cupy.cuda.runtime.CUDARuntimeError(201)

    monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", refused)
    raised = []

    def rank(world):
        with raises(DeviceError, operation="CUDA IPC", got="cudaError201", remedy="--ipc=host"):
            make(world, RowSize(3, np.dtype("f4")))
        raised.append(world.rank)

    thread_comm.run(3, rank)
    assert sorted(raised) == [0, 1, 2]


def test_each_row_begins_an_allocation_of_its_own_in_whole_blocks(gpus_on_host):
    def rank(world):
        return make(world, *(RowSize(count, np.dtype("f4")) for count in (0, 5, (2 << 20) // 4 + 1)))

    thread_comm.run(2, rank)
    assert sorted(block.size >> 20 for block in gpus_on_host.allocated.values()) == [2, 2, 2, 2, 4, 4]


def test_more_ranks_than_one_kernel_takes_are_refused_before_anything_is_made(gpus_on_host):
    with raises(UnsupportedError, operation="CUDA IPC", expected=[32, "GPU"], got=33):
        thread_comm.run(33, make)
    assert not gpus_on_host.allocated
