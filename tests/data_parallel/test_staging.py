"""Segments go through pinned memory one beside the other, and their slots are used again only when they are free."""

import importlib

import numpy as np
import pytest
from gpu_on_host import pinned_nbytes
from raises import raises

from hpcdp.comm.communicator import PolledRequest
from hpcdp.comm.gpu_buckets.transport import RowSize, lone_rows
from hpcdp.comm.progress import LANES, TAGS, run_until_complete, segments
from hpcdp.core.arrays import Streams, gpu
from hpcdp.data_parallel import gpu_reduction
from hpcdp.data_parallel.gpu_reduction import ON_THE_NETWORK, SLOTS, Staging
from hpcdp.errors import DeviceError

COUNT = 1000


@pytest.fixture
def row(gpus_on_host, monkeypatch):
    monkeypatch.setattr(gpu_reduction, "SEGMENT_NBYTES", 400)
    streams = Streams(gpu(0))
    (made,) = lone_rows(streams, [RowSize(COUNT, np.dtype("f4"))])
    made.mine[...] = importlib.import_module("cupy").arange(COUNT, dtype="f4")
    streams.follow(made.stream)
    return made


def sum_staged(staged, number, part, row, total):
    """As who uses it: the row's stream goes on behind the sum."""

    def machine():
        row._streams.wait_events(row.stream, (yield from staged.sum(number, part, row, total, 0, None)))

    run_until_complete(machine())


def doubled(seen, polls=3):
    """What takes the place of a sum over nodes; it says which segments are on the network at a time."""

    def total(x, tag, turn):
        seen.append(("begins", tag))
        for _ in range(polls):
            asked = iter([False, True])
            yield [PolledRequest(lambda asked=asked: next(asked))]
        x *= 2
        seen.append(("ends", tag))

    return total


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 200, COUNT])
def test_any_part_of_a_row_goes_through_the_slots(row, count):
    staged, seen = Staging(Streams(gpu(0)), [count * 4]), []
    for times in (2, 4):  # what was copied back in the first step stays there until it has come
        sum_staged(staged, 0, row.mine[:count], row, doubled(seen))
        if times == 4:
            row.stream.synchronize()
            found = row.mine.to_host()
            np.testing.assert_array_equal(found[:count], times * np.arange(count, dtype="f4"))
            np.testing.assert_array_equal(found[count:], np.arange(count, COUNT, dtype="f4"))
    assert len(seen) == 2 * 2 * -(-count * 4 // 400)


def test_sums_on_their_way_back_arrive_also_where_the_slots_are_forgotten(row):
    """As with a trainer that ends with its last step; a loader that begins then takes pinned memory, too."""
    sum_staged(Staging(Streams(gpu(0)), [row.mine.nbytes]), 0, row.mine, row, doubled([]))
    row.stream.synchronize()
    np.testing.assert_array_equal(row.mine.to_host(), 2 * np.arange(COUNT, dtype="f4"))


def test_some_segments_are_on_the_network_while_others_come(row, monkeypatch):
    seen = []
    copy = Streams.copy_async

    def noted(streams, target, source, stream):
        seen.append(("to the host" if isinstance(target, np.ndarray) else "back", 0))
        copy(streams, target, source, stream)

    monkeypatch.setattr(Streams, "copy_async", noted)
    run_until_complete(Staging(Streams(gpu(0)), [row.mine.nbytes]).sum(0, row.mine, row, doubled(seen, 20), 0, None))
    under_way = np.cumsum([{"begins": 1, "ends": -1}.get(what, 0) for what, _ in seen])
    assert under_way.max() == ON_THE_NETWORK
    tags = {tag for what, tag in seen if what == "begins"}
    assert tags == {lane * LANES for lane in range(ON_THE_NETWORK)} and max(tags) + LANES <= TAGS
    assert [what for what, _ in seen[:SLOTS]] == ["to the host"] * SLOTS, "all slots before the host waits"
    first = [what for what, _ in seen].index("back")
    assert [what for what, _ in seen[first : first + 2]] == ["back", "to the host"], "behind it the next one comes"


def test_pinned_memory_of_a_bucket_is_its_part_or_eight_segments(row, monkeypatch):
    asked = []
    cuda = importlib.import_module("cupy").cuda
    monkeypatch.setattr(cuda, "alloc_pinned_memory", lambda nbytes: asked.append(nbytes) or np.zeros(nbytes, np.uint8))
    Staging(Streams(gpu(0)), [4000, 0, 40, 800])
    assert SLOTS == 8 and asked == [400] * SLOTS + [40] + [400] * 2


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize(
    "nbytes", [40, 4 << 20, (4 << 20) + 8, 12 << 20, (12 << 20) - 8, (20 << 20) + 24, 32 << 20, 256 << 20]
)
def test_the_pool_takes_no_more_for_a_bucket_than_eight_segments(nbytes, dtype):
    sizes = gpu_reduction._slot_nbytes(nbytes)
    assert sum(map(pinned_nbytes, sizes)) <= min(max(2 * nbytes, 512), 64 << 20)
    longest = max(piece.nbytes for piece in segments(np.empty(nbytes, "u1").view(dtype), gpu_reduction.SEGMENT_NBYTES))
    assert all(longest <= size for size in sizes)


def test_what_fails_on_the_gpu_ends_the_wait(row, monkeypatch):
    staged = Staging(Streams(gpu(0)), [row.mine.nbytes])
    monkeypatch.setattr(importlib.import_module("cupy.cuda.runtime"), "eventQuery", lambda event: 700)
    with raises(DeviceError, operation="wait for a GPU", where="gpu(0)", got="cudaError700"):
        run_until_complete(staged.sum(0, row.mine, row, doubled([]), 0, None))


def test_who_waits_for_a_copy_looks_after_the_node(row, monkeypatch):
    def check():
        raise DeviceError("NCCL", got="a rank that is gone")

    monkeypatch.setattr(row, "check", check)
    with raises(DeviceError, operation="NCCL", got="gone"):
        run_until_complete(Staging(Streams(gpu(0)), [row.mine.nbytes]).sum(0, row.mine, row, doubled([]), 0, None))
