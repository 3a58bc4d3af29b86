"""What an updater that fails leaves, and what is said of it: alike in all kinds of stores."""

import contextlib
import functools
import sys
import threading
import time

import numpy as np
import pytest
from raises import raises
from small_stores import added, full

from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, HpcdpError, MismatchError, UnsupportedError
from hpcdp.kvstore import server_keys
from hpcdp.kvstore.serve import serve
from hpcdp.nn import Parameter

KINDS = [("local", None), ("dist_sync", None), ("dist_async", None), ("dist_async", 1)]


def halves(key, received, stored):
    """Of a sum that begins with a 1 it does half."""
    stored[:2] += received[:2]
    if received[0] == 1:
        raise ValueError("a one")
    stored[2:] += received[2:]


def with_store(kind, per_node, do):
    """What ``do`` returns on each worker of a new store; in ``dist_sync`` the push of the first one counts."""
    if kind == "local":
        return [do(kvstore.create("local"), True)]
    return thread_comm.run(2, lambda world: do(kvstore.create(kind, world), world.rank == 0), per_node)


def pushed(store, value, first):
    if store.kind == "dist_sync" or first:
        store.push("w", np.full(4, float(value if first else 0)))


def told_by_a_pull(store, kinds=HpcdpError):
    """What it raises, with the notes."""
    with pytest.raises(kinds) as failure:
        store.pull("w").wait()
    return " ".join([str(failure.value), *getattr(failure.value, "__notes__", ())])


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_an_error_has_changed_nothing_and_lasts_until_the_next_push(kind, per_node):
    def one(store, first):
        store.init("w", np.zeros(4))
        store.set_updater(halves)
        pushed(store, 1, first)
        concerned = first or store.kind == "dist_sync"
        for _ in range(2 if concerned else 0):
            said = told_by_a_pull(store, (ValueError, HpcdpError))
            assert "a one" in said
            assert "key 'w'" in said
        pushed(store, 2, first)
        if concerned:
            store.wait()
        store.barrier()
        return store.pull("w").wait().tolist()

    assert all(value == [2.0] * 4 for value in with_store(kind, per_node, one))


def leaves(key, received, stored):
    if received[0] == 1:
        sys.exit("enough")
    stored += received


def interrupts(key, received, stored):
    if received[0] == 1:
        raise KeyboardInterrupt
    stored += received


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(("updater", "said"), [(leaves, "SystemExit: enough"), (interrupts, "KeyboardInterrupt")])
@pytest.mark.parametrize("per_node", [None, 1])
def test_an_updater_that_would_end_the_program_fails_like_others(per_node, updater, said, kind):
    def one(store, first):
        store.init("w", np.zeros(4))
        store.set_updater(updater)
        pushed(store, 1, first)
        if first or kind == "dist_sync":
            told = told_by_a_pull(store)
            assert f"expected a function that returns, got {said}" in told
            assert "key 'w'" in told
        pushed(store, 2, first)
        if first or kind == "dist_sync":
            store.wait()
        store.barrier()
        return store.pull("w").wait().tolist()

    assert all(value == [2.0] * 4 for value in with_store(kind, per_node, one))


class Leaves(optim.SGD):
    def update(self, param, grad, state, **settings):
        if grad[0] == 1:
            sys.exit("enough")
        super().update(param, grad, state, **settings)


@pytest.mark.parametrize("in_one", [False, True])
def test_a_rule_that_would_end_the_program_is_told_to_all_ranks(in_one):
    """Also to those that wait for new values in the exchange itself."""

    def one(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", np.zeros(64))
        store.set_optimizer(Leaves(lr=1.0))
        with raises(HpcdpError, operation="push", got="SystemExit"):
            if in_one:
                store.pushpull("w", np.full(64, 1 / 3))
            else:
                store.push("w", np.full(64, 1 / 3))
                store.pull("w").wait()
        value = np.full(64, 2.0)
        store.pushpull("w", value)
        return value.tolist()

    assert thread_comm.run(3, one) == [[-6.0] * 64] * 3


def shouts(key, received, stored):
    sys.exit("\x1b[31mred")


@pytest.mark.parametrize("num_servers", [1, 2])
def test_an_error_of_a_server_says_that_it_is_one(num_servers):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        store.set_updater(shouts)
        store.push("w", np.ones(4))
        with pytest.raises(HpcdpError) as failure:
            store.pull("w").wait()
        said = str(failure.value)
        assert r"SystemExit: \x1b[31mred; in the updater, of key 'w' [on server 0 (rank 3)]" in said

    thread_comm.run(3, one, 1, num_servers, serve)


@pytest.mark.parametrize("body", [None, "raise ZeroDivisionError('by nothing')", "import sys; sys.exit(1)"])
def test_an_updater_that_servers_cannot_import_is_an_error_of_all(body, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    if body is not None:
        (tmp_path / "script_of_its_own.py").write_text(body)

    def added(key, received, stored):
        stored += received

    added.__module__, added.__qualname__ = "script_of_its_own", "added"

    def one(world):
        store = kvstore.create("dist_async", world)
        with pytest.raises(ConfigError) as failure:
            store.set_updater(added)
        return str(failure.value)

    (said,) = {*thread_comm.run(2, one, 1, 1, serve)}
    assert said.startswith("server 0 (rank 2): set_updater: expected a function that servers can import, got script_of")


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_no_key_and_an_empty_one_are_refused(kind):
    def one(store, first):
        for call, got in (
            (lambda: store.push([], []), "[]"), (lambda: store.pull([]), "[]"), (lambda: store.init([], []), "[]"),
            (lambda: store.init("", np.zeros(1)), "''"),
        ):  # fmt: skip
            with pytest.raises(ConfigError) as failure:
                call()
            assert f"[key]: expected one or more keys, none of them empty, got {got}" in str(failure.value)

    with_store(kind, None, one)


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_a_function_that_returns_a_new_value_is_told(kind, per_node):
    def one(store, first):
        store.init("w", np.zeros(4))
        store.set_updater(returns_the_sum)
        pushed(store, 1, first)
        if first:
            with raises(HpcdpError, operation="updater", expected=None, got="ndarray"):
                store.wait()

    with_store(kind, per_node, one)


def returns_the_sum(key, received, stored):
    return stored + received


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_a_function_may_return_what_it_has_changed(kind, per_node):
    def one(store, first):
        store.init("w", np.zeros(4))
        store.set_updater(returns_stored)
        pushed(store, 1, first)
        store.barrier()
        return store.pull("w").wait().tolist()

    assert all(value == [1.0] * 4 for value in with_store(kind, per_node, one))


def returns_stored(key, received, stored):
    return np.add(stored, received, out=stored)


def spoils(key, received, stored):
    """What it is given, in one way or another."""
    stored += received
    if received[0] == 1:
        stored.dtype = np.uint8
    else:
        stored.flags.writeable = False


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_a_function_may_spoil_the_array_that_it_is_given_and_not_the_value(kind, per_node):
    def one(store, first):
        store.init("w", np.zeros(4))
        store.set_updater(spoils)
        concerned = first or store.kind == "dist_sync"
        for value in (1, 2, 3):
            pushed(store, value, first)
            if concerned and value == 1:
                with raises(HpcdpError, got="uint8"):
                    store.pull("w").wait()
        if concerned:
            store.wait()
        store.barrier()
        return store.pull("w").wait().tolist()

    assert all(value == [5.0] * 4 for value in with_store(kind, per_node, one))


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_a_rate_that_is_none_is_an_error_of_the_push(kind, per_node):
    def one(store, first):
        store.init("w", np.zeros(4))
        rule = optim.SGD(lr=1.0)
        store.set_optimizer(rule)
        rule.lr = "x"
        with raises(ConfigError, operation="push", where="lr", expected=0, got="x"):
            store.push("w", np.ones(4))
            store.wait()
        rule.lr = 1.0
        store.push("w", np.ones(4))
        store.barrier()
        assert (store.pull("w").wait() < 0).all()

    with_store(kind, per_node, one)


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_what_only_an_asynchronous_store_has_is_refused_by_name(kind):
    """A staleness of 0 makes rounds."""
    settings = {"staleness": 0} if kind == "dist_async" else {}
    kind_of = "dist_sync" if kind == "dist_async" else kind

    def one(world):
        store = kvstore.create(kind, world, **settings)
        store.init("w", np.zeros(1, np.int64))
        for name, call in (("take", lambda: store.take("w")), ("statistics", store.statistics)):
            with raises(UnsupportedError, operation=name, where="kvstore", expected="dist_async", got=kind_of):
                call()

    thread_comm.run(1, one)


@pytest.mark.parametrize("name", [["local"], None, 3])
def test_a_kind_that_is_no_name_is_refused(name):
    with raises(ConfigError, operation="kvstore.create", where="name"):
        kvstore.create(name)


def adds(key, received, stored):
    stored += received


@functools.wraps(adds)
def adds_twice(key, received, stored):
    stored += 2 * received


class Adder:
    def __call__(self, key, received, stored):
        stored += received

    def add(self, key, received, stored):
        stored += received


@pytest.mark.parametrize("updater", [adds_twice, Adder(), Adder().add, functools.partial(adds)])
def test_servers_never_run_another_function_that_has_the_name(updater):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        with pytest.raises(ConfigError) as failure:
            store.set_updater(updater)
        return str(failure.value)

    said = {*thread_comm.run(2, one, 1, 1, serve)}
    assert len(said) == 1 and "a function that servers can import, got a function other than" in said.pop()


@pytest.mark.parametrize("updater", [adds_twice, Adder(), Adder().add, functools.partial(adds)])
def test_without_servers_of_their_own_any_function_will_do(updater):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        store.set_updater(updater)
        store.push("w", np.full(4, world.rank + 1.0))
        store.barrier()
        return store.pull("w").wait().tolist()

    times = 2 if updater is adds_twice else 1
    assert thread_comm.run(3, one, 1) == [[6.0 * times] * 4] * 3


@pytest.mark.parametrize("settings", ["functions", "rules"])
def test_workers_that_set_different_updaters_are_told(settings):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        with pytest.raises(MismatchError) as failure:
            if settings == "functions":
                store.set_updater(adds if world.rank < 2 else halves)
            else:
                store.set_optimizer(optim.SGD(lr=0.1 if world.rank < 2 else 0.2))
        return str(failure.value)

    (said,) = {*thread_comm.run(3, one)}
    assert "on rank 2" in said and said.startswith("set_")


def stops(key, received, stored):
    raise StopIteration


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_the_exception_that_ends_generators_is_told_like_others(kind, per_node):
    def one(store, first):
        store.init("w", np.zeros(4))
        store.set_updater(stops)
        pushed(store, 1, first)
        if first or kind == "dist_sync":
            said = told_by_a_pull(store)
            assert "expected a function that returns, got StopIteration" in said and "key 'w'" in said

    with_store(kind, per_node, one)


@pytest.mark.parametrize("wrong", [{"staleness": -1}, {"staleness": 1.5}, {"replay": "x"}])
def test_settings_that_one_rank_has_wrong_are_told_to_all(wrong):
    def one(world):
        with pytest.raises(ConfigError) as failure:
            kvstore.create("dist_async", world, **(wrong if world.rank == 1 else {}))
        return str(failure.value)

    (said,) = {*thread_comm.run(3, one)}
    assert said.startswith("rank 1: kvstore.create [")


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

    found = thread_comm.run(3, one)
    assert (
        sorted(map(str, found)) == ["own"] + ["push [key 'w']: expected an update, got ZeroDivisionError on rank 0"] * 2
    )


def _fails(key, received, stored):
    raise ZeroDivisionError


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

    found = thread_comm.run(3, one, per_node) if kind == "dist_async" else thread_comm.run(3, one)
    assert all(np.array_equal(value, full(5)) for value in found)


def half(key, received, stored):
    stored[0] = 77
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize("per_node", [None, 1])
def test_half_an_update_of_another_worker_is_undone_and_another_updater_goes_on(per_node):
    """The key lies with the first worker, on another node or not."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_updater(half)
        if world.rank:
            store.push("w", full(1))
            with pytest.raises((ZeroDivisionError, HpcdpError), match="by nothing"):
                store.pull("w").wait()
        world.barrier()
        if world.rank == 0:
            assert (store.pull("w")[...] == 1).all() and store.pull("w").version == 0
        store.set_updater(added)
        if world.rank:
            store.push("w", full(1))
        store.barrier()
        return float(store.pull("w")[0, 0]), store.pull("w").version

    assert thread_comm.run(3, one, per_node) == [(5.0, 2)] * 3


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_push_that_fails_just_when_a_pull_begins_is_told(kind):
    def one(world):
        store, go_on = kvstore.create(kind, world), threading.Event()

        def fails(key, received, stored):
            assert go_on.wait(20)
            raise ZeroDivisionError

        store.init("w", full(1))
        store.set_updater(fails)
        store.push("w", full(1))
        hold, variable = store._engine.hold, store._entries["w"].variable

        def hold_after_the_push(*args, **kwargs):
            go_on.set()
            deadline = time.monotonic() + 20
            while variable.held and time.monotonic() < deadline:
                time.sleep(1e-3)
            return hold(*args, **kwargs)

        store._engine.hold = hold_after_the_push
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                store.pull("w", full(0))

    thread_comm.run(1, one)


@pytest.mark.parametrize("in_one", [False, True])
def test_all_parts_of_a_node_have_their_turn(in_one, monkeypatch):
    """Where one fails; a part that was passed over would wait for its turn for ever, and answers that nobody takes pile
    up."""
    monkeypatch.setattr(server_keys, "SPLIT_NBYTES", 8)

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(64))
        store.set_updater(halves)
        if world.rank == 0:
            with pytest.raises((ValueError, HpcdpError), match="a one"):
                if in_one:
                    store.pushpull("w", np.ones(64))
                else:
                    store.push("w", np.ones(64))
                    store.wait()
        world.barrier()
        store.push("w", np.full(64, 2.0))
        store.barrier()
        return store.pull("w").wait().tolist(), len(store._server._answers)

    assert thread_comm.run(4, one, 2) == [([8.0] * 64, 0)] * 4


def names_a_file(key, received, stored):
    if received[0] == 1:
        raise ValueError("a one in \udcff.txt")  # a name that is no UTF-8, as os.listdir() gives it
    stored += received


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_an_error_that_utf8_cannot_say_is_told_like_others(kind, per_node):
    def one(store, first):
        store.init(["v", "w"], [np.zeros(4)] * 2)  # one lies on each node
        store.set_updater(names_a_file)
        for value in (1, 2):
            for key in ("v", "w"):
                if kind == "dist_sync" or first:
                    store.push(key, np.full(4, float(value if first else 0)))
            if value == 1 and (first or kind == "dist_sync"):
                for key in ("v", "w"):
                    with pytest.raises((ValueError, HpcdpError), match="a one in"):
                        store.pull(key).wait()
        store.barrier()
        return store.pull("w").wait().tolist()

    assert all(value == [2.0] * 4 for value in with_store(kind, per_node, one))


@pytest.mark.parametrize("per_node", [None, 1])
def test_an_updater_that_is_refused_leaves_the_last_one(per_node):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        with pytest.raises(ConfigError):
            store.set_updater(adds_twice)
        before = store.has_updater
        store.set_optimizer(optim.SGD(lr=0.5))
        with pytest.raises(ConfigError):
            store.set_updater(adds_twice)
        store.push("w", np.ones(4))
        store.barrier()
        return before, store.pull("w").wait().tolist()

    assert thread_comm.run(2, one, per_node, 1, serve) == [(False, [-1.0] * 4)] * 2


@pytest.mark.parametrize(("kind", "per_node"), KINDS)
def test_a_parameter_gets_the_next_value_after_one_that_failed(kind, per_node):
    def one(store, first):
        parameter = Parameter(np.zeros(4))
        store.init("w", np.zeros(4))
        store.set_updater(halves)
        for value in (1.0, 1.0, 2.0):
            if kind == "dist_sync" or first:
                store.pushpull("w", np.full(4, value if first else 0.0), out=parameter)
            if value == 1 and (kind == "dist_sync" or first):
                for _ in range(2):
                    with pytest.raises((ValueError, HpcdpError), match="a one"):
                        print(parameter.data)
                with pytest.raises((ValueError, HpcdpError), match="a one"):  # the key is as it was
                    store.pull("w", out=parameter)
                    print(parameter.data)
        store.barrier()
        store.pull("w", out=parameter)
        return parameter.data.tolist()

    assert all(value == [2.0] * 4 for value in with_store(kind, per_node, one))


@pytest.mark.parametrize("call", ["state_dict", "save", "load"])
@pytest.mark.parametrize("per_node", [None, 1])
def test_what_all_do_with_states_fails_on_all_where_the_push_of_one_has_failed(per_node, call, tmp_path):
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(4))
        store.set_optimizer(Leaves(lr=1.0))
        store.save_optimizer_states(tmp_path / "before")
        if world.rank == 1:
            with contextlib.suppress(HpcdpError):  # told at once where nobody else is needed
                store.push("w", np.ones(4))
        with pytest.raises(HpcdpError, match="SystemExit: enough"):
            if call == "state_dict":
                store.state_dict()
            elif call == "save":
                store.save_optimizer_states(tmp_path / "after")
            else:
                store.load_optimizer_states(tmp_path / "before")
        store.push("w", np.full(4, 2.0))
        store.state_dict()
        return store.pull("w").wait().tolist()

    assert thread_comm.run(2, one, per_node) == [[-4.0] * 4] * 2
