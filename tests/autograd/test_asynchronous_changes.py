"""Who changes, copies or saves what asynchronous calls read or move waits for them."""

import contextlib
import copy
import pickle
import threading

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, checkpoint, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError
from hpcdp.train import SyncBatchNorm
from hpcdp.train.trainer import Trainer

LOSS = nn.functional.softmax_cross_entropy


def random(seed, *shape):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype("f4"))


def soon(gates):
    """Open gate 1 when this thread waits, or has gone on without."""
    threading.Timer(0.05, gates.events[1].set).start()


def under_way(gates, net, x):
    """A call that has returned at once, of ``net`` and of what waits for gate 1, which is about to open."""
    gates.know(x)
    net(gates.add_one(x, 0.0)).wait_to_read()
    y = net(gates.add_one(x, 1.0))
    soon(gates)
    return y


def test_a_change_in_place_waits_for_those_who_read(gates):
    x = random(0, 3)
    before = x.data.copy()
    with autograd.asynchronous():
        gates.know(x)
        y = gates.add_one(x, 1.0)
        soon(gates)
        x[...] = 0
        np.testing.assert_array_equal(y.asnumpy(), before + 1)
        y += 1
        np.testing.assert_array_equal(y.asnumpy(), before + 2)


def replace_state(net):
    net.load_state_dict({name: np.zeros_like(each) for name, each in net.state_dict().items()})


def replace_array(net):
    net.weight.data = np.zeros_like(net.weight.data)


@pytest.mark.parametrize("change", [replace_state, replace_array, lambda net: net.to("float64")])
def test_so_do_changes_of_whole_parameters(gates, change):
    net, x = nn.Dense(3, 2), random(0, 4, 3)
    expected = net(x.data + 1).asnumpy()
    with autograd.asynchronous():
        y = under_way(gates, net, x)
        change(net)
        np.testing.assert_array_equal(y.asnumpy(), expected)


@pytest.mark.parametrize("read", [lambda net: net.running_mean.asnumpy(), lambda net: net.state_dict()["running_mean"]])
def test_who_reads_running_statistics_waits_for_the_calls_that_move_them(gates, read):
    net, x = nn.BatchNorm(3), random(0, 4, 3)
    with autograd.asynchronous(), autograd.train_mode():
        gates.know(x)
        net(gates.add_one(x, 0.0)).wait_to_read()
        before = read(net).copy()
        net(gates.add_one(x, 1.0))
        soon(gates)
        found = read(net)
        np.testing.assert_allclose(found, before * net.momentum + (1 - net.momentum) * (x.data + 1).mean(0), rtol=1e-5)


def test_what_has_a_gradient_is_settled_when_it_is_called(gates):
    w, x = nn.Parameter(np.ones(3, "f4")), Tensor(np.ones(3, "f4"))

    def products(gate):
        gated = gates.add_one(x, gate)
        return w * gated + x * gated

    with autograd.asynchronous():
        gates.know(x)
        with autograd.record():
            products(0.0).wait_to_read()
            total = products(1.0)
            soon(gates)
            w.grad_req = "null"
            total = total + w * 5
            w.grad_req = "write"
            x.attach_grad()
        total.backward()
        np.testing.assert_array_equal(w.grad, [2, 2, 2])
        assert not x.grad.any()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_networks_are_of_what_all_calls_left(gates, copied):
    net, x = nn.Sequential(nn.BatchNorm(3), nn.Dropout(0.5, seed=3)), random(0, 4, 3)
    with autograd.asynchronous(), autograd.train_mode():
        gates.know(x)
        net(gates.add_one(x, 0.0)).wait_to_read()
        net(gates.add_one(x, 1.0))
        soon(gates)
        found = copied(net)
        statistics, state = found[0].running_mean.data.copy(), found[1].generator.bit_generator.state
    np.testing.assert_array_equal(statistics, net[0].running_mean.data)
    assert state == net[1].generator.bit_generator.state


@pytest.mark.parametrize("kept", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), np.asarray])
def test_and_so_are_those_of_running_statistics_alone(gates, kept):
    net, x = nn.BatchNorm(3), random(0, 4, 3)
    with autograd.asynchronous(), autograd.train_mode():
        gates.know(x)
        net(gates.add_one(x, 0.0)).wait_to_read()
        net(gates.add_one(x, 1.0))
        soon(gates)
        found = np.array(kept(net.running_mean))
        autograd.waitall()
        np.testing.assert_array_equal(found, net.running_mean.data)


def exported(net, folder):
    net.export(folder / "net")
    return nn.SymbolBlock.load(folder / "net").state_dict()["0.running_mean"]


def saved(net, folder):
    with checkpoint.Manager(folder / "checkpoints") as manager:
        manager.save(1, {"net": net})
        return manager.restore().state["net"]["0.running_mean"]


@pytest.mark.parametrize("saved", [exported, saved])
def test_and_what_is_saved(gates, saved, tmp_path):
    net, x = nn.Sequential(nn.BatchNorm(3), nn.Dense(3, 2)), random(0, 4, 3)
    net.hybridize()
    net(x)
    with autograd.asynchronous():
        gates.know(x)
        with autograd.train_mode():
            net(gates.add_one(x, 0.0)).wait_to_read()
            net(gates.add_one(x, 1.0))
        soon(gates)
        found = saved(net, tmp_path)
        pending = gates.add_one(x, 0.0)
        assert type(pending) is not Tensor, "later calls do not return at once"
        np.testing.assert_array_equal(found, net[0].running_mean.data)


def test_what_is_restored_is_for_later_calls(gates, tmp_path):
    net, x = nn.Dense(3, 2), random(0, 4, 3)
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, {"net": net})
        net.weight.data[...] = 0
        expected = net(x.data + 1).asnumpy()
        with autograd.asynchronous():
            y = under_way(gates, net, x)
            manager.restore(into={"net": net})
            np.testing.assert_array_equal(y.asnumpy(), expected)


def test_backward_waits_for_who_reads_gradients(gates):
    w = nn.Parameter(np.ones(3, "f4"))
    w.grad[...] = 5
    with autograd.asynchronous():
        gates.know(w)
        norm = Tensor(w.grad) * gates.add_one(Tensor(np.zeros(3, "f4")), 0.0)
        norm.wait_to_read()
        norm = Tensor(w.grad) * gates.add_one(Tensor(np.zeros(3, "f4")), 1.0)
        with autograd.record():
            loss = (w * 100).sum()
        soon(gates)
        loss.backward()
        np.testing.assert_array_equal(norm.asnumpy(), [5, 5, 5])
        np.testing.assert_array_equal(w.grad, [100, 100, 100])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("store", [None, "dist_sync"])
def test_so_do_making_a_trainer_and_sums_of_gradients(gates, n, store):
    """Earlier calls have the values, and the gradients, of their own rank."""

    def rank(world):
        net, x, own = nn.Dense(3, 2), Tensor(np.ones((4, 3), "f4")), float(world.rank + 1)
        net.weight.data[...], net.bias.data[...] = own, 0
        how = {} if store is None else {"kvstore": store, "update_on_kvstore": False}
        with autograd.asynchronous():
            gates.know(x)
            net(gates.add_one(x, 0.0)).wait_to_read()
            y = net(gates.add_one(x, 1.0))
            world.barrier()
            if world.rank == 0:
                soon(gates)
            trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world, **how)
            np.testing.assert_array_equal(y.asnumpy(), np.full((4, 2), 6 * own))
            with autograd.record():
                loss = net(x).sum() * own
            loss.backward()
            mine = net.weight.grad.copy()
            (Tensor(net.weight.grad) * gates.add_one(Tensor(np.zeros((3, 2), "f4")), 0.0)).wait_to_read()
            read = Tensor(net.weight.grad) * gates.add_one(Tensor(np.zeros((3, 2), "f4")), 2.0)
            if world.rank == 0:
                threading.Timer(0.05, gates.events[2].set).start()
            trainer.allreduce_grads()
            np.testing.assert_array_equal(read.asnumpy(), mine)
            np.testing.assert_array_equal(net.weight.grad, np.full((3, 2), 4.0 * sum(range(1, n + 1))))

    thread_comm.run(n, rank)


def test_synchronized_batch_norm_moves_statistics_behind_earlier_predictions(gates):
    def rank(world):
        net, x = SyncBatchNorm(3, world=world), random(0, 4, 3)
        expected = net(x.data + 1).asnumpy()
        with autograd.asynchronous():
            y = under_way(gates, net, x)
            with autograd.train_mode():
                net(x)
            np.testing.assert_array_equal(y.asnumpy(), expected)

    thread_comm.run(1, rank)


def test_operands_count_as_they_were_when_they_were_passed(gates):
    x, mean, picked = random(0, 3), Tensor(np.ones(3, "f4")), [0, 1]
    expected = x.data + 2
    with autograd.asynchronous():
        gates.know(x)
        (gates.add_one(x, 0.0) + mean)[picked].wait_to_read()
        sums = gates.add_one(x, 1.0) + mean
        y = sums[picked]
        mean.data = np.full(3, 7, "f4")
        picked[0] = 2
        gates.events[1].set()
        np.testing.assert_array_equal(sums.asnumpy(), expected)
        np.testing.assert_array_equal(y.asnumpy(), expected[:2])


def left_by(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_who_leaves_the_block_by_an_exception_waits_too(gates, error, capfd):
    net, x, labels = nn.BatchNorm(3), random(0, 4, 3), np.array([0, 1, 2, 0])
    with pytest.raises(type(error)) as raised, autograd.asynchronous(), autograd.train_mode():
        gates.know(x)
        LOSS(net(gates.add_one(x, 0.0)), labels).wait_to_read()
        y = net(gates.add_one(x, 1.0))
        LOSS(y, labels + 1)
        soon(gates)
        left_by(error)
    assert raised.value is error
    assert y.asnumpy().shape == (4, 3)
    assert "DataError: softmax_cross_entropy [labels]" in capfd.readouterr().err


def test_a_generator_that_is_left_early_has_computed_what_it_called(gates):
    def batches(x):
        with autograd.asynchronous():
            gates.know(x)
            for _ in range(3):
                yield x * 2

    x = random(0, 3)
    with contextlib.closing(batches(x)) as made:
        y = next(made)
    np.testing.assert_array_equal(y.asnumpy(), x.data * 2)


def test_results_of_another_block_or_thread_are_waited_for(gates):
    logits, labels, found = random(0, 4, 3), np.array([0, 1, 2, 0]), []
    with autograd.asynchronous():
        LOSS(logits, labels).wait_to_read()
        failed = LOSS(logits, labels + 1)
        with contextlib.suppress(DataError):
            autograd.waitall()
        gates.know(logits)
        pending = gates.add_one(logits, 1.0)

        def other():
            with autograd.asynchronous():
                found.append((pending * 2).asnumpy())

        thread = threading.Thread(target=other)
        soon(gates)
        thread.start()
        thread.join()
    np.testing.assert_array_equal(found[0], (logits.data + 1) * 2)
    with autograd.asynchronous(), raises(DataError, operation="softmax_cross_entropy", where="labels"):
        _ = failed * 2
