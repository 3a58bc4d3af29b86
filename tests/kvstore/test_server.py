"""A rank's end of the exchange with others: what is on its way stays kept."""

import threading
import time

import numpy as np
import pytest

from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.kvstore.serve import serve
from hpcdp.kvstore.server_loop import Message, MessageKind, Server


class OnItsWay:
    def test(self):
        return False


class DropsAStore:
    """While it is asked whether it has arrived, garbage collection finds a store, which says that it ends."""

    def __init__(self, server, to):
        self._server, self._to, self._asked = server, to, False

    def test(self):
        if not self._asked:
            self._asked = True
            self._server.tell(self._to, Message(MessageKind.DONE))
        return True


class SlowCommunicator:
    def __init__(self, comm):
        self._comm, self.sent = comm, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, x, dest, tag):
        self.sent.append(OnItsWay())
        return self.sent[-1]


def test_a_store_that_is_dropped_while_another_sends_loses_no_message():
    def one(world):
        other = 1 - world.rank
        server = Server.of(world, has_servers=False)
        comm = server.comm
        slow = server.comm = SlowCommunicator(comm)
        server.tell(other, Message(MessageKind.DONE))
        with server._counting:
            server._sending.append(DropsAStore(server, other))
        server.tell(other, Message(MessageKind.DONE))
        with server._counting:
            kept = list(server._sending)
            server._sending.clear()
            server.comm = comm
        assert len(slow.sent) == 3
        assert set(kept) == set(slow.sent)

    thread_comm.run(2, one, 1)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_store_is_kept_until_all_its_workers_have_dropped_it(ranks):
    """Also by nodes whose own workers have dropped it: others ask for the keys that lie there."""

    def one(world):
        server = Server.of(world, has_servers=False)
        for staleness in (None, 1):
            store = kvstore.create("dist_async", world, staleness=staleness)
            for key in range(world.size):
                store.init(key, np.full(5, key, np.float32))
            store.set_optimizer(optim.SGD(lr=0.5))
            store.barrier()
            if world.rank != ranks - 1:
                del store
            world.barrier()
            if world.rank == ranks - 1:
                for key in range(world.size):
                    store.push(key, np.full(5, 2, np.float32))
                    assert store.pull(key)[0] == key - 1
                assert len(server.stores) == 1
                del store
            until = time.monotonic() + 20
            while server.stores and time.monotonic() < until:
                time.sleep(1e-3)
            assert not server.stores
            world.barrier()

    thread_comm.run(ranks, one, 1)


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_world_ends_on_one_rank_after_others_have_dropped_it(ranks):
    """Ranks that drop a world free it at different times, so some find it at the end of the program and some do not."""

    def one(world):
        part = world.split(0)
        store = kvstore.create("dist_async", part)
        store.init("w", np.full(3, world.rank, "f4"))
        del store
        if world.rank == ranks - 1:
            ending = threading.Thread(target=part.finish, daemon=True)
            ending.start()
            ending.join(20)
            assert not ending.is_alive(), "it waits for ranks that have no such world"
        world.barrier()

    thread_comm.run(ranks, one, 1)


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 0), (3, 0), (4, 0), (9, 0), (3, 2), (1, 3)])
def test_workers_leave_a_store_by_two_messages_a_rank(workers, servers):
    """From each to each it would be n (n - 1): a job of 1,000 ranks would end with a million."""
    ends = []

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(3, "f4"))
        store.set_optimizer(optim.SGD(lr=1.0))
        store.push("w", np.ones(3, "f4"))
        assert float(store.pull("w")[0]) < 0
        server = store._server
        if server is None:
            assert workers == 1
            return
        ends.append(server)
        world.barrier()
        before = sum(each.comm.traffic.messages for each in ends)
        world.barrier()
        if world.rank == workers - 1:
            time.sleep(0.05)
            assert all(each.stores for each in ends), "one has not left yet"
        del store
        deadline = time.monotonic() + 20
        while any(each.stores or each._left for each in ends) and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert not any(each.stores or each._left for each in ends)
        sent = sum(each.comm.traffic.messages for each in ends) - before
        assert sent == (workers - 1) + (workers + servers - 1)
        world.barrier()

    def served(whole):
        ends.append(Server.of(whole, has_servers=True))
        serve(whole)

    thread_comm.run(workers, one, 1, servers, served)
