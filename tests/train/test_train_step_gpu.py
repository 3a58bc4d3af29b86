"""`TrainStep` on a GPU, or on `graphs_on_host`: one CUDA graph a step, the update in it where nothing lies between."""

from contextlib import nullcontext

import numpy as np
import pytest
from compared_steps import RULES, STEPS, alone, batches, by_hand, compare, made, mlp, planned
from graph_checks import needs_compiler, on_gpu, same
from raises import raises

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.core.arrays import to_host
from hpcdp.errors import HpcdpError, NonFiniteGradientError
from hpcdp.kernels import cuda

pytestmark = needs_compiler
NETWORKS = {
    "mlp": (mlp, (4, 6)),
    "batch norm": (lambda: nn.Sequential(nn.Dense(6, 1), nn.BatchNorm(1), nn.Dense(1, 3)), (5, 6)),
    "lenet": (lambda: nn.models.lenet((1, 12, 12)), (2, 1, 12, 12)),
    "lstm": (lambda: nn.Sequential(nn.LSTM(3, 4), nn.LayerNorm(4), nn.Dense(4, 3)), (2, 5, 3)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("host", [False, True], ids=["labels on the GPU", "labels on the host"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_one_launch_with_the_same_bits(gpu, name, host):
    build, shape = NETWORKS[name]
    compare(alone(), shape, build=build, host=host)
    assert len(gpu.graphs) == 1 and len(gpu.launches) == STEPS - 1


@pytest.mark.parametrize("rule", RULES)
def test_rates_and_corrections_are_those_of_each_step(gpu, rule):
    def between(number, net, trainer):
        if number == 3:
            trainer.optimizer.lr = 0.007

    compare(alone(), rule=RULES[rule], between=between)
    assert len(gpu.graphs) == 1


CLIPPED = {
    "sgd": {"rule": RULES["sgd"]},
    "adamw": {"rule": RULES["adamw"]},
    "shards": {"owner": "shard"},
    "float16": {"dtype": "float16", "loss_scale": 8.0},
}
LONGEST = 0.7
"""Some gradients of these tests are longer."""


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_is_in_the_graph(gpu, name):
    pairs = compare(alone(), clip_norm=LONGEST, **CLIPPED[name])
    assert len(gpu.graphs) == 1 and len(gpu.launches) == STEPS - 1
    assert not pairs[1][1].num_nonfinite


def test_clipped_steps_are_those_of_the_host(gpu):
    found = []
    for on_host in (False, True):
        net, trainer = made(alone(), rule=RULES["sgd"], on_host=on_host, clip_norm=LONGEST)
        step = by_hand(net, trainer) if on_host else planned(net, trainer)
        for x, y in batches((4, 6), 8):
            step(*((to_host(x), to_host(y)) if on_host else (x, y)))
        found.append([to_host(param.data) for param in net.parameters()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_what_nobody_looks_at_is_not_counted_and_updates(gpu):
    net, trainer = made(alone(), clip_norm=LONGEST)
    step = planned(net, trainer)
    for number, (x, y) in enumerate(batches((4, 6))):
        if number == 3:
            x[...] = np.nan
        step(x, y)
    assert trainer.step_count == STEPS and not trainer.num_nonfinite
    assert np.isnan(to_host(net[0].weight.data)).all() and len(gpu.launches) == STEPS - 1


@pytest.mark.parametrize("clip_norm", [None, LONGEST])
def test_nothing_is_launched_behind_the_graph(gpu, monkeypatch, clip_norm):
    """Nor before it, where rates stay as they are: kernels of ours would be seen here."""
    step = planned(*made(alone(), rule=RULES["sgd"], clip_norm=clip_norm))
    given = list(batches((4, 6)))
    for x, y in given[:3]:
        step(x, y)
    launched, launch = [], cuda.launch
    monkeypatch.setattr(cuda, "launch", lambda *args: (launched.append(args[1]), launch(*args)))
    step(*given[3])
    assert not launched and len(gpu.launches) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_copies_in_float32_are_updated_in_the_graph(gpu, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    compare(alone(), dtype=dtype, loss_scale=8.0)
    assert len(gpu.graphs) == 1 and len(gpu.launches) == STEPS - 1


BEHIND = {
    "clipping and a look at sums": {"clip_norm": 0.05, "policy": hpcdp.Policy(nonfinite="skip")},
    "clipping and lars": {"clip_norm": 0.05, "rule": lambda: optim.LARS(lr=1.0)},
    "a dynamic loss scale": {"loss_scale": "dynamic"},
    "a look at sums": {"policy": hpcdp.Policy(nonfinite="raise")},
    "lars": {"rule": lambda: optim.LARS(lr=1.0)},
    "a rule of the program's": {"rule": lambda: Halving(lr=0.1)},
    "a rule of the program's, and clipping": {"rule": lambda: Halving(lr=0.1), "clip_norm": 0.05},
}


class Halving(optim.SGD):
    """A variant, which is more than its kernel."""

    def update(self, param, grad, state, *, step, scale=1.0):
        super().update(param, grad, state, step=step, scale=scale / 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name == "lars" else ()) for name in BEHIND]
)
def test_what_lies_between_has_the_update_behind_the_graph(gpu, name):
    compare(alone(), **BEHIND[name])
    assert len(gpu.graphs) == 1 and len(gpu.launches) == STEPS - 1


def test_graphs_are_cut_where_sums_over_ranks_begin(gpu, one_bucket_each, monkeypatch):
    """With each bucket that backward completes, before the graph of what comes behind is launched."""
    net, trainer = made(alone(), NETWORKS["lenet"][0], overlap=True)
    step, scheduler, found = planned(net, trainer), trainer.reducer.scheduler, []
    launch, first = scheduler.launch, net.parameters()[0]

    def launched(bucket):
        found.append((number, np.array_equal(to_host(first.grad), before)))
        launch(bucket)

    monkeypatch.setattr(scheduler, "launch", launched)
    for number, (x, y) in enumerate(batches((2, 1, 12, 12), 8)):
        before = to_host(first.grad).copy()
        with trainer.no_sync() if number % 2 == 0 else nullcontext():
            step(x, y)
    trainer.reducer.settle()
    count = len(trainer.reducer.buckets)
    assert count > 2 and len(gpu.graphs) == 2
    behind_it = 1  # the bias of the first layer
    assert found == [(number, left > behind_it) for number in (1, 3, 5, 7) for left in reversed(range(count))]


def test_a_cut_step_has_the_same_bits(gpu, one_bucket_each):
    compare(alone(), (2, 1, 12, 12), build=NETWORKS["lenet"][0], overlap=True)


def test_gradients_of_several_batches_have_graphs_of_their_own(gpu):
    def accumulating(step, trainer, given):
        for number, (x, y) in enumerate(given):
            if number % 3 < 2:
                with trainer.no_sync():
                    step(x, y)
            else:
                step(x, y)

    pairs = [made(alone()), made(alone())]
    for (_, trainer), step in zip(pairs, (by_hand(*pairs[0]), planned(*pairs[1])), strict=True):
        accumulating(step, trainer, batches((4, 6), 12))
    for a, b in zip(*(net.parameters() for net, _ in pairs), strict=True):
        same(a.data, b.data)
    assert pairs[0][1].step_count == pairs[1][1].step_count == 4
    assert len(gpu.graphs) == 2, "one that adds and is followed by others, one that adds and updates"


def test_changes_are_captured_again(gpu):
    def between(number, net, trainer):
        if number == 3:
            with trainer.changing_parameters():
                net[0].weight *= 0.5
        elif number == 5:
            trainer.optimizer.nesterov = True
        elif number == 7:
            trainer.loss_scale = 4.0
        elif number == 9:
            trainer.load_state_dict(trainer.state_dict())
        elif number == 11:
            trainer.policy = hpcdp.Policy(nonfinite="skip")
        elif number == 13:
            trainer.policy = hpcdp.Policy()

    compare(alone(), count=15, between=between)
    assert len(gpu.graphs) == 3, "nesterov is another kernel, and who looks at sums has the update behind the graph"


def test_a_gradient_that_a_program_replaces_is_captured_again(gpu):
    """Of a parameter that the trainer does not have: the others have theirs in buckets."""

    def between(number, net, trainer):
        if number == 3:
            first = net.parameters()[0]
            first.grad = on_gpu(np.zeros(first.shape, np.float32))

    pairs = compare(alone(), trained=slice(1, None), between=between)
    wanted, found = (net.parameters()[0].grad for net, _ in pairs)
    same(wanted, found)
    assert to_host(found).any() and len(gpu.graphs) == 2


def test_another_norm_to_clip_to_is_captured_again(gpu):
    norms = {3: 0.05, 6: None, 9: LONGEST}

    def between(number, net, trainer):
        trainer.clip_norm = norms.get(number, trainer.clip_norm)

    compare(alone(), count=12, between=between, clip_norm=LONGEST)
    assert len(gpu.graphs) == 4


def test_hooks_of_a_program_see_gradients_before_the_update(gpu):
    net, trainer = made(alone(), rule=RULES["sgd"])
    step, seen = planned(net, trainer), {}
    for param in net.parameters():
        own = param.grad_hook
        param.grad_hook = lambda p, own=own: (seen.update({p.name: (to_host(p.grad), to_host(p.data))}), own(p))
    for x, y in batches((4, 6)):
        step(x, y)
        for param in net.parameters():
            grad, before = seen.pop(param.name)
            wanted = before - 0.1 * (grad / 4 + 0.01 * before)
            np.testing.assert_allclose(to_host(param.data), wanted, rtol=1e-4, atol=1e-6)
    assert len(gpu.graphs) == 1 and len(gpu.launches) == STEPS - 1


def test_hooks_that_come_and_go_move_the_update(gpu):
    """Set when it was captured in the graph: they see this step's gradients, and what they change is trained."""

    def halving(number, net, trainer):
        param = net[0].weight
        if number == 3:
            own.setdefault(id(param), param.grad_hook)
            param.grad_hook = lambda p: (p.grad.__imul__(0.5), own[id(param)](p))
        elif number == 6:
            param.grad_hook = own[id(param)]
        elif number == 8:
            param.grad_hook = None

    own = {}
    compare(alone(), count=11, between=halving, policy=hpcdp.Policy(unused="zero"))
    assert len(gpu.graphs) >= 2


class WithMore(nn.Module):
    """A network with a layer that its forward does not use."""

    def __init__(self):
        self.used, self.more = nn.Dense(6, 3), nn.Dense(6, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("rule", ["momentum", "adamw"])
@pytest.mark.parametrize("freezes", [False, True])
def test_the_update_of_a_graph_leaves_alone_what_its_step_does_not_use(gpu, rule, freezes):
    """Also where the step before has used it, and where it is frozen."""

    def more(number, net, trainer):
        if id(net) in left:
            same(net.more.weight.data, left[id(net)])
        if number in (1, 3, 6):
            x, y = next(batches((4, 6)))
            with autograd.record():
                losses = nn.functional.softmax_cross_entropy(net.used(x) + net.more(x), y)
            losses.backward()
            trainer.step(4)
            left[id(net)] = net.more.weight.data.copy()
        if freezes and number in (4, 5):
            net.used.bias.grad_req = "null" if number == 4 else "write"

    rest = {"build": WithMore, "rule": RULES[rule], "policy": hpcdp.Policy(unused="zero")}
    left = {}
    compare(alone(), count=9, between=more, **rest)
    assert len(left) == 2 and len(gpu.launches) >= 2


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_step_with_a_bad_label_is_none(gpu, bad):
    """By hand as by a graph: nothing is counted, and the next step is that of this one."""
    pairs = [made(alone(), lambda: nn.Sequential(nn.Dense(6, 8), nn.Dense(8, 3)), RULES["adam"]) for _ in range(2)]
    steps = [by_hand(*pairs[0]), planned(*pairs[1])]
    for number, (x, y) in enumerate(batches((4, 6), 6, host=True)):
        for step in steps:
            if number == bad:
                with raises(HpcdpError, operation="softmax_cross_entropy", where="labels"):
                    step(x, y + 50)
            else:
                step(x, y)
        assert pairs[0][1].step_count == pairs[1][1].step_count == number + (number < bad)
    for a, b in zip(*(net.parameters() for net, _ in pairs), strict=True):
        same(a.data, b.data)


@pytest.mark.parametrize("why", ["skipped", "raised"])
def test_a_first_step_that_comes_to_no_update_is_traced_again(gpu, why):
    def between(number, net, trainer):
        if why == "skipped":
            trainer.policy = hpcdp.Policy(nonfinite="skip" if number == 0 else "ignore")

    pairs = [made(alone()), made(alone())]
    steps = [by_hand(*pairs[0]), planned(*pairs[1])]
    for number, (x, y) in enumerate(batches((4, 6))):
        for (net, trainer), step in zip(pairs, steps, strict=True):
            between(number, net, trainer)
            if number == 0 and why == "skipped":
                x[...] = np.nan
                step(x, y)
            elif number == 0:
                with raises(HpcdpError, operation="softmax_cross_entropy", where="labels"):
                    step(x, to_host(y) + 50)
            else:
                step(x, y)
    assert pairs[0][1].step_count == pairs[1][1].step_count == STEPS - 1
    for a, b in zip(*(net.parameters() for net, _ in pairs), strict=True):
        same(a.data, b.data)
    assert len(gpu.graphs) == 1


def test_tokens_in_host_memory_have_graphs_for_each_kind_of_step(gpu):
    def tokens():
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Dense(8, 3))

    pairs = [made(alone(), tokens), made(alone(), tokens)]
    rng = np.random.default_rng(0)
    given = [(rng.integers(0, 5, (4, 2)), rng.integers(0, 3, 4)) for _ in range(16)]
    for (_, trainer), step in zip(pairs, (by_hand(*pairs[0]), planned(*pairs[1])), strict=True):
        for number, (x, y) in enumerate(given):
            if number % 4 == 2:
                with trainer.no_sync():
                    step(x, y)
            else:
                step(x, y)
    for a, b in zip(*(net.parameters() for net, _ in pairs), strict=True):
        same(a.data, b.data)
    assert len(gpu.graphs) == 3, "write and update; add; add and update"


def test_an_error_of_the_trainer_is_raised_and_no_reason_to_go_without(gpu):
    net, trainer = made(alone(), policy=hpcdp.Policy(nonfinite="raise"))
    step = planned(net, trainer)
    for number, (x, y) in enumerate(batches((4, 6), 4)):
        if number in (1, 3):
            x[...] = np.nan
            with pytest.raises(NonFiniteGradientError):
                step(x, y)
        else:
            step(x, y)
    assert trainer.step_count == 2 and len(gpu.graphs) == 1


def test_a_wrong_rate_is_an_error_before_the_launch(gpu):
    net, trainer = made(alone())
    step = planned(net, trainer)
    for number, (x, y) in enumerate(batches((4, 6), 4)):
        if number == 3:
            before = [to_host(param.data).copy() for param in net.parameters()]
            trainer.optimizer.lr = -1.0
            with raises(HpcdpError, operation="SGD", where="lr"):
                step(x, y)
            for param, was in zip(net.parameters(), before, strict=True):
                np.testing.assert_array_equal(to_host(param.data), was)
        else:
            step(x, y)


def test_what_cannot_be_captured_goes_without(counted_graphs):
    class Indexed(nn.Module):
        def __init__(self):
            self.dense = nn.Dense(6, 3)

        def forward(self, x):
            return self.dense(x)[[0, 1, 2, 3]]

    with pytest.warns(RuntimeWarning, match="runs without a CUDA graph.*getitem"):
        compare(alone(), build=Indexed)
    assert not counted_graphs.launches
