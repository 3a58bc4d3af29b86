"""Sums of buckets over ranks and nodes, launched by backward or when a step ends, in any order and at any pace."""

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp import nn
from hpcdp.collectives import iallreduce
from hpcdp.comm import thread_comm
from hpcdp.data_parallel import Reducer, bucket_layout
from hpcdp.data_parallel.bucket_layout import State
from hpcdp.data_parallel.overlap import STALLED_S, CommunicationLane
from hpcdp.errors import StaleGradientError, WorldAborted

SHAPES = [(7, 3), (5,), (40, 30), (1,), (3000,)]
NODES = [(1, None), (2, None), (3, None), (2, 1), (3, 1), (4, 2), (5, 2), (6, (2, 1, 3))]


def gradient(rank, step, shape):
    return np.random.default_rng([rank, step, *shape]).standard_normal(shape).astype("f4")


def make(world, overlap, cap_mb=0.004):
    params = [nn.Parameter(np.zeros(shape, "f4"), name=f"p{i}") for i, shape in enumerate(SHAPES)]
    layout = bucket_layout.plan([(p.name, p.data.shape, p.data.dtype) for p in params], cap_mb, cap_mb)
    return Reducer(params, layout, world, overlap), params


def write(params, rank, step, order=None, pause=None):
    """What backward does: in reverse, or in any order."""
    for i in reversed(range(len(params))) if order is None else order:
        if pause is not None:
            time.sleep(pause())
        params[i].grad[...] = gradient(rank, step, params[i].shape)
        params[i].grad_hook(params[i])


def check_sums(found, n, step):
    for sum_found in found:
        wanted = sum(gradient(rank, step, sum_found.shape).astype("f8") for rank in range(n))
        np.testing.assert_allclose(sum_found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("n", "nodes"), NODES)
def test_every_rank_holds_the_sum(n, nodes, overlap):
    def rank(world):
        made, params = make(world, overlap)
        assert made.overlap == overlap
        sums = []
        for step in range(3):
            write(params, world.rank, step)
            made.launch_rest()
            made.tally(0)
            made.reduce_everywhere()
            sums.append([param.grad.copy() for param in params])
            made.reset()
            made.barrier()
        return sums

    results = thread_comm.run(n, rank, nodes)
    for sums in results:
        for step in range(3):
            check_sums(sums[step], n, step)
            for mine, first in zip(sums[step], results[0][step], strict=True):
                np.testing.assert_array_equal(mine, first)


@pytest.mark.parametrize(("n", "nodes"), NODES)
def test_the_bits_do_not_depend_on_overlap(n, nodes):
    def shards(world, overlap):
        made, params = make(world, overlap)
        write(params, world.rank, 0)
        made.launch_rest()
        made.tally(0)
        made.reduce_shards()
        return [bucket.mine[slice(*bucket.shard)].tobytes() for bucket in made.buckets]

    at_the_end, meanwhile = (thread_comm.run(n, lambda world, o=o: shards(world, o), nodes) for o in (False, True))
    assert at_the_end == meanwhile


@settings(max_examples=25 if os.environ.get("HPCDP_TEST_THOROUGH") else 8, deadline=None)
@given(
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 8),
    seed=st.integers(0, 10**6),
)
def test_ranks_that_differ_in_order_and_pace_do_not_wait_for_ever(nodes, seed):
    n = sum(nodes)

    def rank(world):
        rng = np.random.default_rng([seed, world.rank])
        made, params = make(world, True)
        for step in range(2):
            order = rng.permutation(len(params))
            write(params, world.rank, step, order, lambda: float(rng.choice([0, 0, 0.001, 0.004])))
            made.launch_rest()
            made.tally(0)
            made.reduce_everywhere()
            check_sums([param.grad for param in params], n, step)
            made.reset()
            made.barrier()

    thread_comm.run(n, rank, nodes)


def test_a_step_after_one_that_an_exception_has_ended_halfway_is_refused():
    """It would be paired with the step of which other ranks still wait for the end."""

    def rank(world):
        reducer, _ = make(world, False)
        world.abandon("the closing exchange of a step (see the guide)", KeyboardInterrupt())
        with raises(WorldAborted, operation="the closing exchange of a step", got="KeyboardInterrupt has ended the"):
            reducer.tally(1.0)

    thread_comm.run(2, rank)


def test_the_states_of_a_bucket_can_be_seen():
    """A bucket is launched by its last gradient, and done while backward goes on with others."""

    def rank(world):
        made, params = make(world, True)
        seen = [made.buckets[0].state]
        write(params, world.rank, 0, order=[4])
        seen.append(made.buckets[0].state)
        began = time.monotonic()
        while made.buckets[0].state is not State.REDUCED and time.monotonic() - began < 30:
            time.sleep(0.001)
        seen.append(made.buckets[0].state)
        seen.append(made.buckets[-1].state)
        write(params, world.rank, 0, order=[3, 2, 1, 0])
        made.reduce_shards()
        first, last = made.buckets[0], made.buckets[-1]
        assert first.ready_ns <= first.launched_ns <= first.done_ns <= last.ready_ns <= last.done_ns
        return seen

    for seen in thread_comm.run(2, rank, 1):
        assert seen[0] is State.FILLING
        assert seen[1] in (State.LAUNCHED, State.REDUCED)
        assert seen[2:] == [State.REDUCED, State.FILLING]


def test_a_second_backward_is_told():
    def rank(world):
        made, params = make(world, True)
        write(params, world.rank, 0)
        with raises(StaleGradientError, operation="backward", where="p4", expected="step()"):
            write(params, world.rank, 1)
        made.reduce_shards()

    thread_comm.run(2, rank, 1)


def test_front_layers_get_the_network_first():
    """While the urgent one begins messages, the other begins none; once it has stalled, the other goes on."""

    def rank(world):
        lane, order, go = CommunicationLane.of(world), [], threading.Event()

        def machine(name, turn, segments):
            while not go.is_set():
                yield []
            for number in range(segments):
                yield [turn]
                order.append((name, number))

        variables = [lane.engine.variable(str(i)) for i in range(2)]
        lane.launch(lambda turn: machine("back", turn, 5), [variables[0]], 0, "back")
        lane.launch(lambda turn: machine("front", turn, 5), [variables[1]], 1, "front")
        go.set()
        for each in variables:
            lane.wait(each)
        return order

    order = thread_comm.run(1, rank)[0]
    assert [name for name, _ in order].index("back") >= 5 or order[0][0] == "back"
    assert sorted(order) == [(name, i) for name in ("back", "front") for i in range(5)]


def test_who_stalls_does_not_hold_up_the_others():
    def rank(world):
        lane, stalls = CommunicationLane.of(world), threading.Event()

        class Never:
            def test(self):
                return stalls.is_set()

        def waits(turn):
            yield [turn]
            yield [Never()]

        def goes_on(turn):
            yield [turn]

        variables = [lane.engine.variable(str(i)) for i in range(2)]
        lane.launch(waits, [variables[0]], 1, "front")
        lane.launch(goes_on, [variables[1]], 0, "back")
        began = time.monotonic()
        lane.wait(variables[1])
        assert time.monotonic() - began < STALLED_S + 5
        stalls.set()
        lane.wait(variables[0])

    thread_comm.run(1, rank)


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
def test_real_ranks_that_differ_in_order_and_pace():
    import hpcdp

    world = hpcdp.init()
    rng = np.random.default_rng(world.rank)
    made, params = make(world, True)
    for step in range(20):
        write(params, world.rank, step, rng.permutation(len(params)), lambda: float(rng.choice([0, 0.001])))
        made.launch_rest()
        made.tally(0)
        made.reduce_everywhere()
        check_sums([param.grad for param in params], world.size, step)
        made.reset()
        made.barrier()


@pytest.mark.parametrize(("ranks_per_node", "overlap"), [(None, False), (2, False), (1, False), (1, True)])
def test_the_closing_exchange_ends_what_was_started_before(ranks_per_node, overlap):
    """Another rank waits for that first, and does not come to the exchange before it has ended."""

    def rank(world):
        made, params = make(world, overlap)
        started = np.full(100, world.rank + 1.0)
        request = iallreduce(started, "sum", world, "ring")
        write(params, world.rank, 0)
        made.launch_rest()
        if world.rank != 1:
            made.tally(world.rank)
        deadline = time.monotonic() + 60  # the first of them may compile kernels, beside other tests
        while not request.test():
            assert time.monotonic() < deadline, "the others do not let it progress"
        if world.rank == 1:
            made.tally(world.rank)
        made.reduce_everywhere()
        check_sums([param.grad for param in params], 3, 0)
        assert (started == 6).all()

    thread_comm.run(3, rank, ranks_per_node)


@pytest.mark.parametrize(("n", "ranks_per_node"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_buckets_of_two_models_may_be_under_way_together_in_any_order(n, ranks_per_node):
    def rank(world):
        models = [make(world, overlap=True) for _ in range(2)]
        for step in range(3):
            late = (step + world.rank) % 3 == 0
            for number in (0, 1) if late else (1, 0):  # so that one model's wait for the other's
                reducer, params = models[number]
                write(params, world.rank + 10 * number, step, pause=(lambda: 0.01) if late else None)
            for number, (reducer, params) in enumerate(models):
                reducer.tally(1)
                reducer.reduce_everywhere()
                for param in params:
                    total = sum(gradient(other + 10 * number, step, param.shape) for other in range(n))
                    np.testing.assert_allclose(param.grad, total, rtol=1e-4, atol=1e-5)
            world.barrier()
            for reducer, _ in models:
                reducer.reset()

    thread_comm.run(n, rank, ranks_per_node)
