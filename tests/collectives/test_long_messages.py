"""Long messages inside a node, which both ranks copy from process to process."""

import os
import threading

import numpy as np
import pytest

import hpcdp
from hpcdp import kernels
from hpcdp.collectives.point_to_point import SHORT_IN_NODE_NBYTES
from hpcdp.comm import thread_comm
from hpcdp.comm.node_messages import Mailbox

_NOBODY = (1 << 22) + 1
"""No process has this number."""
_BEGUN = 3
_PATTERN = np.resize(np.arange(251, dtype=np.uint8), 251 << 10)
_SIZES = [
    SHORT_IN_NODE_NBYTES - 1, SHORT_IN_NODE_NBYTES, SHORT_IN_NODE_NBYTES + 1, (96 << 10) + 4097, (1 << 20) - 3,
    (3 << 20) + 5,
]  # fmt: skip


def bytes_from(rank, nbytes, salt=0):
    """Return bytes that depend on the rank and the place, without a period of a power of two."""
    return np.resize(_PATTERN, nbytes) + np.uint8(7 * rank + salt)


def send_long_arrays(world):
    """Each rank sends arrays of each size to the next one by each function, several times."""
    n, me = world.size, world.rank
    right, left = (me + 1) % n, (me - 1) % n
    for nbytes in _SIZES:
        out = np.zeros(nbytes, np.uint8)
        for salt in range(3):
            mine, theirs = bytes_from(me, nbytes, salt), bytes_from(left, nbytes, salt)
            assert hpcdp.sendrecv(mine, right, left, out, 1, world) is out
            np.testing.assert_array_equal(out, theirs)
            if n > 1:
                for turn in (0, 1):
                    if me % 2 == turn and (me + 1 < n or n % 2 == 0):
                        hpcdp.send(mine, right, 2, world)
                    elif me % 2 != turn and (me > 0 or n % 2 == 0):
                        np.testing.assert_array_equal(hpcdp.recv(None, left, 2, world), theirs)
            sending = hpcdp.isend(mine, right, 3, world)
            receiving = hpcdp.irecv(out, left, 3, world)
            assert receiving.wait() is out
            np.testing.assert_array_equal(out, theirs)
            sending.wait()
        spread = np.zeros((nbytes, 2), np.uint8)
        hpcdp.sendrecv(np.stack([mine, mine], 1)[:, 1], right, None, spread[:, 0], 4, world)
        np.testing.assert_array_equal(spread, np.stack([theirs, np.zeros_like(theirs)], 1))


@pytest.mark.each_value
@pytest.mark.parametrize("has_cores", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_long_arrays_of_all_sizes(n, has_cores):
    def rank(world):
        world.kept[Mailbox]._has_cores = has_cores
        send_long_arrays(world)

    thread_comm.run(n, rank)


def test_an_offer_waits_while_the_queue_is_full():
    sizes, all_sent = [*[SHORT_IN_NODE_NBYTES] * 8, SHORT_IN_NODE_NBYTES + 9, 300_001], threading.Event()

    def rank(world):
        if world.rank == 0:
            sent = [hpcdp.isend(bytes_from(i, nbytes), 1, world=world) for i, nbytes in enumerate(sizes)]
            all_sent.set()
            for operation in sent:
                operation.wait()
        else:
            assert all_sent.wait(30)
            for i, nbytes in enumerate(sizes):
                np.testing.assert_array_equal(hpcdp.recv(None, 0, world=world), bytes_from(i, nbytes))

    thread_comm.run(2, rank)


@pytest.mark.ordinary_ranks(2, 4)
@pytest.mark.mpi
def test_real_ranks_send_long_arrays_of_all_sizes():
    send_long_arrays(hpcdp.init())


def exchange_between_all(world):
    """Every rank has long arrays for and from all others under way at once."""
    n, me, nbytes = world.size, world.rank, 300_001
    for salt in range(3):
        sends = [hpcdp.isend(bytes_from(me, nbytes + dest, salt), dest, 5, world) for dest in range(n)]
        receives = [hpcdp.irecv(None, source, 5, world) for source in reversed(range(n))]
        for source, operation in zip(reversed(range(n)), receives, strict=True):
            np.testing.assert_array_equal(operation.wait(), bytes_from(source, nbytes + me, salt))
        for operation in sends:
            operation.wait()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_long_arrays_between_all_ranks(n):
    thread_comm.run(n, exchange_between_all)


@pytest.mark.mpi
def test_real_ranks_exchange_long_arrays_between_all():
    exchange_between_all(hpcdp.init())


@pytest.mark.parametrize("refused", [{"read"}, {"write"}, {"read", "write"}])
def test_memory_that_one_rank_or_both_cannot_copy(refused):
    """The receiver cannot read if the sender gives a wrong process, the sender cannot write if the receiver does."""

    def rank(world):
        n, me = world.size, world.rank
        mailbox = world.kept[Mailbox]
        mailbox._has_cores = True
        if ("read" if me == 0 else "write") in refused:
            mailbox._process = _NOBODY
        for i in range(4):
            x, out = bytes_from(me, 300_000 + i), np.zeros(300_000 + i, np.uint8)
            if me == 0:
                hpcdp.send(x, 1, 0, world)
            else:
                hpcdp.recv(out, 0, 0, world)
                np.testing.assert_array_equal(out, bytes_from(0, 300_000 + i))
        for _ in range(4):
            hpcdp.sendrecv(x, n - 1 - me, n - 1 - me, out, 1, world)
            np.testing.assert_array_equal(out, bytes_from(1 - me, 300_003))
        return mailbox._can_offer

    assert thread_comm.run(2, rank)[0] == ("read" not in refused)


def offer_of(module, data):
    """Return the words of an offer of ``data``, and the queue of its receiver."""
    words, queue = np.zeros(module.OFFER_WORDS, np.int32), np.zeros(module.RING + 16 * 64, np.int32)
    header, number = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert module.push_offer(queue, 0, 0, header, number, words, os.getpid(), data, True, 0) == 0
    return words


@pytest.mark.parametrize("nbytes", [1, 4096, 70_001, (9 << 20) + 77, (130 << 20) + 1])
def test_both_ranks_copy_parts_of_an_offer(nbytes):
    module = kernels.load("shm_messages")
    data, out, nothing = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8), np.zeros(module.OFFER_WORDS, np.int32)
    data[::4099] = 7
    words = offer_of(module, data)
    answers = []
    giving = threading.Thread(target=lambda: answers.append(module.give(words, 10**9)))
    giving.start()
    while (answer := module.take(words, out, os.getpid(), 100, nothing)) == _BEGUN:
        pass
    giving.join()
    assert answers == [answer] == [module.READ]
    assert np.array_equal(out, data)


@pytest.mark.parametrize("can_write", [True, False])
def test_the_receiver_waits_for_a_part_that_the_sender_has_claimed(can_write):
    module = kernels.load("shm_messages")
    nbytes, last = 300_001, 2 * 4096
    data, out, nothing = bytes_from(0, nbytes), np.zeros(nbytes, np.uint8), np.zeros(module.OFFER_WORDS, np.int32)
    words = offer_of(module, data)
    words[module.ANSWER], words[module._CLAIMS] = _BEGUN, 2 << 16
    assert module.take(words, out, os.getpid(), 100, nothing) == _BEGUN
    first = (nbytes // 4096 + 1) * 4096 - last
    np.testing.assert_array_equal(out[:first], data[:first])
    assert not out[first:].any()
    if can_write:
        out[first:] = data[first:]
        words[module._WRITTEN] = 2
    else:
        words[module._IS_UNWRITABLE] = 1
    assert module.take(words, out, os.getpid(), 0, nothing) == module.READ == words[module.ANSWER]
    np.testing.assert_array_equal(out, data)
    assert module.give(words, 1) == module.READ


def test_receives_wait_for_a_sender_that_is_late():
    """Pretend that the data are complete only when the receiver has asked for them some more times."""

    def rank(world):
        mailbox, nbytes, polls = world.kept[Mailbox], 500_000, []
        copy, module = mailbox.copy, mailbox._kernels

        def copy_late(number, data):
            polls.append(number)
            if len(polls) < 4:
                return _BEGUN
            return module.READ if mailbox._offers[number][module.ANSWER] == module.READ else copy(number, data)

        class Late:
            def __getattr__(self, name):
                return getattr(module, name)

            def receive(self, *args):
                sender, answer = module.receive(*args), args[5]
                if sender >= 0 and answer.size:
                    answer[0] = _BEGUN
                return sender

        mailbox.copy = copy_late
        mailbox.__dict__["_kernels"] = Late()
        for i in range(3):
            if world.rank == 0:
                hpcdp.send(bytes_from(0, nbytes, i), 1, 0, world)
            else:
                polls.clear()
                out = np.zeros(nbytes, np.uint8)
                np.testing.assert_array_equal(hpcdp.recv(out, 0, 0, world), bytes_from(0, nbytes, i))
                assert len(polls) == 4

    thread_comm.run(2, rank)
