"""Ranks that become ready in different orders start things in one."""

import random

import pytest

from hpcdp.collectives.progress import Together
from hpcdp.comm import threads
from hpcdp.comm.agreed_order import THINGS, AgreedOrder
from hpcdp.comm.steps import Until


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
                    yield [Until(lambda: chance.random() < 0.5)]
                order.ready(thing)
                yield [Until(lambda: order.is_turn(thing))]
                started.append((thing, number))
                order.pass_on()

        Together([machine(thing) for thing in chance.sample(range(things), things)]).wait()
        return started

    first, *others = threads.run(n, rank)
    assert len(first) == things * rounds
    assert all(other == first for other in others)


def test_more_decisions_than_there_is_room_for_at_a_time():
    def rank(world):
        order = AgreedOrder(world.node_memory)
        for _ in range(2 * THINGS + 3):
            order.ready(7)
            Until(lambda: order.is_turn(7)).wait()
            order.pass_on()
        return True

    assert all(threads.run(2, rank))


def test_nothing_is_started_before_all_are_ready():
    def rank(world):
        order = AgreedOrder(world.node_memory)
        order.ready(world.rank)
        world.comm.barrier()
        early = [order.is_turn(thing) for thing in range(2)]
        world.comm.barrier()
        order.ready(1 - world.rank)

        def machine(thing):
            yield [Until(lambda: order.is_turn(thing))]
            order.pass_on()

        Together([machine(thing) for thing in range(2)]).wait()
        return early

    assert threads.run(2, rank) == [[False, False]] * 2
