"""Gradients through collectives of hpcdp's own autograd, against finite differences over all ranks."""

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import autograd
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.errors import UnsupportedError
from hpcdp.parallel import functional as F

STEP = 1e-6


def splits_of(world):
    """Uneven, with an empty part for rank 1 of several."""
    return [r % 3 + 1 if r != 1 else 0 for r in range(world.size)]


OPERATIONS = {
    "allreduce": lambda x, world: F.allreduce(x, "sum", world),
    "allreduce mean": lambda x, world: F.allreduce(x, "mean", world),
    "allgather": lambda x, world: F.allgather(x[: 3 + world.rank], world),
    "reduce_scatter": lambda x, world: F.reduce_scatter(x[: 4 * world.size], "sum", world),
    "reduce_scatter uneven": lambda x, world: F.reduce_scatter(x, "mean", world),
    "reduce_scatter splits": lambda x, world: F.reduce_scatter(
        x[: sum(splits_of(world))], "sum", world, splits_of(world)),
    "alltoall": lambda x, world: F.alltoall(x[: 2 * world.size], None, world),
    "alltoall splits": lambda x, world: F.alltoall(
        x[: sum(splits_of(world)) + world.size * world.rank % 2],
        [count + (r == 0) * (world.size * world.rank % 2) for r, count in enumerate(splits_of(world))], world)[0],
    "broadcast": lambda x, world: F.broadcast(x, world.size - 1, world),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_the_sum_of_all_losses(name):
    operation = OPERATIONS[name]

    def rank(world):
        n, me = world.size, world.rank
        rng = np.random.default_rng(me)
        x = Tensor(rng.standard_normal((17, 2)))
        x.attach_grad()
        weights = rng.standard_normal(operation(x, world).shape)

        def loss():
            """Each rank's own loss; it is not linear, so that a gradient depends on all ranks' values."""
            y = operation(x * x, world)
            return (y * y * Tensor(weights)).sum()

        with autograd.record():
            own = loss()
        own.backward()
        at = [(0, 1), (3, 0), (16, 1)]
        for r in range(n):
            for place in at:
                totals = []
                for sign in (1, -1):
                    x.data[place] += sign * STEP * (r == me)
                    totals.append(hpcdp.allreduce(loss().data.reshape(1), "sum", world)[0])
                    x.data[place] -= sign * STEP * (r == me)
                expected = (totals[0] - totals[1]) / (2 * STEP)
                if r == me:
                    np.testing.assert_allclose(x.grad[place], expected, rtol=1e-5, atol=1e-6)

    for n in (1, 2, 3, 4):
        thread_comm.run(n, rank)


def test_halves_are_summed_in_single_precision():
    def rank(world):
        x = Tensor(np.full((world.size + 1, 1), 2048 if world.rank == 0 else 1, np.float16))
        y = F.reduce_scatter(x, "sum", world)
        assert y.dtype == np.float16 and (y.data == 2048 + world.size - 1).all()

    thread_comm.run(3, rank)


def test_wrong_arguments():
    x = Tensor(np.ones(3))
    with raises(UnsupportedError, operation="allreduce", where="op", got="'max'"):
        thread_comm.run(1, lambda world: F.allreduce(x, "max", world))
    with raises(UnsupportedError, operation="reduce_scatter", where="splits", expected=3):
        thread_comm.run(1, lambda world: F.reduce_scatter(x, "sum", world, [2]))
