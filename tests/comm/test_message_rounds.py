"""Exchanges of all ranks in rounds of messages, and calls that are repeated by them over hosts."""

import numpy as np
import pytest

import hpcdp
from hpcdp.comm import message_rounds, repeated, thread_comm
from hpcdp.comm.message_rounds import HEADER_NBYTES, WHOLE_NBYTES, RoutedBlock, rounds_of, routes_of
from hpcdp.errors import MismatchError


def warmed(world, call):
    """Make a call until it is repeated by kernels; return the messages and bytes of the last one."""
    for _ in range(repeated.FIRST_CALLS + 1):
        call()
    traffic = world.call_comm.traffic
    before = traffic.messages, traffic.nbytes
    call()
    return traffic.messages - before[0], traffic.nbytes - before[1]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_repeated_calls_of_all_kinds_give_the_same_as_first_ones(n):
    def rank(world):
        me = world.rank
        for dtype, count in ((np.float32, 5), (np.int64, 3), (np.complex64, 4), (np.float16, 2)):
            whole = [np.arange(count) + 10 * other for other in range(n)]
            for call in range(repeated.FIRST_CALLS // 2):
                x, total = whole[me].astype(dtype), sum(whole)
                assert hpcdp.allreduce(x.copy(), world=world).tolist() == total.tolist()
                root = call % n
                out = np.empty_like(x) if me == root else None
                reduced = hpcdp.reduce(x, root=root, world=world, out=out)
                assert reduced is (out if me == root else x) and (me != root or out.tolist() == total.tolist())
                shard = hpcdp.reduce_scatter(x, world=world)
                assert shard.tolist() == total[count * me // n : count * (me + 1) // n].tolist()
                assert hpcdp.broadcast(x.copy(), root, world).tolist() == whole[root].tolist()
                out = np.empty((n, count), dtype)
                assert hpcdp.allgather(x, world, out=out).tolist() == [part.tolist() for part in whole]
                uneven = [value for r, other in enumerate(whole) for value in other.tolist()[: r % 3]]
                assert hpcdp.allgather(x[: me % 3], world).tolist() == uneven
                gathered = hpcdp.gather(x[: me % 3], root, world)
                assert gathered is None if me != root else gathered.tolist() == uneven
                rows = np.arange(n * 2).reshape(n, 2).astype(dtype) + 10 * me
                expected = [[2 * me + 10 * r, 2 * me + 1 + 10 * r] for r in range(n)]
                assert hpcdp.alltoall(rows, world=world).tolist() == expected
                moved, counts = hpcdp.alltoall(rows[: me + 1], [me + 1] + [0] * (n - 1), world)
                assert counts.tolist() == [r + 1 if me == 0 else 0 for r in range(n)] and len(moved) == counts.sum()
                scattered = hpcdp.scatter(rows if me == root else None, root, world)
                assert scattered.tolist() == [[2 * me + 10 * root, 2 * me + 1 + 10 * root]]
        mean = [hpcdp.allreduce(np.full(2, me + 1.0), "mean", world, postscale=2.0).tolist() for _ in range(3)]
        assert mean == [[n + 1.0] * 2] * 3

    thread_comm.run(n, rank, 1)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 3, 15_000])
def test_messages_carry_what_the_formulas_say(n, count):
    def rank(world):
        x, out = np.ones(count, np.float32), np.empty((n, count), np.float32)
        sums = warmed(world, lambda: hpcdp.allreduce(x, world=world, algorithm="recursive_doubling"))
        gathered = warmed(world, lambda: hpcdp.allgather(x[:2], world, "recursive_doubling", out=out[:, :2].copy()))
        barrier = warmed(world, world.barrier)
        reduced = warmed(world, lambda: hpcdp.reduce(x[:3], root=1, world=world))
        scattered = warmed(world, lambda: hpcdp.reduce_scatter(np.ones(n * 2), world=world))
        sent = sum(sends for *_, sends, _ in rounds_of(world.rank, n))
        parts = -(-(HEADER_NBYTES + x.nbytes) // WHOLE_NBYTES)
        assert sums == (sent * parts, sent * (HEADER_NBYTES + x.nbytes))
        assert barrier == (sent, sent * HEADER_NBYTES)
        if n in (2, 4) and count > 1:
            assert reduced == (sent, sent * HEADER_NBYTES + (world.rank != 1) * 12)
            assert scattered == (sent, sent * HEADER_NBYTES + (n - 1) * 16)
            assert gathered == (sent, sent * HEADER_NBYTES + (n - 1) * 8)

    thread_comm.run(n, rank, 1)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_ranks_that_call_otherwise_raise_one_error_everywhere_and_go_on(n):
    def rank(world):
        x = np.ones(4, np.float32)
        calls = [
            lambda: hpcdp.allreduce(x.copy(), world=world),
            lambda: hpcdp.alltoall(np.ones((n, 2)), world=world),
        ]
        for call in calls:
            warmed(world, call)
            for odd in range(n):
                others = [
                    lambda: hpcdp.allreduce(np.ones(16_000, np.float32), world=world, algorithm="recursive_doubling"),
                    lambda: hpcdp.alltoall(np.ones((n, 3)), world=world),
                    lambda: hpcdp.iallreduce(x.copy(), world=world).wait(),
                ]
                for other in others:
                    with pytest.raises(MismatchError) as caught:
                        (other if world.rank == odd else call)()
                    ranks = "ranks 1" if odd == 0 and n > 2 else f"rank {odd or 1}"
                    assert ranks in str(caught.value) and caught.value.is_on_every_rank
                call()

    thread_comm.run(n, rank, 1)


def test_counts_that_change_are_exchanged_again():
    def rank(world):
        for length in (2, 2, 3, 2):
            mine = length if world.rank == 1 else 2
            for _ in range(repeated.FIRST_CALLS):
                assert len(hpcdp.allgather(np.ones(mine), world)) == 4 + length
        strided = np.ones(4)[:: 1 + (world.rank == 0)]  # which a kernel does not take
        for _ in range(3):
            assert len(hpcdp.allgather(strided[:2], world)) == 6

    thread_comm.run(3, rank, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_routes_bring_each_block_to_its_receivers(n):
    receivers = [(number * 37 + 11) % (1 << n) & ~(1 << number % n) for number in range(3 * n)]
    blocks = [RoutedBlock(number % n, number % 5, bits) for number, bits in enumerate(receivers)]
    data = [[] for _ in range(n)]
    firsts = []
    for number, block in enumerate(blocks):
        firsts.append(len(data[block.source]))
        data[block.source] += [number] * block.nbytes
    routes = [routes_of(blocks, firsts, rank, n) for rank in range(n)]
    messages = {}

    def bytes_at(rank, copy):
        source = data[rank] if copy.round is None else messages[rank, copy.round]
        return source[copy.at : copy.at + copy.nbytes]

    pending = {rank: list(enumerate(rounds_of(rank, n))) for rank in range(n)}
    sent = {}
    while any(pending.values()):
        for rank, left in pending.items():
            while left:
                number, (lane, peer, sends, receives) = left[0]
                if sends and (rank, peer, lane) not in sent:
                    message = []
                    for copy in routes[rank].sent[number]:
                        assert copy.to == len(message)
                        message += bytes_at(rank, copy)
                    sent[rank, peer, lane] = message
                if receives and (peer, rank, lane) not in sent:
                    break
                if receives:
                    messages[rank, number] = sent[peer, rank, lane]
                    assert len(messages[rank, number]) == routes[rank].received[number]
                left.pop(0)
    assert {route.longest for route in routes} == {max(map(len, sent.values()), default=0)}
    for rank in range(n):
        for number, block in enumerate(blocks):
            if block.receivers >> rank & 1 and block.nbytes:
                assert bytes_at(rank, routes[rank].places[number]) == [number] * block.nbytes


def test_long_messages_are_sent_in_two_parts(monkeypatch):
    monkeypatch.setattr(message_rounds, "WHOLE_NBYTES", 32)

    def rank(world):
        steps = hpcdp.iallreduce(np.arange(9.0), world=world, algorithm="recursive_doubling")
        return steps.wait().tolist(), hpcdp.allreduce(np.arange(7.0), world=world).tolist()

    assert thread_comm.run(3, rank, 1) == [([3.0 * i for i in range(9)], [3.0 * i for i in range(7)])] * 3
