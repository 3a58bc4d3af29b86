"""PyTorch tensors as arguments and results of collectives, messages and objects."""

import numpy as np
import pytest
from pairs import only_on
from raises import raises

only_on(2, 3)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hpcdp
from hpcdp.comm import thread_comm
from hpcdp.errors import UnsupportedError

RANKS = (1, 2, 3)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8]


def of_rank(rank, dtype=torch.float32, size=7):
    return (torch.arange(size) + 2 * rank).to(dtype)


def total_of(n, dtype=torch.float32, size=7):
    return sum(of_rank(rank, torch.float64, size) for rank in range(n)).to(dtype)


def transposed(rank):
    return (torch.arange(12.0).reshape(3, 4) * (rank + 1)).t()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reduction_in_place_returns_the_same_tensor(dtype):
    def rank(world):
        n, me = world.size, world.rank
        blocking, started = of_rank(me, dtype), of_rank(me, dtype)
        assert hpcdp.allreduce(blocking, world=world) is blocking
        operation = hpcdp.iallreduce(started, "sum", world)
        assert operation.wait() is started and operation.wait() is started
        for x in (blocking, started):
            torch.testing.assert_close(x, total_of(n, dtype))

    for n in RANKS:
        thread_comm.run(n, rank)


def test_results_are_tensors_also_of_uneven_and_empty_parts():
    def rank(world):
        n, me = world.size, world.rank
        rows = torch.full((me, 2), me, dtype=torch.bfloat16)
        expected = torch.cat([torch.full((r, 2), r, dtype=torch.bfloat16) for r in range(n)])
        for gathered in (hpcdp.allgather(rows, world), hpcdp.iallgather(rows, world).wait()):
            assert type(gathered) is torch.Tensor and gathered.equal(expected)
        splits = [me + 1] * n
        received, counts = hpcdp.alltoall(torch.arange(n * (me + 1)) + 100 * me, splits, world)
        assert counts.tolist() == [r + 1 for r in range(n)]
        assert received.tolist() == [100 * r + me * (r + 1) + i for r in range(n) for i in range(r + 1)]
        at_root = hpcdp.gather(torch.tensor(me), 0, world)
        assert at_root is None if me else at_root.tolist() == list(range(n))
        shard = hpcdp.reduce_scatter(of_rank(me), "sum", world)
        assert shard.equal(total_of(n)[7 * me // n : 7 * (me + 1) // n])

    for n in RANKS:
        thread_comm.run(n, rank)


def test_tensors_with_other_strides_keep_them():
    def rank(world):
        x, out = transposed(world.rank), torch.zeros(3, 8)[:, ::2].t()
        assert hpcdp.allreduce(x, "mean", world, out=out) is out
        torch.testing.assert_close(out, sum(map(transposed, range(world.size))) / world.size)
        assert x.equal(transposed(world.rank)) and out.stride() == (2, 8)
        assert hpcdp.broadcast(x, world.size - 1, world) is x
        assert x.equal(transposed(world.size - 1)) and x.stride() == (1, 4)

    for n in RANKS:
        thread_comm.run(n, rank)


def test_lists_of_tensors_and_arrays_of_any_dtypes():
    def rank(world):
        n, me = world.size, world.rank
        xs = [of_rank(me), of_rank(me, torch.int64, 3), np.ones(2), of_rank(me, torch.bfloat16, 0), torch.tensor(1.0)]
        assert all(y is x for x, y in zip(xs, hpcdp.grouped_allreduce(xs, "sum", world), strict=True))
        assert xs[0].equal(total_of(n)) and xs[1].equal(total_of(n, torch.int64, 3))
        assert (xs[2] == n).all() and xs[4] == n
        first, second = hpcdp.igrouped_allgather((torch.ones(me), torch.tensor([me])), world).wait()
        assert len(first) == sum(range(n)) and second.tolist() == list(range(n))

    for n in RANKS:
        thread_comm.run(n, rank)


@pytest.mark.parametrize("count", [3, 50_000])
def test_messages_and_objects(count):
    def rank(world):
        n, me = world.size, world.rank
        right, left = (me + 1) % n, (me - 1) % n
        out = torch.empty(count, dtype=torch.bfloat16)
        sent = torch.full((count,), me, dtype=torch.bfloat16)
        assert hpcdp.sendrecv(sent, right, left, out, world=world) is out and (out == left).all()
        weight = torch.nn.Parameter(torch.full((2, 2), float(me)))
        (got,) = hpcdp.allgather_object({"weight": weight, "sent": sent, "step": me}, world)[left : left + 1]
        assert type(got["weight"]) is torch.Tensor and not got["weight"].requires_grad
        assert (got["weight"] == left).all() and got["sent"].equal(out) and got["step"] == left

    for n in RANKS:
        thread_comm.run(n, rank)


@pytest.mark.parametrize("operation", [hpcdp.allreduce, hpcdp.iallreduce, hpcdp.allgather, hpcdp.broadcast])
def test_a_tensor_that_requires_a_gradient_is_refused_but_within_no_grad(operation):
    def rank(world):
        x = torch.ones(3, requires_grad=True)
        with raises(UnsupportedError, where="x", remedy=["x.detach()", "hpcdp.torch.functional"]):
            operation(x, world=world)
        with torch.no_grad():
            result = operation(x, world=world)
            result = result.wait() if operation is hpcdp.iallreduce else result
        assert result is x or operation is hpcdp.allgather

    thread_comm.run(1, rank)


def test_a_change_in_place_is_known_to_autograd():
    def rank(world):
        x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        y = (weight * x).sum()
        hpcdp.allreduce(x, world=world)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    thread_comm.run(1, rank)


@pytest.mark.parametrize("x", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")])
def test_tensors_without_plain_memory_are_refused(x):
    with raises(UnsupportedError, operation="allreduce", where="x", expected="host memory"):
        thread_comm.run(1, lambda world: hpcdp.allreduce(x, world=world))


def lazy(rank, kind, size=5):
    """A tensor whose memory has the conjugate, or the negative, of its values, and those values in memory."""
    x = torch.complex(torch.arange(float(size)) + rank, torch.arange(float(size)) * (rank + 2)).conj()
    x = x if kind == "conjugate" else x.imag
    assert x.is_conj() or x.is_neg()
    return x, x.clone()


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_conjugates_are_read_and_changed(kind):
    def rank(world):
        n, me = world.size, world.rank
        every = torch.stack([lazy(r, kind)[1] for r in range(n)])
        total = every.sum(0)
        x, values = lazy(me, kind)
        assert hpcdp.allgather(x, world).equal(every.reshape(-1)) and x.equal(values)
        assert hpcdp.sendrecv(x, (me + 1) % n, (me - 1) % n, world=world).equal(every[me - 1])
        assert hpcdp.allreduce(x, out=torch.empty_like(x), world=world).equal(total) and x.equal(values)
        assert all(map(torch.equal, hpcdp.allgather_object(x, world), every))
        assert hpcdp.allreduce(x, world=world) is x and x.equal(total)
        x, started, grouped = (lazy(me, kind)[0] for _ in range(3))
        assert hpcdp.allreduce(values, out=x, world=world) is x and x.equal(total)
        x, _ = lazy(me, kind)
        assert hpcdp.broadcast(x, n - 1, world) is x and x.equal(every[-1])
        operation = hpcdp.iallreduce(started, world=world)
        while not operation.test():
            pass
        assert started.equal(total)  # also without wait()
        assert hpcdp.grouped_allreduce([grouped, values.clone()], world=world)[0] is grouped and grouped.equal(total)
        leaf = torch.ones(5, dtype=x.dtype, requires_grad=True)
        product = leaf * started
        hpcdp.broadcast(started, 0, world)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().abs().backward()

    for n in RANKS:
        thread_comm.run(n, rank)


@pytest.mark.mpi
def test_tensors_between_processes():
    world = hpcdp.init()
    n, me = world.size, world.rank
    for size in (1, 1001, 300_000):
        x = of_rank(me, torch.bfloat16 if size == 1001 else torch.float64, size)
        expected = hpcdp.allreduce(x.double().numpy())
        operation = hpcdp.iallreduce(x)
        rows = hpcdp.iallgather(torch.full((me + 1, 3), me))
        assert rows.wait()[:, 0].tolist() == [r for r in range(n) for _ in range(r + 1)]
        assert operation.wait() is x
        torch.testing.assert_close(x.double(), torch.from_numpy(expected), rtol=2e-2, atol=0)


def test_receivers_get_what_was_sent_tensors_or_arrays():
    def rank(world):
        n, me = world.size, world.rank
        x = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
        for sent, kind in ((x, torch.Tensor), (np.arange(6.0), np.ndarray)):
            rows = hpcdp.scatter(sent if me == 0 else None, 0, world)
            assert type(rows) is kind and len(rows) == len(sent) * (me + 1) // n - len(sent) * me // n
            hpcdp.isend(sent, (me + 1) % n, 1, world)
            got = hpcdp.recv(None, (me - 1) % n, 1, world)
            assert type(got) is kind and got.dtype == sent.dtype and bool((got == sent).all())
            hpcdp.isend(sent, (me + 1) % n, 1, world)
            got, source = hpcdp.irecv(None, None, 1, world).wait()
            assert type(got) is kind and source == (me - 1) % n
        out = torch.zeros(3, 2, dtype=torch.bfloat16)
        hpcdp.isend(x, (me + 1) % n, 1, world)
        got, source = hpcdp.recv(out, None, 1, world)
        assert got is out and out.equal(x) and type(source) is int
        kept = hpcdp.reduce_scatter(x.float(), "mean", world, splits="even")
        assert kept.equal(x.float()[3 * me // n : 3 * (me + 1) // n])

    for n in RANKS:
        thread_comm.run(n, rank)
