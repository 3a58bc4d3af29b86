"""Factors before and after a reduction, means in the pass of the sum, and reductions of complex numbers and bools."""

import os

import numpy as np
import pytest
from by_numpy import data, part
from raises import raises

import hpcdp
from hpcdp.collectives import (
    ALGORITHMS,
    Monoid,
    allreduce,
    grouped_allreduce,
    grouped_reduce_scatter,
    iallreduce,
    intra_node,
    ireduce,
    ireduce_scatter,
    reduce,
    reduce_scatter,
)
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of, is_half
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError

THOROUGH = os.environ.get("HPCDP_TEST_THOROUGH")
FACTORS = [(0.25, 3.0), (0.3, 1.0), (1.0, 0.7), (1, -2), (np.float32(1.5), np.int64(1))]
LAYOUTS = [(1, None), (2, None), (3, None), (4, 2), (3, 1)]
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def values(rank, count, dtype):
    if dtype.startswith("complex"):
        real = "float32" if dtype == "complex64" else "float64"
        return data(rank, 2 * count, real).view(dtype)
    return data(rank, count, dtype)


def wanted(n, count, dtype, op, prescale, postscale):
    """In double precision."""
    wide = "c16" if dtype.startswith("complex") else "f8"
    total = sum(float(prescale) * values(rank, count, dtype).astype(wide) for rank in range(n))
    return total * float(postscale) / (n if op == "mean" else 1)


def assert_near(result, expected):
    eps = 2e-2 if is_half(result) else 1e-5 if result.dtype in ("f4", "c8") else 1e-13
    np.testing.assert_allclose(result.astype(expected.dtype), expected, rtol=eps, atol=8 * eps)


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(intra_node, "CHUNK_NBYTES", 512)
    monkeypatch.setattr(intra_node, "BY_ALL_NBYTES", 64)  # both ways of exchanging


@pytest.mark.each_value
@pytest.mark.parametrize(("n", "nodes"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_apply_before_and_after_sums_and_means(dtype, n, nodes, short_chunks):
    def rank(world):
        me, last = world.rank, n - 1
        for number, (prescale, postscale) in enumerate(FACTORS):
            factors = {"prescale": prescale, "postscale": postscale}
            for op in ("sum", "mean") if THOROUGH else (("sum", "mean")[number % 2],):
                for count in (0, 1, n + 1, 1009) if THOROUGH else (1009 if number < 2 else (0, 1, n + 1)[number - 2],):
                    result = wanted(n, count, dtype, op, prescale, postscale)
                    for algorithm in [*ALGORITHMS["allreduce"], "auto"][number % 2 :: 2]:
                        if algorithm == "shared" and nodes:
                            continue
                        x = values(me, count, dtype)
                        assert allreduce(x, op, world, algorithm, **factors) is x
                        assert_near(x, result)
                        x = values(me, count, dtype)
                        assert_near(iallreduce(x, op, world, algorithm, **factors).wait(), result)
                    for algorithm in ALGORITHMS["reduce_scatter"]:
                        if algorithm == "shared" and nodes:
                            continue
                        x = values(me, count, dtype)
                        assert_near(reduce_scatter(x, op, world, algorithm, **factors), part(result, me, n))
                        np.testing.assert_array_equal(x, values(me, count, dtype))
                    for algorithm in ALGORITHMS["reduce"]:
                        if algorithm == "shared" and nodes:
                            continue
                        x = values(me, count, dtype)
                        reduce(x, op, last, world, algorithm, **factors)
                        expected = result if me == last else values(me, count, dtype)
                        assert_near(x, expected)
            x = values(me, 31, dtype)
            result = wanted(n, 31, dtype, "mean", prescale, postscale)
            assert_near(ireduce_scatter(x, "mean", world, **factors).wait(), part(result, me, n))
            assert_near(ireduce(x, "mean", last, world, **factors).wait(), result if me == last else x)

    thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_mean_has_the_bits_of_a_divided_sum(n, short_chunks):
    """Also of subnormal and of very large numbers."""

    def rank(world):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            x = data(world.rank, 1009, dtype)
            wide = "f4" if is_half(x) else dtype
            tiny = np.finfo(wide).smallest_subnormal if not is_half(x) else np.float32(6e-8)
            x[:300] = (np.arange(300) * 7 + world.rank).astype(wide) * tiny
            inputs = [np.frombuffer(bytes.fromhex(text), dtype_of(dtype)).astype(wide)
                      for text in world.comm.allgather_json(x.tobytes().hex())]  # fmt: skip
            total = inputs[0].copy()
            for other in inputs[1:]:
                total += other
            divided = (total / total.dtype.type(n)).astype(x.dtype)
            for count in (5, 1009):
                assert allreduce(x[:count].copy(), "mean", world).tobytes() == divided[:count].tobytes()

    thread_comm.run(n, rank)


@pytest.mark.parametrize(("n", "nodes"), LAYOUTS)
def test_bools_are_reduced_by_or_and_and(n, nodes):
    def rank(world):
        mine = [np.random.default_rng(number).random(1009) < 0.5 for number in range(n)]
        either, both = np.logical_or.reduce(mine), np.logical_and.reduce(mine)
        for op, result in (("sum", either), ("max", either), ("prod", both), ("min", both)):
            for algorithm in ALGORITHMS["allreduce"]:
                if algorithm == "shared" and nodes:
                    continue
                x = mine[world.rank].copy()
                allreduce(x, op, world, algorithm)
                np.testing.assert_array_equal(x, result)
                np.testing.assert_array_equal(iallreduce(mine[world.rank].copy(), op, world, algorithm).wait(), result)
            shard = reduce_scatter(mine[world.rank], op, world)
            assert shard.dtype == bool
            np.testing.assert_array_equal(shard, part(result, world.rank, n))
            x = reduce(mine[world.rank].copy(), op, 0, world)
            np.testing.assert_array_equal(x, result if world.rank == 0 else mine[world.rank])
        x = allreduce(mine[world.rank].copy(), Monoid(np.logical_xor, False, "xor"), world)
        np.testing.assert_array_equal(x, np.logical_xor.reduce(mine))

    thread_comm.run(n, rank, nodes)


def test_the_input_stays_beside_an_out():
    def rank(world):
        x, out = np.full((2, 3), world.rank + 1.0), np.empty((2, 3))
        assert allreduce(x, "mean", world, out=out, prescale=2, postscale=0.5) is out
        strided = np.full((4, 6), world.rank + 1.0)
        allreduce(strided[::2, 1::2], "sum", world, prescale=0.5)
        return x[0, 0], out[1, 2], strided[2, 3], strided[1, 1]

    assert thread_comm.run(3, rank) == [(1.0, 2.0, 3.0, 1.0), (2.0, 2.0, 3.0, 2.0), (3.0, 2.0, 3.0, 3.0)]


@pytest.mark.parametrize("n", [1, 3])
def test_groups_take_factors_too(n):
    def rank(world):
        xs = [np.full(3, world.rank + 1.0), np.full((2, 2), world.rank + 1, "f4")]
        total = n * (n + 1) / 2
        for shard, x in zip(grouped_reduce_scatter(xs, "sum", world, prescale=0.5), xs, strict=True):
            np.testing.assert_allclose(shard, part(np.full(x.size, total / 2), world.rank, n))
        grouped_allreduce(xs, "mean", world, prescale=0.5, postscale=4)
        for x in xs:
            np.testing.assert_allclose(x, np.full(x.shape, 2 * total / n), rtol=1e-6)

    thread_comm.run(n, rank)


def of_group(call):
    return lambda x, *args, **named: call([x], *args, **named)[0]


CALLS = {
    "allreduce": allreduce,
    "iallreduce": iallreduce,
    "reduce_scatter": reduce_scatter,
    "reduce": reduce,
    "grouped_allreduce": of_group(grouped_allreduce),
    "grouped_reduce_scatter": of_group(grouped_reduce_scatter),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("where", ["prescale", "postscale"])
@pytest.mark.parametrize("n", [1, 2])
def test_factors_of_other_reductions_are_refused(name, where, n):
    cases = [
        (np.ones(3), "max", [0.5, "op='max'", "float64"]),
        (np.ones(3, "i4"), "sum", [0.5, "op='sum'", "int32"]),
        (np.ones(3, "i8"), "mean", [0.5, "op='mean'", "int64"]),
        (np.ones(3, "?"), "sum", [0.5, "op='sum'", "bool"]),
        (np.ones(3), Monoid(np.fmax, name="fmax"), [0.5, "op='fmax'", "float64"]),
    ]

    def rank(world):
        for x, op, got in cases:
            with raises(UnsupportedError, operation=name, where=where, expected=1, got=got):
                CALLS[name](x, op, world=world, **{where: 0.5})
        for factor in (np.nan, np.inf, "2", [2], True, None, 1j):
            with raises(ConfigError, operation=name, where=where):
                CALLS[name](np.ones(5), world=world, **{where: factor})
        x = CALLS[name](np.full(3, 2.0), "max", world=world, **{where: 1})
        return (x.wait() if name == "iallreduce" else x).tolist()

    assert thread_comm.run(n, rank)[0][0] == 2.0


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nodes", [None, 1])
@pytest.mark.parametrize("warm", [False, True])
def test_different_factors_are_the_same_error_on_every_rank(name, nodes, warm):
    def call(world, **factors):
        result = CALLS[name](np.ones(40), world=world, **factors)
        return result.wait() if name == "iallreduce" else result

    def rank(world):
        for _ in range(2 if warm else 0):
            call(world)
            call(world, prescale=0.5)
        with raises(MismatchError, got=["prescale 0.5", "postscale 1.0", "rank 1"]):
            call(world, **({"prescale": 0.5} if world.rank == 1 else {}))
        with raises(MismatchError, expected=["postscale 3.0", "rank 0"]):
            call(world, **({"postscale": 3} if world.rank == 0 else {}))
        assert allreduce(np.ones(3), world=world).tolist() == [3.0] * 3

    thread_comm.run(3, rank, nodes)


@pytest.mark.mpi
def test_real_ranks_scale_too():
    world = hpcdp.init()
    n, me = world.size, world.rank
    counts = (3, 5000, 200_001)
    for number, dtype in enumerate(DTYPES):
        for turn, algorithm in enumerate([*ALGORITHMS["allreduce"], "auto"]):
            if algorithm == "shared" and world.num_nodes > 1:
                continue
            for count in counts if THOROUGH else (counts[(number + turn) % 3],):
                x = allreduce(values(me, count, dtype), "mean", algorithm=algorithm, prescale=0.3, postscale=3.0)
                assert_near(x, wanted(n, count, dtype, "mean", 0.3, 3.0))
        for algorithm in ALGORITHMS["reduce_scatter"]:
            if algorithm == "shared" and world.num_nodes > 1:
                continue
            shard = reduce_scatter(values(me, 5000, dtype), "mean", algorithm=algorithm, prescale=0.3, postscale=3.0)
            assert_near(shard, part(wanted(n, 5000, dtype, "mean", 0.3, 3.0), me, n))
        x = reduce(values(me, 500, dtype), "mean", n - 1, algorithm="native", postscale=0.25)
        assert_near(x, wanted(n, 500, dtype, "mean", 1, 0.25) if me == n - 1 else values(me, 500, dtype))
    x = allreduce(np.array([me == 0, True, False, me >= 0]), "sum", algorithm="native")
    assert x.tolist() == [True, True, False, True]
