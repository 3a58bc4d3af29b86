"""Who is dead, as workers of an asynchronous store see it; processes that are killed: test_lost_processes.py."""

from raises import raises
from small_stores import added, full

from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, HpcdpError
from hpcdp.kvstore.server_loop import Message, MessageKind


def test_nobody_is_dead_among_the_living():
    def one(world):
        store = kvstore.create("dist_async", world)
        for wrong in ("x", -1, 0, True):
            with raises(ConfigError, operation="num_dead_node", where="timeout_s"):
                store.num_dead_node(wrong)
        return store.num_dead_node(timeout_s=10)

    assert thread_comm.run(4, one, 2) == [0] * 4


def test_the_dead_of_all_nodes_count_once():
    """Four workers on two nodes; what the kernel and the MPI library would tell is put in their place."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init(["a", "b"], [full(0), full(0)])
        store.set_optimizer(optim.SGD(lr=1.0))
        table, lost = store._table, store._server.comm.lost
        world.barrier()
        if world.node == 1:
            table.gone = lambda: [3]
        world.barrier()
        found = [store.num_dead_node(10)]
        world.barrier()
        if world.rank < 2:
            lost.add(3)
            found.append(store.num_dead_node(10))
            lost.add(2)  # whom it has asked so far
            found.append(store.num_dead_node(10))
            with raises(HpcdpError, operation="key-value store", where="on rank 2"):
                store._transfer._ask_and_wait(2, Message(MessageKind.GONE, store._number))
        world.barrier()
        lost.clear()
        return found

    assert thread_comm.run(4, one, 2) == [[1, 1, 2]] * 2 + [[1]] * 2


def test_a_rank_that_dies_in_the_middle_of_an_update_is_named():
    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", full(1))
        store.set_updater(added)
        if world.rank == 1:
            store._table.items["w"].cells[0]._numbers[:2] = 1, 1  # as it leaves it when it is killed there
        world.barrier()
        if world.rank == 0:
            with raises(HpcdpError, operation="key-value store", where="key 'w'", got="rank 1"):
                store.pull("w").wait()
        world.barrier()

    thread_comm.run(2, one)
