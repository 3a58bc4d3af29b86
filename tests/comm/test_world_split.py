"""Parts of a world are worlds: their ranks, nodes and rails, and what they compute together."""

from collections import Counter

import numpy as np
import pytest

import hpcdp
from hpcdp.comm import threads
from hpcdp.errors import ConfigError


def seen(world, color):
    part = world.split(color)
    x = np.full(100, 1.0 + world.rank)
    hpcdp.allreduce(x, world=part)
    shared = part.node_memory.alloc((part.node_memory.size,), np.int64)
    shared[part.node_memory.rank] = world.rank
    part.barrier()
    return {
        "color": color, "rank": world.rank, "node": world.node, "sum": x[0], "shared": shared.tolist(),
        "part": [part.rank, part.size, part.node, part.num_nodes, part.local_rank, part.local_size, part.num_rails],
    }  # fmt: skip


def check(everyone):
    for color in {each["color"] for each in everyone}:
        members = [each for each in everyone if each["color"] == color]
        nodes = list(dict.fromkeys(each["node"] for each in members))
        sizes = Counter(each["node"] for each in members)
        for rank, each in enumerate(members):
            node = each["node"]
            mates = [other["rank"] for other in members if other["node"] == node]
            assert each["part"] == [
                rank, len(members), nodes.index(node), len(nodes), mates.index(each["rank"]), sizes[node],
                min(sizes.values()),
            ]  # fmt: skip
            assert each["sum"] == sum(1.0 + other["rank"] for other in members)
            assert each["shared"] == mates


@pytest.mark.parametrize("color", [lambda rank: 0, lambda rank: rank, lambda rank: rank % 2, lambda rank: rank // 3])
@pytest.mark.parametrize(("n", "per_node"), [(1, None), (3, None), (5, 2), (6, [3, 1, 2])])
def test_on_thread_ranks(n, per_node, color):
    check(threads.run(n, lambda world: seen(world, color(world.rank)), per_node))


def test_parts_of_parts_end_with_the_world():
    ended = []

    class Ends:
        def __init__(self, rank):
            self.rank = rank

        def end(self):
            ended.append(self.rank)

    def rank(world):
        inner = world.split(world.rank % 2).split(world.rank // 2)
        inner.endings.add(inner.keep(Ends, lambda: Ends(world.rank)).end)
        return inner.size, inner.split(0).rank

    assert threads.run(5, rank) == [(1, 0)] * 5
    assert sorted(ended) == [0, 1, 2, 3, 4]


def test_an_ending_that_fails_keeps_no_other_from_its_turn():
    ended = []

    class Ends:
        def __init__(self, rank, fails):
            self.rank, self.fails = rank, fails

        def end(self):
            ended.append((self.rank, self.fails))
            if self.fails:
                raise ArithmeticError("an update that has failed")

    def rank(world):
        for each in (world, world.split(0)):
            for fails in (False, True):
                each.endings.add(each.keep(fails, lambda fails=fails: Ends(world.rank, fails)).end)
        with pytest.raises(ArithmeticError):
            world.finish()
        seen = [fails for rank, fails in ended if rank == world.rank]
        world.endings.clear()
        world.parts.clear()
        return seen

    assert threads.run(2, rank) == [[True, False, True, False]] * 2


def test_the_world_of_all_with_servers_in_it_is_not_split():
    def rank(world):
        assert world.split(0).size == 2
        with pytest.raises(ConfigError, match="servers"):
            world.whole.split(0)

    threads.run(2, rank, num_servers=1)


@pytest.mark.parametrize("color", [-1, 1.5, None, "a", 2**31, np.float64(1)])
def test_a_color_that_mpi_does_not_take_is_refused(color):
    def rank(world):
        with pytest.raises(ConfigError, match=r"^split \[color\]: expected an integer from 0 to 2147483647, got "):
            world.split(color)
        return [world.split(each).size for each in (world.rank == 0, np.bool_(world.rank), np.int8(3), 2**31 - 1)]

    assert threads.run(3, rank) == [[1, 1, 3, 3], [2, 2, 3, 3], [2, 2, 3, 3]]


@pytest.mark.mpi
def test_on_real_ranks():
    world = hpcdp.init()
    for color in (0, world.rank, world.rank % 2):
        check(world.comm.allgather_json(seen(world, color)))
