"""The trainer on stores: the numbers of the trainer without one."""

import threading
from unittest.mock import Mock

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from store_networks import (
    BATCH,
    WORLDS,
    all_to_the_last,
    backward,
    in_turn,
    network,
    rule,
    samples,
    train,
    uneven,
    values_of,
)

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.bucket_trainer import BucketTrainer
from hpcdp.data_parallel.gradient_policy import Policy
from hpcdp.errors import MismatchError, StaleGradientError
from hpcdp.kvstore.arguments import PullHandle
from hpcdp.kvstore.serve import serve
from hpcdp.kvstore.store_trainer import StoreTrainer

SYNC = ("dist_sync", "dist_device_sync")


@pytest.mark.parametrize(
    ("layout", "split", "optimizer"), pairs(WORLDS, [in_turn, uneven, all_to_the_last], ["sgd", "adam", "schedule"])
)
def test_a_store_gives_what_buckets_give(layout, split, optimizer):
    ranks, per_node = layout
    expected = thread_comm.run(ranks, lambda world: train(world, optimizer, split), per_node)[0]
    for there in (True, False):
        found = thread_comm.run(
            ranks,
            lambda world, t=there: train(world, optimizer, split, kvstore="dist_sync", update_on_kvstore=t),
            per_node,
        )
        for each in found:
            np.testing.assert_array_equal(each, found[0])
            np.testing.assert_allclose(each, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["local", "device", "dist", *SYNC])
@pytest.mark.parametrize("there", [None, True, False])
def test_every_kind_trains_on_one_rank(kind, there):
    expected = thread_comm.run(1, train)[0]
    found = thread_comm.run(1, lambda world: train(world, kvstore=kind, update_on_kvstore=there))[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_compression_is_the_stores(kind):
    def rank(world, compression):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind, compression=compression)
        backward(net, 0, in_turn(world, 0))
        world.barrier()
        trainer.step(len(in_turn(world, 0)))
        if kind == "dist_async":
            trainer.synchronize()
        return values_of(net)

    for ranks, per_node in [(2, None), (3, 1)]:
        plain, half, few = (
            thread_comm.run(ranks, lambda world, c=codec: rank(world, c), per_node) for codec in (None, "fp16", "topk")
        )
        assert 0 < np.abs(half[0] - plain[0]).max() < 1e-4 < np.abs(few[0] - plain[0]).max()
        for others in (half, few):
            for each in others:
                np.testing.assert_array_equal(each, others[0])


def test_a_local_store_starts_no_mpi(monkeypatch):
    monkeypatch.setattr("hpcdp.kvstore.store_trainer.init", lambda: pytest.fail("a local store needs no ranks"))
    net = network()
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), kvstore="local")
    before = values_of(net)
    backward(net, 0, range(3))
    gradients = np.concatenate([param.grad.reshape(-1) for param in net.parameters()])
    assert trainer.step(3) == 3
    np.testing.assert_allclose(values_of(net), before - 0.1 * gradients / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, None), (4, 2)])
def test_gradients_can_be_changed_between_sum_and_update(ranks, per_node):
    expected = thread_comm.run(ranks, lambda world: train(world, split=uneven), per_node)[0]

    def rank(world):
        return train(world, split=uneven, by_hand=True, kvstore="dist_sync", update_on_kvstore=False)

    for found in thread_comm.run(ranks, rank, per_node):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("there", [True, False])
def test_accumulated_batches_are_one_batch(there):
    def rank(world, micro):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        for step in range(3):
            mine = in_turn(world, step)
            if micro:
                with trainer.no_sync():
                    for sample in mine[:-1]:
                        backward(net, step, [sample])
                        trainer.step(1)
                mine = mine[-1:]
            backward(net, step, mine)
            assert trainer.step(len(mine)) == BATCH
        assert all(param.grad_req == "write" for param in net.parameters())
        return values_of(net)

    for ranks in (1, 3):
        whole, parts = (thread_comm.run(ranks, lambda world, m=micro: rank(world, m)) for micro in (False, True))
        np.testing.assert_allclose(parts[0], whole[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("there", [True, False])
def test_a_step_whose_push_fails_is_dropped_whole(there, monkeypatch):
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=there
        )
        with trainer.no_sync():
            backward(net, 0, [0])
            trainer.step(1)
        backward(net, 0, [1])
        with monkeypatch.context() as failing, pytest.raises(OSError, match="no wire"):
            failing.setattr(trainer.store, "pushpull", Mock(side_effect=OSError("no wire")))
            trainer.step(1)
        assert not trainer.holds_gradients and all(param.grad_req == "write" for param in net.parameters())
        with raises(StaleGradientError, operation="step", where="rank 0"):
            trainer.step(1)
        backward(net, 0, [2])
        assert trainer.step(1) == 1

    thread_comm.run(1, rank)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_unused_parameters_may_count_as_zero(kind):
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind, policy=Policy(unused="zero"))
        before = values_of(net)
        for param in net.parameters():
            param.grad[...] = 5  # of an earlier step
        trainer.step(1)
        np.testing.assert_array_equal(values_of(net), before)

    thread_comm.run(1, rank)


def test_frozen_parameters_are_no_keys():
    def rank(world):
        net = network()
        frozen, *others = net.parameters()
        frozen.grad_req = "null"
        before = frozen.data.copy()
        store = kvstore.create("dist_sync", world)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=store)
        assert store.keys == list(range(len(others)))
        last = others[-1].asnumpy().copy()
        backward(net, 0, [0])
        trainer.step(1)
        assert (others[-1].asnumpy() != last).any()
        np.testing.assert_array_equal(frozen.data, before)

    thread_comm.run(2, rank)


def test_a_loss_scale_is_divided_away_and_ranks_must_agree_on_it():
    def rank(world, scale):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync")
        trainer.loss_scale = scale
        x, y = samples(0)
        with record():
            loss = nn.functional.softmax_cross_entropy(net(x[[world.rank]]), y[[world.rank]])
        loss.backward(np.full(1, scale, "f4"))
        trainer.step(1)
        return values_of(net)

    plain, scaled = (thread_comm.run(2, lambda world, s=s: rank(world, s))[0] for s in (1.0, 64.0))
    np.testing.assert_allclose(scaled, plain, rtol=2e-5, atol=2e-6)
    with raises(
        MismatchError, operation="step", where="item 2 of 2 on rank 0", expected=[1.0, "rank 0"], got=[2.0, "rank 1"]
    ):
        thread_comm.run(2, lambda world: rank(world, 1.0 + world.rank))


@pytest.mark.parametrize(("ranks", "per_node", "num_servers"), [(1, None, 0), (3, None, 0), (3, 2, 0), (2, None, 1)])
@pytest.mark.parametrize("kind", [None, "dist_sync", "dist_async"])
def test_what_is_written_to_parameters_counts_when_it_is_taken(kind, ranks, per_node, num_servers):
    def rank(world, there):
        net = network()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, kvstore=kind, update_on_kvstore=there
        )
        backward(net, 0, [0])
        trainer.step(1)
        world.barrier()
        for param in net.parameters():
            param.data[...] = 7 + (world.rank if there else 0)  # rank 0's counts
        world.barrier()
        trainer.take_parameters()
        trainer.optimizer.lr = 0.0
        backward(net, 0, [0])
        trainer.step(1)
        if kind == "dist_async":
            trainer.synchronize()
        assert (values_of(net) == 7).all()
        world.barrier()

    for there in (True, False) if kind == "dist_sync" else (None if kind is None else True,):
        thread_comm.run(ranks, lambda world, t=there: rank(world, t), per_node, num_servers, serve)


@pytest.mark.parametrize("there", [True, False])
def test_parameters_are_arrays_of_the_ranks_own(there):
    def rank(world):
        net = network()
        BucketTrainer(net.parameters(), optim.SGD(lr=0.1), world)  # they are shared now
        hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=there)
        world.barrier()
        for param in net.parameters():
            param.data[...] = world.rank
        world.barrier()
        assert all((param.data == world.rank).all() for param in net.parameters())

    thread_comm.run(2, rank)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_the_first_layers_come_first(kind):
    """Which the next forward reads first."""

    def rank(world):
        net, given = network(), {}
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        pushpull = trainer.store.pushpull

        def notes(key, value, out=None, priority=0):
            given[key] = priority
            pushpull(key, value, out, priority)

        trainer.store.pushpull = notes
        backward(net, 0, [0])
        trainer.step(1)
        assert len(given) > 2 and sorted(given, key=given.get, reverse=True) == sorted(given)
        assert len(set(given.values())) == len(given)

    thread_comm.run(1, rank)


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_gradients_are_scaled_in_one_place_and_stay_as_they_are(kind):
    """For whom ``grad_req="add"`` adds to them; the store makes a copy of what is pushed."""

    def rank(world):
        net, pushed = network(), []
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        pushpull = trainer.store.pushpull

        def notes(key, value, out=None, priority=0):
            pushed.append((value, value.copy()))
            pushpull(key, value, out, priority)

        trainer.store.pushpull = notes
        backward(net, 0, [0, 1])
        before = [param.grad.copy() for param in net.parameters()]
        trainer.step(2)
        for param, grad, (value, then) in zip(net.parameters(), before, pushed, strict=True):
            np.testing.assert_array_equal(param.grad, grad)
            np.testing.assert_array_equal(then, grad / 2)
            assert np.shares_memory(value, pushed[0][0])

    thread_comm.run(1, rank)


def test_which_trainer_it_is():
    def rank(world):
        in_buckets = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world)
        on_a_store = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")
        assert type(in_buckets) is BucketTrainer and type(on_a_store) is StoreTrainer
        assert isinstance(in_buckets, hpcdp.Trainer) and isinstance(on_a_store, hpcdp.Trainer)
        assert on_a_store.store.kind == "dist_sync"
        values = sum(param.data.nbytes for param in network().parameters())
        assert on_a_store.nbytes == {"parameters": values, "gradients": values}

    thread_comm.run(2, rank)


def test_time_that_somebody_waits_for_a_value_counts_as_communication():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")
        for step in range(3):
            backward(net, step, [world.rank])
            trainer.step(1)
        assert trainer.stats.steps == 3
        assert 0 < trainer.stats.exposed_s == trainer.stats.total_s

    thread_comm.run(2, rank)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_thread_that_reads_parameters_late_leaves_the_next_value_alone(kind, monkeypatch):
    late, wait = {}, PullHandle.wait

    def waits_and_is_late(pulled):
        found = wait(pulled)
        if threading.current_thread() in late:
            has_come, goes_on = late[threading.current_thread()]
            has_come.set()
            goes_on.wait(30)
        return found

    monkeypatch.setattr(PullHandle, "wait", waits_and_is_late)

    def rank(world):
        param = nn.Parameter(np.full(9, 5, "f4"), name="w")
        trainer = hpcdp.Trainer([param], optim.SGD(lr=0.5), world, kvstore=kind)

        def step():
            param.grad[...] = 1 + world.rank
            param.grad_hook(param)
            trainer.step(1)

        step()
        reader, has_come, goes_on = threading.Thread(target=lambda: param.data), threading.Event(), threading.Event()
        late[reader] = has_come, goes_on
        reader.start()
        assert has_come.wait(30)
        _ = param.data
        step()
        goes_on.set()
        reader.join()
        assert param.data_hook is not None  # whoever reads it now waits for the second value
        trainer.synchronize()
        assert trainer.stats.total_s > 0
        return param.data.tolist()

    assert thread_comm.run(2, rank) == [[5 - 2 * 0.5 * 1.5] * 9] * 2
