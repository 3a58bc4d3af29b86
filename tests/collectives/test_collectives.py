"""Every algorithm of every collective x dtype x op x number of ranks x count, over thread ranks and real ranks."""

import os
import zlib

import numpy as np
import pytest
from by_numpy import CASES, DTYPES, assert_close, assert_same_bits, counts, data, part, reduced
from hypothesis import given, settings
from hypothesis import strategies as st
from message_length import set_message_nbytes

from hpcdp.collectives import (
    ALGORITHMS,
    Monoid,
    allgather,
    allreduce,
    broadcast,
    hierarchical,
    iallreduce,
    intra_node,
    reduce,
    reduce_scatter,
)
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of

REDUCING = [(c, a) for c in ("allreduce", "reduce_scatter", "reduce") for a in [*ALGORITHMS[c], "auto"]]
MOVING = [(c, a) for c in ("allgather", "broadcast") for a in [*ALGORITHMS[c], "auto"]]
RANKS = pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.thorough if n in (4, 5, 7) else ()) for n in range(1, 9)]
)
"""The numbers of ranks of ordinary tests, which leave out some powers of two, and some odd numbers."""
THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH")
LIKE_OTHERS = ("int32", "uint8", "uint32")
"""Of which `shared` has kernels that are compiled from the same lines as those of the integers left."""
FEW = [("float16", "sum"), ("bfloat16", "mean"), ("float32", "max"), ("float64", "prod"), ("int64", "sum")]


@pytest.fixture
def short_segments(monkeypatch):
    """So that small arrays go in many."""
    set_message_nbytes(monkeypatch, 256)
    monkeypatch.setattr(hierarchical, "SEGMENT_NBYTES", 1024)
    monkeypatch.setattr(intra_node, "CHUNK_NBYTES", 512)
    monkeypatch.setattr(intra_node, "BY_ALL_NBYTES", 64)  # both ways of exchanging


def check_reducing(collective, algorithm, world, dtype, op, count, root=0):
    """What this rank gets is right; returns it where all ranks get the same."""
    n, wanted = world.size, reduced(world.size, count, dtype, op)
    x = data(world.rank, count, dtype)
    if collective == "allreduce":
        assert allreduce(x, op, world, algorithm) is x
        assert_close(x, wanted, n, op, count)
        return x
    if collective == "reduce_scatter":
        result = reduce_scatter(x, op, world, algorithm)
        assert_close(result, part(wanted, world.rank, n), n, op, count)
    else:
        assert reduce(x, op, root, world, algorithm) is x
        if world.rank == root:
            assert_close(x, wanted, n, op, count)
            return None
    np.testing.assert_array_equal(x, data(world.rank, count, dtype))
    return None


def check_moving(collective, algorithm, world, dtype, count, root):
    whole = data(root, count, dtype)
    if collective == "broadcast":
        x = data(world.rank, count, dtype)
        assert broadcast(x, root, world, algorithm) is x
        np.testing.assert_array_equal(x, whole)
        return
    out = np.zeros(count, whole.dtype)
    assert allgather(part(whole, world.rank, world.size).copy(), world, algorithm, out) is out
    np.testing.assert_array_equal(out, whole)
    mine = data(world.rank, count, dtype)
    every = allgather(mine, world)
    np.testing.assert_array_equal(every, np.concatenate([data(rank, count, dtype) for rank in range(world.size)]))


def counts_of(case, number, n):
    """Select cases: ordinary runs take each count with half of those that run at each n, and a third of the others."""
    if THOROUGH and case in FEW:
        return counts(n)
    return counts(n)[(FEW.index(case) + n) % 2 :: 2] if case in FEW else counts(n)[number // 3 % 3 :: 3]


@RANKS
@pytest.mark.parametrize("algorithm", [*ALGORITHMS["allreduce"], "auto"])
def test_allreduce_of_every_dtype_op_and_count(algorithm, n, short_segments):
    compiled = algorithm in ("shared", "auto") and not THOROUGH

    def rank(world):
        return [
            check_reducing("allreduce", algorithm, world, *case, count)
            for number, case in enumerate(CASES)
            if THOROUGH or case in FEW or (number + n // 2) % 3 == 0  # of others, some at each n, and all over some n
            if not (compiled and case[0] in LIKE_OTHERS)
            for count in counts_of(case, number, n)
        ]

    for results in zip(*thread_comm.run(n, rank), strict=True):
        assert_same_bits(results)


def some_counts(n, dtype):
    """With their numbers: in ordinary runs each with half of the dtypes at each n, and with all over some n."""
    first, step = (0, 1) if THOROUGH else ((DTYPES.index(dtype) + n // 2) % 2, 2)
    return list(enumerate(counts(n)))[first::step]


@RANKS
@pytest.mark.parametrize(("collective", "algorithm"), [pair for pair in REDUCING if pair[0] != "allreduce"])
def test_other_reductions(collective, algorithm, n, short_segments):
    def rank(world):
        for dtype, op in FEW:
            for number, count in some_counts(n, dtype):
                check_reducing(collective, algorithm, world, dtype, op, count, root=number % n)

    thread_comm.run(n, rank)


@pytest.mark.each_value
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 70_001, 600_011])
def test_a_repeated_reduce_changes_the_result_of_the_root_only(n, count):
    def rank(world):
        me, values = world.rank, np.arange(count, dtype=np.float32) % 1000
        wanted = values * (n * (n + 1) / 2)
        for _ in range(3):
            for root in (0, n - 1):
                x, out = values * (me + 1), np.full(count + 2, 5, np.float32)[1:-1]
                kept = x.copy()
                assert reduce(x, "sum", root, world, out=out if me == root else None) is (out if me == root else x)
                assert (x == kept).all()
                assert (out == (wanted if me == root else 5)).all()
                assert out.base[0] == out.base[-1] == 5
                assert reduce(x, "sum", root, world, postscale=2.0, prescale=0.5) is x
                assert (x == (wanted if me == root else kept)).all()
                both = np.concatenate([kept, kept[:1]])
                shifted = reduce(both[:count], "mean", root, world, out=both[-count:] if me == root else None)
                if me == root and count:
                    np.testing.assert_allclose(shifted, wanted / n, rtol=1e-6)

    thread_comm.run(n, rank)


@RANKS
@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_moving_data(collective, algorithm, n, short_segments):
    def rank(world):
        for dtype in ("float16", "float64", "uint8"):
            for number, count in some_counts(n, dtype):
                check_moving(collective, algorithm, world, dtype, count, root=(number + 1) % n)

    thread_comm.run(n, rank)


@st.composite
def worlds(draw):
    """The ranks of every node."""
    return tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 8)))


@settings(max_examples=80)
@given(
    nodes=worlds(),
    which=st.sampled_from([pair for pair in REDUCING if pair[1] not in ("shared", "native")]),
    case=st.sampled_from(CASES),
    count=st.integers(0, 300),
    low=st.integers(0, 7),
)
def test_reductions_on_any_nodes(nodes, which, case, count, low):
    n = sum(nodes)

    def rank(world):
        return check_reducing(*which, world, *case, count, root=low % n)

    assert_same_bits([result for result in thread_comm.run(n, rank, nodes) if result is not None] or [np.empty(0)])


@settings(max_examples=40)
@given(
    nodes=worlds(),
    which=st.sampled_from([pair for pair in MOVING if pair[1] != "shared"]),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(0, 300),
    low=st.integers(0, 7),
)
def test_moving_data_on_any_nodes(nodes, which, dtype, count, low):
    n = sum(nodes)
    thread_comm.run(n, lambda world: check_moving(*which, world, dtype, count, low % n), nodes)


@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
@pytest.mark.parametrize("n", [5, 8])
def test_the_same_call_again_gives_the_same_bits_on_all_ranks(algorithm, n, short_segments):
    def rank(world):
        rng = np.random.default_rng(world.rank)
        x = (rng.standard_normal(700) * 10.0 ** rng.integers(-4, 5, 700)).astype("f4")  # sums depend on their order
        return allreduce(x, "sum", world, algorithm)

    nodes = None if algorithm == "shared" else 3
    runs = [thread_comm.run(n, rank, nodes) for _ in range(3)]
    assert_same_bits([x for results in runs for x in results])


FLAT = [a for a in ALGORITHMS["allreduce"] if a not in ("native", "shared")]


@pytest.mark.parametrize(("dtype", "large"), [("float16", 2048), ("bfloat16", 256)])
@pytest.mark.parametrize("algorithm", [*FLAT, "shared"])
def test_half_precision_is_accumulated_in_single_and_rounded_once(algorithm, dtype, large):
    """2048 + 1 is 2048 in float16, and the sum of eight ranks is 2055; of bfloat16 that is so of 256."""
    wanted = np.float32(large + 7).astype(dtype_of(dtype))

    def rank(world):
        return allreduce(np.full(20, 1 if world.rank else large, wanted.dtype), "sum", world, algorithm)

    for result in thread_comm.run(8, rank):
        assert (result == wanted).all()
    assert wanted != large


@pytest.mark.parametrize("algorithm", FLAT)
def test_shortest_paths_by_the_min_plus_semiring(algorithm):
    """Every rank owns some middle vertices: the product of its columns and rows, reduced by minimum over the ranks."""
    vertices, n = 13, 5
    rng = np.random.default_rng(7)
    edges = rng.integers(1, 30, (vertices, vertices)).astype("f8")
    edges[rng.random((vertices, vertices)) < 0.7] = np.inf
    np.fill_diagonal(edges, 0)
    floyd_warshall = edges.copy()
    for middle in range(vertices):
        floyd_warshall = np.minimum(floyd_warshall, floyd_warshall[:, [middle]] + floyd_warshall[[middle]])
    assert np.isfinite(floyd_warshall).mean() > np.isfinite(edges).mean()

    def rank(world):
        paths, least = edges.copy(), Monoid(np.minimum, np.inf, "min-plus")
        mine = slice(vertices * world.rank // n, vertices * (world.rank + 1) // n)
        for _ in range(4):  # paths of up to 2, 4, 8, 16 edges
            paths = (paths[:, mine, None] + paths[None, mine]).min(axis=1, initial=np.inf)
            allreduce(paths, least, world, algorithm)
        return paths

    for result in thread_comm.run(n, rank, ranks_per_node=2):
        np.testing.assert_array_equal(result, floyd_warshall)


@pytest.mark.parametrize(("collective", "algorithm"), [(c, a) for c, a in REDUCING if a not in ("native", "shared")])
def test_a_monoid_of_one_s_own(collective, algorithm):
    n, count, total = 6, 37, Monoid(np.logaddexp, -np.inf, "log-sum-exp")
    inputs = [data(rank, count, "float64") * 20 for rank in range(n)]
    wanted = np.log(np.sum(np.exp(np.array(inputs) - np.max(inputs)), axis=0)) + np.max(inputs)

    def rank(world):
        x = inputs[world.rank].copy()
        if collective == "allreduce":
            np.testing.assert_allclose(allreduce(x, total, world, algorithm), wanted, rtol=1e-12)
        elif collective == "reduce_scatter":
            mine = reduce_scatter(x, total, world, algorithm)
            np.testing.assert_allclose(mine, part(wanted, world.rank, n), rtol=1e-12)
        else:
            reduce(x, total, 4, world, algorithm)
            np.testing.assert_allclose(x, wanted if world.rank == 4 else inputs[world.rank], rtol=1e-12)

    thread_comm.run(n, rank, ranks_per_node=4)


def integers(rank, dtype):
    """Zeros, small ones of both signs, the extremes, and some by chance."""
    info, rng = np.iinfo(dtype), np.random.default_rng(rank)
    ends = [info.min, info.max, info.min + rank, info.max - rank, info.max if rank % 2 else info.min]
    small = [-rank if info.min else rank, 0, min(rank, 1), -1 if info.min else 1, 7 * rank - (13 if info.min else 0)]
    return np.array([*ends, *small, *rng.integers(info.min, info.max, 20, dtype, endpoint=True)], dtype)


def truncated(values, n):
    """Of Python's own integers."""
    total = sum(values)
    return abs(total) // n * (1 if total >= 0 else -1)


@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_mean_of_integers_is_rounded_towards_zero(n, nodes):
    def rank(world):
        for dtype in ("u1", "i1", "i2", "u4", "i4", "i8", "u8"):
            everyone = [integers(number, dtype).tolist() for number in range(n)]
            wanted = np.array([truncated(values, n) for values in zip(*everyone, strict=True)], dtype)
            mine, last = integers(world.rank, dtype), n - 1
            for algorithm in ALGORITHMS["allreduce"] if dtype in ("u1", "i8") else ("auto",):
                if algorithm == "shared" and nodes:
                    continue
                x = allreduce(mine.copy(), "mean", world, algorithm)
                assert x.dtype == dtype
                np.testing.assert_array_equal(x, wanted)
            x = mine.copy()
            iallreduce(x, "mean", world).wait()
            np.testing.assert_array_equal(x, wanted)
            np.testing.assert_array_equal(reduce_scatter(mine.copy(), "mean", world), part(wanted, world.rank, n))
            np.testing.assert_array_equal(
                reduce(mine.copy(), "mean", last, world), wanted if world.rank == last else mine
            )

    thread_comm.run(n, rank, nodes)


def check_real_ranks(world, sizes, cases):
    for collective, algorithm in REDUCING:
        for dtype, op in cases:
            for count in sizes:
                x = check_reducing(collective, algorithm, world, dtype, op, count, root=world.size - 1)
                if x is not None and count:
                    bits = world.comm.allgather_json(zlib.crc32(x.tobytes()))
                    assert len(set(bits)) == 1, (algorithm, dtype, op, count)
    for collective, algorithm in MOVING:
        for dtype in ("float16", "bfloat16"):
            for count in sizes:
                check_moving(collective, algorithm, world, dtype, count, root=world.size - 1)


@pytest.mark.mpi
def test_real_ranks():
    import hpcdp

    check_real_ranks(hpcdp.init(), (0, 1, 17), FEW)


@pytest.mark.ordinary_ranks(2, 4)
@pytest.mark.mpi
@pytest.mark.parametrize(("collective", "algorithm"), [*REDUCING, *MOVING])
def test_real_ranks_with_long_arrays(collective, algorithm):
    import hpcdp

    world = hpcdp.init()
    if (collective, algorithm) in MOVING:
        check_moving(collective, algorithm, world, "float32", 700_001, root=0)
    else:
        check_reducing(collective, algorithm, world, "float32", "sum", 700_001)


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
def test_arrays_of_more_elements_than_one_message_may_have(monkeypatch):
    import hpcdp
    from hpcdp.comm import mpi_communicator

    monkeypatch.setattr(mpi_communicator, "MAX_ELEMENTS", 10)
    # MPI has the dtype of the second one, and not that of the first.
    check_real_ranks(hpcdp.init(), (9, 10, 11, 101), FEW if THOROUGH else FEW[1:3])


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_a_nan_of_any_rank_wins(algorithm, op):
    import hpcdp

    world = hpcdp.init()
    x = np.arange(world.size + 1, dtype="f4")
    x[world.rank] = np.nan
    allreduce(x, op, world, algorithm)
    assert np.isnan(x[: world.size]).all()
    assert x[world.size] == world.size


@pytest.mark.mpi
@pytest.mark.parametrize(("collective", "algorithm"), REDUCING)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_overflows_is_no_error_of_the_rank_that_adds(collective, algorithm, dtype):
    import hpcdp

    world = hpcdp.init()
    function = {"allreduce": allreduce, "reduce_scatter": reduce_scatter, "reduce": reduce}[collective]
    largest = np.finfo(dtype).max
    for mine, total in [(largest, np.inf), (np.inf if world.rank else -np.inf, np.nan)]:
        x = np.full(100, mine, dtype)
        with np.errstate(all="raise"):
            x = function(x, "sum", world=world, algorithm=algorithm)
        if collective != "reduce" or world.rank == 0:
            np.testing.assert_array_equal(x, total if world.size > 1 else mine)


@pytest.mark.mpi
def test_the_same_run_twice_gives_the_same_bits():
    import hpcdp

    world = hpcdp.init()
    for algorithm in [*ALGORITHMS["allreduce"], "auto"]:
        first, second = (allreduce(data(world.rank, 100003), "sum", world, algorithm) for _ in range(2))
        np.testing.assert_array_equal(first, second)
        bits = world.comm.allgather_json(int(first.view(np.uint32).astype(np.uint64).sum()))
        assert len(set(bits)) == 1
