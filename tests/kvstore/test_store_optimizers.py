"""Optimizers on stores: the updates of one process, and rates that change, and those that differ."""

from functools import partial

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from small_stores import LAYOUTS, WORLDS, full, on_one_worker

from hpcdp import kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.kvstore.serve import serve


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
def test_an_optimizer_updates_as_one_process_with_the_sum_would(ranks, per_node):
    rng = np.random.default_rng(3)
    gradients = rng.standard_normal((4, ranks, 37, 5)).astype("f4")
    start = rng.standard_normal((37, 5)).astype("f4")

    def one(world):
        store = kvstore.create("dist_sync", world)
        rule = optim.Adam(lr=0.1)
        store.init(["big", "small"], [start, start[0]])
        store.set_optimizer(rule)
        for step in range(4):
            rule.lr = 0.1 / (step + 1)  # reaches the owners with the next push
            store.push("big", gradients[step, world.rank], priority=-1)
            store.push("small", gradients[step, world.rank, 0])
        return store.pull("big").wait(), store.pull("small").wait()

    wanted, state = start.reshape(-1).copy(), None
    for step in range(4):
        rule = optim.Adam(lr=0.1 / (step + 1))
        state = state or rule.init_state(wanted)
        rule.update(wanted, gradients[step].sum(axis=0).reshape(-1), state, step=step + 1)
    everyone = thread_comm.run(ranks, one, ranks_per_node=per_node)
    for big, small in everyone:
        np.testing.assert_allclose(big.reshape(-1), wanted, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(small, wanted[:5], rtol=2e-4, atol=2e-5)
        assert big.tobytes() == everyone[0][0].tobytes()


def test_a_batch_on_n_workers_is_one_machine_with_n_batches():
    """dist_sync(b, n) equals one process at b n."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((3, 12, 6)).astype("f4"), rng.integers(0, 3, (3, 12))

    def trained(store, first, last):
        layer = nn.Dense(6, 3, weight_init=nn.init.Xavier(seed=1))
        from hpcdp.autograd import record

        params = {"w": layer.weight, "b": layer.bias}
        store.set_optimizer(optim.SGD(lr=0.05, momentum=0.9))
        store.init(list(params), [param.data for param in params.values()])
        for step in range(3):
            with record():
                loss = nn.functional.softmax_cross_entropy(layer(x[step, first:last]), y[step, first:last])
            loss.backward()
            store.push(list(params), [param.grad for param in params.values()])
            store.pull(list(params), out=list(params.values()))
        return np.concatenate([param.data.reshape(-1) for param in params.values()])

    alone = trained(kvstore.create("local"), 0, 12)
    for ranks in (2, 3, 4):
        count = 12 // ranks
        for found in thread_comm.run(
            ranks, lambda w, c=count: trained(kvstore.create("dist", w), c * w.rank, c * (w.rank + 1)), ranks_per_node=2
        ):
            np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rate", "shape", "at_once"),
    pairs([int, np.float32, optim.ConstantSchedule], [(40_000,), (3,)], [True, False]),
)
def test_rates_that_differ_are_told_whatever_they_are(rate, shape, at_once):
    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", np.zeros(shape, "f4"))
        rule = optim.SGD(lr=1.0)
        store.set_optimizer(rule)
        rule.lr = rate(1 + world.rank)
        if at_once:
            store.pushpull("w", np.ones(shape, "f4"), np.empty(shape, "f4"))
        else:
            store.push("w", np.ones(shape, "f4"))
            store.wait()

    with raises(MismatchError, operation="push", where="key 'w'", got=[1, "rank 0", 2]):
        thread_comm.run(2, one)


@pytest.mark.parametrize(("ranks", "per_node", "split"), LAYOUTS, indirect=["split"])
def test_an_optimizer_and_a_rate_that_is_assigned(ranks, per_node, split):
    """SGD without momentum: the order of pushes matters to the rounding alone."""
    rng = np.random.default_rng(3)
    gradients = rng.standard_normal((4, ranks, 37, 5))
    start = rng.standard_normal((37, 5))

    def one(world):
        store = kvstore.create("dist_async", world)
        rule = optim.SGD(lr=0.5)
        store.init(["big", "small"], [start, start[0]])
        store.set_optimizer(rule)
        for step in range(4):
            rule.lr = 0.5 / (step + 1)  # reaches the servers with the next push
            store.push("big", gradients[step, world.rank], priority=-1)
            store.pushpull("small", gradients[step, world.rank, 0], np.empty(5))
        store.barrier()
        return store.pull("big").wait(), store.pull("small").wait(), store.statistics()["pushes"]

    wanted = start - sum(0.5 / (step + 1) * gradients[step].sum(axis=0) for step in range(4))
    for big, small, pushes in thread_comm.run(ranks, one, ranks_per_node=per_node):
        np.testing.assert_allclose(big, wanted, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(small, wanted[0], rtol=1e-12, atol=1e-14)
        assert pushes == 8


RATES = {
    "np.float32": lambda step: np.float32(0.5 / step),
    "a schedule": lambda step: optim.ConstantSchedule(0.25) if step < 3 else optim.StepSchedule(0.5, 2, 0.5),
    "a schedule, then a number": lambda step: optim.ConstantSchedule(0.25) if step < 3 else 0.125,
    "one that changes": lambda step: CHANGED,
}


CHANGED = optim.ConstantSchedule(0.0)


@pytest.mark.parametrize("rates", list(RATES))
@pytest.mark.parametrize(
    ("ranks", "per_node", "num_servers", "split"),
    [(1, None, 0, False), (2, 1, 0, False), (2, 1, 0, True), (2, None, 1, False), (3, 1, 2, False), (3, 1, 2, True)],
    indirect=["split"],
)
def test_whatever_rate_a_worker_assigns_is_that_of_its_pushes(ranks, per_node, num_servers, rates, split):
    """The last worker pushes; the others have assigned another rate, with which nothing is pushed."""
    rate_at, start = RATES[rates], np.zeros(7)

    def rule_at(rule, step):
        rule.lr = rate_at(step)
        if rule.lr is CHANGED:
            CHANGED.lr = 0.1 * step

    wanted, rule = start.copy(), optim.SGD(lr=9.0)
    for step in range(1, 6):
        rule_at(rule, step)
        rule.update(wanted, np.ones(7), {}, step=step)

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["w", "v"], [start, start])
        rule = optim.SGD(lr=9.0)
        store.set_optimizer(rule)
        rule.lr = 77.0
        world.barrier()
        for step in range(1, 6) if world.rank == ranks - 1 else ():
            rule_at(rule, step)
            store.push(["w", "v"], [np.ones(7), np.ones(7)])
            store.wait()
        store.barrier()
        return [np.asarray(each) for each in store.pull(["w", "v"])]

    for found in thread_comm.run(ranks, one, per_node, num_servers, serve):
        for each in found:
            np.testing.assert_allclose(each, wanted, rtol=1e-12)


@pytest.mark.parametrize("per_node", [None, 1])
def test_a_rate_that_is_none_is_told_where_it_is_pushed(per_node):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["w", "v"], [full(1), full(1)])
        rule = optim.SGD(lr=0.1)
        store.set_optimizer(rule)
        rule.lr = np.array(0.5)
        with raises(ConfigError, operation="push", where="lr", expected=0, got="array(0.5)"):
            store.push(["w", "v"], [full(1), full(1)])

    thread_comm.run(2, one, per_node)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_updates_of_one_worker_are_those_of_the_optimizer(kind, split):
    """One worker pushes, in all worlds: state and steps are the key's, wherever it lies."""
    rng = np.random.default_rng(5)
    gradients, start = rng.standard_normal((5, 11)).astype("f4"), rng.standard_normal(11).astype("f4")
    rule = optim.create(kind, lr=optim.StepSchedule(0.1, every=2, factor=0.5))
    wanted, state = start.copy(), rule.init_state(start)
    for step, gradient in enumerate(gradients, 1):
        rule.update(wanted, gradient, state, step=step)

    def one(world, who):
        store = kvstore.create("dist_async", world)
        store.init(0, start)
        store.set_optimizer(optim.create(kind, lr=optim.StepSchedule(0.1, every=2, factor=0.5)))
        if world.rank == who:
            for gradient in gradients:
                store.push(0, gradient)
        store.barrier()
        return store.pull(0).wait()

    for who in range(3):
        for found in thread_comm.run(3, partial(one, who=who), ranks_per_node=2):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("per_node", [None, 1])
def test_half_precision_is_updated_in_single(kind, per_node):
    rule = optim.SGD(lr=0.25, momentum=0.5)
    wanted, state = np.ones(70, "f4"), rule.init_state(np.ones(70, "f4"))
    for step in range(1, 5):
        rule.update(wanted, np.linspace(0, 1, 70).astype("f2").astype("f4"), state, step=step)
        wanted = wanted.astype("f2").astype("f4")

    def one(world):
        store = kvstore.create(kind, world)
        store.init("w", full(1, (70,), "f2"))
        store.set_optimizer(optim.SGD(lr=0.25, momentum=0.5))
        for _ in range(4):
            if kind == "dist_sync" or world.rank == 0:
                mine = world.rank == 0  # the others push nothing, or zeros
                store.push("w", np.linspace(0, 1, 70).astype("f2") * np.float16(mine))
        store.barrier()
        return np.asarray(store.pull("w"))

    for found in thread_comm.run(2, one, per_node):
        assert found.dtype == np.float16
        np.testing.assert_array_equal(found, wanted.astype("f2"))


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_gradients_that_nobody_may_write_to_are_pushed(kind):
    gradient = np.full(100, 0.5, "f4")
    gradient.flags.writeable = False
    apart = np.zeros(401, np.uint8)[1:].view("f4")  # not aligned
    apart[:] = 0.5

    def one(store):
        store.init("w", np.ones(100, "f4"))
        store.set_optimizer(optim.SGD(lr=0.5))
        for value in (gradient, apart):
            store.push("w", value)
            store.pushpull("w", value, out=np.zeros(100, "f4"))
        return store.pull("w").wait().tolist()

    assert on_one_worker(kind, one) == [0.0] * 100
