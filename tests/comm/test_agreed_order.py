"""Ranks that become ready in different orders start things in one."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import PolledRequest
from hpcdp.comm.gpu_buckets.nccl import THINGS, AgreedOrder
from hpcdp.comm.progress import TaskGroup
from hpcdp.comm.shared_memory import ProgressCounters


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_start_in_one_order_and_nobody_waits_for_ever(n, seed):
    things, rounds = 20, 3

    def rank(world):
        order, chance = AgreedOrder(world.node_memory), random.Random(100 * seed + world.rank)
        started = []

        def machine(thing):
            for number in range(rounds):
                for _ in range(chance.randrange(10)):  # messages that have not come
                    yield [PolledRequest(lambda: chance.random() < 0.5)]
                order.ready(thing)
                yield [PolledRequest(lambda: order.is_turn(thing))]
                started.append((thing, number))
                order.pass_on()

        TaskGroup([machine(thing) for thing in chance.sample(range(things), things)]).wait()
        return started

    first, *others = thread_comm.run(n, rank)
    assert len(first) == things * rounds
    assert all(other == first for other in others)


def test_threads_of_a_rank_share_an_order(monkeypatch):
    """Of two that look at once what all are ready for, one decides."""

    def rank(world):
        order, looking, look = AgreedOrder(world.node_memory), threading.Barrier(2), ProgressCounters.reached

        def looked(self, *args, **kwargs):
            found = look(self, *args, **kwargs)
            with contextlib.suppress(threading.BrokenBarrierError):
                looking.wait(0.2)
            return found

        monkeypatch.setattr(ProgressCounters, "reached", looked)
        order.ready(3)
        with ThreadPoolExecutor(2) as two:
            assert all(two.map(lambda _: order.is_turn(3), range(2)))
        order.pass_on()
        return order.is_turn(3)

    assert thread_comm.run(1, rank) == [False]


def test_more_decisions_than_there_is_room_for_at_a_time():
    def rank(world):
        order = AgreedOrder(world.node_memory)
        for _ in range(2 * THINGS + 3):
            order.ready(7)
            PolledRequest(lambda: order.is_turn(7)).wait()
            order.pass_on()
        return True

    assert all(thread_comm.run(2, rank))


def test_nothing_is_started_before_all_are_ready():
    def rank(world):
        order = AgreedOrder(world.node_memory)
        order.ready(world.rank)
        world.comm.barrier()
        early = [order.is_turn(thing) for thing in range(2)]
        world.comm.barrier()
        order.ready(1 - world.rank)

        def machine(thing):
            yield [PolledRequest(lambda: order.is_turn(thing))]
            order.pass_on()

        TaskGroup([machine(thing) for thing in range(2)]).wait()
        return early

    assert thread_comm.run(2, rank) == [[False, False]] * 2
