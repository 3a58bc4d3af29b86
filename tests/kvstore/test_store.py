"""Stores of all kinds: the numbers of the documents, every form of arguments, and what is refused."""

import threading
import time
from functools import partial

import numpy as np
import pytest
import standin

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.comm import threads
from hpcdp.errors import ConfigError, HpcdpError, MismatchError, UnsupportedError

WORLDS = [(1, None), (2, None), (3, None), (4, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2)]
"""Ranks, and ranks per node."""
SHAPE = (2, 3)


def full(value, shape=SHAPE, dtype="f4"):
    return np.full(shape, value, dtype)


def on_one_worker(kind, fn):
    """``fn(store)`` with a store of any kind that has one worker."""
    if kvstore.KINDS[kind].scope == "process":
        return fn(kvstore.create(kind))
    return threads.run(1, lambda world: fn(kvstore.create(kind, world)))[0]


@pytest.fixture(params=list(kvstore.KINDS))
def kind(request):
    return request.param


@pytest.fixture(params=[kind for kind in kvstore.KINDS if kind != "dist_async"])
def replacing(request):
    """A kind in which the stored value becomes the sum where there is no updater."""
    return request.param


def test_the_numbers_of_the_documents(replacing):
    def numbers(store):
        out = np.zeros(SHAPE, "f4")
        store.init(3, full(2))
        store.pull(3, out=out)
        assert (out == 2).all()
        store.push(3, full(8))
        store.pull(3, out=out)
        assert (out == 8).all()
        store.push(3, [full(1)] * 4)
        store.pull(3, out=out)
        assert (out == 4).all()

        def update(key, received, stored):
            assert key == 3 and received.shape == stored.shape == SHAPE
            stored += 2 * received

        store.set_updater(update)
        store.push(3, full(1))
        store.pull(3, out=out)
        assert (out == 6).all()
        assert (store.rank, store.num_workers, store.kind) == (0, 1, replacing)

    on_one_worker(replacing, numbers)


@pytest.mark.parametrize(("ranks", "per_node"), WORLDS)
def test_ranks_push_and_a_server_of_rate_r_adds(ranks, per_node):
    """Key starts at 1, each rank pushes ones * (rank + 1): after i rounds exactly 1 + i r n (n + 1) / 2."""

    def one(world, dtype, shape, rate):
        store = kvstore.create("dist_sync", world)
        store.init("weight", full(1 if world.rank == 0 else 99, shape, dtype))
        found = []
        store.set_updater(_added if rate == 2 else _halved)
        for _ in range(3):
            store.push("weight", full(world.rank + 1, shape, dtype))
            found.append(store.pull("weight"))
        return [np.asarray(each) for each in found]

    for dtype in ("f2", "f4", "f8"):
        for shape in (SHAPE, (40, 30), (7,), ()):
            for rate in (2, 0.5):
                for found in threads.run(ranks, partial(one, dtype=dtype, shape=shape, rate=rate), per_node):
                    for i, each in enumerate(found, 1):
                        assert (each.dtype, each.shape) == (np.dtype(dtype), shape)
                        assert (each == 1 + i * rate * ranks * (ranks + 1) / 2).all()


def _added(key, received, stored):
    stored += np.asarray(2, stored.dtype) * received


def _halved(key, received, stored):
    stored += np.asarray(0.5, stored.dtype) * received


@pytest.mark.slow
def test_large_values_too():
    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init(0, full(1, (1200, 1200)))
        store.set_updater(_added)
        for _ in range(2):
            store.push(0, full(world.rank + 1, (1200, 1200)))
        return float(np.asarray(store.pull(0)).min()), float(np.asarray(store.pull(0)).max())

    assert threads.run(3, one, ranks_per_node=2) == [(25.0, 25.0)] * 3


def test_several_keys_repeated_ones_and_lists_for_devices(replacing):
    def forms(store):
        store.init(["a", "b"], [full(0), full(0, (4,))])
        store.push(["a", "b", "a"], [full(1), [full(2, (4,)), full(3, (4,))], full(5)])
        assert (store.pull("a")[...] == 6).all() and (store.pull("b")[...] == 5).all()
        first, second = np.zeros(SHAPE, "f4"), np.zeros(SHAPE, "f4")
        other = np.zeros(4, "f4")
        store.pull(["a", "b", "a"], out=[first, [other], second])
        assert (first == 6).all() and (second == 6).all() and (other == 5).all()
        assert [each.shape for each in store.pull(["b", "a"])] == [(4,), SHAPE]
        values = [full(7), full(8)]
        store.pushpull("a", values)
        assert all((each == 15).all() for each in values)
        out = np.zeros(SHAPE, "f4")
        store.pushpull("a", full(3), out=out)
        assert (out == 3).all()
        store.broadcast("c", full(9), out=out)
        assert (out == 9).all()

    on_one_worker(replacing, forms)


def test_what_is_pushed_may_be_changed_at_once(replacing):
    def changes(store):
        store.init(1, full(0))
        value = full(5)
        store.push(1, value)
        value[...] = 77
        initial = full(6)
        store.init(2, initial)
        initial[...] = 77
        assert (store.pull(1)[...] == 5).all() and (store.pull(2)[...] == 6).all()

    on_one_worker(replacing, changes)


def test_pushes_and_pulls_return_before_they_are_done_and_keep_their_order(kind):
    def order(store):
        begun, go_on = threading.Event(), threading.Event()

        def waits(key, received, stored):
            begun.set()
            assert go_on.wait(20)
            stored += received

        store.init(1, full(1))
        store.set_updater(waits)
        store.push(1, full(1))
        earlier = store.pull(1)
        store.push(1, full(1))
        later = store.pull(1)
        assert begun.wait(20)
        go_on.set()
        assert (np.asarray(later) == 3).all() and (earlier[...] == 2).all()
        assert earlier.dtype == np.float32 and repr(earlier).startswith("Pulled(array(")

    on_one_worker(kind, order)


def test_parameters_wait_when_they_are_read(kind):
    def pulled(store):
        go_on = threading.Event()
        layer = nn.Dense(3, 2)

        def waits(key, received, stored):
            assert go_on.wait(20)
            stored[...] = received

        store.init("w", full(0, (3, 2)))
        store.set_updater(waits)
        store.push("w", full(4, (3, 2)))
        store.pull("w", out=layer.weight)
        go_on.set()
        assert (layer(np.ones((1, 3), "f4")).data == 12).all()
        assert layer.weight.data_hook is None

    on_one_worker(kind, pulled)


def test_rows_that_repeat_in_any_order(kind):
    def rows(store):
        values = np.arange(12, dtype="f4").reshape(4, 3)
        store.init("rows", values)
        wanted = np.zeros((4, 3), "f4")
        wanted[[1, 3]] = values[[1, 3]]
        assert (store.row_sparse_pull("rows", row_ids=np.array([3, 1, 3, 3])).wait() == wanted).all()
        out = np.full((4, 3), 5, "f4")
        store.row_sparse_pull("rows", out=out, row_ids=[])
        assert (out == 0).all()
        for wrong in ([4], [-1], [0.5], [[[1]]]):
            with pytest.raises(ConfigError, match=r"\[row_ids\]: expected integers from 0 to 3"):
                store.row_sparse_pull("rows", row_ids=wrong)

    on_one_worker(kind, rows)


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
    everyone = threads.run(ranks, one, ranks_per_node=per_node)
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
        for found in threads.run(
            ranks, lambda w, c=count: trained(kvstore.create("dist", w), c * w.rank, c * (w.rank + 1)), ranks_per_node=2
        ):
            np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)


def test_ranks_may_push_keys_in_other_orders_and_with_other_priorities():
    def one(world):
        store = kvstore.create("dist_sync", world)
        keys = list(range(7))
        store.init(keys, [full(0, (key + 1, 9)) for key in keys])
        order = np.random.default_rng(world.rank).permutation(keys)
        for key in order.tolist():
            store.push(key, full(world.rank + key, (key + 1, 9)), priority=(key * 7 + world.rank) % 5)
        return [float(store.pull(key)[0, 0]) for key in keys]

    for per_node in (None, 1, 2):
        assert threads.run(4, one, ranks_per_node=per_node) == [[6.0 + 4 * key for key in range(7)]] * 4


def test_stores_do_not_meet_each_other():
    def one(world):
        stores = [kvstore.create("dist_sync", world) for _ in range(3)]
        for number, store in enumerate(stores):
            store.init("key", full(number))
        for number, store in enumerate(stores if world.rank % 2 else stores[::-1]):
            store.push("key", full(number + 1 if world.rank % 2 else 3 - number))
        return [float(store.pull("key")[0, 0]) for store in stores]

    assert threads.run(3, one, ranks_per_node=1) == [[3.0, 6.0, 9.0]] * 3


@pytest.mark.parametrize(("saved", "loaded"), [((3, 2), (2, None)), ((1, None), (4, 2)), ((2, 1), (3, 1))])
def test_states_go_on_with_another_number_of_ranks(saved, loaded, tmp_path):
    path = str(tmp_path / "states.npz")
    gradient = np.random.default_rng(1).standard_normal((33, 7)).astype("f4")

    def some(world, steps, value=None):
        store = kvstore.create("dist_sync", world)
        store.init("w", full(1, (33, 7)) if value is None else value)
        store.init("never", full(0))
        store.set_optimizer(optim.Adam(lr=0.1))
        if value is not None:
            store.load_optimizer_states(path)
        for _ in range(steps):
            store.push("w", gradient / world.size)
        value = store.pull("w").wait()
        store.save_optimizer_states(path)
        return value

    wanted = threads.run(1, lambda world: some(world, 5))[0]
    value = threads.run(saved[0], lambda world: some(world, 2), ranks_per_node=saved[1])[0]
    for found in threads.run(loaded[0], lambda world: some(world, 3, value), ranks_per_node=loaded[1]):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    local = kvstore.create("local")
    local.init("w", full(1, (33, 7)))
    local.set_optimizer(optim.Adam(lr=0.1))
    local.load_optimizer_states(path)  # of any kind of store
    local.save_optimizer_states(path)


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, None), (4, 2)])
def test_values_can_be_assigned(kind, ranks, per_node):
    def one(store):
        store.init(["a", "b"], [full(1), full(2, (5,))])
        store.set_optimizer(optim.SGD(lr=1.0))
        store.push("a", full(1))
        earlier = store.pull("a")
        store.assign(["a", "b"], [full(7 + store.rank), full(8 + store.rank, (5,))])
        assert (earlier[...] <= 0).all()
        store.barrier()
        store.push("b", full(-1, (5,)))
        store.barrier()
        assert (store.pull("a")[...] == 7).all() and (store.pull("b")[...] == 8 + store.num_workers).all()
        for wrong, message in (
            (("c", full(1)), "one of the keys"),
            (("a", [full(1)] * 2), "one array, got several"),
            (("a", full(1, (3,))), r"an array of \(2, 3\) float32"),
        ):
            with pytest.raises((ConfigError, UnsupportedError), match=rf"assign \[key .*{message}"):
                store.assign(*wrong)

    if kvstore.KINDS[kind].scope == "process":
        one(kvstore.create(kind))
    else:
        threads.run(ranks, lambda world: one(kvstore.create(kind, world)), per_node)


def test_an_updater_that_fails_is_told_to_every_rank_that_waits():
    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", full(1))
        store.set_updater(_fails)
        store.push("w", full(1))
        try:
            store.pull("w").wait()
        except ZeroDivisionError:
            return "own"
        except HpcdpError as error:
            return str(error).split("\n")[0]

    found = threads.run(3, one)
    assert (
        sorted(map(str, found)) == ["own"] + ["push [key 'w']: expected an update, got ZeroDivisionError on rank 0"] * 2
    )


def _fails(key, received, stored):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda store: kvstore.create("dist-sync"), "expected one of local, device, dist_sync, dist, dist_device_sync"),
        (lambda store: store.init("w", full(1)), r"init \[key 'w'\]: expected a new key, got one that was made before"),
        (lambda store: store.init(3, full(1)), r"init \[key 3\]: expected keys that are all int or all str, got both"),
        (lambda store: store.init(True, full(1)), r"init \[key\]: expected an int, a str or a list of them, got True"),
        (lambda store: store.init("x", [full(1), full(2)]), r"init \[key 'x'\]: expected one array"),
        (lambda store: store.init("x", 1.0), r"init \[key 'x'\]: expected one array, got a float"),
        (
            lambda store: store.push("x", full(1)),
            r"push \[key 'x'\]: expected one of the keys that init\(\) has made: 'w'",
        ),
        (
            lambda store: store.push(["w", "w"], [full(1)]),
            r"push \[value\]: expected a list of 2, one for each key, got 1",
        ),
        (
            lambda store: store.push(["w"], full(1)),
            r"push \[value\]: expected a list of 1, one for each key, got ndarray",
        ),
        (lambda store: store.push("w", full(1), priority=0.5), r"push \[priority\]: expected an integer, got 0.5"),
        (lambda store: store.set_updater(3), "set_updater: expected a function of key, received, stored, got 3"),
        (lambda store: store.set_optimizer("sgd"), "set_optimizer: expected an optimizer, e.g"),
        (lambda store: store.load_state_dict({}), r"load_state_dict: expected what state_dict\(\) .* got {}"),
        (lambda store: store.load_state_dict(None), r"load_state_dict: expected what state_dict\(\) .* got None"),
        (lambda store: store.num_dead_node(-1), r"num_dead_node \[timeout_s\]: expected a positive number"),
        (lambda store: store.init("c", np.zeros(2, "c8")), r"init \[key 'c'\]: expected a NumPy array of uint8, .*<c8"),
        (lambda store: store.init("o", np.array([None])), r"init \[key 'o'\]: expected a NumPy array of"),
        (lambda store: store.save_optimizer_states("x"), "expected a store with an optimizer, got none"),
    ],
)
def test_what_is_refused(kind, make, said):
    def refused(store):
        store.init("w", full(1))
        with pytest.raises((ConfigError, UnsupportedError), match=said):
            make(store)

    on_one_worker(kind, refused)


@pytest.mark.parametrize("name", list(kvstore.KINDS))
def test_what_is_no_world_is_refused(name):
    with pytest.raises(
        ConfigError, match=r"kvstore.create \[world\]: expected what hpcdp.init\(\) returns, .* got 'w'"
    ):
        kvstore.create(name, "w")


def test_a_broadcast_overwrites_its_value_where_no_other_place_is_named():
    def one(world):
        store, value = kvstore.create("dist_sync", world), full(world.rank + 1)
        store.broadcast("w", value)
        return value

    assert all(np.array_equal(value, full(1)) for value in threads.run(3, one))


def fails_on_rank_1(key, received, stored):
    if received.flat[0] == 2:
        raise ValueError("two")
    stored += received


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("per_node", [None, 1])
def test_a_barrier_is_one_for_a_worker_whose_push_has_failed_too(kind, per_node):
    def one(world):
        store = kvstore.create(kind, world)
        store.init("w", full(0))
        store.set_updater(fails_on_rank_1)
        store.push("w", full(2.0 if kind == "dist_async" and world.rank == 1 else 1.0))
        failed = False
        try:
            store.barrier()
        except Exception as error:
            failed = "two" in str(error)
        assert failed == (kind == "dist_async" and world.rank == 1)
        store.assign("w", full(5))  # and goes on from there
        store.barrier()
        return store.pull("w").wait()

    found = threads.run(3, one, per_node) if kind == "dist_async" else threads.run(3, one)
    assert all(np.array_equal(value, full(5)) for value in found)


@pytest.mark.parametrize("wrong", [full(1, (3, 2)), full(1, dtype="f8"), 1.0])
def test_arrays_that_do_not_fit_are_refused_before_anything_is_pushed(kind, wrong):
    def refused(store):
        store.init(["w", "v"], [full(1), full(1)])
        with pytest.raises(UnsupportedError, match=r"push \[key 'v'\]: expected an array of \(2, 3\) float32, got "):
            store.push(["w", "v"], [full(5), [full(1), wrong]])
        assert (store.pull("w")[...] == 1).all()
        if hasattr(wrong, "dtype"):
            with pytest.raises(UnsupportedError, match=r"pull \[key 'w'\]: expected an array of \(2, 3\) float32"):
                store.pull("w", out=wrong)

    on_one_worker(kind, refused)


@pytest.mark.parametrize("shape", [(40_000,), (3,)])
@pytest.mark.parametrize("rate", [int, np.float32, optim.ConstantSchedule], ids=lambda each: each.__name__)
@pytest.mark.parametrize("at_once", [True, False], ids=["pushpull", "push"])
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

    with pytest.raises(MismatchError, match=r"expected the same learning rate on all ranks, got 1 on rank 0, 2 on ra"):
        threads.run(2, one)


def test_rows_of_several_keys(kind):
    values = np.arange(12, dtype="f4").reshape(4, 3)

    def one(store):
        store.init([1, 2], [values, values[:, 0].copy()])
        first, second = store.row_sparse_pull([1, 2], row_ids=[[3, 0], np.array([2])])
        assert (np.asarray(first) == values * [[1], [0], [0], [1]]).all()
        assert (np.asarray(second) == values[:, 0] * [0, 0, 1, 0]).all()
        out = [np.empty((4, 3), "f4")]
        assert store.row_sparse_pull(np.int64(1), out=out, row_ids=[1]) is None
        assert (out[0] == values * [[0], [1], [0], [0]]).all()
        several = [np.empty((4, 3), "f4") for _ in range(3)]
        store.row_sparse_pull(1, out=several, row_ids=[2, 0, 2])
        assert all((each == values * [[1], [0], [1], [0]]).all() for each in several)
        store.row_sparse_pull(1, out=several, row_ids=[[1], np.array([3, 0]), [2]])
        for each, rows in zip(several, ([1], [0, 3], [2]), strict=True):
            assert (each[rows] == values[rows]).all() and np.count_nonzero(each.any(axis=1)) == len(rows)
        with pytest.raises(ConfigError, match="expected rows for each of 3 arrays, or for all, got 2 lists"):
            store.row_sparse_pull(1, out=several, row_ids=[[1], [2]])
        with pytest.raises(ConfigError, match=r"row_sparse_pull \[row_ids\]: expected integers from 0 to 3, got None"):
            store.row_sparse_pull(1)
        with pytest.raises(ConfigError, match=r"row_sparse_pull \[row_ids\]: expected a list of 2, one for each key"):
            store.row_sparse_pull([1, 2], row_ids=[[1]])

    on_one_worker(kind, one)


def test_keys_of_higher_priority_come_first(kind):
    def order(store):
        begun, go_on, updated = threading.Event(), threading.Event(), []

        def notes(key, received, stored):
            updated.append(key)
            if key == 0:
                begun.set()
                assert go_on.wait(20)

        store.init([0, 1, 2, 3], [full(0)] * 4)
        store.set_updater(notes)
        store.push(0, full(1))
        assert begun.wait(20)
        for key, priority in ((1, -5), (2, 5), (3, 0)):  # while the first one keeps the thread that updates
            store.push(key, full(1), priority=priority)
        go_on.set()
        store.wait()
        return updated

    assert on_one_worker(kind, order) == [0, 2, 3, 1]


def test_what_is_no_array_is_refused_by_name(kind):
    param = nn.models.mlp(input_shape=3, num_classes=2, hidden=()).parameters()[0]
    masked = np.ma.masked_array(np.zeros(SHAPE, "f4"), np.zeros(SHAPE, bool))

    def one(store):
        store.init("w", full(1))
        store.init("p", param.data)
        store.init("n", np.zeros(()))
        store.set_optimizer(optim.SGD(lr=0.1))
        for name, wrong in (("Parameter", param), ("MaskedArray", masked), ("float", 3.0)):
            with pytest.raises(ConfigError, match=rf"init \[key 'x'\]: expected one array, got a {name}$"):
                store.init("x", wrong)
        for key, name, wrong in (
            ("p", "Parameter", param),
            ("w", "MaskedArray", masked),
        ):
            with pytest.raises(
                UnsupportedError, match=rf"push \[key '{key}'\]: expected an array of .*, got a {name}$"
            ):
                store.push(key, wrong)
        store.push("n", np.float64(-10))  # what NumPy makes of arrays without dimensions
        assert store.pull("n").wait() == 1
        with pytest.raises(
            UnsupportedError, match=r"pull \[key 'n'\]: expected an array of \(\) float64, got a float64"
        ):
            store.pull("n", out=np.float64(3))
        with pytest.raises(UnsupportedError, match=r"\[key 'n'\]: expected an array of \(\) float64, got a float64"):
            store.pushpull("n", np.float64(3))  # which the sum cannot overwrite
        assert store.pull("n").wait() == 1
        for call in (store.pull, lambda key, out: store.pushpull(key, full(1), out)):
            with pytest.raises(
                UnsupportedError, match=r"pull \[key 'w'\]: expected an array to write to, got a read-only"
            ):
                call("w", out=np.broadcast_to(np.float32(1), SHAPE))
        assert np.array_equal(store.pull("w").wait(), full(1))
        with pytest.raises(ConfigError, match=r"push \[key 'w'\]: expected an array or more, got an empty list"):
            store.push("w", [])

    on_one_worker(kind, one)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_key_that_one_rank_cannot_make_is_an_error_on_all(kind):
    def one(world):
        store = kvstore.create(kind, world)
        with pytest.raises(ConfigError, match=r"rank 1: init \[key 'a'\]: expected one array, got a float"):
            store.init("a", 3.0 if world.rank == 1 else np.array(3.0))
        store.init("n", np.float64(3) if world.rank == 1 else np.array(3.0))
        on_a_device = standin.asarray(np.ones(3, "f4"))  # which the first rank's value overwrites, as all others
        store.init("d", on_a_device if world.rank == 1 else np.zeros(3, "f4"))
        assert not np.asarray(store.pull("d")).any()
        store.init("a", np.zeros(3, "f4"))
        with pytest.raises(MismatchError, match=r"assign .*expected key 'a' as on rank 0, got key 'b' on rank 1"):
            store.init("b", np.zeros(3, "f4"))
            store.assign("ab"[world.rank], np.zeros(3, "f4"))

    threads.run(2, one)


def test_ranks_that_differ_are_told():
    def keys(world):
        kvstore.create("dist_sync", world).init("w", full(1, (2, 3 + world.rank // 2)))

    def twice(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", full(1))
        store.init("w" if world.rank else "v", full(1))

    def rules(world):
        kvstore.create("dist_sync", world).set_optimizer(optim.SGD(lr=0.1 * (1 + world.rank)))

    def functions(world):
        kvstore.create("dist_sync", world).set_updater(_added if world.rank else _halved)

    def kinds(world):
        kvstore.create("dist_sync" if world.rank else "dist_async", world)

    for fn, kind_of, said in (
        (
            keys,
            MismatchError,
            r"expected key 'w' \(2, 3\) float32 as on rank 0, got key 'w' \(2, 4\) float32 on rank 2",
        ),
        (twice, ConfigError, "expected a new key, got one that was made before"),
        (rules, MismatchError, "set_optimizer"),
        (functions, MismatchError, "_halved as on rank 0, got .*_added on rank"),
        (kinds, MismatchError, r"kvstore.create .*expected dist_async .* as on rank 0, got dist_sync .* on ranks 1, 2"),
    ):
        with pytest.raises(kind_of, match=said):
            threads.run(3, fn)


@pytest.mark.parametrize("waits_in", ["pull", "wait"])
def test_a_rank_that_has_not_pushed_is_known_to_those_that_wait(waits_in):
    def one(world):
        store, seen = kvstore.create("dist_sync", world), []
        store.init("w", full(1))
        if world.rank != 2:
            store.push("w", full(1))
        world.barrier()
        if world.rank == 0:
            deadline = time.monotonic() + 20
            while store._rows["w"].milestones.behind(1) != [2]:  # its lane, too, takes its time
                assert time.monotonic() < deadline
            lane, wait = store._of_world, store._of_world.wait
            lane.wait = lambda variable: seen.append(store._watchdog.call[2]())
            pulled = store.pull("w") if waits_in == "pull" else store
            pulled.wait()
            lane.wait = wait
        world.barrier()
        if world.rank == 2:
            store.push("w", full(1))
        store.barrier()
        return seen

    assert threads.run(3, one)[0] == [[2]]


def test_arrays_on_a_device():
    store = kvstore.create("device")
    store.init(1, standin.asarray(full(1)))
    store.push(1, [standin.asarray(full(2)), standin.asarray(full(3))])
    out = standin.asarray(full(0))
    store.pull(1, out=out)
    assert (out.to_host() == 5).all()

    def through_the_host(world):
        store = kvstore.create("dist_sync", world)
        store.init(1, standin.asarray(full(1)))
        store.pushpull(1, [standin.asarray(full(world.rank)), standin.asarray(full(3))], out=out[world.rank])

    out = [standin.asarray(full(0)) for _ in range(3)]
    threads.run(3, through_the_host)
    assert all((each.to_host() == 12).all() for each in out)


@pytest.mark.mpi
def test_on_real_ranks():
    store = kvstore.create("dist_sync")
    world = hpcdp.init()
    store.init(["a", "b"], [full(1 + world.rank), full(0, (300, 70))])
    store.set_updater(_added)
    for _ in range(3):
        store.push(["a", "b"], [[full(world.rank + 1), full(1)], full(world.rank + 1, (300, 70))])
    total = world.size * (world.size + 1) / 2
    assert (store.pull("a")[...] == 1 + 6 * (total + world.size)).all()
    assert (store.pull("b")[...] == 6 * total).all()
    store.barrier()
