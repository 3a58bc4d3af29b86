"""Horovod's interface: the families of its own tests, in other words; docs/from-horovod.md has the table of them."""

import itertools

import numpy as np
import pytest
from pairs import only_on
from raises import raises

only_on(2, 3)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hpcdp.horovod.torch as hvd
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError

pytestmark = pytest.mark.mpi
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def started():
    torch.set_num_threads(1)
    hvd.init()


def of_rank(rank, dtype=torch.float32, shape=(5, 3)):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def of_all(dtype=torch.float32, shape=(5, 3)):
    return torch.stack([of_rank(rank, dtype, shape) for rank in range(hvd.size())])


@pytest.fixture
def sets():
    """Even ranks, and odd ones if there are any."""
    hvd.init()
    n = hvd.size()
    if n < 3:
        pytest.skip("needs three ranks")
    made = [hvd.add_process_set(range(first, n, 2)) for first in (0, 1)]
    yield made
    for each in made:
        assert hvd.remove_process_set(each)


def mine_of(sets):
    (mine,) = (each for each in sets if each.included())
    return mine


def test_numbers_of_ranks():
    assert hvd.is_initialized() and 0 <= hvd.rank() < hvd.size()
    assert hvd.local_rank() < hvd.local_size() and hvd.cross_rank() < hvd.cross_size()
    assert hvd.is_homogeneous() and hvd.mpi_built() and hvd.mpi_enabled() and not hvd.gloo_built()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_allreduce_of_every_dtype_and_op(dtype):
    x, values = of_rank(hvd.rank(), dtype), of_all().double()
    expected = {hvd.Sum: values.sum(0), hvd.Min: values.amin(0), hvd.Max: values.amax(0), hvd.Product: values.prod(0)}
    for op, result in expected.items():
        got = hvd.allreduce(x, op=op)
        torch.testing.assert_close(got, result.to(dtype), rtol=1e-2, atol=0)
        assert x.equal(of_rank(hvd.rank(), dtype))
    averaged = values.mean(0)
    averaged = averaged.to(dtype) if dtype in FLOATS else averaged.trunc().to(dtype)
    torch.testing.assert_close(hvd.allreduce(x), averaged, rtol=1e-2, atol=0)
    assert hvd.allreduce(x, average=False).equal(hvd.allreduce(x, op=hvd.Sum))
    assert hvd.allreduce_(x, op=hvd.Sum) is x and x.equal(expected[hvd.Sum].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_factors_before_and_after(dtype):
    x, values = of_rank(hvd.rank(), dtype), of_all(dtype)
    scaled = (values.double() * 0.7).to(dtype).double().sum(0)
    torch.testing.assert_close(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.7).double(), scaled, rtol=2e-3, atol=0)
    total = (values.double().sum(0) * 0.7).to(dtype)
    torch.testing.assert_close(hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.7), total, rtol=2e-3, atol=0)
    both = hvd.grouped_allreduce([x, x], op=hvd.Sum, postscale_factor=0.7)
    torch.testing.assert_close(both[1], total, rtol=2e-3, atol=0)
    rows = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2, postscale_factor=0.5)
    n, me = hvd.size(), hvd.rank()
    ends = [len(x) // n * rank + min(rank, len(x) % n) for rank in (me, me + 1)]
    torch.testing.assert_close(rows.double(), values.double().sum(0)[ends[0] : ends[1]], rtol=2e-3, atol=0)
    assert x.equal(of_rank(hvd.rank(), dtype))


def test_what_is_no_tensor_of_pytorch_is_refused_by_name():
    kinds = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
    names = [name for name in hvd.__all__ if name.removesuffix("_").removesuffix("_async").endswith(kinds)]
    assert len(names) == 23
    for name, x in itertools.product(names, (np.ones(3), 3.0, [torch.ones(3), 2])):
        with raises(UnsupportedError, operation=name, expected="PyTorch"):
            getattr(hvd, name)([x] if name.startswith("grouped") else x, *(0,) * name.startswith("broadcast"))
    with raises(UnsupportedError, remedy=["torch.as_tensor(tensor)", "hpcdp.reduce_scatter"]):
        hvd.reducescatter(np.ones(3))
    with raises(ConfigError, operation="reducescatter", where="prescale"):
        hvd.reducescatter(torch.ones(3), op=hvd.Sum, prescale_factor=float("nan"))


def test_an_error_that_a_handle_raises_names_the_function_that_was_called():
    """Also where another one runs for it."""
    if hvd.size() > 1:
        for name in ("allreduce", "reducescatter"):
            handle = getattr(hvd, f"{name}_async")(torch.ones(2 + 2 * (hvd.rank() == 1)), op=hvd.Sum)
            with raises(MismatchError, operation=name):
                handle.wait()


def test_parameters_are_changed_in_place():
    weight = torch.nn.Parameter(of_rank(hvd.rank()))
    assert hvd.synchronize(hvd.broadcast_async_(weight, 0)) is weight and weight.equal(of_rank(0))
    assert hvd.allreduce_(weight, op=hvd.Sum, postscale_factor=0.5) is weight
    assert weight.requires_grad and weight.equal(of_rank(0) * hvd.size() / 2)


def test_many_operations_under_way_end_in_any_order():
    me = hvd.rank()
    shapes = [(17,) * dims for dims in (1, 2, 3)] + [(0,), ()]
    handles = [hvd.allreduce_async(of_rank(me, dtype, shape), op=hvd.Sum)
               for dtype, shape in itertools.product([torch.float64, torch.int64], shapes)]  # fmt: skip
    rows = hvd.allgather_async(torch.full((me + 1, 2), me))
    grouped = hvd.grouped_allreduce_async([of_rank(me), of_rank(me, torch.int64)], op=hvd.Sum)
    assert [int(each) for each in hvd.synchronize(rows)[:, 0]] == [r for r in range(hvd.size()) for _ in range(r + 1)]
    assert hvd.synchronize(grouped)[1].equal(of_all(torch.int64).sum(0))
    for handle, (dtype, shape) in reversed(
        list(zip(handles, itertools.product([torch.float64, torch.int64], shapes), strict=True))
    ):
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle).equal(of_all(dtype, shape).sum(0))


def test_allgather_broadcast_alltoall_reducescatter():
    n, me = hvd.size(), hvd.rank()
    first, second = hvd.grouped_allgather([torch.full((me,), me), torch.tensor([[1.0 * me]])])
    assert first.tolist() == [r for r in range(n) for _ in range(r)] and second.flatten().tolist() == list(range(n))
    x = of_rank(me)
    assert hvd.broadcast(x, n - 1).equal(of_rank(n - 1)) and x.equal(of_rank(me))
    assert hvd.broadcast_(x, n - 1) is x and x.equal(of_rank(n - 1))
    with raises(UnsupportedError, where="root", got=n):
        hvd.broadcast(x, n)
    received, splits = hvd.alltoall(torch.full(((me + 1) * n,), me), torch.tensor([me + 1] * n))
    assert received.tolist() == [r for r in range(n) for _ in range(r + 1)] and splits.tolist() == list(range(1, n + 1))
    assert hvd.alltoall(torch.arange(2 * n) + 100 * me).tolist() == [
        100 * r + 2 * me + i for r in range(n) for i in (0, 1)
    ]
    with raises(UnsupportedError, where="splits"):
        hvd.alltoall(torch.ones(3), [4] * n)
    rows = [7 // n + (r < 7 % n) for r in range(n)]
    for length, op in ((7, hvd.Sum), (2 * n, hvd.Average)):
        y = of_all(torch.float64, (length, 2))
        expected = (y.sum(0) if op is hvd.Sum else y.mean(0)).split(rows if length == 7 else [2] * n)[me]
        handle = hvd.reducescatter_async(of_rank(me, torch.float64, (length, 2)), op=op)
        torch.testing.assert_close(hvd.synchronize(handle), expected)
    with raises(UnsupportedError, where="tensor"):
        hvd.reducescatter(torch.tensor(1.0))
    hvd.barrier()


def gradient(function, shape=(5, 3)):
    """The gradient of the sum of all elements of the result, weighted by this rank."""
    x = of_rank(hvd.rank(), torch.float64, shape).requires_grad_()
    y = function(x)
    y = y[0] if isinstance(y, tuple | list) else y
    (y * (hvd.rank() + 1)).sum().backward()
    return x.grad


def test_gradients_have_the_scales_of_horovod():
    n, me = hvd.size(), hvd.rank()
    weights = sum(range(1, n + 1))
    for function, expected in [
        (lambda x: hvd.allreduce(x, op=hvd.Sum), weights),
        (lambda x: hvd.allreduce(x), weights / n),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum, postscale_factor=0.5), weights / 2),
        (hvd.allgather, weights / n),
        (lambda x: hvd.broadcast(x, n - 1), weights / n if me == n - 1 else 0),
        (lambda x: hvd.alltoall(x[:n] if n <= 5 else x, [1] * n), None),
        (lambda x: hvd.reducescatter(x, op=hvd.Average), None),
    ]:
        got = gradient(function)
        if expected is not None:
            torch.testing.assert_close(got, torch.full((5, 3), float(expected), dtype=torch.float64))
    by_row = gradient(lambda x: hvd.alltoall(x, [1] * n), (n, 2))[:, 0]
    assert by_row.tolist() == list(range(1, n + 1))
    by_row = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), (n, 2))[:, 0]
    assert by_row.tolist() == [n * (r + 1) for r in range(n)]
    with raises(UnsupportedError, operation="backward", expected=["Sum", "Average"]):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max))


def test_process_sets(sets):
    mine, n, me = mine_of(sets), hvd.size(), hvd.rank()
    ranks = list(range(me % 2, n, 2))
    assert mine.ranks == ranks and mine.size() == len(ranks) and ranks[mine.rank()] == me
    total = torch.stack([of_rank(r) for r in ranks]).sum(0)
    assert hvd.allreduce(of_rank(me), op=hvd.Sum, process_set=mine).equal(total)
    assert hvd.allgather(torch.tensor([me]), process_set=mine).tolist() == ranks
    assert hvd.broadcast(of_rank(me), ranks[-1], process_set=mine).equal(of_rank(ranks[-1]))
    assert hvd.broadcast_object({"rank": me}, ranks[-1], process_set=mine) == {"rank": ranks[-1]}
    with raises(ConfigError, where="root_rank"):
        hvd.broadcast(of_rank(me), 1 - me % 2, process_set=mine)
    (other,) = (each for each in sets if each is not mine)
    assert not other.included()
    with raises(ConfigError, where="process_set"):
        hvd.allreduce(of_rank(me), process_set=other)
    with raises(ConfigError, operation="add_process_set"):
        hvd.add_process_set(ranks)
    hvd.barrier(process_set=mine)


def test_what_is_not_valid():
    with raises(UnsupportedError, where="op", got="Adasum"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with raises(ConfigError, operation="allreduce", expected="op="):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    with pytest.raises(UnsupportedError):
        hvd.broadcast_object(object())
    if hvd.size() > 1:
        for x in (torch.ones(2 + hvd.rank()), torch.ones(2, dtype=torch.int32 if hvd.rank() else torch.float32)):
            with pytest.raises(MismatchError):
                hvd.allreduce(x)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def loss_of(model, rank, step):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * rank + step))
    return model(x).pow(2).mean()


def reference(steps, passes=1, clip=None, by_rank=lambda rank: 99):
    """One process that does what all ranks should; rank r has ``by_rank(r)`` batches."""
    model, n = network(), hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(0, steps, passes):
        optimizer.zero_grad()
        for rank, more in itertools.product(range(n), range(passes)):
            if step + more < by_rank(rank):
                (loss_of(model, rank, step + more) / n).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def alike(ours, theirs, **tolerance):
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


def distributed(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, {}),
        ({"gradient_predivide_factor": 2.0}, {}),
        ({"compression": hvd.Compression.fp16}, {"rtol": 1e-2, "atol": 1e-3}),
        ({"groups": 2}, {}),
    ],
)
def test_the_optimizer_trains_as_one_process_on_all_batches(options, tolerance):
    model = network()
    if hvd.rank():
        torch.nn.init.ones_(model[0].weight)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = distributed(model, **options)
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        schedule.step()
    alike(model, reference(4), **tolerance)


def test_accumulation_and_clipping():
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2)
    for step in range(0, 4, 2):
        optimizer.zero_grad()
        for more in (0, 1):
            loss_of(model, hvd.rank(), step + more).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    alike(model, reference(4, passes=2, clip=0.05))


def test_misuse_of_the_optimizer():
    model = network()
    optimizer = distributed(model)
    loss_of(model, 0, 0).backward()
    with raises(StaleGradientError, operation="zero_grad"):
        optimizer.zero_grad()
    with raises(StaleGradientError, remedy="backward_passes_per_step"):
        loss_of(model, 0, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for named in ([("a", each) for each in model.parameters()], [("a", model[0].weight)], list(model.parameters())):
        with raises(ConfigError, where="named_parameters"):
            hvd.DistributedOptimizer(sgd, named_parameters=named)
    with raises(UnsupportedError, where="op", got="Adasum"):
        hvd.DistributedOptimizer(sgd, op=hvd.Adasum)


def test_parameters_that_some_ranks_do_not_use_and_sparse_gradients():
    torch.manual_seed(0)
    embedding, unused = torch.nn.Embedding(6, 2, sparse=True), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*embedding.parameters(), unused], lr=1.0), op=hvd.Sum)
    before = embedding.weight.detach().clone()
    y = embedding(torch.tensor([hvd.rank(), hvd.rank() + 1])).sum()
    (y + (unused.sum() if hvd.rank() == 0 else 0)).backward()
    optimizer.step()
    counts = torch.zeros(6)
    for rank in range(hvd.size()):
        counts[rank : rank + 2] += 1
    torch.testing.assert_close(embedding.weight.detach(), before - counts[:, None])
    assert embedding.weight.grad.is_sparse and unused.tolist() == [0, 0]
    x = torch.sparse_coo_tensor([[hvd.rank()]], torch.ones(1), (6,), check_invariants=True)
    assert hvd.synchronize(hvd.sparse_allreduce_async(x, op=hvd.Sum)).to_dense().tolist() == [
        float(i < hvd.size()) for i in range(6)
    ]


def test_parameters_that_are_frozen_for_a_while():
    model, steps = network(), 4
    optimizer = distributed(model)
    for step in range(steps):
        model[2].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    expected = network()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        theirs.zero_grad(set_to_none=False)  # Horovod's gradients of frozen parameters are zeros, not None
        for rank in range(hvd.size()):
            (loss_of(expected, rank, step) / hvd.size()).backward()
        for param in expected[2].parameters() if step % 2 else ():
            param.grad.zero_()
        theirs.step()
    alike(model, expected)


def test_the_optimizer_of_a_process_set(sets):
    mine = mine_of(sets)
    model, outside = network(), network()
    optimizer = distributed(model, process_set=mine)
    (other,) = (each for each in sets if each is not mine)
    others = distributed(outside, process_set=other)
    for each, optimizer_of_it in ((model, optimizer), (outside, others)):
        loss_of(each, hvd.rank(), 0).backward()
        optimizer_of_it.step()
    expected, alone = network(), network()
    for rank in mine.ranks:
        (loss_of(expected, rank, 0) / mine.size()).backward()
    loss_of(alone, hvd.rank(), 0).backward()
    for each in (expected, alone):
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9).step()
    alike(model, expected)
    alike(outside, alone)


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_broadcast_of_states_and_objects(rule):
    model = network()
    optimizer = rule(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        loss_of(model, 0, 0).backward()
        optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    for name, values in states[0].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(states[-1][name][key]), torch.as_tensor(value))
    assert hvd.broadcast_object([hvd.rank(), "epoch"], root_rank=hvd.size() - 1) == [hvd.size() - 1, "epoch"]


def test_joined_ranks_take_part_with_zeros():
    n, me = hvd.size(), hvd.rank()
    model = network()
    optimizer = distributed(model)
    for step in range(me + 1):
        optimizer.zero_grad()
        loss_of(model, me, step).backward()
        optimizer.step()
        rows = hvd.allgather(torch.full((2,), me))
        assert sorted(rows.tolist()) == sorted(r for r in range(step, n) for _ in range(2))
    assert hvd.join() == n - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=n - 1)
    alike(model, reference(n, by_rank=lambda rank: rank + 1))


def test_start_again_after_shutdown():
    hvd.shutdown()
    assert not hvd.is_initialized()
    with raises(ConfigError, remedy="hvd.init()"):
        hvd.rank()
    with raises(ConfigError, remedy="hvd.init()"):
        distributed(network())
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
