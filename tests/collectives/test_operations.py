"""What the public functions promise of any algorithm: arrays of all kinds, and what cannot be done is said."""

import itertools

import numpy as np
import pytest
import standin
from by_numpy import data, part, reduced
from numpy.lib.stride_tricks import as_strided
from raises import raises

import hpcdp
from hpcdp.collectives import (
    ALGORITHMS,
    Monoid,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    gather,
    gather_object,
    grouped_allreduce,
    iallgather,
    iallreduce,
    ialltoall,
    ibroadcast,
    ireduce_scatter,
    reduce,
    reduce_scatter,
    scatter,
)
from hpcdp.comm import init, thread_comm
from hpcdp.comm.consistency import Call, Calls, require_same
from hpcdp.comm.progress import TaskGroup
from hpcdp.errors import HpcdpError, MismatchError, UnsupportedError

COLLECTIVES = {
    "allreduce": allreduce,
    "iallreduce": iallreduce,
    "reduce_scatter": reduce_scatter,
    "allgather": allgather,
    "broadcast": broadcast,
    "reduce": reduce,
}
REDUCING = ["allreduce", "iallreduce", "reduce_scatter", "reduce"]
ROOTED = ["broadcast", "reduce"]


def test_the_document_s_example():
    results = thread_comm.run(2, lambda world: allreduce(np.full((1, 2), world.rank + 1.0), world=world))
    assert [result.tolist() for result in results] == [[[3.0, 3.0]]] * 2


def test_arrays_that_are_not_contiguous_are_changed_in_place():
    def rank(world):
        whole = np.arange(24.0).reshape(4, 6) * (world.rank + 1)
        view = whole[::2, 1::2]
        assert allreduce(view, "sum", world) is view
        return whole

    base = np.arange(24.0).reshape(4, 6)
    for number, whole in enumerate(thread_comm.run(3, rank)):
        np.testing.assert_array_equal(whole[::2, 1::2], base[::2, 1::2] * 6)
        np.testing.assert_array_equal(whole[1], base[1] * (number + 1))


def unaligned(values):
    x = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype)
    x[...] = values
    assert not x.flags.aligned
    return x


@pytest.mark.parametrize("count", [5, 4000])
def test_arrays_may_begin_at_any_byte(count):
    thread_comm.run(3, lambda world: check_unaligned(world, count))


def check_unaligned(world, count):
    n, me = world.size, data(world.rank, count)
    wanted, own = reduced(n, count), slice(count * world.rank // n, count * (world.rank + 1) // n)
    for algorithm, chosen in ALGORITHMS["allreduce"].items():
        if algorithm == "shared" and world.num_nodes > 1:
            continue
        near = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(allreduce(unaligned(me), world=world, algorithm=algorithm), wanted, **near)
        if chosen.steps is not None:
            iallreduce(x := unaligned(me), world=world, algorithm=algorithm).wait()
            np.testing.assert_allclose(x, wanted, **near)
    x = unaligned(me)
    np.testing.assert_allclose(reduce_scatter(x, world=world, out=x[own]), wanted[own], **near)
    np.testing.assert_array_equal(allgather(unaligned(me), world)[-count:], data(n - 1, count))
    np.testing.assert_array_equal(broadcast(unaligned(me), n - 1, world), data(n - 1, count))
    found = reduce(unaligned(me), "sum", n - 1, world)
    np.testing.assert_allclose(found, wanted if world.rank == n - 1 else me, **near)


@pytest.mark.mpi
def test_real_ranks_take_them_too():
    check_unaligned(init(), 1000)


@pytest.mark.mpi
@pytest.mark.parametrize("x", [np.float64(5), np.broadcast_to(np.float64(5), 3)], ids=["number", "read-only"])
def test_a_receiver_that_cannot_be_written_is_told_to_all_ranks(x):
    world = init()
    for value in (7.0, 70.0):
        if world.rank > 0:
            with raises(UnsupportedError, operation="broadcast", where="x"):
                broadcast(x)
        elif world.size > 1:
            with raises(MismatchError, operation="broadcast", got="read-only" if x.ndim else "a number"):
                broadcast(x)
        else:
            broadcast(x)
        assert broadcast(np.full(2, world.rank + value)).tolist() == [value] * 2


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_masked_array_is_refused_on_all_ranks(collective):
    def rank(world):
        with raises(UnsupportedError, operation=collective, where="x", got="masked"):
            COLLECTIVES[collective](np.ma.array([1.0, 2.0], mask=[0, 1]), world=world)

    thread_comm.run(2, rank)


def matrices(world):
    n, me = world.size, world.rank

    def of(rank, rows=2):
        return (np.arange(2.0 * rows).reshape(rows, 2) * (rank + 1) - rank).view(np.matrix)

    every = np.stack([np.asarray(of(rank)) for rank in range(n)])
    of_root, sent = np.asarray(of(7, n)), [np.asarray(of(rank, n)) for rank in range(n)]
    for started in (False, True):

        def call(name, *args, started=started, **settings):
            result = getattr(hpcdp, "i" * started + name)(*args, **settings)
            return result.wait() if started else result

        for got, wanted in (
            (call("allgather", of(me), world), every.reshape(-1, 2)),
            (call("gather", of(me), n - 1, world), every.reshape(-1, 2) if me == n - 1 else None),
            (call("scatter", of(7, n) if me == 0 else None, 0, world), of_root[[me]]),
            (call("alltoall", of(me, n), None, world), np.stack([x[me] for x in sent])),
            (call("reduce_scatter", of(me), world=world), part(every.sum(0).reshape(-1), me, n)),
            (call("sendrecv", of(me), (me + 1) % n, (me - 1) % n, world=world), every[me - 1]),
        ):
            assert type(got) is type(wanted)  # no matrix
            np.testing.assert_array_equal(got, wanted)
        x, y = of(me), of(me)
        assert call("allreduce", x, world=world) is x and call("grouped_allreduce", [y], world=world)[0] is y
        for reduced_in_place in (x, y):
            np.testing.assert_array_equal(reduced_in_place, every.sum(0))
        x = of(me)
        assert call("broadcast", x, n - 1, world) is x
        np.testing.assert_array_equal(x, every[-1])
        assert call("reduce", x, "sum", 0, world) is x
        np.testing.assert_array_equal(x, every[-1] * (n if me == 0 else 1))
        assert call("sendrecv", of(me), (me + 1) % n, (me - 1) % n, x, world=world) is x
        np.testing.assert_array_equal(x, every[me - 1])


def test_matrices_are_taken_as_plain_arrays():
    for n, nodes in ((1, None), (2, None), (3, 1), (4, 2)):
        thread_comm.run(n, matrices, nodes)


@pytest.mark.mpi
def test_real_ranks_take_matrices():
    matrices(init())


def test_every_collective_takes_arrays_that_are_not_contiguous():
    n, root = 3, 1

    def rank(world):
        mine = data(world.rank, 48).reshape(6, 8)
        wanted = reduced(n, 48).reshape(6, 8).T

        request = iallreduce(x := mine.copy().T, world=world)
        request.wait()
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-5)
        x = mine.copy().T
        np.testing.assert_allclose(
            reduce_scatter(x, world=world), part(wanted.reshape(-1), world.rank, n), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_array_equal(x, mine.T)
        np.testing.assert_array_equal(allgather(x, world)[-8:], data(2, 48).reshape(6, 8).T)
        out = np.zeros((24, 6), "f4").T  # 6 x 24
        allgather(x, world, out=out)
        np.testing.assert_array_equal(out.reshape(3, 8, 6)[2], data(2, 48).reshape(6, 8).T)
        assert reduce(x, "sum", root, world) is x
        np.testing.assert_allclose(x, wanted if world.rank == root else mine.T, rtol=1e-5, atol=1e-5)
        x = mine.copy().T
        assert broadcast(x, root, world) is x
        np.testing.assert_array_equal(x, data(root, 48).reshape(6, 8).T)

    thread_comm.run(n, rank)


def test_out_leaves_the_input_alone():
    def rank(world):
        x, out = np.full(5, world.rank + 1.0), np.empty(5)
        assert allreduce(x, "prod", world, out=out) is out
        later = np.empty(5)
        iallreduce(x, "prod", world, out=later).wait()
        assert later.tolist() == out.tolist()
        at_root = np.zeros(5)
        reduce(x, "prod", 2, world, out=at_root)
        assert at_root.tolist() == (out.tolist() if world.rank == 2 else [0.0] * 5)
        return x[0], out[0]

    assert thread_comm.run(3, rank) == [(1.0, 6.0), (2.0, 6.0), (3.0, 6.0)]


@pytest.mark.parametrize("algorithm", ["reference", "native", "ring", "halving_doubling"])
def test_parts_stay_where_they_are(algorithm):
    """reduce_scatter into a view of its input and allgather from it: an allreduce in place."""
    n, count = 4, 30

    def rank(world):
        x = data(world.rank, count, "float64")
        own = part(x, world.rank, n)
        assert reduce_scatter(x, "sum", world, algorithm, out=own) is own
        np.testing.assert_allclose(own, part(reduced(n, count, "float64"), world.rank, n), rtol=1e-13)
        assert allgather(own, world, "ring", out=x) is x
        return x

    for x in thread_comm.run(n, rank):
        np.testing.assert_allclose(x, reduced(n, count, "float64"), rtol=1e-13)


def test_an_input_stays_beside_which_its_part_of_the_result_is_written():
    """In the memory between them, but not in it."""

    def rank(world):
        place = np.zeros((3, 10))
        place[1] = data(world.rank, 10, "float64")
        reduce_scatter(place[1], "sum", world, "ring", out=place[::2, 5])
        np.testing.assert_array_equal(place[1], data(world.rank, 10, "float64"))
        return place[::2, 5]

    wanted = reduced(5, 10, "float64")
    np.testing.assert_allclose(np.concatenate(thread_comm.run(5, rank)), wanted, rtol=1e-13)


def test_an_array_of_another_namespace_goes_through_host_memory():
    def rank(world):
        def own():
            return standin.asarray(np.full(4, world.rank + 1.0, np.float32))

        x = own()
        assert allreduce(x, "sum", world) is x
        iallreduce(later := own(), "sum", world).wait()
        assert later.to_host().tolist() == x.to_host().tolist()
        assert broadcast(moved := own(), 2, world) is moved
        assert moved.to_host().tolist() == [3.0] * 4
        assert type(allgather(own(), world)) is type(x)
        assert reduce_scatter(own(), "sum", world).to_host().tolist() == part(np.full(4, 6.0), world.rank, 3).tolist()
        assert reduce(at_root := own(), "sum", 1, world) is at_root
        assert at_root.to_host()[0] == (6.0 if world.rank == 1 else world.rank + 1.0)
        return x.to_host().tolist()

    assert thread_comm.run(3, rank) == [[6.0] * 4] * 3


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_unknown_algorithm_is_told_with_the_valid_ones(collective):
    with raises(UnsupportedError, where="algorithm", got="ringo"):
        thread_comm.run(2, lambda world: COLLECTIVES[collective](np.zeros(3), world=world, algorithm="ringo"))


@pytest.mark.parametrize("collective", REDUCING)
@pytest.mark.parametrize(
    ("x", "op", "fields"),
    [
        (np.zeros(3), "median", {"where": "op", "expected": "Monoid", "got": "median"}),
        (np.zeros(3), ["sum"], {"where": "op and algorithm", "expected": "names", "got": "['sum']"}),
        (np.zeros(3, "c8"), "max", {"where": "op", "got": "max"}),
        (np.zeros(3, "?"), "mean", {"where": "op", "got": "bool"}),
        (np.zeros(3, "U1"), "sum", {"where": "dtype", "got": "U1"}),
        (np.zeros(3, "i4,f4"), "sum", {"where": "dtype", "got": "V8"}),
        (np.zeros(3, ">f4"), "sum", {"where": "dtype", "got": "f4"}),
        ([1, 2], "sum", {"where": "x", "got": "list"}),
        (np.zeros(3), None, {"where": "op", "expected": "Monoid", "got": None}),
    ],
)
def test_what_cannot_be_reduced_is_said(collective, x, op, fields):
    with raises(UnsupportedError, operation=collective, **fields):
        thread_comm.run(2, lambda world: COLLECTIVES[collective](x, op, world=world))


@pytest.mark.parametrize("collective", ["allgather", "broadcast"])
@pytest.mark.parametrize("x", [np.zeros(3, ">f4"), np.zeros(2, "i4,f4"), np.array(["a"]), [1, 2], 3.0])
def test_what_cannot_be_moved_is_said(collective, x):
    with raises(HpcdpError, operation=collective):
        thread_comm.run(2, lambda world: COLLECTIVES[collective](x, world=world))


@pytest.mark.parametrize("collective", ROOTED)
@pytest.mark.parametrize("root", [-1, 2, 1.0, True, "0", None])
def test_a_root_that_is_no_rank_is_refused(collective, root):
    with raises(UnsupportedError, operation=collective, where="root", expected=[0, 1], got=root):
        thread_comm.run(2, lambda world: COLLECTIVES[collective](np.zeros(3), root=root, world=world))


@pytest.mark.parametrize(
    ("collective", "out", "fields"),
    [
        ("allreduce", np.zeros(4), {"expected": [(3,), "float64"], "got": [(4,), "float64"]}),
        ("allreduce", np.zeros((3, 1)), {"expected": [(3,), "float64"], "got": [(3, 1), "float64"]}),
        ("allreduce", np.zeros(3, "f4"), {"expected": [(3,), "float64"], "got": [(3,), "float32"]}),
        ("iallreduce", np.zeros(4), {"expected": [(3,), "float64"], "got": [(4,), "float64"]}),
        ("reduce_scatter", np.zeros(3), {"expected": "float64", "got": [(3,), "float64"]}),
        ("reduce_scatter", np.zeros((1, 1)), {"expected": "float64", "got": [(1, 1), "float64"]}),
        ("allgather", np.zeros(8), {"expected": [3, "float64"], "got": ["float64", 8]}),
        ("allgather", np.zeros(6, "f4"), {"expected": [3, "float64"], "got": [3, "float32"]}),
    ],
)
def test_a_receiver_that_does_not_fit_is_refused(collective, out, fields):
    with raises(UnsupportedError, operation=collective, where="out", **fields):
        thread_comm.run(2, lambda world: COLLECTIVES[collective](np.zeros(3), world=world, out=out.copy()))


@pytest.mark.parametrize("collective", ["allreduce", "iallreduce", "reduce"])
def test_a_read_only_array_is_refused(collective):
    with raises(UnsupportedError, operation=collective, where="x", expected="writeable"):
        thread_comm.run(1, lambda world: COLLECTIVES[collective](read_only(3), world=world))


@pytest.mark.parametrize("collective", ["allreduce", "iallreduce", "reduce_scatter", "allgather", "reduce"])
def test_a_receiver_that_is_read_only_or_no_array_is_refused(collective):
    call, x = COLLECTIVES[collective], np.zeros(3)
    with raises(UnsupportedError, operation=collective, where="out", expected="writeable"):
        thread_comm.run(1, lambda world: call(x, world=world, out=read_only(3)))
    with raises(UnsupportedError, operation=collective, where="out", got="list"):
        thread_comm.run(1, lambda world: call(x, world=world, out=[0, 0, 0]))


@pytest.mark.parametrize("where", ["x", "out"])
@pytest.mark.parametrize(("shape", "strides"), [((4,), (0,)), ((3, 2), (8, 8)), ((2,), (6,))])
def test_an_array_whose_elements_share_memory_is_read_but_not_written(shape, strides, where):
    def rank(world):
        x = as_strided(np.zeros(4), shape, strides)
        y = np.full(x.shape, world.rank + 1.0)
        for name in ("allreduce", "iallreduce"):
            with raises(UnsupportedError, operation=name, where=where, got=x.strides, remedy="copy"):
                COLLECTIVES[name](*((x,) if where == "x" else (y, "sum")), world=world, out=None if where == "x" else x)
        for apart in (np.zeros((3, 4)).T, np.zeros((3, 4))[:, ::-2], as_strided(np.zeros(8), (2, 3), (24, 16))):
            assert allreduce(apart + 1, world=world, out=apart) is apart and (apart == 2).all()
        return allreduce(x, world=world, out=y).any()

    assert thread_comm.run(2, rank) == [False, False]


def read_only(count):
    x = np.arange(float(count))
    x.flags.writeable = False
    return x


def test_broadcast_reads_the_root_s_array_and_writes_the_others():
    def rank(world):
        return broadcast(read_only(4) if world.rank == 1 else np.zeros(4), 1, world).tolist()

    assert thread_comm.run(3, rank) == [[0.0, 1.0, 2.0, 3.0]] * 3


WRONG_ON_THE_LAST_RANK = {
    "allreduce": lambda x, world, bad: allreduce(x, world=world, out=np.zeros(3 + bad)),
    "iallreduce": lambda x, world, bad: iallreduce(x, "product" if bad else "sum", world).wait(),
    "reduce": lambda x, world, bad: reduce(x, "sum", world.size - 1, world, out=np.zeros(3 + bad)),
    "reduce_scatter": lambda x, world, bad: reduce_scatter(x, world=world, out=np.zeros(1 + bad)),
    "ireduce_scatter": lambda x, world, bad: ireduce_scatter(x, world=world, splits=[1, 1, 1 + bad]).wait(),
    "allgather": lambda x, world, bad: allgather(x, world, out=np.zeros(9 + bad)),
    "iallgather": lambda x, world, bad: iallgather("x" if bad else x, world).wait(),
    "broadcast": lambda x, world, bad: broadcast(read_only(3) if bad else x, 0, world),
    "ibroadcast": lambda x, world, bad: ibroadcast(x, 3 * bad, world).wait(),
    "gather": lambda x, world, bad: gather(x, 2, world, out=[0] * 9 if bad else np.zeros(9)),
    "ialltoall": lambda x, world, bad: ialltoall(x, [1, 1, 1 + bad], world).wait(),
    "grouped_allreduce": lambda x, world, bad: grouped_allreduce([] if bad else [x], world=world),
    "gather_object": lambda x, world, bad: gather_object(0, 3 * bad, world),
}


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_wrong_argument_on_one_rank_is_an_error_of_all(num_nodes):
    def rank(world):
        for _ in range(2):  # the second call may repeat the first
            for name, call in WRONG_ON_THE_LAST_RANK.items():
                call(np.arange(3.0) + world.rank, world, False)
                bad = world.rank == 2
                with pytest.raises(HpcdpError) as caught:
                    call(np.arange(3.0) + world.rank, world, bad)
                assert type(caught.value) is (UnsupportedError if bad else MismatchError), (name, caught.value)
                own = "expected" if bad else f"{name} with an invalid argument"
                assert own in str(caught.value) and (bad or "on rank 2" in str(caught.value)), caught.value
                assert allreduce(np.ones(1), world=world) == 3

    thread_comm.run(3, rank, ranks_per_node=3 // num_nodes)


@pytest.mark.parametrize("count", [3, 100_000])
def test_a_receiver_that_does_not_fit_what_others_send_is_an_error_of_its_rank(count):
    def rank(world):
        bad, x = world.rank == 1, np.full(count, 1.0 + world.rank)
        for call in (
            lambda out: gather(x, 1, world, out),
            lambda out: alltoall(np.tile(x, (3, 1)), None, world, out),
            lambda out: scatter(np.tile(x, 3) if world.rank == 0 else None, 0, world, out=out),
        ):
            if bad:
                with raises(UnsupportedError, where="out", got=[(count + 1,), "float64"]):
                    call(np.zeros(count + 1))
            else:
                call(None)
            assert allreduce(np.ones(1), world=world) == 3

    thread_comm.run(3, rank)


def test_a_mismatch_of_splits_names_the_shapes_of_the_callers():
    def rank(world):
        rows, splits = 5 + world.rank, [4, 1 + world.rank]
        for call in (reduce_scatter, lambda *args, **kwargs: ireduce_scatter(*args, **kwargs).wait()):
            with raises(MismatchError, expected=["(5, 2)", [4, 1]], got=["(6, 2)", [4, 2]]):
                call(np.ones((rows, 2)), world=world, splits=splits)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("dtype", ["?", "c16", "f2"])
def test_what_is_only_moved_may_be_of_more_dtypes(dtype):
    def rank(world):
        mine = np.array([world.rank, 1, 0], dtype)
        broadcast(x := mine.copy(), np.int64(1), world)
        return x.tolist(), allgather(mine[None], world).tolist()

    rows = [np.array([number, 1, 0], dtype).tolist() for number in range(3)]
    assert thread_comm.run(3, rank) == [(rows[1], rows)] * 3


def test_what_is_no_world_or_no_function_is_said():
    with raises(
        UnsupportedError, operation="collective", where="world", expected=["World", "hpcdp.init()"], got="world"
    ):
        allreduce(np.zeros(3), world="world")
    with raises(UnsupportedError, operation="Monoid", where="function", got=3):
        Monoid(3, 0.0)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("collective", "algorithm"), [("allreduce", "shared"), ("reduce", "native")])
def test_a_reduction_of_ones_own_needs_an_algorithm_for_it(n, collective, algorithm):
    mine = Monoid(np.minimum, np.inf, "sum")
    with raises(
        UnsupportedError, operation=collective, where=f"algorithm={algorithm!r}", got="sum", remedy="algorithm='auto'"
    ):
        thread_comm.run(n, lambda world: COLLECTIVES[collective](np.ones(3), mine, world=world, algorithm=algorithm))


def test_a_reduction_of_ones_own_differs_from_the_named_one_whose_name_it_has():
    def rank(world):
        op = Monoid(np.add, name="sum") if world.rank == 0 else "sum"
        with raises(MismatchError, operation="allreduce", expected="op Monoid 'sum' as on rank 0", got="op 'sum'"):
            allreduce(np.ones(3), op, world)

    thread_comm.run(2, rank)


def test_a_reduction_of_ones_own_needs_no_identity():
    def rank(world):
        allreduce(x := np.array([world.rank, 2.0]), Monoid(np.fmax, name="fmax"), world)
        return x.tolist()

    assert thread_comm.run(2, rank) == [[1.0, 2.0]] * 2


def test_monoids_made_anew_are_not_kept():
    def rank(world):
        for _ in range(3):
            allreduce(x := np.array([world.rank + 2.0]), Monoid(lambda a, b: a * b, 1.0, "times"), world)
            before = len(world.kept)
        return x[0], len(world.kept) - before

    assert thread_comm.run(2, rank) == [(6.0, 0)] * 2


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather"])
def test_a_read_only_input_that_is_only_read_will_do(collective):
    x = np.arange(3.0)
    x.flags.writeable = False
    results = thread_comm.run(2, lambda world: COLLECTIVES[collective](x, world=world))
    assert results[1].tolist() == ([2.0, 4.0] if collective == "reduce_scatter" else [0.0, 1.0, 2.0] * 2)


def test_a_monoid_that_changes_the_shape_is_told():
    first = Monoid(lambda a, b: a[:1], 0.0, "first")
    with raises(UnsupportedError, operation="reduction", where="op='first'", expected=(2,), got=(1,)):
        thread_comm.run(2, lambda world: allreduce(np.zeros(4), first, world, "ring"))


def test_a_monoid_whose_results_do_not_fit_into_the_dtype_is_told():
    def rank(world):
        length = Monoid(np.hypot, 0.0, "length")
        with raises(
            UnsupportedError,
            operation="reduction",
            where="op='length'",
            expected=[(2,), "int64"],
            got=[(2,), "float64"],
        ):
            allreduce(np.full(4, 3), length, world, "ring")
        either = Monoid(np.logical_or, 0.0, "either")
        assert allreduce(np.full(4, float(world.rank)), either, world).tolist() == [1.0] * 4

    thread_comm.run(2, rank)


ODD = [
    *[(collective, {"x": np.zeros((3, 4))}) for collective in COLLECTIVES],
    *[(collective, {"x": np.zeros(13)}) for collective in COLLECTIVES],
    *[(collective, {"x": np.zeros((2, 6000))}) for collective in COLLECTIVES],
    *[(collective, {"x": np.zeros((2, 6), "i8")}) for collective in COLLECTIVES],
    *[(collective, {"op": "max"}) for collective in REDUCING],
    *[(collective, {"op": Monoid(np.add, 0.0, "mine")}) for collective in REDUCING],
    *[(collective, {"root": 1}) for collective in ROOTED],
    *[(collective, {"algorithm": "reference"}) for collective in COLLECTIVES],
]


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("collective", "odd"), ODD)
def test_calls_that_differ_are_the_same_error_on_every_rank(collective, odd, warm, nodes):
    n, told = 4, []

    def call(world, odd):
        result = COLLECTIVES[collective](**{"x": np.zeros((2, 6)), "world": world} | odd)
        if collective == "iallreduce":
            result.wait()

    def rank(world):
        if warm:
            for _ in range(10):
                call(world, {})
                call(world, odd)
        with pytest.raises(MismatchError) as error:
            call(world, odd if world.rank in (1, 3) else {})
        told.append(str(error.value))
        x = allreduce(np.full(5, world.rank + 1.0), world=world)  # the world is still usable
        assert x.tolist() == [10.0] * 5

    thread_comm.run(n, rank, nodes)
    assert len(told) == n
    assert len(set(told)) == 1
    assert "as on rank 0" in told[0]
    assert "on ranks 1, 3; call it with the same arguments, and in the same order, on all ranks" in told[0]


OTHERS = {
    **{name: lambda world, name=name: COLLECTIVES[name](np.zeros(4), world=world) for name in COLLECTIVES},
    "ring": lambda world: allreduce(np.zeros(4), world=world, algorithm="ring"),
    "recursive_doubling": lambda world: allreduce(np.zeros(90_000), world=world, algorithm="recursive_doubling"),
    "barrier": lambda world: world.barrier(),
    "split": lambda world: world.split(0),
    "exchange": lambda world: world.comm.allgather_json(1),
}


@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_every_call_is_told_from_every_other_one(n, warm, nodes):
    def call(world, name):
        result = OTHERS[name](world)
        if name == "iallreduce":
            result.wait()

    def rank(world):
        if warm:
            for name in OTHERS:
                call(world, name)
                call(world, name)
        told = []
        for first, last in itertools.permutations(OTHERS, 2):
            with pytest.raises(MismatchError) as error:
                call(world, last if world.rank == n - 1 else first)
            told.append(str(error.value))
        x = iallreduce(np.full(40_000, 1.0), "sum", world, "ring")
        x.wait()
        assert broadcast(np.full(3, world.rank), world=world).tolist() == [0] * 3
        return told

    first, *others = thread_comm.run(n, rank, nodes)
    assert [first] * (n - 1) == others
    assert all(f"on rank {n - 1}" in text for text in first)


@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_first_call_is_told_from_what_ranks_compare_otherwise(collective, nodes):
    def rank(world):
        with raises(MismatchError, expected=["require_same", "rank 0"], got=["float64", "rank 2"]):
            if world.rank == 2:
                COLLECTIVES[collective](np.zeros(3), world=world)
            else:
                require_same(world.comm, "Trainer", ["a"])
        assert allreduce(np.ones(3), world=world).tolist() == [3.0] * 3

    thread_comm.run(3, rank, nodes)


def test_what_is_under_way_ends_as_it_should_beside_calls_that_differ():
    def rank(world):
        arrays = [np.full(3000, 1.0) for _ in range(3)]
        requests = [iallreduce(arrays[0], "sum", world, "ring"), iallreduce(arrays[1], "sum", world)]
        bad = iallreduce(np.zeros(4 + world.rank), "sum", world)
        requests.append(iallreduce(arrays[2], "sum", world, "native"))
        for request in requests:
            request.wait()
        with raises(
            MismatchError, operation="iallreduce", where="item 1 of 4 on rank 0", got=[(5,), "float64", "rank 1"]
        ):
            bad.wait()
        return [x.tolist() == [float(world.size)] * 3000 for x in arrays]

    for nodes in (None, 1):
        assert thread_comm.run(3, rank, nodes) == [[True] * 3] * 3


@pytest.mark.parametrize("n", [2, 3, 4])
def test_texts_of_two_calls_that_differ_do_not_cross(n):
    """Though their comparisons end in another order on each rank."""

    def rank(world):
        compare, errors = Calls.of(world).messages, []

        def caught(steps):
            try:
                yield from steps
            except MismatchError as error:
                errors.append(str(error))

        odd = world.rank == n - 1
        both = [caught(compare.steps(Call(name, f"{name} {world.rank if odd else 0}"))) for name in ("one", "two")]
        begun = [(next(steps), steps) for steps in both]
        world.comm.barrier()  # all messages of the first round are here

        def resumed(stage, steps):
            yield stage
            yield from steps

        TaskGroup(itertools.starmap(resumed, begun if odd else begun[::-1])).wait()
        return errors

    found = thread_comm.run(n, rank, 1)
    assert found == [found[0]] * n
    assert [error.split()[0] for error in found[0]] == ["one", "two"]
    assert all(f"rank {n - 1}" in error for error in found[0])


def test_functions_that_are_not_one_object_and_parts_of_other_sizes_are_alike():
    def rank(world):
        total = Monoid(lambda a, b: a + b, 0.0, "total")
        assert allreduce(np.full(2, 1.0), total, world).tolist() == [3.0, 3.0]
        whole = np.arange(7.0)
        np.testing.assert_array_equal(allgather(part(whole, world.rank, 3), world, out=np.zeros(7)), whole)

    thread_comm.run(3, rank)


def test_worlds_of_a_split_compare_their_own_calls():
    def rank(world):
        half = world.split(world.rank % 2)
        with raises(MismatchError, operation="broadcast", where="item 1 of 4 on rank 0", got="rank 1"):
            broadcast(np.zeros(3 + half.rank), world=half)
        assert allreduce(np.ones(3), world=half).tolist() == [2.0] * 3

    thread_comm.run(4, rank)


@pytest.mark.mpi
def test_real_ranks_are_told_and_go_on():
    import hpcdp

    world = hpcdp.init()
    if world.size == 1:
        pytest.skip("a rank alone agrees")
    last = world.rank == world.size - 1
    for _ in range(2):
        for call in (
            lambda: broadcast(np.zeros((2, 3) if last else (3, 2))),
            lambda: allreduce(np.zeros(300_000 + last), algorithm="ring"),
            lambda: world.barrier() if last else reduce(np.zeros(3)),
            lambda: world.comm.allgather_json(1) if last else iallreduce(np.zeros(3)).wait(),
        ):
            with raises(MismatchError, got=f"rank {world.size - 1}"):
                call()
        for algorithm in ("auto", "native", "ring", "recursive_doubling"):
            assert allreduce(np.ones(3), algorithm=algorithm).tolist() == [float(world.size)] * 3
