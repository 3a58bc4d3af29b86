"""Parts of a world are worlds: their ranks, nodes and rails, and what they compute together."""

import contextlib
import gc
import io
import os
import re
import signal
import time
import weakref
from collections import Counter

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import checkpoint, kvstore, nn, optim
from hpcdp.comm import thread_comm, watchdog
from hpcdp.comm.watchdog import Watchdog
from hpcdp.errors import ConfigError, WorldAborted


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
    check(thread_comm.run(n, lambda world: seen(world, color(world.rank)), per_node))


def test_parts_of_parts_end_with_the_world():
    ended, held = [], []

    class Ends:
        def __init__(self, rank):
            self.rank = rank

        def end(self):
            ended.append(self.rank)

    def rank(world):
        inner = world.split(world.rank % 2).split(world.rank // 2)
        inner.endings.add(inner.keep(Ends, lambda: Ends(world.rank)).end)
        held.append(inner)
        return inner.size, inner.split(0).rank

    assert thread_comm.run(5, rank) == [(1, 0)] * 5
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
        part = world.split(0)
        for each in (world, part):
            for fails in (False, True):
                each.endings.add(each.keep(fails, lambda fails=fails: Ends(world.rank, fails)).end)
        with pytest.raises(ArithmeticError):
            world.finish()
        seen = [fails for rank, fails in ended if rank == world.rank]
        world.endings.clear()
        part.endings.clear()
        return seen

    assert thread_comm.run(2, rank) == [[True, False, True, False]] * 2


def test_the_world_of_all_with_servers_in_it_is_not_split():
    def rank(world):
        assert world.split(0).size == 2
        with raises(ConfigError, operation="split", got="servers"):
            world.whole.split(0)

    thread_comm.run(2, rank, num_servers=1)


@pytest.mark.parametrize("color", [-1, 1.5, None, "a", 2**31, np.float64(1)])
def test_a_color_that_mpi_does_not_take_is_refused(color):
    def rank(world):
        with raises(ConfigError, operation="split", where="color", expected=[0, 2147483647]):
            world.split(color)
        return [world.split(each).size for each in (world.rank == 0, np.bool_(world.rank), np.int8(3), 2**31 - 1)]

    assert thread_comm.run(3, rank) == [[1, 1, 3, 3], [2, 2, 3, 3], [2, 2, 3, 3]]


@pytest.mark.mpi
def test_on_real_ranks():
    world = hpcdp.init()
    for color in (0, world.rank, world.rank % 2):
        check(world.comm.allgather_json(seen(world, color)))


def uses(part):
    x = np.ones(3)
    return {
        "allreduce": lambda: hpcdp.allreduce(x, world=part),
        "iallreduce": lambda: hpcdp.iallreduce(x, world=part),
        "barrier": part.barrier,
        "split": lambda: part.split(0),
        "create": lambda: kvstore.create("dist_sync", part),
        "Manager": lambda: checkpoint.Manager("nowhere", part),
        "with": part.__enter__,
        "Trainer": lambda: hpcdp.Trainer(nn.Dense(2, 3).parameters(), optim.SGD(0.1), part),
        "keep": lambda: part.keep("something", list),
    }


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_closed_world_is_refused_by_name(n):
    def rank(world):
        with world.split(world.rank % 2) as part:
            request = hpcdp.iallreduce(np.full(3, 1.0 + world.rank), world=part)
            inner = part.split(0)
        assert request.test()  # what was under way has ended
        assert part.is_closed and inner.is_closed and not world.is_closed and world.parts == []
        part.close()
        assert (part.rank, part.size) == (world.rank // 2, (n + 1 - world.rank % 2) // 2)
        for each in (part, inner):
            for name, use in uses(each).items():
                with raises(ConfigError, operation=name, got=[part.size, "close()"]):
                    use()
        for name, use in (("close", world.close), ("with", world.__enter__)):
            with raises(ConfigError, operation=name, expected="split()"):
                use()
        world.barrier()
        return world.split(0).size

    assert thread_comm.run(n, rank) == [n] * n


def test_an_error_in_its_context_closes_a_world_at_once():
    def rank(world):
        ended = []

        class Ends:
            def end(self):
                ended.append(world.rank)

        ends = Ends()
        with pytest.raises(ArithmeticError), world.split(0) as part:
            part.endings.add(ends.end)
            raise ArithmeticError
        return part.is_closed, ended  # what is under way may wait for others, which have not failed

    assert thread_comm.run(2, rank) == [(True, [])] * 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_world_goes_with_the_last_that_holds_it(n):
    """At once: not when garbage is collected, which may be thousands of worlds later."""

    def rank(world):
        gc.disable()
        part = world.split(world.rank % 2)
        hpcdp.allreduce(np.ones(3), world=part)
        hpcdp.iallreduce(np.ones(3), world=part).wait()
        world.barrier()  # all have what the first rank has made for them
        comm, gone = part.comm, [weakref.ref(part), weakref.ref(part.comm)]
        del part
        seen = [gone[0]() is None, gone[1]() is comm, world.parts]
        del comm
        return [*seen, gone[1]() is None]

    try:
        assert thread_comm.run(n, rank) == [[True, True, [], True]] * n
    finally:
        gc.enable()


def abandon(part):
    with contextlib.suppress(KeyboardInterrupt), Watchdog.of(part).watching("barrier"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda part: part.close(), "has closed this world"),
        (abandon, "has abandoned a call of this world"),
    ],
)
def test_a_rank_that_waits_in_a_world_that_another_has_left_is_told(leave, said, monkeypatch):
    monkeypatch.setattr(watchdog, "_DEATH_S", 0.1)
    reports = [io.StringIO() for _ in range(3)]

    def rank(world):
        part = world.split(0)
        part.kept[Watchdog] = Watchdog(part, 0, 2, reports[world.rank])
        part.comm.barrier()
        if world.rank == 1:
            leave(part)
        else:
            part.barrier()

    with pytest.raises(WorldAborted):
        thread_comm.run(3, rank)
    reported = "".join(each.getvalue() for each in reports)
    assert re.search(rf"barrier cannot end: rank 1 \(.*\) {said}; the job ends now\n", reported)


@pytest.mark.mpi
def test_a_call_that_an_exception_has_ended_halfway_leaves_a_world_that_only_refuses():
    """Others may have met this rank in the call, and the world that it was split from works on."""
    world = hpcdp.init()
    part = world.split(0)
    for _ in range(20):
        part.barrier()

    def interrupted(*_):
        raise TimeoutError("a handler's own")

    if world.rank != world.size - 1:
        time.sleep(0.5 * (world.rank == 0))
        part.barrier()
    elif world.size > 1:
        before = signal.signal(signal.SIGALRM, interrupted)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError):
            part.barrier()
        signal.signal(signal.SIGALRM, before)
        for name in ("allreduce", "allgather"):
            with raises(WorldAborted, operation=name, got=["TimeoutError", "barrier"], remedy="end the job"):
                getattr(hpcdp, name)(np.ones(3), world=part)
        with raises(WorldAborted, operation="barrier"):
            part.barrier()
        part.close()
    world.barrier()
    assert hpcdp.allreduce(np.ones(2), world=world)[0] == world.size


def held():
    """What this rank holds: threads, descriptors, and communicators, where the library numbers them."""
    from mpi4py import MPI

    made = MPI.COMM_SELF.Dup()
    number = made.py2f() if MPI.get_vendor()[0] == "Open MPI" else 0
    made.Free()
    return np.array([len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), number])


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
def test_communicators_of_worlds_that_nobody_holds_are_used_again():
    """Also where one rank keeps its own for some time, or drops it later than others."""
    world, kept = hpcdp.init(), []

    def make(color):
        part = world.split(color)
        part.barrier()
        if world.rank == 0 and len(kept) < 3:
            kept.append(part)
        return part

    for color in (0, world.rank % 2, 0, 0):
        make(color)
    before = held()
    for number in range(30):
        part = make(number % 2 * (world.rank % 2))
        if number % 3 == world.rank:
            part.close()
    assert (held() - before <= [0, 2, 8]).all(), (before, held())
    kept.clear()
    make(0)
    assert (held() <= before).all()
