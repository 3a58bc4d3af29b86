"""Locks of a node: who holds one is alone, who shares one is not, and the dead hold none."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpcdp.comm import thread_comm
from hpcdp.comm.shared_memory import NodeLocks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_who_holds_a_lock_is_alone(ranks):
    counts = {0: 0, 1: 0}

    def one(world):
        locks = NodeLocks(world.node_comm)
        for i in range(200):
            with locks.hold(i % 2):
                before = counts[i % 2]
                if i % 20 == 0:
                    time.sleep(1e-4)
                counts[i % 2] = before + 1

    thread_comm.run(ranks, one)
    assert counts == {0: 100 * ranks, 1: 100 * ranks}


def test_threads_of_one_rank_exclude_each_other():
    locks, count = NodeLocks(None), [0]

    def adds():
        for _ in range(200):
            with locks.hold(3):
                before = count[0]
                time.sleep(0)
                count[0] = before + 1

    both = [threading.Thread(target=adds) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert count == [400]


def test_those_who_share_meet_and_do_not_keep_others_out_for_ever():
    inside, together = threading.Barrier(2, timeout=20), []

    def one(world):
        locks = NodeLocks(world.node_comm)
        if world.rank < 2:
            with locks.hold(0, shared=True):
                inside.wait()  # both at once
            world.barrier()
            deadline = time.monotonic() + 20
            while not together and time.monotonic() < deadline:
                with locks.hold(0, shared=True):
                    time.sleep(1e-3)
        else:
            world.barrier()
            with locks.hold(0):
                together.append(time.monotonic())

    thread_comm.run(3, one)
    assert together


def test_an_exception_frees_it():
    locks = NodeLocks(None)
    with pytest.raises(KeyError), locks.hold(1):
        raise KeyError
    with locks.hold(1):
        pass


def test_nobody_is_gone_while_all_live():
    def one(world):
        locks = NodeLocks(world.node_comm)
        gone = locks.gone()
        world.barrier()
        return gone

    assert thread_comm.run(3, one) == [[]] * 3


@pytest.mark.parametrize("forks", ["", "os.fork() or time.sleep(21) or os._exit(0); "])
def test_the_dead_hold_nothing(forks):
    """The lock of a process that is killed, tried by one that was made by its parent; its own child may live on."""
    read, write = os.pipe()
    locks = NodeLocks(None)
    descriptor = os.open(f"/proc/self/fd/{locks._file}", os.O_RDWR)
    os.set_inheritable(descriptor, True)
    code = (
        "import os, sys, time; from hpcdp.comm.shared_memory import NodeLocks; other = NodeLocks(None); "
        f"os.close(other._file); other._file = {descriptor}\n"
        f"with other.hold(0):\n    {forks}os.write({write}, b'x'); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], pass_fds=[descriptor, write])
    os.close(descriptor)
    try:
        assert os.read(read, 1) == b"x"
        taken = []

        def take():
            with locks.hold(0):
                taken.append(time.monotonic())

        waiting = threading.Thread(target=take)
        waiting.start()
        time.sleep(0.2)
        assert not taken
        holder.send_signal(signal.SIGKILL)
        waiting.join(20)
        assert taken
    finally:
        holder.kill()
        holder.wait()
        os.close(read)
        os.close(write)
