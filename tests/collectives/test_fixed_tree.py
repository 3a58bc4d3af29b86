import functools
import itertools

import numpy as np
import pytest

from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import bounds
from hpcdp.comm.progress import run_until_complete
from hpcdp.data_parallel import deterministic


def summed(node, leaves):
    """The definition: a node is the sum of its halves, the first of them the longer one."""
    first, end = node
    if end - first == 1:
        return leaves[first]
    middle = first + (end - first + 1) // 2
    return summed((first, middle), leaves) + summed((middle, end), leaves)


@functools.cache
def leaves_of(num, size=40, dtype="f4"):
    """Numbers of which every order of addition makes others; to be read only, by all ranks."""
    rng = np.random.default_rng([num, size])
    leaves = (rng.standard_normal((num, size)) * 10.0 ** rng.integers(-3, 4, (num, size))).astype(dtype)
    leaves.flags.writeable = False
    return leaves


@pytest.mark.parametrize(
    ("leaves", "nodes"),
    [
        (range(8), [(0, 8)]),
        (range(4), [(0, 4)]),
        (range(3), [(0, 2), (2, 3)]),
        (range(3, 7), [(3, 4), (4, 6), (6, 7)]),
        ([1, 4, 5, 6, 7], [(1, 2), (4, 8)]),
        ([], []),
    ],
)
def test_the_fewest_nodes_that_hold_some_leaves(leaves, nodes):
    assert deterministic.cover((0, 8), leaves) == nodes


def test_halves_of_odd_nodes():
    assert deterministic.halves((0, 5)) == ((0, 3), (3, 5))
    assert deterministic.halves((3, 5)) == ((3, 4), (4, 5))


def test_folding_changes_the_first_of_two_arrays_and_keeps_what_has_no_sibling():
    sums = {(0, 2): np.array([1.0]), (2, 3): np.array([2.0]), (3, 4): np.array([4.0]), (5, 6): np.array([8.0])}
    held = deterministic.fold((0, 8), sums)
    assert {node: x.tolist() for node, x in held.items()} == {(0, 4): [7.0], (5, 6): [8.0]}
    assert sums[0, 2][0] == 7.0
    assert deterministic.fold((0, 8), {}) == {}


@pytest.mark.parametrize("num", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_any_number_of_ranks_gets_the_bits_of_the_definition(num, dtype):
    wanted = summed((0, num), leaves_of(num, 61, dtype)).tobytes()
    for n in range(1, min(num, 7) + 1):
        found = thread_comm.run(n, lambda world, n=n: allreduced(world, num, bounds(num, n), 61, dtype))
        assert set(found) == {wanted}, n


def allreduced(world, num, ends, size, dtype="f4"):
    """With rank r holding the leaves between two of ``ends``."""
    leaves, root = leaves_of(num, size, dtype), (0, num)
    held = [deterministic.cover(root, range(first, end)) for first, end in itertools.pairwise(ends)]
    own = {node: summed(node, leaves).copy() for node in held[world.rank]}
    out = np.empty(size, dtype)
    run_until_complete(deterministic.allreduce(own, held, root, out, world.comm, 16))
    return out.tobytes()


def test_order_matters_for_these_numbers():
    leaves = leaves_of(8)
    assert summed((0, 8), leaves).tobytes() != leaves.sum(axis=0).tobytes()


def test_uneven_runs_and_long_arrays():
    size = 300_000  # many segments
    wanted = summed((0, 11), leaves_of(11, size)).tobytes()
    for ends in ([0, 1, 2, 11], [0, 7, 11], [0, 4, 5, 6, 11]):
        assert set(thread_comm.run(len(ends) - 1, lambda world, ends=ends: allreduced(world, 11, ends, size))) == {
            wanted
        }


def test_fewer_elements_than_ranks():
    wanted = summed((0, 4), leaves_of(4, 2)).tobytes()
    assert set(thread_comm.run(4, lambda world: allreduced(world, 4, [0, 1, 2, 3, 4], 2))) == {wanted}


def test_leaves_that_are_scattered_over_ranks():
    """As where neighboring ranks are on different nodes."""
    leaves, root = leaves_of(8), (0, 8)
    held = [deterministic.cover(root, each) for each in ([0, 1, 4, 5], [2, 3, 6, 7])]

    def one(world):
        out = np.empty(40, "f4")
        own = {node: summed(node, leaves).copy() for node in held[world.rank]}
        run_until_complete(deterministic.allreduce(own, held, root, out, world.comm, 16))
        return out.tobytes()

    assert set(thread_comm.run(2, one)) == {summed(root, leaves).tobytes()}


@pytest.mark.parametrize(("num", "n", "nodes"), [(8, 2, 1), (8, 4, 1), (6, 4, 2)])
def test_bytes_sent(num, n, nodes):
    size = 1200
    ends = bounds(num, n)

    def one(world):
        before = world.comm.traffic.messages, world.comm.traffic.nbytes
        allreduced(world, num, ends, size)
        return world.comm.traffic.messages - before[0], world.comm.traffic.nbytes - before[1]

    held = [len(deterministic.cover((0, num), range(*each))) for each in itertools.pairwise(ends)]
    assert max(held) == nodes
    assert thread_comm.run(n, one) == [(2 * (n - 1), (n - 1) * (k + 1) * size * 4 // n) for k in held]
