"""Allgather, gather, scatter and alltoall of any sizes, nonblocking forms, and what is said where calls differ."""

import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

import hpcdp
from hpcdp import kernels
from hpcdp.collectives import algorithm_choice, blocks, data_movement, intra_node
from hpcdp.comm import thread_comm
from hpcdp.comm.progress import run_until_complete
from hpcdp.core.state import hold_together
from hpcdp.errors import HpcdpError, MismatchError, UnsupportedError

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint64", "bool", "complex64", "complex128"]
NODES = st.one_of(st.none(), st.integers(1, 3))


def rows_of(rank, rows, row, dtype):
    """Return this rank's array, different from that of any other rank."""
    values = np.random.default_rng([rank, rows]).integers(0, 100, (rows, *row)) + rank
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 8),
    nodes=NODES,
    dtype=st.sampled_from(DTYPES),
    row=st.sampled_from([(), (3,), (2, 0), (1, 5)]),
    seed=st.integers(0, 99),
    root=st.integers(0, 7),
    starts=st.booleans(),
)
def test_movements_of_any_sizes(n, nodes, dtype, row, seed, root, starts):
    rows = np.random.default_rng(seed).integers(0, 9, n).tolist()
    splits = np.random.default_rng(seed).integers(0, 5, (n, n))
    parts = [rows_of(rank, count, row, dtype) for rank, count in enumerate(rows)]
    sent = [rows_of(rank, splits[rank].sum(), row, dtype) for rank in range(n)]
    blocks_of = [np.split(x, np.cumsum(splits[rank])[:-1]) for rank, x in enumerate(sent)]
    root %= n
    whole = rows_of(root, sum(rows), row, dtype)

    def call(name, *args):
        return getattr(hpcdp, f"i{name}")(*args).wait() if starts else getattr(hpcdp, name)(*args)

    def rank(world):
        me = world.rank
        np.testing.assert_array_equal(call("allgather", parts[me], world), np.concatenate(parts))
        gathered = call("gather", parts[me], root, world)
        assert (gathered is None) == (me != root)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, np.concatenate(parts))
        mine = call("scatter", whole if me == root else None, root, world)
        np.testing.assert_array_equal(mine, whole[len(whole) * me // n : len(whole) * (me + 1) // n])
        mine = call("scatter", whole if me == root else None, root, world, rows if me == root else None)
        np.testing.assert_array_equal(mine, whole[sum(rows[:me]) : sum(rows[: me + 1])])
        assert mine.dtype == whole.dtype
        received, counts = call("alltoall", sent[me], splits[me], world)
        np.testing.assert_array_equal(received, np.concatenate([blocks_of[other][me] for other in range(n)]))
        assert counts.tolist() == splits[:, me].tolist()

    thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize("nodes", [None, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_alltoall_of_equal_parts(nodes, count):
    """Short parts go by Bruck's algorithm over nodes, long ones in several pieces through a node's memory."""

    def rank(world):
        n, me = world.size, world.rank
        x = np.arange(n * count, dtype=np.float64) + 1000 * me
        wanted = np.concatenate([np.arange(me * count, (me + 1) * count) + 1000 * other for other in range(n)])
        np.testing.assert_array_equal(hpcdp.alltoall(x, world=world), wanted)

    for n in (1, 2, 3, 5):
        thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize(
    ("algorithm", "messages", "sent"),
    [
        ("direct", 4, 40), ("pairwise", 4, 40), ("bruck", 3, 50), ("ring", 4, 40), ("bruck_allgather", 3, 40),
        ("by_node", 4, 40),
    ],
)  # fmt: skip
def test_algorithms_send_what_their_formulas_say(algorithm, messages, sent):
    def rank(world):
        if algorithm in ("ring", "bruck_allgather"):
            parts = np.zeros(50, np.uint8)
            parts[10 * world.rank :][:10] = world.rank
            layout, data, received = (
                blocks.allgather_layout(range(0, 51, 10), world.rank),
                parts[10 * world.rank :][:10],
                parts,
            )
        else:
            layout, received = blocks.even_alltoall_layout(50, 5, world.rank), np.zeros(50, np.uint8)
            data = np.full(50, world.rank, np.uint8)
        moved = blocks.Blocks(layout, data, received)
        moved.keep_own(world.rank)
        for stage in blocks.ALGORITHMS[algorithm](moved, world, 0):
            for request in stage:
                request.wait()
        assert moved.received.tolist() == np.repeat(np.arange(5), 10).tolist()
        return world.comm.traffic.messages, world.comm.traffic.nbytes

    assert thread_comm.run(5, rank, 1) == [(messages, sent)] * 5


@pytest.mark.parametrize("nodes", [None, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_blocks_move_by_the_algorithm_that_is_asked_for(n, nodes):
    def rank(world):
        me, rows = world.rank, np.arange(n * 3).reshape(n * 3, 1)
        wanted = np.concatenate([100 * other + rows[3 * me : 3 * me + 3] for other in range(n)])
        for algorithm in algorithm_choice.movements("alltoall", world):
            found = hpcdp.alltoall(100 * me + rows, world=world, algorithm=algorithm)
            np.testing.assert_array_equal(found, wanted)
            if algorithm != "bruck":
                found = hpcdp.ialltoall(100 * me + rows, [3] * n, world, algorithm=algorithm).wait()[0]
                np.testing.assert_array_equal(found, wanted)
        with raises(UnsupportedError, where="algorithm", got="'bruck'"):
            hpcdp.alltoall(rows, [3] * n, world, algorithm="bruck")
        for algorithm in algorithm_choice.movements("allgatherv", world):
            found = hpcdp.allgather(np.full(me, me), world, algorithm)
            assert found.tolist() == [other for other in range(n) for _ in range(other)]
        with raises(MismatchError):
            hpcdp.alltoall(rows, None, world, algorithm="bruck" if me else "pairwise")

    thread_comm.run(n, rank, nodes)


@settings(max_examples=30, deadline=None)
@given(nodes=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 99), is_even=st.booleans())
def test_blocks_that_are_joined_by_node_arrive_as_by_the_specification(nodes, seed, is_even):
    n = sum(nodes)
    sizes = np.full((n, n), 3) if is_even else np.random.default_rng(seed).integers(0, 5, (n, n))
    data = [np.random.default_rng([seed, rank]).integers(0, 256, sizes[rank].sum(), np.uint8) for rank in range(n)]

    def rank(world):
        results = []
        has_carriers = is_even or 1 < world.num_nodes < n
        for algorithm in ("direct", "pairwise", *["by_node"] * has_carriers, *["bruck"] * is_even):
            received = np.zeros(sizes[:, world.rank].sum(), np.uint8)
            blocks.nodes_of(world)
            layout = blocks.even_alltoall_layout(3 * n, n, world.rank)
            if not is_even:
                counts = blocks.counts_by_node(sizes[world.rank].astype(np.int64), world, 64 * (8 + len(results)))
                counts, carried = run_until_complete(counts)
                assert counts.tolist() == sizes[:, world.rank].tolist()
                layout = blocks.layout_of_messages(sizes[world.rank].tolist(), counts.tolist(), carried)
            moved = blocks.Blocks(layout, data[world.rank], received)
            moved.keep_own(world.rank)
            run_until_complete(blocks.ALGORITHMS[algorithm](moved, world, 64 * len(results)))
            results.append(received.tolist())
        assert results.count(results[0]) == len(results)

    thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize("nodes", [None, 1])
def test_any_number_under_way_ends_in_any_order(nodes):
    def rank(world):
        n, me = world.size, world.rank
        wanted = np.concatenate([np.full(other, other) for other in range(n)])
        started = []
        for _ in range(40):
            started += [
                hpcdp.iallgather(np.full(me, me), world),
                hpcdp.ibarrier(world),
                hpcdp.iallreduce(np.full(3, me), world=world),
                hpcdp.ibroadcast(np.full(2, me), n - 1, world),
                hpcdp.ireduce(np.full(2, me), root=1, world=world),
                hpcdp.ireduce_scatter(np.arange(7), world=world),
            ]
        order = np.random.default_rng(me).permutation(len(started))
        results = {number: started[number].wait() for number in order}
        for first in range(0, len(started), 6):
            np.testing.assert_array_equal(results[first], wanted)
            assert results[first + 2].tolist() == [n * (n - 1) // 2] * 3
            assert results[first + 3].tolist() == [n - 1] * 2
            assert results[first + 4].tolist() == [n * (n - 1) // 2 if me == 1 else me] * 2
            assert results[first + 5].tolist() == (n * np.arange(7))[7 * me // n : 7 * (me + 1) // n].tolist()

    for n in (2, 3, 4):
        thread_comm.run(n, rank, nodes)


def test_threads_start_operations_of_worlds_of_their_own_at_the_same_time():
    def rank(world):
        worlds = [world.split(0) for _ in range(4)]

        def work(number):
            part, sums = worlds[number], []
            for step in range(20):
                operations = [
                    hpcdp.iallgather(np.full(step % 3, part.rank + number), part),
                    hpcdp.iallreduce(np.full(2, part.rank + step), world=part),
                ]
                sums.append([operation.wait().tolist() for operation in operations])
            return sums

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, range(4)))
        for number, sums in enumerate(results):
            for step, (gathered, total) in enumerate(sums):
                assert gathered == np.repeat([number, number + 1], step % 3).tolist()
                assert total == [1 + 2 * step] * 2

    thread_comm.run(2, rank)


@pytest.mark.parametrize("nodes", [None, 1])
def test_operations_progress_without_being_asked(nodes):
    def rank(world):
        x = np.full(100_000, world.rank + 1.0)
        operation = hpcdp.iallreduce(x, world=world)
        deadline = time.monotonic() + 60
        while not (x == 6).all() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (x == 6).all()
        assert operation.wait() is x

    thread_comm.run(3, rank, nodes)


DIFFERENT = {
    "row": lambda world: hpcdp.allgather(np.zeros((2, 3 + world.rank)), world),
    "dtype": lambda world: hpcdp.gather(np.zeros(2, "f4" if world.rank else "f8"), 0, world),
    "root": lambda world: hpcdp.scatter(np.zeros(2), world.rank % 2, world),
    "operation": lambda world: (hpcdp.alltoall if world.rank else hpcdp.allgather)(np.zeros(3), world=world),
    "rows": lambda world: hpcdp.alltoall(np.zeros(3 * (world.rank + 1)), world=world),
    "splits": lambda world: hpcdp.alltoall(np.zeros(3), [1, 1, 1] if world.rank else None, world),
    "array of a group": lambda world: hpcdp.grouped_allreduce(
        [np.zeros(2 + world.rank % 2), np.zeros(3 - world.rank % 2)], world=world
    ),
    "dtypes of a group": lambda world: hpcdp.grouped_reduce_scatter(
        [np.zeros(6), np.zeros(6, "int32" if world.rank else "float64")], world=world
    ),
    "op of a group": lambda world: hpcdp.grouped_allreduce([np.zeros(3)], "max" if world.rank else "sum", world),
}


@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("case", DIFFERENT)
def test_calls_that_differ_are_an_error_on_every_rank(case, is_warm, nodes):
    def rank(world):
        if is_warm:
            for _ in range(20):
                hpcdp.allgather(np.zeros((world.rank, 3)), world)
                hpcdp.grouped_reduce_scatter([np.zeros(6), np.zeros(6)], world=world)
                hpcdp.grouped_allreduce([np.zeros(3)], world=world)
        with pytest.raises(MismatchError) as caught:
            DIFFERENT[case](world)
        assert "rank 0" in caught.value.expected
        assert caught.value.got.rpartition(" on rank")[2].strip("s 0,") in ("1", "1, 2")
        assert hpcdp.allgather(np.full(1, world.rank), world).tolist() == [0, 1, 2]

    thread_comm.run(3, rank, nodes)


def test_the_root_s_error_is_raised_on_every_rank():
    def rank(world):
        for x in ("text", np.float64(3), np.array(["a"]), np.zeros(3)):
            with pytest.raises(UnsupportedError):
                hpcdp.scatter(x if world.rank == 1 else None, 1, world, [1, 1])
        return hpcdp.scatter(np.arange(6) if world.rank == 1 else None, 1, world).tolist()

    assert thread_comm.run(3, rank) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("splits", [[1, 2], [1, 1, 1], [3, 1, -1], ["a", 1, 2], 3])
def test_splits_that_do_not_fit_are_refused(splits):
    with pytest.raises(UnsupportedError) as caught:
        thread_comm.run(3, lambda world: hpcdp.alltoall(np.zeros(4), splits, world))
    assert caught.value.where == "splits"

    def rank(world):  # the root's error is that of all
        with raises(UnsupportedError, operation="scatter", expected=[3, 4]) as caught:
            hpcdp.scatter(np.zeros(4) if world.rank == 1 else None, 1, world, splits)
        return caught.value.where

    assert thread_comm.run(3, rank) == ["splits on rank 1", "splits", "splits on rank 1"]


@pytest.mark.parametrize("nodes", [None, 1])
def test_results_come_into_arrays_of_the_program(nodes):
    def rank(world):
        n, me = world.size, world.rank
        out = np.zeros((n, 2))
        assert hpcdp.alltoall(np.full((n, 2), float(me)), world=world, out=out) is out
        assert out[:, 0].tolist() == list(range(n))
        strided = np.zeros((2, n)).T
        received, _ = hpcdp.alltoall(np.full((n, 2), float(me)), [1] * n, world, out=strided)
        assert received is strided and strided[:, 1].tolist() == list(range(n))
        gathered = hpcdp.gather(np.full((1, 2), float(me)), 1, world, out if me == 1 else None)
        assert gathered is (out if me == 1 else None)
        own = np.zeros((1, 2))
        assert hpcdp.scatter(out if me == 1 else None, 1, world, out=own) is own and (own == me).all()
        with pytest.raises(UnsupportedError) as caught:
            hpcdp.alltoall(np.zeros((n, 2)), world=world, out=np.zeros((n, 3)))
        assert caught.value.where == "out"

    thread_comm.run(3, rank, nodes)


def test_scalars_strided_and_read_only_arrays():
    def rank(world):
        me = world.rank
        assert hpcdp.allgather(np.float32(me), world).tolist() == [0, 1, 2]
        assert hpcdp.allgather(np.array(me), world).tolist() == [0, 1, 2]
        strided = (np.arange(12).reshape(3, 4) + me).T[::2]
        np.testing.assert_array_equal(
            hpcdp.allgather(strided, world), np.concatenate([strided - me + other for other in range(3)])
        )
        strided.flags.writeable = False
        np.testing.assert_array_equal(hpcdp.alltoall(np.broadcast_to(me, 3), world=world), [0, 1, 2])

    for nodes in (None, 1):
        thread_comm.run(3, rank, nodes)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 5),
    nodes=NODES,
    arrays=st.lists(
        st.tuples(st.sampled_from(["f2", "f4", "f8", "i4"]), st.sampled_from([(), (0,), (7,), (2, 3)])),
        min_size=1,
        max_size=5,
    ),
)
def test_grouped_operations(n, nodes, arrays):
    def made(rank):
        return [np.full(shape, rank + i, dtype) for i, (dtype, shape) in enumerate(arrays)]

    def rank(world):
        me = world.rank
        xs = made(me)
        results = hpcdp.grouped_allreduce(xs, world=world)
        for i, (x, result) in enumerate(zip(xs, results, strict=True)):
            assert result is x and (x == sum(rank + i for rank in range(n))).all()
        for i, x in enumerate(hpcdp.grouped_broadcast(made(me), n - 1, world)):
            assert (x == n - 1 + i).all() and x.dtype == arrays[i][0]
        for i, x in enumerate(hpcdp.grouped_reduce_scatter(made(me), "max", world)):
            size = made(0)[i].size
            assert x.tolist() == [n - 1 + i] * (size * (me + 1) // n - size * me // n)
        gathered = hpcdp.grouped_allgather([np.repeat(np.atleast_1d(x), me, 0) for x in made(me)], world)
        for i, x in enumerate(gathered):
            wanted = [np.repeat(np.atleast_1d(made(other)[i]), other, 0) for other in range(n)]
            np.testing.assert_array_equal(x, np.concatenate(wanted))

    thread_comm.run(n, rank, nodes)


@pytest.mark.each_value
@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_operations_of_several_calls_are_under_way_together(n, nodes):
    """They keep their order, also when the numbers of calls start again (after 2,048)."""

    def rank(world):
        me, ranks = world.rank, range(n)
        for turn in range(3 if nodes else 120):
            means = [hpcdp.iallreduce(np.full(3, 100 * i + me), "mean", world) for i in range(4)]
            one = hpcdp.igrouped_allreduce(
                [np.full(2, me, "f4"), np.full(3, 2 * me), np.full(1, me, "u8")], "mean", world
            )
            sums = hpcdp.iallreduce(np.full(3, me + turn), "sum", world)
            other = hpcdp.igrouped_reduce_scatter([np.full(n, 2.0 * me), np.full(n, me)], "sum", world)
            sent = hpcdp.igrouped_broadcast([np.full(2, me), np.full(1, 0.5 * me)], n - 1, world)
            operations = [*means, one, sums, other, sent]
            for operation in operations if me % 2 else reversed(operations):
                operation.wait()
            assert [x.value[0] for x in means] == [sum(100 * i + r for r in ranks) // n for i in range(4)]
            assert [x[0] for x in one.value] == [(n - 1) / 2, n - 1, (n - 1) // 2]
            assert sums.value.tolist() == [sum(ranks) + turn * n] * 3
            assert [x[0] for x in other.value] == [2 * sum(ranks), sum(ranks)]
            assert [x[0] for x in sent.value] == [n - 1, 0.5 * (n - 1)]

    thread_comm.run(n, rank, nodes)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 8),
    nodes=NODES,
    case=st.sampled_from(
        [("float32", "sum"), ("bfloat16", "mean"), ("int64", "mean"), ("bool", "sum"), ("complex64", "sum")]
    ),
    row=st.sampled_from([(), (3,), (2, 0)]),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["even", "uneven", "one"]),
    algorithm=st.sampled_from(["auto", "ring"]),
    starts=st.booleans(),
)
def test_a_reduce_scatter_by_rows(n, nodes, case, row, seed, kind, algorithm, starts):
    dtype, op = case
    random = np.random.default_rng(seed)
    splits = random.integers(0, 5, n).tolist() if kind == "uneven" else [*[0] * (n - 1), 7]
    total = sum(splits) if kind != "even" else int(random.integers(0, 3 * n))
    parts = [rows_of(rank, total, row, dtype) for rank in range(n)]
    how = splits if kind != "even" else "even"
    splits = np.diff([total * rank // n for rank in range(n + 1)]).tolist() if kind == "even" else splits
    ends = np.cumsum([0, *splits])

    def rank(world):
        me = world.rank
        wanted = hpcdp.allreduce(parts[me].copy(), op, world)[ends[me] : ends[me + 1]]
        x = parts[me].copy()
        if starts:
            got = hpcdp.ireduce_scatter(x, op, world, algorithm, splits=how).wait()
        else:
            out = np.empty((splits[me], *row), x.dtype)
            got = hpcdp.reduce_scatter(x, op, world, algorithm, out, splits=how)
            assert got is out
        np.testing.assert_allclose(got.astype("c16"), wanted.astype("c16"), 1e-2 if dtype == "bfloat16" else 1e-6)
        assert got.dtype == x.dtype and got.shape == wanted.shape and (x == parts[me]).all()

    thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize("nodes", [None, 1])
def test_splits_that_do_not_fit_or_differ_are_refused(nodes):
    def rank(world):
        for wrong in ([1, 2], [5, 5, -4], [2, 2, 3], 3, "odd"):
            with pytest.raises(UnsupportedError) as caught:
                hpcdp.reduce_scatter(np.zeros((6, 2)), world=world, splits=wrong)
            assert caught.value.where == "splits"
        for _ in range(2):
            with pytest.raises(MismatchError) as differs:
                hpcdp.reduce_scatter(np.zeros(6), world=world, splits=[1, 2, 3] if world.rank else [3, 2, 1])
            assert "splits" in str(differs.value)

    thread_comm.run(3, rank, nodes)


def check_repeated(world, seed, long):
    """Repeat calls of equal sizes, which are one kernel call each, with others between them on some ranks."""
    n, me = world.size, world.rank
    random = np.random.default_rng(seed)
    for number in range(24):
        rows = random.choice([2, 2, 2, 2, 0, 3, long], n, p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05]).tolist()
        splits = random.choice([1, 1, 1, 0, long // 4], (n, n), p=[0.3, 0.3, 0.3, 0.05, 0.05])
        if number % 6 < 4:
            rows, splits = [2] * n, np.ones((n, n), int)
        parts = [np.full((count, 3), 100 * number + rank, "f4") for rank, count in enumerate(rows)]
        sent = [np.arange(splits[rank].sum()) + 1000 * rank + number for rank in range(n)]
        root, all_rows = number // 6 % n, np.concatenate(parts)
        name = ("allgather", "gather", "scatter", "alltoall", "even")[int(random.integers(5))]
        if random.integers(4) == 0:
            hpcdp.iallreduce(np.ones(3), world=world).wait()
        out = None
        if name == "allgather":
            got, wanted = hpcdp.allgather(parts[me], world), all_rows
        elif name == "gather":
            out = np.empty_like(all_rows) if me == root and number % 2 else None
            got, wanted = hpcdp.gather(parts[me], root, world, out), all_rows if me == root else None
        elif name == "scatter":
            whole = all_rows if me == root else None
            splits_of = rows if me == root else None
            got, wanted = hpcdp.scatter(whole, root, world, splits_of), all_rows[sum(rows[:me]) : sum(rows[: me + 1])]
        elif name == "alltoall":
            got, counts = hpcdp.alltoall(sent[me], splits[me].tolist(), world)
            assert counts.tolist() == splits[:, me].tolist()
            blocks_of = [np.split(x, np.cumsum(splits[rank])[:-1]) for rank, x in enumerate(sent)]
            wanted = np.concatenate([blocks_of[rank][me] for rank in range(n)])
        else:
            out = np.empty(n, int)
            got = hpcdp.alltoall(np.arange(n) + 10 * me + number, None, world, out)
            wanted = me + 10 * np.arange(n) + number
        assert out is None or got is out
        if wanted is None:
            assert got is None
        else:
            np.testing.assert_array_equal(got, wanted)


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 5), seed=st.integers(0, 10**6), nodes=st.sampled_from([None, None, 2]))
def test_repeated_calls_follow_sizes_that_change_on_some_ranks(n, seed, nodes):
    thread_comm.run(n, lambda world: check_repeated(world, seed, 100_000), nodes)


@pytest.mark.ordinary_ranks(2, 4)
@pytest.mark.mpi
def test_real_ranks_repeat_calls():
    for seed in range(8):
        check_repeated(hpcdp.init(), seed, 300_000)


def test_a_repeated_call_that_differs_is_an_error_and_the_next_one_works():
    def rank(world):
        n, me = world.size, world.rank
        for number in range(9):
            if number % 3 == 2:
                with pytest.raises(MismatchError):
                    hpcdp.allgather(np.zeros(2, "f4" if me else "f8"), world)
                with pytest.raises(MismatchError):
                    hpcdp.gather(np.zeros(2), 1 if me else 0, world)
            assert hpcdp.allgather(np.full(2, me), world).tolist() == np.repeat(np.arange(n), 2).tolist()
            assert (hpcdp.gather(np.full(2, me), 0, world) is None) == (me > 0)
            x = np.full(3, me)
            assert hpcdp.broadcast(x, n - 1, world).tolist() == [n - 1] * 3
            assert hpcdp.reduce(np.full(3, 1.0), root=1, world=world).tolist() == [float(n if me == 1 else 1)] * 3
            assert hpcdp.reduce_scatter(np.arange(float(n)), world=world).tolist() == [n * me]
            whole = np.full(2 * n, me)
            assert hpcdp.allgather(np.full(2, me), world, out=whole).tolist() == np.repeat(np.arange(n), 2).tolist()

    thread_comm.run(3, rank)


def test_an_alltoall_over_nodes_tells_a_rank_no_more_than_it_needs(monkeypatch):
    """The numbers of rows travel as the rows do: no rank gets those that others exchange, if there are many ranks."""
    monkeypatch.setattr(data_movement, "_INLINE_NBYTES_OF_ALL", 0)

    def rank(world):
        n = world.size
        hpcdp.alltoall(np.arange(n), [1] * n, world)  # the first call looks for the nodes
        before = [(comm.traffic.messages, comm.traffic.nbytes) for comm in (world.comm, world.call_comm)]
        received, counts = hpcdp.alltoall(np.zeros(0, "u1"), [0] * n, world)
        assert received.size == 0 and counts.tolist() == [0] * n
        after = [(comm.traffic.messages, comm.traffic.nbytes) for comm in (world.comm, world.call_comm)]
        return np.subtract(after, before).tolist()

    # Inside the node a block and those to pass on to 3 nodes, across a message of 2 numbers for each node. Calls are
    # compared in 3 messages of 16 bytes and a number.
    assert thread_comm.run(8, rank, [2, 2, 2, 2]) == [[[2 + 3, 8 + 3 * 8 + 3 * 16], [3, 3 * 24]]] * 8


@pytest.mark.each_value
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("way", ["read", "take turns", "refused"])
def test_long_data_are_read_in_place_or_staged_in_pieces(way, n, monkeypatch):
    monkeypatch.setattr(intra_node, "CHUNK_NBYTES", 1 << 14)
    if way == "take turns":
        monkeypatch.setattr(intra_node, "TURNS_BY_TWO_NBYTES", 1 << 15)
        monkeypatch.setattr(kernels.load("shm_exchange"), "CORES_KEEP_LINES", False)
    if way == "refused":  # as where the kernel refuses to read the memory of other processes
        monkeypatch.setattr(kernels.load("shm_exchange"), "read_memory", lambda *_: False)

    def rank(world):
        n, me = world.size, world.rank
        for number in range(3):
            x = np.arange(30_001) + 7 * me + number
            parts = [np.arange(30_001) + 7 * other + number for other in range(n)]
            wanted, out = np.concatenate(parts), np.empty(n * 30_001, int)
            assert (hpcdp.allgather(x, world, out=out) == wanted).all()
            started = hpcdp.iallgather(x, world)
            assert (hpcdp.broadcast(x.copy(), n - 1, world) == parts[-1]).all()
            assert (started.wait() == wanted).all()
            rows = hpcdp.scatter(wanted if me == 0 else None, 0, world, [30_001] * n)
            assert (rows == x).all()
            # Ranks with long and short data, of which the root has what it reads and what others write to it.
            gathered = hpcdp.gather(x[: 30_001 >> 4 * me], n - 1, world)
            if me == n - 1:
                assert (gathered == np.concatenate([part[: 30_001 >> 4 * r] for r, part in enumerate(parts)])).all()
            sizes = [[(a + b + number // 2) % 3 * 5000 + (a == b) * 9000 for b in range(n)] for a in range(n)]
            sent = np.concatenate([np.full(size, 10 * me + to) for to, size in enumerate(sizes[me])])
            received, counts = hpcdp.alltoall(sent, sizes[me], world)
            assert counts.tolist() == [row[me] for row in sizes]
            assert (received == np.repeat(10 * np.arange(n) + me, counts)).all()
        # Results that are written past the caches, to any address.
        x = np.arange(2_500_001, dtype=np.uint8) + np.uint8(me)
        wanted = np.concatenate([np.arange(x.size, dtype=np.uint8) + np.uint8(other) for other in range(n)])
        for first in (0, 3):
            out = np.empty(n * x.size + 3, np.uint8)[first : first + n * x.size]
            assert (hpcdp.allgather(x, world, out=out) == wanted).all()
            rows = hpcdp.alltoall(np.tile(x, n), world=world, out=out)
            assert (rows == wanted).all()

    thread_comm.run(n, rank)


def check_staged_by_one(world):
    """Two ranks stage longer data in repeated calls, and there leave out what they keep; here one rank does."""
    me, largest = world.rank, 1 << 17
    splits = [[3 * largest, 10_000], [45_000, 5_000]]
    sent = [np.arange(sum(counts)) + 1000 * rank for rank, counts in enumerate(splits)]
    wanted = np.concatenate([x[counts[0] :] if me else x[: counts[0]] for x, counts in zip(sent, splits, strict=True)])
    for _ in range(3):
        received, _ = hpcdp.alltoall(sent[me], splits[me], world)
        np.testing.assert_array_equal(received, wanted)
    for number in range(8):  # a length that this rank has seen, and one that it has not
        lengths = [60_000, 60_000 - number] if number % 4 < 2 else [60_000 - number, 60_000]
        parts = [np.arange(length) + 1000 * rank + number for rank, length in enumerate(lengths)]
        np.testing.assert_array_equal(hpcdp.allgather(parts[me], world), np.concatenate(parts))


def test_one_of_two_ranks_stages_and_the_other_does_not():
    thread_comm.run(2, check_staged_by_one)


@pytest.mark.mpi(min_size=2)
def test_one_of_two_real_ranks_stages_and_the_other_does_not():
    with hpcdp.init().split(hpcdp.init().rank // 2) as pair:
        if pair.size == 2:
            check_staged_by_one(pair)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 30_001])
@pytest.mark.parametrize("case", [("f4", "mean", 0.7), ("f8", "sum", 1.0), ("i8", "sum", 1.0)])
def test_a_repeated_reduce_scatter_has_the_bits_of_the_first_and_spares_its_array(n, count, case, monkeypatch):
    monkeypatch.setattr(intra_node, "CHUNK_NBYTES", 1 << 12)
    dtype, op, prescale = case

    def rank(world):
        x = (np.random.default_rng(world.rank).standard_normal(count) * 100).astype(dtype)
        given, out = x.copy(), np.empty(count * (world.rank + 1) // n - count * world.rank // n, dtype)
        first = hpcdp.reduce_scatter(x, op, world, prescale=prescale)
        whole = hpcdp.allreduce(x.copy(), op, world, prescale=prescale)
        assert (first == whole[count * world.rank // n : count * (world.rank + 1) // n]).all()
        for _ in range(3):
            assert (hpcdp.reduce_scatter(x, op, world, prescale=prescale) == first).all()
            assert (hpcdp.reduce_scatter(x, op, world, out=out, prescale=prescale) == first).all()
            assert (x == given).all()

    thread_comm.run(n, rank)


@pytest.mark.parametrize("nodes", [1, 2])
def test_short_data_between_nodes_come_with_the_counts_also_when_sizes_change(nodes):
    """One exchange, whether the sizes are those of an earlier call on all ranks, on some or on none."""

    def rank(world):
        n, me = world.size, world.rank
        sent = []
        for counts in ([2] * n, [2] * n, [1 + r for r in range(n)], [2] * n, [0] * n, [40] * n, [2] * n):
            before = world.comm.traffic.messages
            x = np.arange(counts[me]) + 100 * me
            wanted = np.concatenate([np.arange(count) + 100 * r for r, count in enumerate(counts)])
            assert hpcdp.allgather(x, world).tolist() == wanted.tolist()
            gathered = hpcdp.gather(x, n - 1, world)
            assert gathered is None if me < n - 1 else gathered.tolist() == wanted.tolist()
            whole = wanted.copy() if me == 0 else None
            assert hpcdp.scatter(whole, 0, world, counts if me == 0 else None).tolist() == (
                wanted[sum(counts[:me]) : sum(counts[: me + 1])].tolist()
            )
            received, rows = hpcdp.alltoall(np.repeat(np.arange(n), counts) + 10 * me, counts, world)
            assert rows.tolist() == [counts[me]] * n
            assert received.tolist() == np.repeat(me + 10 * np.arange(n), counts[me]).tolist()
            sent.append(world.comm.traffic.messages - before)
        return sent

    for n in (2, 3, 4):
        for sent in thread_comm.run(n, rank, nodes) if n > nodes else []:
            assert sent[:5] == [0] * 5 and sent[6] == 0


def test_a_repeated_movement_into_memory_that_ranks_share_is_refused():
    def rank(world):
        shared = world.node_memory.alloc((2 * world.size,), np.float64)
        for _ in range(2):
            hpcdp.alltoall(np.zeros(2 * world.size), None, world, np.zeros(2 * world.size))
        hpcdp.barrier(world)
        if world.rank == 0:
            hold_together(shared, world.size)
        hpcdp.barrier(world)
        with pytest.raises(HpcdpError):
            hpcdp.alltoall(np.zeros(2 * world.size), None, world, shared[:])

    thread_comm.run(2, rank)
