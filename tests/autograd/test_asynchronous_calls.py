"""Asynchronous calls: they return at once, keep dependencies, run side by side, and give the same bits."""

import copy
import pickle
import re
import threading

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.autograd.tape import CALLS, OPERATORS, operator
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError
from hpcdp.train.trainer import Trainer

LIMIT_S = 20
LOSS = nn.functional.softmax_cross_entropy


def random(seed, *shape):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype("f4"))


def test_calls_return_before_their_results_are_there_and_reading_waits(gates):
    x = random(0, 3)
    with autograd.asynchronous():
        gates.know(x)
        y = gates.add_one(x, 1.0)
        z = y * 2
        assert (z.shape, z.dtype, z.ndim, z.size, len(z)) == ((3,), np.float32, 1, 3, 3)
        threading.Timer(0.05, gates.events[1].set).start()
        np.testing.assert_array_equal(z.asnumpy(), (x.data + 1) * 2)


@pytest.mark.parametrize(
    "read",
    [float, int, bool, repr, np.asarray, lambda y: y.item(), lambda y: y.data, lambda y: y.wait_to_read(),
     lambda y: autograd.waitall()],
)  # fmt: skip
def test_implicit_blockers(gates, read):
    x = Tensor(np.ones((), "f4"))
    with autograd.asynchronous():
        gates.know(x)
        y = gates.add_one(x, 1.0)
        threading.Timer(0.02, gates.events[1].set).start()
        read(y)
        assert y.call.computed is not None


def test_it_prints_as_what_was_computed():
    x = random(0, 3)
    x.attach_grad()
    told = repr(x * 2)
    with autograd.asynchronous():
        assert repr(x * 2) == repr(x * 2) == told and told.startswith("Tensor([")


def test_what_does_not_depend_on_each_other_runs_side_by_side(gates):
    x = random(0, 4)
    with autograd.asynchronous(threads=2):
        gates.know(x)
        first, second = gates.add_one(x, 1.0), gates.add_one(x, 2.0)
        assert gates.arrived[1].wait(LIMIT_S) and gates.arrived[2].wait(LIMIT_S)
        third = gates.add_one(first, 3.0)
        assert not gates.arrived[3].wait(0.02), "it needs the first"
        for number in (2, 3, 1):
            gates.events[number].set()
        np.testing.assert_array_equal((second + third).asnumpy(), (x.data + 1) + (x.data + 2))


def test_no_more_calls_are_under_way_than_was_said(gates):
    x, returned = random(0, 2), []
    with autograd.asynchronous(threads=1, max_inflight=3):
        gates.know(x)
        threading.Timer(0.1, lambda: (returned.append(len(called)), gates.events[1].set())).start()
        called = []
        for _ in range(6):
            called.append(gates.add_one(x, 1.0))
    assert returned == [3] and len(called) == 6


def test_results_and_gradients_are_the_same_to_the_bit():
    x, y = np.random.default_rng(0).normal(size=(9, 1, 28, 28)).astype("f4"), np.arange(9) % 10

    def gradients():
        net = nn.Sequential(
            nn.Conv2D(1, 4, 5), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool2D(4), nn.Flatten(), nn.Dropout(0.3, seed=3),
            nn.Dense(144, 10),
        )  # fmt: skip
        for number, param in enumerate(net.parameters()):
            param.data[...] = np.random.default_rng(number).normal(size=param.shape)
        found = []
        for _ in range(3):
            with autograd.record():
                logits = net(x)
                loss = LOSS(logits, y)
            loss.backward()
            found += [logits.asnumpy(), net(x).asnumpy(), *(param.grad.copy() for param in net.parameters())]
        return found + [each.copy() for each in net.state_dict().values()]

    eager = gradients()
    with autograd.asynchronous():
        for ours, theirs in zip(gradients(), eager, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_gradients_with_respect_to_results():
    w = random(1, 5)
    with autograd.asynchronous():
        for _ in range(2):
            x = w * 3
            x.attach_grad()
            with autograd.record():
                y = x * x
                z = y * w
            np.testing.assert_array_equal(autograd.grad(z, [y], retain_graph=True)[0], w.data)
            z.backward()
            np.testing.assert_array_equal(x.grad, w.data * x.data * 2)


def test_gradients_of_what_several_operators_read_are_added_in_the_order_of_the_calls():
    x, factors = random(0, 400, 400), [random(1 + number, 400, 400) for number in range(6)]
    x.attach_grad()

    def gradient():
        with autograd.record():
            total = sum([x @ each for each in factors] + [x * 0.1, x.tanh(), x.exp()])
        total.backward()
        return x.grad.tobytes()

    expected = gradient()
    with autograd.asynchronous(threads=2):
        assert {gradient() for _ in range(20)} == {expected}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("per_node", [None, 1])
def test_training_gives_the_same_bits(n, per_node):
    def rank(world, asynchronous):
        net = nn.Sequential(nn.Dense(6, 8, activation="relu"), nn.Dense(8, 4))
        for number, param in enumerate(net.parameters()):
            param.data[...] = np.random.default_rng(number).normal(size=param.shape)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, overlap=per_node == 1)
        seen = []

        def train():
            for step in range(6):
                rng = np.random.default_rng([step, world.rank])
                x, y = rng.normal(size=(5, 6)).astype("f4"), rng.integers(0, 4, 5)
                with autograd.record():
                    loss = LOSS(net(x), y)
                loss.backward()
                seen.append(net(x).sum())  # reads parameters that the step changes
                trainer.step(5)

        if asynchronous:
            with autograd.asynchronous():
                train()
        else:
            train()
        return [each.item() for each in seen], [param.data.copy() for param in net.parameters()]

    eager, ours = (thread_comm.run(n, lambda world, a=a: rank(world, a), per_node) for a in (False, True))
    for (sums, params), (our_sums, our_params) in zip(eager, ours, strict=True):
        assert sums == our_sums
        for param, our_param in zip(params, our_params, strict=True):
            np.testing.assert_array_equal(param, our_param)


def test_what_an_operator_raises_comes_to_who_reads_its_result_with_the_line_that_called():
    logits, labels = random(0, 4, 3), np.array([0, 1, 2, 0])
    with autograd.asynchronous():
        _ = (LOSS(logits, labels) * 2).sum()  # now the shapes are known
        loss = LOSS(logits, labels + 1)
        double = loss * 2
        with raises(DataError, operation="softmax_cross_entropy", where="labels") as raised:
            _ = loss.data
        assert any(re.search(r"called at .*test_asynchronous_calls\.py:\d+", note) for note in raised.value.__notes__)
        with raises(DataError, operation="softmax_cross_entropy", where="labels"):
            float(double.sum())
        assert LOSS(logits, labels).shape == (4,)
    with raises(DataError, operation="softmax_cross_entropy", where="labels"), autograd.asynchronous():
        LOSS(logits, labels)
        LOSS(logits, labels + 1)  # whose result nobody reads
        autograd.waitall()


@pytest.mark.parametrize("ask", ["threads", "synchronous"])
def test_what_an_operator_with_an_effect_raises_is_for_no_others(ask, monkeypatch):
    monkeypatch.setenv("HPCDP_ENGINE", ask)

    @operator("fails_with_an_effect", has_effect=True)
    def fails(x):
        raise DataError("fails", got="nothing")

    x, net = random(0, 4, 3), nn.BatchNorm(3)
    try:
        with autograd.asynchronous(), autograd.train_mode():
            for _ in range(2):
                with raises(DataError, operation="fails"):
                    fails(x).asnumpy()
                np.testing.assert_array_equal((x * 3).asnumpy(), x.data * 3)
                assert net(x).asnumpy().shape == (4, 3) and net.running_mean.asnumpy().any()
    finally:
        del OPERATORS["fails_with_an_effect"], CALLS["fails_with_an_effect"]


def test_the_number_of_elements_that_a_mask_chooses_is_never_guessed():
    x = random(0, 50)
    with autograd.asynchronous():
        for shift in (0.0, 0.5, 1.0):
            mask = x.data > shift
            assert x[mask].shape == (mask.sum(),)


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.array])
def test_shapes_follow_the_values_of_axes_and_slices(kind):
    x = random(0, 12).reshape(3, 4)
    with autograd.asynchronous():
        for n in (0, 1, 1, 0):
            assert x.sum(axis=kind(n)).shape == x.data.sum(axis=n).shape
            assert x[kind(n) :].shape == x.data[n:].shape
            assert x.reshape(kind(2 + n), -1).shape == x.data.reshape(2 + n, -1).shape


def test_an_index_may_be_a_list():
    x = random(0, 8)
    with autograd.asynchronous():
        for index in ([1, 0, 1], [True, False] * 4, (slice(None),), [2]):
            np.testing.assert_array_equal(x[index].asnumpy(), x.data[index])


@pytest.mark.parametrize("dtype", [np.float64, float, np.dtype("f8"), "float64"], ids=str)
def test_casts_return_at_once_whatever_names_the_dtype(gates, dtype):
    with autograd.asynchronous(2):
        gates.know(x := random(0, 3))
        assert x.astype(np.float16).dtype == np.float16 and x.astype(dtype).dtype == np.float64
        result = gates.add_one(x, 1.0).astype(dtype)  # which would wait for the gate
        gates.events[1].set()
        np.testing.assert_array_equal(result.asnumpy(), (x.data + 1).astype("f8"))


def test_hybridized_networks_are_called_without_their_plans():
    net, x = nn.models.lenet(), np.random.default_rng(0).normal(size=(2, 1, 28, 28)).astype("f4")
    expected = net(x).asnumpy()
    net.hybridize()
    with autograd.asynchronous():
        for _ in range(2):
            np.testing.assert_array_equal(net(x).asnumpy(), expected)


def test_synchronous_for_debugging(monkeypatch, gates):
    monkeypatch.setenv("HPCDP_ENGINE", "synchronous")
    with autograd.asynchronous():
        y = gates.add_one(random(0, 2), 0.0) * 2
        assert y.call.computed is not None
        with raises(DataError, operation="softmax_cross_entropy", where="labels"):
            LOSS(random(0, 1, 2), np.array([5]))


def test_what_is_refused():
    with autograd.asynchronous(), raises(ConfigError, operation="asynchronous"), autograd.asynchronous():
        pass
    with (
        raises(ConfigError, operation="add_lane", where="threads of compute", expected=1, got=0),
        autograd.asynchronous(threads=0),
    ):
        pass
    with raises(ConfigError, operation="Engine", where="max_inflight"), autograd.asynchronous(max_inflight=0):
        pass
    autograd.waitall()  # nothing to wait for
    random(0, 1).wait_to_read()


def test_floating_point_errors_are_those_of_the_calling_code():
    ones, zeros = Tensor(np.ones(5, np.float32)), Tensor(np.zeros(5, np.float32))
    with autograd.asynchronous():
        _ = ones / ones
        with np.errstate(divide="ignore"):
            quiet = ones / zeros
        with np.errstate(all="raise"):
            loud = ones / zeros
        assert np.isinf(quiet.asnumpy()).all()
        with pytest.raises(FloatingPointError, match="divide by zero"):
            loud.asnumpy()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles_are_of_what_was_computed(gates, copied):
    x = random(0, 3)
    with autograd.asynchronous():
        gates.know(x)
        pending = gates.add_one(x, 1.0)
        threading.Timer(0.05, gates.events[1].set).start()
        found = copied(pending)
    assert type(found) is Tensor and found is not pending.settled
    np.testing.assert_array_equal(found.data, x.data + 1)
