"""Every algorithm x dtype x op x n over thread ranks, and the public function's promises."""

import numpy as np
import pytest
import standin

from hpcdp.collectives import ALGORITHMS, allreduce, shared
from hpcdp.collectives.select import choose
from hpcdp.comm import threads
from hpcdp.comm.reductions import resolve
from hpcdp.errors import MismatchError, UnsupportedError

OPS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"]


def data(rank, count, dtype):
    rng = np.random.default_rng([rank, count])
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(count) * 2 + 0.3).astype(dtype)
    return rng.integers(1, 20, count).astype(dtype)


def expected(n, count, dtype, op):
    """By NumPy alone, in the order of the ranks."""
    wide = np.float32 if dtype == "float16" else np.dtype(dtype)
    total = data(0, count, dtype).astype(wide)
    for rank in range(1, n):
        total = OPS[op](total, data(rank, count, dtype).astype(wide))
    if op == "mean":
        total = total / total.dtype.type(n)
    return total.astype(dtype)


IN_ORDER = ("reference", "native", "shared")


def assert_reduced(result, of_rank_0, n, dtype, op, count):
    """Within rounding of the sum in the order of the ranks, and the same bits on all of them."""
    wanted = expected(n, count, dtype, op)
    np.testing.assert_array_equal(result, of_rank_0)
    exact = op in ("min", "max") or np.dtype(dtype).kind != "f"
    eps = 0 if exact else 4 * n * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(
        result, wanted, rtol=eps, atol=eps * np.abs(wanted).max(initial=0), err_msg=f"{op} {count}"
    )


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("algorithm", [*ALGORITHMS["allreduce"], "auto"])
def test_every_dtype_op_and_count(algorithm, n, monkeypatch):
    monkeypatch.setattr(shared, "CHUNK_NBYTES", 512)  # several chunks also for small arrays
    monkeypatch.setattr(shared, "BY_ALL_NBYTES", 64)  # both ways of exchanging
    counts = sorted({0, 1, max(n - 1, 0), n, n + 1, 31, 1009})

    def rank(world):
        results = {}
        for dtype in DTYPES:
            for op in OPS:
                if op == "mean" and np.dtype(dtype).kind != "f":
                    continue
                for count in counts:
                    x = data(world.rank, count, dtype)
                    assert allreduce(x, op, world, algorithm) is x
                    results[dtype, op, count] = x
        return results

    results = threads.run(n, rank)
    for dtype, op, count in results[0]:
        for result in results:
            assert_reduced(result[dtype, op, count], results[0][dtype, op, count], n, dtype, op, count)


def test_the_reference_sends_what_its_formula_says():
    def rank(world):
        allreduce(np.zeros(100, np.float32), "sum", world, "reference")
        return world.comm.traffic.messages, world.comm.traffic.nbytes

    assert threads.run(5, rank) == [(4, 1600)] * 5


def test_shared_sends_nothing():
    def rank(world):
        allreduce(np.zeros(1000, np.float32), "sum", world, "shared")
        return world.comm.traffic.nbytes + world.node_comm.traffic.nbytes

    assert threads.run(3, rank) == [0, 0, 0]


@pytest.mark.parametrize("algorithm", ["reference", "native", "auto"])
def test_several_nodes(algorithm):
    def rank(world):
        return allreduce(data(world.rank, 100, "float64"), "sum", world, algorithm)

    for result in threads.run(5, rank, ranks_per_node=2):
        np.testing.assert_allclose(result, expected(5, 100, "float64", "sum"), rtol=1e-14)


def test_the_document_s_example():
    results = threads.run(2, lambda world: allreduce(np.full((1, 2), world.rank + 1.0), world=world))
    assert [result.tolist() for result in results] == [[[3.0, 3.0]]] * 2


def test_arrays_that_are_not_contiguous_are_changed_in_place():
    def rank(world):
        whole = np.arange(24.0).reshape(4, 6) * (world.rank + 1)
        view = whole[::2, 1::2]
        assert allreduce(view, "sum", world) is view
        return whole

    base = np.arange(24.0).reshape(4, 6)
    for number, whole in enumerate(threads.run(3, rank)):
        np.testing.assert_array_equal(whole[::2, 1::2], base[::2, 1::2] * 6)
        np.testing.assert_array_equal(whole[1], base[1] * (number + 1))


def test_out_leaves_the_input_alone():
    def rank(world):
        x, out = np.full(5, world.rank + 1.0), np.empty(5)
        assert allreduce(x, "prod", world, out=out) is out
        return x[0], out[0]

    assert threads.run(3, rank) == [(1.0, 6.0), (2.0, 6.0), (3.0, 6.0)]


def test_an_array_of_another_namespace_goes_through_host_memory():
    def rank(world):
        x = standin.asarray(np.full(4, world.rank + 1.0, np.float32))
        assert allreduce(x, "sum", world) is x
        return x.to_host().tolist()

    assert threads.run(3, rank) == [[6.0] * 4] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "median"}, r"allreduce \[op\]: expected sum or mean or min or max or prod or a Monoid, got 'median'"),
        (
            {"algorithm": "ringo"},
            r"expected auto or reference or native or shared or .*, got 'ringo'",
        ),
        ({"x": np.arange(3), "op": "mean"}, "expected a float dtype for op='mean', got int64; use op='sum'"),
        ({"x": np.zeros(3, "c8")}, r"\[dtype\]: expected a native integer or float, got <c8"),
        ({"x": np.zeros(3, ">f4")}, "got >f4"),
        ({"x": np.zeros(3, "i2"), "algorithm": "shared"}, "of 8, 32 or 64 bits, got int16"),
        ({"out": np.zeros(4)}, r"expected \(3,\) float64 as x, got \(4,\) float64"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, message):
    def rank(world):
        allreduce(**{"x": np.zeros(3), "world": world} | arguments)

    with pytest.raises(UnsupportedError, match=message):
        threads.run(2, rank)


def test_a_read_only_array_is_refused():
    x = np.zeros(3)
    x.flags.writeable = False
    with pytest.raises(UnsupportedError, match="expected a writeable array, got a read-only one"):
        threads.run(1, lambda world: allreduce(x, world=world))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "odd",
    [
        {"x": np.zeros(4)},
        {"x": np.zeros(0)},
        {"x": np.zeros(100_000)},
        {"x": np.zeros(3, "f4")},
        {"x": np.zeros(3, "i8")},
        {"x": np.zeros(3, "f2")},
        {"op": "max"},
    ],
)
def test_ranks_that_call_differently_are_told_on_every_rank(odd, n):
    told = []

    def rank(world):
        arguments = {"x": np.zeros(3), "op": "sum"} | (odd if world.rank == n - 1 else {})
        try:
            allreduce(**arguments, world=world)
        except MismatchError as error:
            told.append(str(error))
        x = allreduce(np.full(5, world.rank + 1.0), world=world)  # the world is still usable
        assert x.tolist() == [n * (n + 1) / 2] * 5

    threads.run(n, rank)
    assert len(told) == n
    assert all("the same dtype, number of elements and op on every rank" in text for text in told)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["reference", "native", "shared"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_a_nan_of_any_rank_wins(algorithm, op):
    import hpcdp

    world = hpcdp.init()
    x = np.arange(world.size + 1, dtype="f4")
    x[world.rank] = np.nan
    allreduce(x, op, world, algorithm)
    assert np.isnan(x[: world.size]).all()
    assert x[world.size] == world.size


def test_what_is_no_array_is_refused():
    with pytest.raises(UnsupportedError, match="expected an array, got list"):
        threads.run(1, lambda world: allreduce([1, 2], world=world))


def test_shared_refuses_several_nodes_by_name():
    with pytest.raises(UnsupportedError, match="expected one node whose ranks share memory"):
        threads.run(4, lambda world: allreduce(np.zeros(3), world=world, algorithm="shared"), ranks_per_node=2)


def test_auto_uses_shared_memory_inside_a_node_and_the_library_elsewhere():
    def chosen(dtype, ranks_per_node=None):
        def rank(world):
            op = resolve("allreduce", "sum", np.dtype(dtype))
            return choose("allreduce", 64, np.dtype(dtype), op, world)

        return threads.run(2, rank, ranks_per_node)[0]

    assert chosen("f8") == "shared"
    assert chosen("i2") == "native"
    assert chosen("f8", ranks_per_node=1) == "native"


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", [*ALGORITHMS["allreduce"], "auto"])
def test_real_ranks(algorithm):
    import hpcdp

    world = hpcdp.init()
    for dtype in ("float16", "float32", "int32"):
        for op in ("sum", "max", "mean"):
            if op == "mean" and dtype == "int32":
                continue
            for count in (0, 1, 17, 70001):
                x = allreduce(data(world.rank, count, dtype), op, world, algorithm)
                np.testing.assert_allclose(
                    x.astype("f8"), expected(world.size, count, dtype, op).astype("f8"), rtol=2e-3, atol=1e-2
                )


@pytest.mark.mpi
def test_the_same_run_twice_gives_the_same_bits():
    import hpcdp

    world = hpcdp.init()
    first, second = (allreduce(data(world.rank, 100003, "float32"), "sum", world) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    bits = world.comm.allgather_json(int(first.view(np.uint32).astype(np.uint64).sum()))
    assert len(set(bits)) == 1
