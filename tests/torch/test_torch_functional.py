"""Gradients through collectives and messages of hpcdp.torch.functional, against a formulation in one process."""

import itertools

import pytest
from pairs import only_on
from raises import raises

only_on(2, 3)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hpcdp
from hpcdp.comm import thread_comm
from hpcdp.errors import UnsupportedError
from hpcdp.torch import functional as F

ROWS = 12  # of every rank's input; a multiple of 1, 2, 3 and 4


def splits_of(rank, n):
    """Uneven, other ones on each rank, also none."""
    counts = [(rank + r) % 3 for r in range(n)]
    return [*counts[:-1], ROWS - sum(counts[:-1])]


def cut(x, splits):
    """The part of each rank."""
    ends = [0, *itertools.accumulate(splits)]
    return [x[first:last] for first, last in itertools.pairwise(ends)]


def exchanged(xs, splits):
    return [torch.cat([cut(x, parts)[r] for x, parts in zip(xs, splits, strict=True)]) for r in range(len(xs))]


def uneven(n):
    return [ROWS - n + 1, *[1] * (n - 1)]


OPERATIONS = {
    "allreduce": (lambda x, w: F.allreduce(x, "sum", w), lambda xs: [sum(xs)] * len(xs)),
    "allreduce mean": (lambda x, w: F.allreduce(x, "mean", w), lambda xs: [sum(xs) / len(xs)] * len(xs)),
    "allgather": (
        lambda x, w: F.allgather(x[: 2 * w.rank], w),
        lambda xs: [torch.cat([x[: 2 * r] for r, x in enumerate(xs)])] * len(xs),
    ),
    "reduce_scatter": (
        lambda x, w: F.reduce_scatter(x, "mean", w),
        lambda xs: cut(sum(xs) / len(xs), [ROWS // len(xs)] * len(xs)),
    ),
    "reduce_scatter uneven": (
        lambda x, w: F.reduce_scatter(x, "sum", w, uneven(w.size)),
        lambda xs: cut(sum(xs), uneven(len(xs))),
    ),
    "alltoall": (
        lambda x, w: F.alltoall(x, None, w),
        lambda xs: exchanged(xs, [[ROWS // len(xs)] * len(xs)] * len(xs)),
    ),
    "alltoall splits": (
        lambda x, w: F.alltoall(x, splits_of(w.rank, w.size), w)[0],
        lambda xs: exchanged(xs, [splits_of(r, len(xs)) for r in range(len(xs))]),
    ),
    "broadcast": (lambda x, w: F.broadcast(x, w.size - 1, w), lambda xs: [xs[-1] + 0 * sum(xs)] * len(xs)),
}  # fmt: skip


def input_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, 2, dtype=torch.float64, generator=generator).requires_grad_()


def loss_of(y, rank):
    """Not linear, and another one on each rank."""
    return ((rank + 1) * y.pow(3)).sum()


def check(world, name):
    operation, in_one_process = OPERATIONS[name]
    n, me = world.size, world.rank
    x = input_of(me)
    y = operation(x.sin(), world)
    (first,) = torch.autograd.grad(loss_of(y, me), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)

    xs = [input_of(r) for r in range(n)]
    ys = in_one_process([each.sin() for each in xs])
    firsts = torch.autograd.grad(sum(loss_of(each, r) for r, each in enumerate(ys)), xs, create_graph=True)
    seconds = torch.autograd.grad(sum(each.pow(2).sum() for each in firsts), xs)
    torch.testing.assert_close(y, ys[me])
    torch.testing.assert_close(first, firsts[me])
    torch.testing.assert_close(second, seconds[me])


@pytest.mark.parametrize("name", OPERATIONS)
def test_first_and_second_derivatives_are_those_of_one_process(name):
    for n in (1, 2, 3, 4):
        thread_comm.run(n, lambda world: check(world, name))


def test_gradients_travel_back_along_messages():
    def rank(world):
        n, me = world.size, world.rank
        x = input_of(me)
        if me == 0:
            F.send(x.sin(), 1, 3, world).backward()
            expected = 2 * x.sin() * x.cos() * (n - 1) ** 2
            torch.testing.assert_close(x.grad, expected.detach())
            return
        got = F.recv(me - 1, 3, world)
        assert got.requires_grad and got.dtype == torch.float64
        if me + 1 < n:
            F.send(got, me + 1, 3, world).backward()
        else:
            (got * (n - 1)).pow(2).sum().backward()

    for n in (2, 3, 4):
        thread_comm.run(n, rank)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_that_are_lazy_conjugates(name):
    operation, in_one_process = OPERATIONS[name]

    def loss_of(y, rank):
        return (y.conj() * (rank + 1 + 2j)).real.sum() - (y.conj().imag * (rank + 1)).sum()

    def rank(world):
        n, me = world.size, world.rank
        xs = [torch.complex(input_of(r).detach(), input_of(r + n).detach()).requires_grad_() for r in range(n)]
        sum(loss_of(y, r) for r, y in enumerate(in_one_process(xs))).backward()
        x = xs[me].detach().clone().requires_grad_()
        loss_of(operation(x, world), me).backward()
        torch.testing.assert_close(x.grad, xs[me].grad)

    for n in (1, 2, 3):
        thread_comm.run(n, rank)


def test_complex_gradients_travel_back_along_messages():
    def rank(world):
        me = world.rank
        x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        if me == 0:
            F.send(x.conj(), 1, 3, world).backward()
            torch.testing.assert_close(x.grad, torch.tensor([2 + 1j] * 2))
        else:
            got = F.recv(0, 3, world)
            assert got.requires_grad and got.equal(x.detach().conj())
            (got.conj() * (2 - 1j)).real.sum().backward()

    thread_comm.run(2, rank)


def test_a_rank_sends_and_then_receives():
    def rank(world):
        weight = torch.tensor(3.0, requires_grad=True)
        if world.rank == 0:
            token = F.send(weight * 2, 1, 0, world)
            back = F.recv(1, 0, world, after=token)
            back.pow(2).backward()
            assert weight.grad == 2 * (2 * 3 * 5) * 2 * 5
        else:
            F.send(F.recv(0, 0, world) * 5, 0, 0, world).backward()

    thread_comm.run(2, rank)


def test_values_without_a_gradient_are_received_without_one():
    def rank(world):
        if world.rank == 0:
            F.send(torch.arange(3), 1, 0, world)
            F.send(torch.ones(3, dtype=torch.bfloat16), 1, 0, world)
        else:
            numbers, ones = F.recv(0, 0, world), F.recv(0, 0, world)
            assert numbers.tolist() == [0, 1, 2] and ones.dtype == torch.bfloat16
            assert not numbers.requires_grad and not ones.requires_grad

    thread_comm.run(2, rank)


def test_operations_without_a_gradient_are_refused():
    with raises(UnsupportedError, where="op", got="'max'", remedy="x.detach()"):
        thread_comm.run(1, lambda world: F.allreduce(torch.ones(2), "max", world))


@pytest.mark.mpi
def test_derivatives_between_processes():
    for name in OPERATIONS:
        check(hpcdp.init(), name)
