"""Rows summed by NCCL, here one that computes in host memory as late as it may; and how its errors end."""

import random

import numpy as np
import pytest
from gpu_on_host.nccl import NcclError
from raises import raises
from rows_on_gpus import assert_summed, summed_and_brought_to_all, write

from hpcdp.comm import gpu_buckets, thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets.nccl import Nccl
from hpcdp.comm.gpu_buckets.transport import GpuTransport, Offer, RowSize, parts_of
from hpcdp.comm.progress import TaskGroup, run_until_complete
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import Streams, dtype_of, gpu
from hpcdp.errors import DeviceError, UnsupportedError, WorldAborted

COUNT = 1001
DTYPES = ("float32", "float16", "float64", "int32", "int64", "bfloat16")


def values(rank, count, dtype):
    return np.random.default_rng([rank, count]).integers(-8, 8, count).astype(dtype)


def make(world, *sizes):
    gpu(world.rank).use()
    offers = [Offer(f"0000:{rank:02x}:00.0", str(rank), 22501) for rank in range(world.local_size)]
    return Nccl(world.node_comm, world.node_memory, Streams(gpu(world.rank)), offers, world.rank).group(sizes)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("n", "owners"), [(1, 1), (2, 2), (3, 2), (4, 1), (8, 8)])
def test_parts_are_summed_by_their_owners_and_brought_to_all(gpus_on_host, n, owners, name):
    dtype = dtype_of(name)

    def rank(world):
        parts = parts_of(COUNT, owners, n)
        group = make(world, RowSize(COUNT, dtype))
        (row,) = group.rows
        return summed_and_brought_to_all(row, parts, world.rank, values(world.rank, COUNT, dtype))

    wanted = sum(values(rank, COUNT, dtype) for rank in range(n))
    assert_summed(thread_comm.run(n, rank), parts_of(COUNT, owners, n), wanted)


@pytest.mark.parametrize("name", DTYPES)
def test_all_columns_are_summed_into_all_rows(gpus_on_host, name):
    dtype = dtype_of(name)

    def rank(world):
        (row,) = make(world, RowSize(COUNT, dtype)).rows
        write(row, values(world.rank, COUNT, dtype))
        run_until_complete(row.allreduce())
        row.stream.synchronize()
        return row.mine.to_host()

    for found in thread_comm.run(3, rank):
        np.testing.assert_array_equal(found, sum(values(each, COUNT, dtype) for each in range(3)))


def test_equal_parts_are_one_call_and_unequal_ones_one_launch(gpus_on_host):
    def rank(world):
        group = make(world, RowSize(12, np.dtype("f4")), RowSize(13, np.dtype("f4")))
        for row in group.rows:
            parts = parts_of(row.size.count, 3, 3)
            run_until_complete(row.reduce_scatter(parts))
            run_until_complete(row.allgather(parts))
        group.rows[0].stream.synchronize()

    thread_comm.run(3, rank)
    launches = [name for name in gpus_on_host.log if name.startswith("nccl")]
    assert sorted(launches) == sorted(
        3 * ["nccl reduceScatter", "nccl allGather", "nccl reduce reduce reduce", "nccl broadcast broadcast broadcast"]
    )


def test_ranks_that_are_ready_in_different_orders_launch_in_one(gpus_on_host):
    sizes = [RowSize(count, np.dtype("f4")) for count in (40, 300, 7, 1000, 64)]

    def rank(world):
        chance = random.Random(world.rank)
        group = make(world, *sizes)
        for step in range(3):
            for row in group.rows:
                write(row, step + values(world.rank, row.size.count, "f4"))
            parts = [parts_of(each.count, 3, 3) for each in sizes]

            def machine(number, parts=parts):
                yield from group.rows[number].reduce_scatter(parts[number])
                yield from group.rows[number].allgather(parts[number])

            TaskGroup([machine(number) for number in chance.sample(range(5), 5)]).wait()
            group.rows[0].stream.synchronize()
            for row in group.rows:
                wanted = sum(step + values(each, row.size.count, "f4") for each in range(3))
                np.testing.assert_array_equal(row.mine.to_host(), wanted)

    thread_comm.run(3, rank)


def test_two_ranks_on_one_gpu_are_refused_before_nccl_starts(gpus_on_host):
    def rank(world):
        same = [Offer("0000:3b:00.0", "a", 22501)] * 2
        Nccl(world.node_comm, world.node_memory, Streams(gpu(0)), same, world.rank)

    with raises(
        DeviceError, operation="NCCL", where="GPU 0000:3b:00.0", expected="GPU", got=["ranks 0", 1], remedy="GPU"
    ):
        thread_comm.run(2, rank)


def test_an_error_at_the_start_says_where_more_is_told(gpus_on_host):
    def rank(world):
        offers = [Offer(f"0000:{rank:02x}:00.0", str(rank), 22501) for rank in range(2)]
        Nccl(world.node_comm, world.node_memory, Streams(gpu(0)), offers, world.rank)  # in truth they share one

    with raises(DeviceError, operation="NCCL", got="NCCL_ERROR_5", remedy="NCCL_DEBUG=INFO"):
        thread_comm.run(2, rank)


def test_what_nccl_has_no_number_for_is_refused_by_name(gpus_on_host):
    for dtype, fields in (("c8", {"got": "complex64"}), ("i2", {"expected": ["int8", "uint8"], "got": "int16"})):
        with raises(UnsupportedError, operation="NCCL", where="dtype", **fields):
            thread_comm.run(1, lambda world, dtype=dtype: make(world, RowSize(3, np.dtype(dtype))))


def test_an_error_while_it_sums_ends_the_wait_and_gives_nccl_up(gpus_on_host):
    def rank(world):
        group = make(world, RowSize(8, np.dtype("f4")))
        (row,) = group.rows
        run_until_complete(row.reduce_scatter(parts_of(8, 2, 2)))
        world.barrier()
        group.node._comm.failed = True
        with raises(DeviceError, operation="NCCL", got="NCCL_ERROR_6"):
            row.check()
        assert group.node._comm.aborted
        with raises(DeviceError, operation="NCCL", got=["NCCL_ERROR_6", "NCCL"]):
            run_until_complete(row.allgather(parts_of(8, 2, 2)))

    thread_comm.run(2, rank)


def test_a_call_that_nccl_refuses_is_an_error_of_its_rank(gpus_on_host):
    def rank(world):
        group = make(world, RowSize(8, np.dtype("f4")))
        monkey = group.node._comm
        monkey.check_async_error = lambda: None
        monkey.failed = True
        with raises(DeviceError, operation="NCCL", got="NCCL_ERROR_1", rank=0) as caught:
            run_until_complete(group.rows[0].reduce_scatter([(0, 8)]))
        assert isinstance(caught.value.__cause__, NcclError)

    thread_comm.run(1, rank)


def test_who_waits_for_a_rank_that_is_gone_ends_its_kernels(gpus_on_host):
    aborted = []

    def rank(world):
        group = make(world, RowSize(8, np.dtype("f4")))
        if world.rank == 1:
            raise ValueError("lost")
        try:
            while True:
                group.rows[0].check()
        except WorldAborted:
            aborted.append(group.node._comm.aborted)
            raise

    with pytest.raises(ValueError, match="lost"):
        thread_comm.run(2, rank)
    assert aborted == [True]


def test_all_ranks_end_the_communicator_together_when_nothing_is_under_way(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        device = gpu(world.rank)
        (row,), way = gpu_buckets.make(world, Streams(device), [RowSize(8, np.dtype("f4"))])
        assert way is GpuTransport.NCCL
        run_until_complete(row.allreduce())
        return row

    rows = thread_comm.run(3, rank)
    assert [row._node._comm.destroyed for row in rows] == [True] * 3
    with raises(DeviceError, operation="NCCL", got="rows"):
        rows[0].check()


def test_rows_are_given_back_when_no_rank_has_them_any_more_and_others_are_made(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        def make_rows():
            return gpu_buckets.make(world, Streams(gpu(world.place)), [RowSize(8, np.dtype("f4"))])[0]

        first = make_rows()
        comms = [first[0]._node._comm]
        run_until_complete(first[0].allreduce())
        kept = first if world.rank == 2 else None
        del first
        second = make_rows()
        comms.append(second[0]._node._comm)
        del kept, second
        world.barrier()
        third = make_rows()
        ended = [each.destroyed for each in comms]
        run_until_complete(third[0].allreduce())
        return ended

    # Rank 2 still had the first when the second was made; nobody had either of them later.
    assert thread_comm.run(4, rank, 2) == [[True, True]] * 4
    assert sum(name == "nccl allReduce" for name in gpus_on_host.log) == 2 * 4


def test_what_is_summed_side_by_side_shares_a_communicator_and_its_order(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        gpu(world.place).use()
        sizes, chance = [RowSize(count, np.dtype("f4")) for count in (8, 300)], random.Random(world.rank)
        rows = [row for _ in range(3) for row in gpu_buckets.make(world, Streams(gpu(world.place)), sizes)[0]]
        for step in range(3):
            for row in rows:
                write(row, step + values(world.rank, row.size.count, "f4"))
            TaskGroup([row.allreduce() for row in chance.sample(rows, len(rows))]).wait()
            rows[0].stream.synchronize()
            for row in rows:
                wanted = sum(step + values(each, row.size.count, "f4") for each in range(world.size))
                np.testing.assert_array_equal(row.mine.to_host(), wanted)
        return len({id(row._node) for row in rows})

    assert thread_comm.run(3, rank) == [1] * 3


def test_numbers_of_rows_are_given_again_when_no_rank_has_them_any_more(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        def make_rows(number):
            return gpu_buckets.make(world, Streams(gpu(world.place)), [RowSize(8, np.dtype("f4"))] * number)[0]

        (kept,) = make_rows(1)
        for _ in range(3):
            rows = make_rows(600)  # of 1024
            run_until_complete(rows[-1].allreduce())
            del rows
        with raises(UnsupportedError, operation="NCCL", expected=1023, got=1024):
            make_rows(1024)
        run_until_complete(kept.allreduce())

    thread_comm.run(2, rank)


def test_where_it_was_given_up_others_get_a_new_one(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        streams, size = Streams(gpu(world.place)), RowSize(8, np.dtype("f4"))
        (first,) = gpu_buckets.make(world, streams, [size])[0]
        world.barrier()
        if world.rank == 1:
            first._node._comm.failed = True
            with raises(DeviceError, operation="NCCL", got="NCCL_ERROR_6"):
                first.check()
        (second,) = gpu_buckets.make(world, streams, [size])[0]
        run_until_complete(second.allreduce())
        return second._node is first._node

    assert thread_comm.run(3, rank) == [False] * 3


def test_rows_that_one_rank_still_has_are_not_ended(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        streams, size = Streams(gpu(world.place)), RowSize(8, np.dtype("f4"))
        kept = gpu_buckets.make(world, streams, [size])[0]
        comm = kept[0]._node._comm
        if world.rank != 3:  # the other node, and its neighbor
            kept = None
        gpu_buckets.make(world, streams, [size])
        return comm.destroyed

    assert thread_comm.run(4, rank, 2) == [False] * 4


def test_memory_goes_back_to_the_stream_it_was_made_for(gpus_on_host):
    """CuPy's pool keeps it for that stream, which need not be the current one when it is given back."""

    def rank(world):
        gpu(world.rank).use()
        made_for, size, waits = Streams(gpu(world.rank)).stream(), RowSize(8, np.dtype("f4")), []
        with made_for:
            group = make(world, size)
        kept = group.node.group([size])  # else the communicator ends, and what its kernels do with it
        wait = group.node.streams.wait_event
        group.node.streams.wait_event = lambda stream, event: (waits.append(stream.ptr), wait(stream, event))
        group.close()
        return kept, waits == [made_for.ptr]

    assert [is_made_for for _, is_made_for in thread_comm.run(2, rank)] == [True, True]


def test_one_that_was_given_up_is_not_ended_again(gpus_on_host):
    def rank(world):
        group = make(world, RowSize(8, np.dtype("f4")))
        group.node._comm.failed = True
        with pytest.raises(DeviceError):
            group.node.check()
        group.close()
        assert not group.node._comm.destroyed

    thread_comm.run(2, rank)


@pytest.mark.parametrize("under_way", [False, True])
def test_where_one_rank_has_given_up_all_give_up_and_none_waits_for_it(gpus_on_host, under_way):
    def rank(world):
        group = make(world, RowSize(8, np.dtype("f4")))
        if under_way and world.rank == 0:  # a kernel that waits for those of other ranks, which never begin
            at = group.rows[0].mine.data.ptr
            group.node._nccl.groupStart()
            group.node._comm.allReduce(at, at, 8, 7, 0, group.node.stream.ptr)
            group.node._nccl.groupEnd()
        world.barrier()
        if world.rank == world.size - 1:
            group.node._comm.failed = True
            with raises(DeviceError, operation="NCCL", got="NCCL_ERROR_6"):
                group.node.check()
        group.close()
        return group.node._comm.aborted, group.node._comm.destroyed

    assert thread_comm.run(3, rank) == [(True, False)] * 3


def test_who_waits_for_its_turn_hears_that_another_rank_has_given_up(gpus_on_host):
    told = []

    def rank(world):
        group = make(world, RowSize(8, np.dtype("f4")))
        if world.rank == 1:
            group.node._comm.failed = True
            with pytest.raises(DeviceError):
                group.node.check()
            return
        with raises(DeviceError, operation="NCCL", got="rank 1", rank=world.rank):
            run_until_complete(group.rows[0].allreduce())
        told.append(group.node._comm.aborted)

    thread_comm.run(3, rank)
    assert told == [True, True]


def test_messages_name_ranks_by_their_number_in_the_world(gpus_on_host, monkeypatch):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def rank(world):
        (row,), _ = gpu_buckets.make(world, Streams(gpu(world.place)), [RowSize(8, np.dtype("f4"))])
        world.barrier()
        if world.rank >= 2:
            row._node._comm.failed = world.rank == 3
            said = "NCCL_ERROR_6" if world.rank == 3 else "rank 3 has given it up"
            with raises(DeviceError, operation="NCCL", got=said, rank=world.rank):
                while True:
                    row.check()

    thread_comm.run(4, rank, 2)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_rounded_once(gpus_on_host, name):
    dtype, large = dtype_of(name), 2048 if name == "float16" else 256  # to which 1 adds nothing in 16 bits

    def rank(world):
        first, second = make(world, *[RowSize(COUNT, dtype)] * 2).rows
        for row in (first, second):
            write(row, np.full(COUNT, large if world.rank == 0 else 1).astype(dtype))
        parts = parts_of(COUNT, 2, 3)
        run_until_complete(first.allreduce())
        run_until_complete(second.reduce_scatter(parts))
        run_until_complete(second.allgather(parts))
        first.stream.synchronize()
        return [row.mine.to_host().astype("f4") for row in (first, second)]

    for found in thread_comm.run(3, rank):
        for each in found:
            np.testing.assert_array_equal(each, large + 2)


def test_where_nccl_does_not_start_on_one_node_all_ranks_of_all_nodes_are_told(gpus_on_host, monkeypatch):
    import cupy

    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(4))
    monkeypatch.setattr(comm_world, "visible", lambda: found)
    get_unique_id = cupy.cuda.nccl.get_unique_id

    def refused():
        if gpus_on_host.process().endswith("2"):
            raise NcclError(3)
        return get_unique_id()

    monkeypatch.setattr(cupy.cuda.nccl, "get_unique_id", refused)
    told = []

    def rank(world):
        device = gpu(world.place)
        with raises(DeviceError, operation="NCCL", got="NCCL_ERROR_3", rank=2):
            gpu_buckets.make(world, Streams(device), [RowSize(8, np.dtype("f4"))])
        told.append(world.rank)

    thread_comm.run(4, rank, 2)
    assert sorted(told) == [0, 1, 2, 3]
