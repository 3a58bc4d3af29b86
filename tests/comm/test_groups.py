"""Subsets, nodes, rails and meshes of ranks, and worlds of communicators that a program owns."""

import contextlib

import numpy as np
import pytest

import hpcdp
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError


def test_ranks_outside_of_a_subset_go_on_undisturbed():
    def rank(world):
        if world.rank in (0, 3):
            for _ in range(3):
                part = world.subset([3, 0])
                assert (part.rank, part.size) == ((0, 2) if world.rank == 0 else (1, 2))
                assert hpcdp.allreduce(np.full(2, world.rank), world=part).tolist() == [3, 3]
                assert hpcdp.allgather_object(world.rank, part) == [0, 3]
                part.close()
        elif world.rank == 1:
            assert world.subset([1]).size == 1
        return hpcdp.allreduce(np.ones(1), world=world)[0]

    for nodes in (None, 1, 3):
        assert thread_comm.run(5, rank, nodes) == [5] * 5


@pytest.mark.parametrize("ranks", [[0, 0], [1, 2], [0, 9], [-1, 0], []])
def test_ranks_that_are_no_subset_with_this_rank_are_refused(ranks):
    with pytest.raises(ConfigError) as caught:
        thread_comm.run(1, lambda world: world.subset(ranks))
    assert caught.value.where == "ranks"


def test_nodes_rails_and_meshes():
    def rank(world):
        node, rail = world.node_world, world.rail_world
        assert (node.rank, node.size, rail.rank) == (world.local_rank, world.local_size, world.node)
        assert world.node_world is node
        mesh = world.mesh(2, 3)
        assert (mesh.row, mesh.col) == divmod(world.rank, 3)
        assert hpcdp.allgather(np.array(world.rank), mesh.row_world).tolist() == [3 * mesh.row + c for c in range(3)]
        assert hpcdp.allgather(np.array(world.rank), mesh.col_world).tolist() == [mesh.col, mesh.col + 3]
        with pytest.raises(ConfigError):
            world.mesh(4, 2)

    for nodes in (None, 1, 2, 4):
        thread_comm.run(6, rank, nodes)


@pytest.mark.mpi
def test_a_program_s_communicator_becomes_a_world_and_stays_the_program_s():
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    for _ in range(3):
        world = hpcdp.World.from_comm(own)
        assert (world.rank, world.size) == (own.rank, own.size)
        ranks = hpcdp.allgather(np.array(MPI.COMM_WORLD.rank), world)
        assert ranks.tolist() == list(range(MPI.COMM_WORLD.rank % 2, MPI.COMM_WORLD.size, 2))
        part = world.split(0)
        assert hpcdp.allreduce(np.ones(1), world=part)[0] == own.size
        world.close()
        with pytest.raises(ConfigError):
            hpcdp.allreduce(np.ones(1), world=world)
    assert own.allreduce(1) == own.size
    own.Free()
    for wrong in (None, 3, MPI.COMM_NULL, hpcdp.init()):
        with pytest.raises(ConfigError) as caught:
            hpcdp.World.from_comm(wrong)
        assert caught.value.where == "comm"


@pytest.mark.mpi
def test_subsets_of_real_ranks():
    world = hpcdp.init()
    members = list(range(0, world.size, 2))
    if world.rank in members:
        for _ in range(3):
            part = world.subset(members)
            assert hpcdp.allgather(np.array(world.rank), part).tolist() == members
            del part
    mesh = world.mesh(1, world.size)
    assert mesh.row_world.size == world.size and mesh.col_world.size == 1
    assert hpcdp.alltoall(np.arange(world.size) + 10 * world.rank).tolist() == [
        world.rank + 10 * other for other in range(world.size)
    ]
    if world.size > 1:
        left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        big = np.arange(50_000) + world.rank
        np.testing.assert_array_equal(hpcdp.sendrecv(big, right, left), np.arange(50_000) + left)


def test_a_barrier_keeps_the_meetings_that_live_on_some_rank():
    """Otherwise only some ranks would release what other ranks wait for, and the next barrier would hang."""

    class Holder:
        def released(self):
            entered.append(1)
            return contextlib.nullcontext()

    entered = []

    def rank(world):
        holder = Holder()
        world.meetings.add(holder.released)
        if world.rank == 1:
            del holder
        world.barrier()
        kept = bool(world.meetings)
        world.barrier()
        if world.rank == 0:
            del holder
        world.barrier()
        return kept, bool(world.meetings)

    assert thread_comm.run(2, rank) == [(True, False)] * 2
    assert len(entered) == 2  # on rank 0
