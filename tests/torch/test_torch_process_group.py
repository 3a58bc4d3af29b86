"""The backend "hpcdp" of torch.distributed, between processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from pairs import only_on

only_on(2, 3)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist

import hpcdp.torch_backend
from hpcdp.comm.watchdog import DEFAULT_TIMEOUT_S, Watchdog, limits_s
from hpcdp.errors import ConfigError
from hpcdp.torch.process_group import create

pytestmark = pytest.mark.mpi
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@pytest.fixture(scope="module", autouse=True)
def group():
    hpcdp.torch_backend.register()
    dist.init_process_group("hpcdp")
    yield dist.group.WORLD
    dist.destroy_process_group()


def of(rank, shape=(3, 5), dtype=torch.float32):
    """Return the tensor of a rank: small numbers, different on every rank and at every place."""
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) * 3 + rank * 7) % 11).reshape(shape).to(dtype)


def everyone(shape=(3, 5), dtype=torch.float32):
    return [of(rank, shape, dtype) for rank in range(dist.get_world_size())]


def test_every_reduction():
    me, n = dist.get_rank(), dist.get_world_size()
    ops = {
        dist.ReduceOp.SUM: lambda x: x.sum(0), dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
        dist.ReduceOp.MIN: lambda x: x.amin(0), dist.ReduceOp.MAX: lambda x: x.amax(0),
    }  # fmt: skip
    for dtype in DTYPES:
        for op, expected in ops.items():
            if op == dist.ReduceOp.PRODUCT and dtype in (torch.bfloat16, torch.uint8):
                continue  # of other ranges
            x = of(me, dtype=dtype)
            dist.all_reduce(x, op)
            assert torch.equal(x, expected(torch.stack(everyone(dtype=dtype)).double()).to(dtype)), (dtype, op)
    rows = everyone(dtype=torch.int32)
    for op, name in (("BAND", "bitwise_and"), ("BOR", "bitwise_or"), ("BXOR", "bitwise_xor")):
        x, expected = of(me, dtype=torch.int32), rows[0].clone()
        for row in rows[1:]:
            expected = getattr(torch, name)(expected, row)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert torch.equal(x, expected), op
    total = torch.stack(everyone()).sum(0)
    x = of(me)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.allclose(x, total / n)
    x = of(me)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert torch.allclose(x, total / 2)
    x = of(me)
    dist.reduce(x, n - 1)
    assert torch.equal(x, total if me == n - 1 else of(me))


def test_layouts_and_parameters():
    me = dist.get_rank()
    total = torch.stack(everyone((4, 6))).sum(0)
    x = torch.nn.Parameter(of(me, (4, 6)))
    dist.all_reduce(x)  # as broadcasts of parameters do
    assert torch.equal(x.detach(), total)
    whole = torch.zeros(4, 12)
    whole[:, ::2] = of(me, (4, 6))
    dist.all_reduce(whole[:, ::2])
    assert torch.equal(whole[:, ::2], total) and not whole[:, 1::2].any()
    x = of(me, (4, 6) if me == 0 else (3, 8))  # c10d compares counts, not shapes
    dist.all_reduce(x)
    assert torch.equal(x.flatten(), total.flatten())
    dist.broadcast(x.mul_(me + 1), 0)
    dist.reduce(x, 0)
    assert torch.equal(x.flatten(), total.flatten() * (dist.get_world_size() if me == 0 else 1))
    number = torch.tensor(float(me))
    dist.all_reduce(number)
    assert number == sum(range(dist.get_world_size()))
    x = torch.complex(of(me), -of(me))
    dist.all_reduce(x)
    assert torch.equal(x.real, torch.stack(everyone()).sum(0)) and torch.equal(x.imag, -x.real)
    empty = torch.empty(0)
    dist.all_reduce(empty)


def test_lazy_negatives():
    # PyTorch itself refuses lazy conjugates.
    me, n = dist.get_rank(), dist.get_world_size()
    every = everyone()
    x = torch._neg_view(of(me))
    dist.broadcast(x, n - 1)
    assert x.is_neg() and torch.equal(x, -of(n - 1))
    x = torch._neg_view(of(me))
    dist.all_reduce(x)
    assert x.is_neg() and torch.equal(x, -sum(every))
    block = torch.zeros(n, 3, 5)
    rows = [torch._neg_view(row) if r % 2 == 0 else row for r, row in enumerate(block)]  # adjacent, and lazy in turns
    dist.all_gather(rows, torch._neg_view(of(me)))
    assert all(torch.equal(row, -x) for row, x in zip(rows, every, strict=True))
    signed = torch.stack([x if r % 2 == 0 else -x for r, x in enumerate(every)])
    assert torch.equal(block, signed)


def test_movements():
    me, n = dist.get_rank(), dist.get_world_size()
    for dtype in (*DTYPES, torch.bool, torch.float8_e4m3fn):
        x = of(n - 1, dtype=torch.float32).to(dtype) if me == n - 1 else torch.zeros(3, 5).to(dtype)
        dist.broadcast(x, n - 1)
        assert torch.equal(x.float(), of(n - 1).to(dtype).float()), dtype
        outs = [torch.zeros(3, 5).to(dtype) for _ in range(n)]
        dist.all_gather(outs, of(me).to(dtype))
        assert all(torch.equal(out.float(), x.to(dtype).float()) for out, x in zip(outs, everyone(), strict=True))
    out = torch.empty(3 * n, 5)
    dist.all_gather_into_tensor(out, of(me))
    assert torch.equal(out, torch.cat(everyone()))
    pieces = list(torch.zeros(n, 3, 5).unbind())  # which lie one after another
    dist.all_gather(pieces, of(me))
    assert all(torch.equal(*pair) for pair in zip(pieces, everyone(), strict=True))
    uneven = [torch.zeros(rank + 1, 2) for rank in range(n)]
    dist.all_gather(uneven, torch.full((me + 1, 2), float(me)))
    assert all((x == rank).all() for rank, x in enumerate(uneven))
    outs = [torch.zeros(3, 5) for _ in range(n)] if me == 0 else None
    dist.gather(of(me), outs)
    assert me or all(torch.equal(*pair) for pair in zip(outs, everyone(), strict=True))
    out = torch.zeros(5, 3).t()  # strided
    dist.scatter(out, everyone() if me == n - 1 else None, src=n - 1)
    assert torch.equal(out, of(me))
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_to_all_single(torch.zeros(n + 1), torch.zeros(n + 1)) if n > 1 else dist.all_to_all_single(
            torch.zeros(2), torch.zeros(1)
        )


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("least", [0, 10, 500])
def test_lists_of_long_tensors(waits, least):
    me, n = dist.get_rank(), dist.get_world_size()
    rows = [least + 900 * (rank % 2) for rank in range(n)]  # some are shorter than those that move by themselves
    x = torch.full((rows[me], 300), float(me))

    def run(call, *args):
        work = call(*args, async_op=waits)
        if waits:
            work.get_future().wait()

    def blank(rank):
        return torch.zeros(300, rows[rank]).t() if me == 0 else torch.zeros(rows[rank], 300)

    for root in (*range(n), 0):
        outs = [blank(rank) for rank in range(n)]
        run(dist.all_gather, outs, x)
        assert all((out == rank).all() for rank, out in enumerate(outs))
        outs = [blank(rank) for rank in range(n)] if me == root else None
        run(dist.gather, x, outs, root)
        assert me != root or all((out == rank).all() for rank, out in enumerate(outs))
        out = blank(me)
        run(dist.scatter, out, [torch.full((rows[r], 300), 1.0 * r) for r in range(n)] if me == root else None, root)
        assert (out == me).all()


def test_repeated_lists_of_long_tensors():
    me, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        x = torch.zeros(1 << 20).to(dtype)
        outs, sent = ([torch.zeros(1 << 20).to(dtype) for _ in range(n)] for _ in range(2))
        for number in range(4):
            if number == 3:
                outs[n - 1] = torch.zeros(1 << 20).to(dtype)  # elsewhere in memory
            x.fill_(me + number)
            dist.all_gather(outs, x)
            assert all((out.float() == rank + number).all() for rank, out in enumerate(outs))
            outs[me].fill_(2 * me + number)
            dist.all_gather(outs, outs[me])
            assert all((out.float() == 2 * rank + number).all() for rank, out in enumerate(outs))
            dist.gather(x, outs if me == 0 else None)
            assert me or all((out.float() == rank + number).all() for rank, out in enumerate(outs))
            for rank in range(n):
                sent[rank].fill_(rank + 3 * number)
            dist.scatter(x, sent if me == n - 1 else None, n - 1)
            assert (x.float() == me + 3 * number).all()
            dist.scatter(x, [sent[0]] * n if me == 0 else None)
            assert (x.float() == 3 * number).all()
            dist.scatter(sent[me], sent if me == 0 else None)
            assert (sent[me].float() == me + 3 * number).all()


@pytest.mark.parametrize("count", [5, 300_001])
def test_a_tensor_may_be_one_of_a_list_for_another_rank(count):
    me, n = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        outs = [torch.zeros(count) for _ in range(n)]
        dist.all_gather(outs, outs[(me + 1) % n].fill_(me + 1))
        assert all((out == rank + 1).all() for rank, out in enumerate(outs))
        outs = [torch.zeros(count) for _ in range(n)]
        dist.gather(outs[n - 1].fill_(me + 1), outs if me == 0 else None)
        assert me or all((out == rank + 1).all() for rank, out in enumerate(outs))
        parts = [torch.full((count,), rank + 1.0) for rank in range(n)]
        out = parts[-1] if me == 0 else torch.zeros(count)
        dist.scatter(out, parts if me == 0 else None)
        assert (out == me + 1).all()
        x = torch.arange(n).repeat_interleave(count) + 10 * me
        dist.all_to_all_single(x, x)
        assert (x.view(n, count) == me + 10 * torch.arange(n)[:, None]).all()


def test_a_list_of_another_length_than_the_group_is_an_error_of_every_rank():
    n = dist.get_world_size()
    for length in (n - 1, n + 1):
        for count in (5, 300_001):
            with pytest.raises(RuntimeError, match=rf"all_gather \[the list\].*{n} tensors.*{length} tensors"):
                dist.all_gather([torch.zeros(count)] * length, torch.zeros(count))


def test_lists_of_long_tensors_of_other_lengths():
    me, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        pytest.skip("of several ranks")
    for _ in range(2):
        outs = [torch.zeros(400_000 + 8 * (me == 0 and rank == 1)) for rank in range(n)]
        for call in (
            lambda outs=outs: dist.all_gather(outs, torch.zeros(400_000)),
            lambda outs=outs: dist.gather(torch.zeros(400_000), outs if me == 0 else None),
        ):
            with pytest.raises(RuntimeError, match="array 1 of the list on rank 0"):
                call()
        x = torch.zeros(400_000)
        dist.all_gather([torch.zeros(400_000) for _ in range(n)], x)


def test_scattered_reductions_and_alltoall():
    me, n = dist.get_rank(), dist.get_world_size()
    whole = torch.stack(everyone((2 * n, 3))).sum(0)
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, of(me, (2 * n, 3)))
    assert torch.equal(out, whole[2 * me : 2 * me + 2])
    out = torch.zeros(2, 3)
    dist.reduce_scatter(out, list(of(me, (2 * n, 3)).split(2)), dist.ReduceOp.AVG)
    assert torch.allclose(out, whole[2 * me : 2 * me + 2] / n)
    out = torch.zeros(me + 1)
    dist.reduce_scatter(out, [torch.arange(rank + 1.0) + me for rank in range(n)])
    assert torch.equal(out, n * torch.arange(me + 1.0) + sum(range(n)))

    sent = of(me, (2 * n, 3))
    out = torch.zeros(2 * n, 3)
    dist.all_to_all_single(out, sent)
    expected = torch.cat([x[2 * me : 2 * me + 2] for x in everyone((2 * n, 3))])
    assert torch.equal(out, expected)
    counts = [(me + rank) % 3 for rank in range(n)]
    x = torch.full((sum(counts), 2), float(me))
    out = torch.zeros(sum(counts), 2)
    dist.all_to_all_single(out, x, counts, counts)
    assert out[:, 0].tolist() == [float(rank) for rank, count in enumerate(counts) for _ in range(count)]
    outs = [torch.zeros(rank + me + 1) for rank in range(n)]
    dist.all_to_all(outs, [torch.full((rank + me + 1,), float(10 * me + rank)) for rank in range(n)])
    assert all((x == 10 * rank + me).all() for rank, x in enumerate(outs))


def test_messages():
    me, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        pytest.skip("of several ranks")
    right, left = (me + 1) % n, (me - 1) % n
    out = torch.zeros(5, 3).t()
    ops = [dist.P2POp(dist.isend, of(me), right, tag=3), dist.P2POp(dist.irecv, out, left, tag=3)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(out, of(left))
    if me == 0:
        for _ in range(n - 1):
            x = torch.zeros(100_000)
            sender = dist.recv(x)
            assert (x == sender).all() and sender > 0
    else:
        dist.send(torch.full((100_000,), float(me)), 0)
    objects = [{"rank": me}] if me == 0 else [None]
    dist.broadcast_object_list(objects)
    assert objects == [{"rank": 0}]
    gathered = [None] * n
    dist.all_gather_object(gathered, ("rank", me))
    assert gathered == [("rank", rank) for rank in range(n)]


def test_works_and_futures():
    me, n = dist.get_rank(), dist.get_world_size()
    total = torch.stack(everyone((300, 1000))).sum(0)
    tensors = [of(me, (300, 1000)) for _ in range(3)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    assert torch.equal(works[2].get_future().wait()[0], total)
    works[0].wait()
    while not works[1].is_completed():
        pass
    assert works[1].is_success() and works[1].exception() is None
    assert all(torch.equal(x, total) for x in tensors)

    def again(future):  # as PowerSGD does, which waits in a callback
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    x = of(me)
    doubled = dist.all_reduce(x, async_op=True).get_future().then(again).wait()
    assert torch.equal(doubled, n * torch.stack(everyone()).sum(0))
    with dist._coalescing_manager(async_ops=True) as manager:
        pair = [of(me), of(me, (7,))]
        for x in pair:
            dist.all_reduce(x)
    manager.wait()
    assert torch.equal(pair[1], torch.stack(everyone((7,))).sum(0))


def test_groups_and_store():
    me, n = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group(list(range(0, n, 2)))
    own = dist.new_group([me], use_local_synchronization=True)
    if me % 2 == 0:
        x = torch.tensor([float(me)])
        dist.all_reduce(x, group=evens)
        assert x == sum(range(0, n, 2)) and dist.get_rank(evens) == me // 2
        dist.destroy_process_group(evens)
    x = torch.ones(3)
    dist.all_reduce(x, group=own)
    assert (x == 1).all()
    store = dist.distributed_c10d._get_default_store()
    assert store.add("count", me + 1) <= n * (n + 1) // 2
    dist.barrier()
    assert int(store.get("count")) == n * (n + 1) // 2
    store.set(f"key {me}", b"\0value")
    store.wait([f"key {rank}" for rank in range(n)])
    assert store.get(f"key {n - 1}") == b"\0value" and store.check(["key 0"]) and not store.check(["other"])
    with pytest.raises(RuntimeError, match="other"):
        store.wait(["other"], timedelta(seconds=0.05))
    dist.barrier()
    assert store.num_keys() >= n + 1  # of all groups
    dist.barrier()
    assert store.delete_key(f"key {me}") and not store.check([f"key {me}"])


def test_a_late_rank_is_a_runtime_error():
    if dist.get_world_size() == 1:
        pytest.skip("of several ranks")
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"timeout of 0\.3 s"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    if dist.get_rank():
        dist.all_reduce(torch.ones(3), group=group)  # which rank 0 has started
    dist.barrier()


def test_the_watchdog_observes_futures_and_waits_for_the_groups_timeout():
    if dist.get_world_size() == 1:
        pytest.skip("of several ranks")
    group = dist.new_group(timeout=timedelta(hours=2))
    watchdog = Watchdog.of(group.world)
    assert watchdog.timeout_s == (7200 if limits_s()[1] == DEFAULT_TIMEOUT_S else limits_s()[1])
    x = torch.ones(3)
    future = dist.all_reduce(x, group=group, async_op=True).get_future() if dist.get_rank() == 0 else None
    if future is not None:  # on which DDP's backward waits in C++, and which tests nothing
        assert watchdog.call is not None and "allreduce" in watchdog.call[0]
    dist.barrier()
    if future is None:
        dist.all_reduce(x, group=group)
    else:
        future.wait()
    assert (x == dist.get_world_size()).all() and watchdog.call is None
    dist.destroy_process_group(group)


def test_the_end_of_a_group_completes_what_is_in_progress_but_messages():
    """Otherwise a rank that ends it first would leave the others waiting, and wait itself."""
    n, me = dist.get_world_size(), dist.get_rank()
    group = dist.new_group()
    x = torch.ones(3)
    message = dist.irecv(torch.empty(1), (me + 1) % n, group=group) if n > 1 else None
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.destroy_process_group(group)
    work.wait()
    assert (x == n).all()
    if message is not None:
        with pytest.raises(RuntimeError):
            message.wait(timedelta(seconds=5))


def test_blocking_and_started_calls_match():
    me = dist.get_rank()
    for k in range(4):
        x = of(me)
        work = dist.all_reduce(x, async_op=bool((me + k) % 2))
        if work is not None:
            work.wait()
        assert torch.equal(x, torch.stack(everyone()).sum(0))


def test_repeated_calls_match_if_some_ranks_are_late_or_do_not_wait_at_once():
    me, n = dist.get_rank(), dist.get_world_size()
    total = torch.stack(everyone((n, 4))).sum(0)
    for step in range(24):
        is_async = (step // 3 + me) % 3 == 0
        pending = dist.irecv(torch.empty(1), (me - 1) % n, tag=7) if is_async and n > 1 else None

        def run(call, *args, late=step % 5 == me, is_async=is_async, **kwargs):
            if late:
                time.sleep(0.003)  # longer than the kernels poll
            work = call(*args, async_op=is_async, **kwargs)
            if is_async:
                work.wait()

        x = of(me, (n, 4))
        run(dist.all_reduce, x)
        assert torch.equal(x, total), step
        x = of(me, (n, 4))
        run(dist.broadcast, x, step % n)
        assert torch.equal(x, of(step % n, (n, 4))), step
        x = of(me, (n, 4))
        run(dist.reduce, x, n - 1)
        assert torch.equal(x, total if me == n - 1 else of(me, (n, 4))), step
        out = torch.empty(4)
        run(dist.reduce_scatter_tensor, out, of(me, (n, 4)).flatten())
        assert torch.equal(out, total[me]), step
        out = torch.empty(4 * n, n)
        run(dist.all_gather_into_tensor, out, of(me, (4, n)))
        assert torch.equal(out, torch.cat(everyone((4, n)))), step
        out = torch.empty(n, 4)
        run(dist.all_to_all_single, out, of(me, (n, 4)))
        assert torch.equal(out, torch.stack([x[me] for x in everyone((n, 4))])), step
        rows = [1 + (rank + step // 8) % 3 for rank in range(n)]  # the same for eight calls
        outs = [torch.empty(count, 2) for count in rows] if me == 0 else None
        run(dist.gather, torch.full((rows[me], 2), float(me)), outs, 0)
        assert outs is None or all((x == rank).all() for rank, x in enumerate(outs)), step
        out = torch.empty(rows[me], 2)
        run(dist.scatter, out, [torch.full((count, 2), 1.0 * step) for count in rows] if me == 0 else None, 0)
        assert (out == step).all(), step
        run(dist.barrier)
        if n > 1:
            sent = dist.isend(torch.ones(1), (me + 1) % n, tag=7)
            if pending is None:
                dist.recv(torch.empty(1), (me - 1) % n, tag=7)
            else:
                pending.wait()
            sent.wait()


def test_groups_used_by_several_threads():
    groups, n = [dist.new_group() for _ in range(2)], dist.get_world_size()
    totals = [0.0, 0.0]

    def run(number):
        for k in range(60):
            x = torch.full((1000 * (number + 1),), 1.0 + k)
            work = dist.all_reduce(x, group=groups[number], async_op=bool(k % 2))
            if work is not None:
                work.wait()
            totals[number] += float(x[-1])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert totals == [n * 60 * 61 / 2] * 2


def test_errors_reach_works_and_futures():
    me, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        pytest.skip("of several ranks")
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    future = dist.all_reduce(torch.ones(3 + (me == n - 1)), group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match=r"all_?reduce|allreduce"):
        future.wait()
    dist.barrier()
    if me == 0:
        late = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        with pytest.raises(RuntimeError, match=r"timeout of 0\.3 s"):
            late.wait()
    dist.barrier()
    for wrong in (
        lambda: dist.all_gather_into_tensor(torch.zeros(3 * n + 1), torch.zeros(3)),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * n + 1)),
        lambda: dist.all_gather([torch.zeros(2) for _ in range(n)], torch.zeros(3)),
        lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    bad = int(me == n - 1)
    for wrong in (  # on one rank only
        lambda: dist.all_gather_into_tensor(torch.zeros(3 * n + bad), torch.zeros(3)),
        lambda: dist.reduce_scatter(torch.zeros(3 + bad), [torch.zeros(3)] * n),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3 + bad), torch.zeros(3 * n)),
        lambda: dist.all_gather([torch.zeros(3) for _ in range(n + bad)], torch.zeros(3)),
        lambda: dist.gather(torch.zeros(3), [torch.zeros(3)] * (n + 1) if bad else None, dst=n - 1),
        lambda: dist.scatter(torch.zeros(3), [torch.zeros(3)] * (n + 1) if bad else None, src=n - 1),
        lambda: dist.all_to_all_single(torch.zeros(3 * n + bad), torch.zeros(3 * n)),
        lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND if bad else dist.ReduceOp.SUM),
    ):
        with pytest.raises(RuntimeError, match="expected .* got" if bad else f"invalid argument .*on rank {n - 1}"):
            wrong()
    for count in (3, 400_000):  # the other ranks do not know of it
        out, parts = torch.zeros(count + bad), [torch.ones(count)] * n if me == 0 else None
        with pytest.raises(RuntimeError, match="out") if bad else contextlib.nullcontext():
            dist.scatter(out, parts)
        assert bad or out.all()
    dist.barrier()


def test_storage_stays_resizable():
    x = torch.ones(4)
    dist.all_reduce(x)
    x.untyped_storage().resize_(0)  # as FSDP 1 frees parameters


def test_training_with_the_wrappers_of_pytorch():
    me, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def loss_of(net, rank):
        return net(of(rank, (4, 5))).pow(2).mean()

    mean = (
        sum(
            loss_of(
                lambda x: torch.func.functional_call(
                    model, dict(zip(dict(model.named_parameters()), reference, strict=True)), (x,)
                ),
                rank,
            )
            for rank in range(n)
        )
        / n
    )
    gradients = torch.autograd.grad(mean, reference)

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    loss_of(wrapped, me).backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)

    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sharded = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    fully_shard(sharded)
    loss_of(sharded, me).backward()
    for p, gradient in zip(sharded.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), gradient)


def test_communication_hooks_of_the_wrapper():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def halved(state, bucket):
        state.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    me, trained = dist.get_rank(), []
    for wrapper in (hpcdp.torch.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        for hook in (powerSGD_hook, halved):
            torch.manual_seed(3)
            model = wrapper(torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 20)))
            state = [] if hook is halved else PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
            by_name = wrapper is hpcdp.torch.DistributedDataParallel and hook is powerSGD_hook
            model.register_comm_hook(state, "powerSGD" if by_name else hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(5):
                optimizer.zero_grad()
                x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + me))
                model(x).square().mean().backward()
                optimizer.step()
            assert len(state) == 5 if hook is halved else state.iter == 5
            trained.append([param.detach() for param in model.parameters()])
    for ours, theirs in zip(trained[:2], trained[2:], strict=True):
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(ours, theirs, strict=True))


def test_other_numbers_than_those_of_mpi_are_refused():
    me, n = dist.get_rank(), dist.get_world_size()
    assert next(dist.rendezvous("env://"))[1:] == (me, n)
    assert next(dist.rendezvous("env://", rank=n - 1 - me, world_size=n))[1:] == (n - 1 - me, n)  # gloo can
    options = SimpleNamespace(global_ranks_in_group=[], group_rank=(me + 1) % (n + 1), group_size=n)
    with pytest.raises(ConfigError, match=f"rank {me} of {n}, as MPI numbers"):
        create(options)


def test_variables_of_torchrun():
    assert os.environ["RANK"] == str(dist.get_rank()) and os.environ["WORLD_SIZE"] == str(dist.get_world_size())
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"  # PyTorch's own, for huge pages
    assert ("MASTER_ADDR" in os.environ) == (hpcdp.init().num_nodes > 1)
