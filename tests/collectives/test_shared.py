"""Allreduce in a node's memory: nothing is sent, and ranks that call differently are told on every rank."""

import numpy as np
import pytest

from hpcdp.collectives import allreduce, shared
from hpcdp.comm import threads
from hpcdp.errors import MismatchError, UnsupportedError


def test_nothing_is_sent():
    def rank(world):
        allreduce(np.zeros(1000, np.float32), "sum", world, "shared")
        return world.comm.traffic.nbytes + world.node_comm.traffic.nbytes

    assert threads.run(3, rank) == [0, 0, 0]


def test_several_nodes_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="expected one node whose ranks share memory"):
        threads.run(4, lambda world: allreduce(np.zeros(3), world=world, algorithm="shared"), ranks_per_node=2)


def test_a_dtype_without_a_kernel_is_told():
    with pytest.raises(UnsupportedError, match="of 8, 32 or 64 bits, got int16"):
        threads.run(2, lambda world: allreduce(np.zeros(3, "i2"), world=world, algorithm="shared"))


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
        usual = {"x": np.zeros(3), "op": "sum", "algorithm": "shared"}
        for arguments in (usual, usual | odd):  # a first call would be compared before
            allreduce(**arguments, world=world)
        arguments = usual | (odd if world.rank == n - 1 else {})
        try:
            allreduce(**arguments, world=world)
        except MismatchError as error:
            told.append(str(error))
        for dtype in ("f8", "i4"):  # the world is still usable, by both kinds of staging
            x = allreduce(np.full(5, world.rank + 1, dtype), world=world)
            assert x.tolist() == [n * (n + 1) / 2] * 5

    threads.run(n, rank)
    assert len(told) == n
    assert all("the same dtype, number of elements and op on every rank" in text for text in told)


@pytest.mark.parametrize("odd", [1 << 22, 1 << 24, (1 << 24) + 7, 1 << 31])
def test_lengths_are_told_apart(odd):
    numbers = {np.int64(shared._with_size(3, size)).astype(np.int32) for size in (1000, 1000 + odd, odd, odd + 1)}
    assert len(numbers) == 4
