import time

import numpy as np
import pytest
from raises import raises

from hpcdp.comm import thread_comm
from hpcdp.comm.consistency import require_same
from hpcdp.comm.shared_memory import NodeBarrier
from hpcdp.errors import ConfigError, MismatchError, WorldAborted


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_a_ring_of_messages_arrives_and_is_counted(n):
    def rank(world):
        left, right = (world.rank - 1) % n, (world.rank + 1) % n
        got = np.empty(3)
        receive = world.comm.irecv(got, left, tag=7)
        world.comm.isend(np.full(3, world.rank + 0.5), right, tag=7).wait()
        receive.wait()
        assert receive.test()
        assert world.comm.traffic.messages == 1
        assert world.comm.traffic.nbytes == 24
        return got[0]

    assert thread_comm.run(n, rank) == [(rank - 1) % n + 0.5 for rank in range(n)]


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix():
    def rank(world):
        if world.rank == 0:
            for value, tag in [(1.0, 5), (2.0, 6), (3.0, 5)]:
                world.comm.isend(np.array([value]), 1, tag)
            return []
        got = [np.empty(1) for _ in range(3)]
        for x, tag in zip(got, [6, 5, 5], strict=True):
            world.comm.irecv(x, 0, tag).wait()
        return [float(x[0]) for x in got]

    assert thread_comm.run(2, rank)[1] == [2.0, 1.0, 3.0]


def test_a_message_of_another_length_is_refused():
    def rank(world):
        if world.rank == 0:
            world.comm.isend(np.zeros(3), 1)
        else:
            world.comm.irecv(np.zeros(2), 0).wait()

    with raises(MismatchError, operation="receive", where="from 0, tag 0", expected=16, got=24):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(("n", "per_node"), [(1, None), (4, None), (4, 2), (5, 2), (7, 3)])
def test_nodes_and_rails(n, per_node):
    def rank(world):
        return world.node, world.local_rank, world.local_size, world.num_nodes, world.num_rails, world.rail_comm

    worlds = thread_comm.run(n, rank, per_node)
    size = per_node or n
    for number, (node, local_rank, local_size, num_nodes, num_rails, rail) in enumerate(worlds):
        assert (node, local_rank) == divmod(number, size)
        assert local_size == sum(other[0] == node for other in worlds)
        assert num_nodes == -(-n // size)
        assert num_rails == min(other[2] for other in worlds)
        assert (rail is not None) == (local_rank < num_rails)
        if rail is not None:
            assert (rail.rank, rail.size) == (node, num_nodes)


def test_nodes_of_given_sizes():
    def rank(world):
        return world.node, world.local_rank, world.local_size, world.num_rails, world.rail_comm is not None

    assert thread_comm.run(6, rank, ranks_per_node=(2, 1, 3)) == [
        (0, 0, 2, 1, True),
        (0, 1, 2, 1, False),
        (1, 0, 1, 1, True),
        (2, 0, 3, 1, True),
        (2, 1, 3, 1, False),
        (2, 2, 3, 1, False),
    ]


def test_node_memory_is_shared_inside_a_node_only():
    def rank(world):
        x = world.node_memory.alloc((world.local_size, 2), np.float32)
        x[world.local_rank] = world.rank + 1
        NodeBarrier(world.node_memory).barrier()
        return x.sum()

    assert thread_comm.run(5, rank, ranks_per_node=2) == [6, 6, 14, 14, 10]


def test_a_failing_rank_releases_the_others_and_its_error_is_the_one_raised():
    released = []

    def rank(world):
        if world.rank == 1:
            time.sleep(0.05)
            raise KeyError("mine")
        try:
            NodeBarrier(world.node_memory) if world.rank == 0 else world.comm.barrier()
        except WorldAborted:
            released.append(world.rank)
            raise

    with pytest.raises(KeyError, match="mine") as caught:
        thread_comm.run(3, rank)
    assert sorted(released) == [0, 2]
    assert caught.value.__notes__ == ["raised on thread rank 1 of 3"]


def test_a_rank_that_waits_in_shared_memory_is_released_too():
    def rank(world):
        gate = NodeBarrier(world.node_memory)
        if world.rank == 1:
            raise ValueError("gone")
        gate.barrier()

    with pytest.raises(ValueError, match="gone"):
        thread_comm.run(2, rank)


def test_a_rank_that_asks_for_a_message_in_a_loop_is_released_too():
    def rank(world):
        if world.rank == 1:
            raise ValueError("gone")
        message = world.comm.irecv(np.zeros(1), 1)
        while not message.test():
            time.sleep(0.001)

    with pytest.raises(ValueError, match="gone"):
        thread_comm.run(2, rank)


def test_json_is_gathered_by_rank_and_nothing_else_passes():
    assert thread_comm.run(3, lambda world: world.comm.allgather_json({"r": world.rank}))[2] == [
        {"r": 0},
        {"r": 1},
        {"r": 2},
    ]
    with pytest.raises(TypeError, match="not JSON serializable"):
        thread_comm.run(2, lambda world: world.comm.allgather_json(object()))


def test_broadcast_takes_the_roots_values():
    def rank(world):
        x = np.arange(4.0) * (world.rank + 1)
        world.comm.native_broadcast(x, 2)
        return x.tolist()

    assert thread_comm.run(3, rank) == [[0.0, 3.0, 6.0, 9.0]] * 3


def test_disagreement_is_the_same_error_on_every_rank():
    messages = []

    def rank(world):
        items = ["w (2, 3) float32", "b (3,) float64" if world.rank in (2, 3) else "b (3,) float32"]
        try:
            require_same(world.comm, "check", items)
        except MismatchError as error:
            messages.append(str(error))

    thread_comm.run(4, rank)
    assert len(messages) == 4
    assert set(messages) == {
        "check [item 2 of 2 on rank 0]: expected b (3,) float32 as on rank 0, got b (3,) float64 on ranks 2, 3; "
        "build the same model with the same options on every rank"
    }


def test_a_missing_item_is_named():
    with raises(MismatchError, operation="check", where="item 2 of 2 on rank 0", expected="rank 0"):
        thread_comm.run(3, lambda world: require_same(world.comm, "check", ["a", "b"][: 2 - (world.rank == 1)]))


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError):
        thread_comm.run(0, lambda world: None)
    with pytest.raises(ConfigError):
        thread_comm.run(2, lambda world: None, ranks_per_node=0)
    with raises(ConfigError, operation="thread_comm.run", got=[4, (2, 1)]):
        thread_comm.run(4, lambda world: None, ranks_per_node=(2, 1))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_numbers_left_at_a_gate_are_added_up(n):
    def rank(world):
        gate, found = NodeBarrier(world.node_memory), []
        for turn in range(50):
            found.append(gate.tally(world.rank + turn, -(2**40) * world.rank, 1))
            gate.barrier()
            found.append(gate.tally(turn * world.rank))
        return found

    ranks = sum(range(n))
    expected = [each for t in range(50) for each in ([ranks + n * t, -(2**40) * ranks, n], [t * ranks])]
    assert thread_comm.run(n, rank) == [expected] * n


def test_ranks_that_pass_a_gate_for_different_things_are_told():
    told = []

    def rank(world):
        gate = NodeBarrier(world.node_memory)
        try:
            gate.tally(1, 2) if world.rank else gate.tally(1)
        except MismatchError as error:
            told.append(str(error))

    thread_comm.run(2, rank)
    assert len(told) == 2
    assert all("expected the same call on every rank of this node" in text for text in told)
