"""Machines that progress together: any order of waiting, errors of one of them, and blocking calls between them."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from by_numpy import assert_close, assert_same_bits, data, reduced
from hypothesis import given, settings
from hypothesis import strategies as st
from message_length import set_message_nbytes
from raises import raises

from hpcdp.collectives import ALGORITHMS, allreduce, broadcast, iallreduce
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import OPERATION_BITS, PolledRequest, disagree
from hpcdp.comm.progress import (
    NOT_YET,
    TAGS,
    ProgressEngine,
    TaskGroup,
    all_ended,
    in_lanes,
    run_until_complete,
    segments,
    together,
)
from hpcdp.comm.watchdog import Watchdog
from hpcdp.errors import MismatchError, UnsupportedError, WorldAborted


class Switch:
    """A request that is complete when it is told."""

    def __init__(self):
        self.on = False

    def test(self):
        return self.on

    def wait(self):
        assert self.on, "would block"


def test_a_machine_goes_on_when_all_requests_of_its_stage_are_complete():
    one, two, log = Switch(), Switch(), []

    def steps():
        yield [one, two]
        log.append("first stage")
        yield []
        log.append("end")

    both = TaskGroup([steps()])
    assert not both.test()
    two.on = True
    assert not both.test()
    assert log == []
    one.on = True
    assert both.test()
    assert log == ["first stage", "end"]
    assert both.test()


def test_machines_overtake_each_other():
    switches, log = [Switch(), Switch()], []

    def steps(number):
        yield [switches[number]]
        log.append(number)

    both = TaskGroup([steps(0), steps(1)])
    switches[1].on = True
    assert not both.test()
    assert log == [1]
    switches[0].on = True
    both.wait()
    assert log == [1, 0]


def test_one_machine_keeps_its_stages_and_several_are_one_stage():
    def steps(stages):
        for _ in range(stages):
            yield []

    assert len(list(together([steps(3)]))) == 3
    (stage,) = together([steps(3), steps(2)])
    assert stage[0].test()


def test_drive_waits_for_every_request():
    done = iter([False, False, True])
    run_until_complete(iter([[PolledRequest(lambda: next(done))]]))
    assert list(done) == []


@pytest.mark.parametrize(("items", "most"), [(0, 8), (1, 8), (7, 8), (20, 8), (20, 1), (200, 100)])
def test_lanes_share_out_all_items_with_tags_of_their_own(items, most):
    seen = []

    def steps(item, tag):
        seen.append((item, tag))
        yield []

    machines = in_lanes(range(items), steps, 640, most)
    assert len(machines) == min(items, most, TAGS)
    TaskGroup(machines).wait()
    assert sorted(item for item, _ in seen) == list(range(items))
    assert all(tag == 640 + item % len(machines) for item, tag in seen)


@settings(max_examples=50)
@given(count=st.integers(0, 500), nbytes=st.integers(1, 300))
def test_segments_cover_the_array(count, nbytes):
    x = np.arange(count, dtype="i4")
    pieces = segments(x, nbytes)
    np.testing.assert_array_equal(np.concatenate(pieces), x)
    assert len(pieces) == max(1, -(-4 * count // nbytes))
    assert max(piece.size for piece in pieces) - min(piece.size for piece in pieces) <= 1


def test_tags_of_consecutive_operations_do_not_meet():
    progress, first = thread_comm.run(1, ProgressEngine.of)[0], []
    for _ in range(1000):
        progress.calls.number += 1
        first.append(progress.tag(0))
    lower = [tag % 32768 for tag in first]  # what MPI guarantees
    for window in (lower[i : i + 200] for i in range(0, 800, 50)):
        assert len(set(window)) == 200
    assert all(tag % TAGS == 0 for tag in first)


def test_tags_of_calls_that_differ_are_apart_and_stay_within_what_mpi_allows():
    def rank(world):
        world.comm.signatures = 1 << 16
        progress = ProgressEngine.of(world)
        first = progress.tag(world.rank + 5 + (1 << 31))
        progress.calls.number += 1
        return [first, progress.tag(7)]

    (first, same), (other, same_too) = thread_comm.run(2, rank)
    assert same == same_too
    assert first != other
    assert disagree(first, other)
    assert not disagree(first, same)  # one of the two has only come earlier
    assert not disagree(first, other, {other // (TAGS << OPERATION_BITS)})  # of another user of the communicator
    assert max(first, other, same) + TAGS <= 1 << 31


PLAIN = [name for name in ALGORITHMS["allreduce"] if name not in ("native", "shared")]


@settings(max_examples=60 if os.environ.get("HPCDP_TEST_THOROUGH") else 20)
@given(
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    calls=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(["sum", "max"]), st.sampled_from(PLAIN)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 99),
)
def test_operations_are_waited_for_in_another_order_on_every_rank(nodes, calls, seed):
    n = sum(nodes)

    def rank(world):
        rng = np.random.default_rng([seed, world.rank])
        arrays = [data(world.rank, count) for count, _, _ in calls]
        requests = []
        for x, (_, op, algorithm) in zip(arrays, calls, strict=True):
            requests.append(iallreduce(x, op, world, algorithm))
            if rng.random() < 0.3:
                requests[rng.integers(len(requests))].test()
        for number in rng.permutation(len(calls)):
            if rng.random() < 0.5:
                requests[number].wait()
                assert requests[number].test()
            else:
                while not requests[number].test():
                    time.sleep(0)
        return arrays

    with pytest.MonkeyPatch.context() as patch:
        set_message_nbytes(patch, 64)
        results = thread_comm.run(n, rank, tuple(nodes))
    for (count, op, algorithm), *arrays in zip(calls, *results, strict=True):
        assert_close(arrays[0], reduced(n, count, "float32", op), n, op, algorithm)
        assert_same_bits(arrays)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared", "hierarchical"])
def test_operations_of_several_worlds_are_waited_for_in_another_order_on_every_rank(algorithm):
    def rank(world):
        parts = [world.split(0), world.split(world.rank % 2), world.split(0).split(0), world]
        arrays = [data(part.rank, 9000, "float64") for part in parts]
        requests = [iallreduce(x, "sum", part, algorithm) for x, part in zip(arrays, parts, strict=True)]
        for place in np.random.default_rng(world.rank).permutation(len(parts)):
            requests[place].wait()
            assert_close(arrays[place], reduced(parts[place].size, 9000, "float64", "sum"), 4, "sum", 9000)

    thread_comm.run(4, rank, 2 if algorithm == "hierarchical" else None)


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
def test_real_ranks_have_each_world_in_a_thread_of_its_own():
    import hpcdp

    world = hpcdp.init()
    parts = [world.split(0) for _ in range(3)]

    def sums(part):
        for count in range(0, 3000, 100):
            requests = [iallreduce(x, "sum", part, "ring") for x in (np.ones(count), np.ones(count + 30000))]
            for request in requests:
                request.wait()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(sums, parts)) == [None] * 3


@pytest.mark.parametrize("algorithm", ["native", "shared"])
def test_operations_of_the_library_and_in_memory(algorithm):
    def rank(world):
        arrays = [data(world.rank, count) for count in (10, 3000, 0, 77)]
        requests = [iallreduce(x, "sum", world, algorithm) for x in arrays]
        for number in np.random.default_rng(world.rank).permutation(4):
            requests[number].wait()
        return arrays

    for results in zip(*thread_comm.run(3, rank), strict=True):
        assert_close(results[0], reduced(3, results[0].size), 3, "sum")
        assert_same_bits(results)


def test_a_blocking_call_ends_what_was_started_before():
    def rank(world):
        started = data(world.rank, 100)
        request = iallreduce(started, "sum", world, "ring")
        x = broadcast(data(world.rank, 5), 1, world)
        np.testing.assert_array_equal(x, data(1, 5))
        assert_close(started, reduced(4, 100), 4, "sum")
        assert request.test()
        request.wait()

    thread_comm.run(4, rank)


def test_what_others_have_ended_is_asked_for_no_longer():
    """The watchdog of another rank would be told that this one is in a call."""

    def rank(world):
        ProgressEngine.of(world)
        if world.rank == 1:
            world.comm.barrier()  # rank 0 has asked in vain by then
        request = iallreduce(np.ones(5), "sum", world, "ring")
        if world.rank == 0:
            assert not request.test()
            assert Watchdog.of(world).tested is request
            world.comm.barrier()
        allreduce(np.ones(5), "sum", world, "ring")
        assert Watchdog.of(world).tested is None

    thread_comm.run(2, rank)


@pytest.mark.parametrize("call", ["barrier", "split"])
def test_what_blocks_until_all_have_come_ends_what_was_started_before(call):
    """Another rank waits for that first, and does not come before it has ended."""

    def meet(world):
        return world.barrier() if call == "barrier" else world.split(0)

    def rank(world):
        started = data(world.rank, 100)
        request = iallreduce(started, "sum", world, "ring")
        if world.rank != 1:
            meet(world)
        deadline = time.monotonic() + 60
        while not request.test():
            assert time.monotonic() < deadline, "the others do not let it progress"
        assert_close(started, reduced(3, 100), 3, "sum")
        if world.rank == 1:
            meet(world)

    thread_comm.run(3, rank)


def test_testing_never_blocks():
    def rank(world):
        x = np.ones(5)
        ProgressEngine.of(world)
        if world.rank == 1:
            world.comm.barrier()  # rank 0 has asked in vain by then
            iallreduce(x, "sum", world, "ring").wait()
        else:
            request = iallreduce(x, "sum", world, "ring")
            assert not request.test()
            world.comm.barrier()
            request.wait()
        assert x.tolist() == [2.0] * 5

    thread_comm.run(2, rank)


def test_an_operation_that_fails_leaves_the_others_alone():
    def rank(world):
        good, bad, later = np.ones(50), np.ones(8 + 8 * world.rank), np.full(30, 2.0)
        requests = [iallreduce(x, "sum", world, "ring") for x in (good, bad, later)]
        requests[2].wait()
        requests[0].wait()
        for _ in range(2):
            with raises(
                MismatchError, operation="iallreduce", where="item 1 of 4 on rank 0", got=[(16,), "float64", "rank 1"]
            ):
                requests[1].wait()
        assert allreduce(np.ones(3), world=world, algorithm="ring").tolist() == [2.0] * 3
        return good[0], later[0]

    assert thread_comm.run(2, rank) == [(2.0, 4.0)] * 2


def test_an_operation_whose_segment_was_interrupted_is_not_complete_when_it_is_asked_for_again():
    switch = Switch()

    def segment(number):
        yield [switch]
        if number == 1:
            raise KeyboardInterrupt

    def rank(world):
        world = replace(world, concurrent=False)  # no lane: Ctrl-C comes to the thread that waits
        interrupted = ProgressEngine.of(world).start(
            "sum", together([segment(number) for number in range(3)]), np.ones(1)
        )
        other = ProgressEngine.of(world).start("sum", segment(3), np.ones(1))
        switch.on = True
        with pytest.raises(KeyboardInterrupt):
            interrupted.wait()
        with raises(WorldAborted, operation="sum", got="KeyboardInterrupt"):
            interrupted.wait()
        other.wait()
        ProgressEngine.of(world).finish()

    thread_comm.run(1, rank)


@pytest.mark.parametrize("place", ["steps", "request", "poll"])
def test_the_exception_of_a_signals_handler_leaves_the_wait_for_any_operation(place):
    """It comes while another one is advanced."""
    switch = Switch()

    def handler(*_):
        raise TimeoutError

    class Request:
        def test(self):
            return handler()

    def one_stage(request):
        yield [request]

    def by_steps():
        yield [switch]
        handler()

    def by_request():
        yield [switch]
        yield from all_ended([one_stage(Request())])

    def rank(world):
        progress = ProgressEngine.of(replace(world, concurrent=False))
        if place == "poll":
            other = progress.start_polled("other", lambda: handler() if switch.on else NOT_YET, np.ones(1))
        else:
            other = progress.start("other", by_steps() if place == "steps" else by_request(), np.ones(1))
        mine = progress.start("mine", one_stage(PolledRequest(lambda: False)), np.ones(1))
        switch.on = True
        with pytest.raises(TimeoutError):
            mine.wait()
        with raises(WorldAborted, operation="other", got="TimeoutError"):
            other.wait()
        assert not mine.test()
        progress.active.running.clear()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread_comm.run(1, rank)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_operations_own_error_leaves_the_world_in_use():
    """Such as that of a result which an array does not take any more."""

    def steps():
        yield []
        raise ValueError("assignment destination is read-only")

    def rank(world):
        operation = ProgressEngine.of(world).start("sum", steps(), np.ones(1))
        with pytest.raises(ValueError, match="read-only"):
            operation.wait()
        return allreduce(np.ones(3), world=world).tolist()

    assert thread_comm.run(2, rank) == [[2.0] * 3] * 2


def test_an_operation_that_cannot_start_says_so_at_once():
    def rank(world):
        with raises(UnsupportedError, operation="allreduce", where="algorithm='shared'", expected=[8, 32, 64]):
            iallreduce(np.zeros(3, "i2"), "sum", world, "shared")
        iallreduce(x := np.ones(3), "sum", world).wait()
        return x[0]

    assert thread_comm.run(2, rank) == [2.0, 2.0]


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
def test_real_ranks_wait_in_any_order():
    import hpcdp

    world = hpcdp.init()
    n = world.size
    names = [name for name in ALGORITHMS["allreduce"] if name != "shared" or world.node_memory.size == n]
    calls = [(count, name) for count in (5, 60_007, 300_001) for name in names]
    arrays = [data(world.rank, count) for count, _ in calls]
    requests = [iallreduce(x, "sum", world, name) for x, (_, name) in zip(arrays, calls, strict=True)]
    for number in np.random.default_rng(world.rank).permutation(len(calls)):
        requests[number].wait()
        assert_close(arrays[number], reduced(n, calls[number][0]), n, "sum", calls[number][1])


@pytest.mark.mpi
def test_real_ranks_receive_messages_that_they_do_not_wait_for():
    import hpcdp

    world = hpcdp.init()
    if not world.concurrent or world.size < 2:
        pytest.skip("needs 2 ranks and a progress lane")
    for pause_s in (0.0, 0.0, 0.1, 0.0):  # the lane naps, or sleeps after a long pause
        time.sleep(pause_s)
        if world.rank == 1:
            hpcdp.send(np.ones(1_000_000), 0)
        elif world.rank == 0:
            received = hpcdp.irecv(np.zeros(1_000_000), 1)
            end_s = time.monotonic() + 20
            while not received.is_over and time.monotonic() < end_s:
                time.sleep(1e-3)
            assert received.is_over and (received.wait() == 1).all()


@pytest.mark.parametrize("algorithm", ["native", "ring", "auto"])
def test_what_one_rank_asks_for_early_meets_the_right_operation(algorithm):
    """A rank that polls between two starts must not put its messages in another order than the others."""

    def rank(world):
        x, y = np.full(50, 10.0 + world.rank), np.full(50, 100.0 + world.rank)
        allreduce(np.ones(50), "min", world, algorithm)
        first = iallreduce(x, "min", world, algorithm)
        if world.rank == 0:
            time.sleep(0.02)
            first.test()
        second = iallreduce(y, "sum", world, algorithm)
        for request in (first, second) if world.rank else (second, first):
            request.wait()
        return x, y

    for x, y in thread_comm.run(3, rank):
        assert (x == 10).all()
        assert (y == 303).all()


def test_more_operations_than_there_are_tags():
    def rank(world):
        arrays = [np.full(3, world.rank + i, "i8") for i in range(900)]
        requests = []
        for i, x in enumerate(arrays):
            requests.append(iallreduce(x, "sum", world, "tree"))
            if world.rank == 0 and i > 5:
                requests[0].test()
        for request in requests[:: -1 if world.rank else 1]:
            request.wait()
        return arrays

    for arrays in thread_comm.run(3, rank):
        assert all((x == 3 + 3 * i).all() for i, x in enumerate(arrays))
