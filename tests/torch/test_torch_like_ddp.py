"""On real ranks: the same gradients as torch's own DistributedDataParallel over gloo leaves, in programs of all kinds.

Ordinary runs take 3 ranks, as for `test_torch_parity`.
"""

import contextlib

import pytest
from pairs import only_on

pytestmark = pytest.mark.mpi
only_on(3)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcdp.torch
from hpcdp.errors import ConfigError


class Net(nn.Module):
    """Two layers, then two heads; which of them is used, and how, is an argument."""

    def __init__(self, normed=False):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6) if normed else nn.Identity()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, reentrant=None):
        run = self.first if reentrant is None else lambda x: checkpoint(self.first, x, use_reentrant=reentrant)
        x = self.norm(run(x)).tanh()
        return self.a(x), self.b(x)


class Hidden(Net):
    """Its output has no tensor; the loss is an attribute."""

    def forward(self, x):
        a, b = super().forward(x)
        self.loss = (a * b).sum()
        return "done"


class Gradless(torch.autograd.Function):
    """Uses a weight, for which backward gives no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class WithGradless(Net):
    def forward(self, x):
        a, b = super().forward(x)
        return Gradless.apply(a, self.b.bias), b.detach() * self.b.weight.sum()


def batch(rank, step=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def loss_of(outputs):
    a, b = outputs
    return a.pow(2).mean() + (a * b).mean()


def plain(wrap, rank):
    model = wrap(Net())
    for step in range(3):
        loss_of(model(batch(rank, step))).backward()
    return model


def through_the_module_on_one_rank(wrap, rank):
    model = wrap(Net())
    if rank == 0:
        (1000 * loss_of(model.module(batch(rank)))).backward()
        model.zero_grad()
    for step in range(2):
        loss_of(model(batch(rank, step))).backward()
        if rank == 1 and step == 0:
            model.module(batch(rank))[0].sum().backward()  # this rank's alone, until the next backward averages
            model.module(batch(rank))[1].sum().backward()
    return model


def through_the_module_on_all_ranks(wrap, rank):
    model = wrap(Net())
    loss_of(model.module(batch(rank))).backward()
    return model


def through_the_module_after_a_forward(wrap, rank):
    model = wrap(Net())
    model(batch(rank))
    loss_of(model.module(batch(rank))).backward()
    loss_of(model.module(batch(rank))).backward()
    return model


def a_loss_that_is_an_attribute(wrap, rank):
    model = wrap(Hidden())
    for step in range(2):
        model(batch(rank, step))
        model.module.loss.backward()
    return model


def evaluation_between(wrap, rank):
    model = wrap(Net())
    for step in range(2):
        with torch.no_grad():
            model(batch(rank))
        out = model(batch(rank, step))
        with torch.no_grad():
            model(batch(rank))
        loss_of(out).backward()
    return model


def accumulation(wrap, rank):
    model = wrap(Net())
    for step in range(3):
        if step < 2:
            with model.no_sync():
                loss_of(model(batch(rank, step))).backward()
        else:
            loss_of(model(batch(rank, step))).backward()
    return model


def two_wrappers_in_one_loss(wrap, rank):
    first, second = wrap(nn.Linear(4, 4)), wrap(Net())
    loss_of(second(first(batch(rank)))).backward()
    loss_of(second(first(batch(rank, 1)).detach())).backward()
    first(batch(rank)).sum().backward()
    return nn.ModuleList([first, second])


def checkpointed(wrap, rank):
    model = wrap(Net())
    for step, reentrant in enumerate((False, True, False)):
        loss_of(model(batch(rank, step).requires_grad_(), reentrant)).backward()
    return model


def one_of_two_outputs(wrap, rank):
    model = wrap(Net(), find_unused_parameters=True)
    for step in range(2):
        model(batch(rank, step))[0].sum().backward()
    return model


def another_output_on_each_rank(wrap, rank):
    model = wrap(Net(), find_unused_parameters=True)
    for step in range(3):
        model(batch(rank, step))[(rank + step) % 2].sum().backward()
    return model


def an_output_that_one_step_leaves_out(wrap, rank):
    model = wrap(Net(), find_unused_parameters=True)
    model(batch(rank))[1].sum().backward()
    model(batch(rank, 1))[0].sum().backward()
    return model


def no_gradient_of_a_used_parameter(wrap, rank):
    model = wrap(WithGradless())
    sum(out.sum() for out in model(batch(rank))).backward()
    return model


class Words(nn.Module):
    """Sparse gradients of an embedding, and dense ones of what follows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.words, self.bags = nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)
        self.last = nn.Linear(4, 3)

    def forward(self, places):
        return self.last(self.words(places).mean(1) * self.bags(places))


def sparse_gradients(wrap, rank):
    model = wrap(Words())
    for step in range(3):
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            model(torch.tensor([[rank, 3 + step], [5, rank]])).pow(2).sum().backward()
    return model


def sparse_gradients_alone(wrap, rank):
    torch.manual_seed(8)
    model = wrap(nn.Embedding(9, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0:
            model.module(torch.tensor([8])).sum().backward()
            optimizer.zero_grad()
        model(torch.tensor([rank, 3 + step])).pow(2).sum().backward()
        optimizer.step()
    return model


def complex_parameters(wrap, rank):
    torch.manual_seed(7)
    layers = nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2, dtype=torch.complex128)
    convolution = nn.Conv2d(2, 4, 3, dtype=torch.complex64).to(memory_format=torch.channels_last)
    model = wrap(nn.ModuleList([*layers, convolution]), find_unused_parameters=True)
    model.module.forward = lambda x: layers[1](layers[0](x).to(torch.complex128))
    for step in range(2):
        model(batch(rank, step).to(torch.complex64)).abs().sum().backward()
    model.module.forward = lambda x: convolution(x)
    model(torch.view_as_complex(batch(rank).reshape(10, 2).repeat(5, 1)).reshape(1, 2, 5, 5)).abs().sum().backward()
    return model


CASES = [
    plain, through_the_module_on_one_rank, through_the_module_on_all_ranks, through_the_module_after_a_forward,
    a_loss_that_is_an_attribute, evaluation_between, accumulation, two_wrappers_in_one_loss, checkpointed,
    one_of_two_outputs, another_output_on_each_rank, an_output_that_one_step_leaves_out,
    no_gradient_of_a_used_parameter, sparse_gradients, sparse_gradients_alone, complex_parameters,
]  # fmt: skip


def wrapping(world, **more):
    return lambda net, **settings: hpcdp.torch.DistributedDataParallel(net, world, **settings, **more)


def require_alike(found, expected):
    for (name, ours), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        torch.testing.assert_close(ours, theirs)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("case", "overlap"),
    [*((case, False) for case in CASES), (through_the_module_on_one_rank, True), (checkpointed, True),
     (another_output_on_each_rank, True)],
)  # fmt: skip
def test_gradients_are_those_of_torchs_ddp(world, case, overlap):
    require_alike(
        case(wrapping(world, overlap=overlap), world.rank), case(nn.parallel.DistributedDataParallel, world.rank)
    )


def test_the_default_group_is_taken_and_others_are_refused(world):
    everyone = torch.distributed.group.WORLD
    model = wrapping(world)(Net(), process_group=everyone)
    assert model.process_group is everyone
    pair = torch.distributed.new_group([0, 1])
    with pytest.raises(ConfigError, match="process_group"):
        wrapping(world)(Net(), process_group=pair)


@pytest.mark.parametrize("retained", [False, True])
def test_every_backward_of_two_is_averaged(world, retained):
    """Torch's wrapper leaves the second one to each rank, silently."""
    model = wrapping(world)(Net())
    first, second = model(batch(world.rank)), model(batch(world.rank, 1))
    for out in (first, first) if retained else (first, second):
        loss_of(out).backward(retain_graph=retained)
    expected = nn.parallel.DistributedDataParallel(Net())
    for step in (0, 0) if retained else (0, 1):
        loss_of(expected(batch(world.rank, step))).backward()
    require_alike(model, expected)


@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.SGD])
def test_what_no_rank_uses_does_not_decay(world, rule):
    model = wrapping(world)(Net(), find_unused_parameters=True)
    optimizer = rule(model.parameters(), 0.1, weight_decay=0.1)
    before = model.module.b.weight.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        model(batch(world.rank, step))[0].pow(2).mean().backward()
        optimizer.step()
    assert model.module.b.weight.grad is None
    assert torch.equal(model.module.b.weight, before)


@pytest.mark.parametrize("sharded", [False, True])
def test_evaluation_has_the_buffers_of_torchs_ddp_on_each_rank(world, sharded):
    def trained(wrap):
        model = wrap(Net(normed=True))
        outputs = []
        if sharded and isinstance(model, hpcdp.torch.DistributedDataParallel):
            optimizer = hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(batch(world.rank, step))).backward()
            optimizer.step()
            if step != 1:
                model.eval()
                with torch.no_grad():
                    outputs += model(batch(7))
                model.train()
        return outputs

    found = trained(wrapping(world, owner="shard" if sharded else "rank"))
    for ours, theirs in zip(found, trained(nn.parallel.DistributedDataParallel), strict=True):
        torch.testing.assert_close(ours, theirs)
    for output in found:
        assert len(set(map(str, world.comm.allgather_json(output.tolist())))) == 1


def test_a_rank_may_evaluate_alone_and_is_told_of_buffers_of_its_own(world):
    model = wrapping(world)(Net(normed=True))
    loss_of(model(batch(world.rank))).backward()
    if world.rank == 0:
        model.eval()
        model(batch(7))
        with torch.no_grad():
            model(batch(7))
        model.train()
    model(batch(world.rank, 1))  # which no backward follows
    model.eval()
    with pytest.warns(UserWarning, match=r"model.sync_buffers\(\) on all ranks"):
        model(batch(7))
    model.sync_buffers()
    assert len(set(map(str, world.comm.allgather_json(model(batch(7))[0].tolist())))) == 1
