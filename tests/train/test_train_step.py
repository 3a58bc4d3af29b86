"""`TrainStep`, as Python and as a plan of the whole step, against the lines that it stands for: to the bit."""

import collections
import gc
import weakref

import numpy as np
import pytest
from raises import raises
from train_command import train_on_threads
from trained_by_plans import OPTIONS, convolutional, require_same_bits

import hpcdp
from hpcdp import autograd, data, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, HpcdpError, StaleGradientError
from hpcdp.train import SyncBatchNorm, TrainStep
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate, read_metrics

F = nn.functional


class Branched(nn.Module):
    """A parameter that is used twice, one that the loss does not depend on through one path, several results."""

    def __init__(self, seed):
        self.first = nn.Dense(36, 8, weight_init=nn.init.Xavier(seed))
        self.shared = nn.Dense(8, 8, weight_init=nn.init.Xavier(seed + 1))
        self.last = nn.Dense(8, 3, weight_init=nn.init.Xavier(seed + 2))

    def forward(self, x):
        h = self.first(x.reshape(x.shape[0], 36)).tanh()
        h = self.shared(F.relu(self.shared(h)) + h) * h.detach()
        return self.last(h), h.sum(axis=1)


def loss_of_first(output, y):
    return F.softmax_cross_entropy(output[0] if isinstance(output, tuple) else output, y)


def by_hand(net, trainer, loss):
    """The lines of the docstring."""

    def step(x, y):
        with autograd.record():
            output = net(x)
            losses = loss(output, y)
        losses.backward(trainer.loss_scale)
        trainer.step(len(y))
        return losses, output

    return step


def planned(net, trainer, loss):
    step = TrainStep(net, trainer, loss)
    step.hybridize()
    return step


WAYS = {"by hand": by_hand, "python": TrainStep, "plan": planned}


def trained(world, way, build=convolutional, sync=False, accumulate=False, optimizer=None, before=None, **options):
    """Parameters, statistics, losses and outputs of steps on uneven batches, of which some are empty on a rank."""
    net = build(world.rank)
    if sync:
        SyncBatchNorm.convert(net, world)
    rule = optimizer() if optimizer else optim.SGD(lr=optim.StepSchedule(0.1, 2, 0.5), momentum=0.9)
    trainer = hpcdp.Trainer(net.parameters(), rule, world, **options)
    step = WAYS[way](net, trainer, loss_of_first)
    rng = np.random.default_rng([7, world.rank])
    seen = []

    def batch(count):
        losses, output = step(rng.standard_normal((count, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, count))
        seen.extend(each.data.copy() for each in (losses, *(output if isinstance(output, tuple) else (output,))))

    for number in range(7):
        for _ in trainer.own_virtual_shards:
            count = 3 + (world.rank + number) % 2
            if accumulate:
                with trainer.no_sync():
                    batch(2)
            batch(0 if number == 5 and world.rank == 1 and not sync else count)
        with autograd.predict_mode():
            result = net(rng.standard_normal((2, 1, 6, 6)).astype(np.float32))
            seen.extend(each.asnumpy() for each in (result if isinstance(result, tuple) else (result,)))
    world.barrier()
    return [np.array(value) for value in net.state_dict().values()] + seen + [trainer.step_count]


CASES = OPTIONS | {
    "branches": {"build": Branched},
    "shards": {"owner": "shard"},
    "clipping": {"clip_norm": 0.05},
    "loss scale": {"loss_scale": "dynamic"},
    "adam": {"optimizer": lambda: optim.AdamW(lr=0.01)},
    "lars": {"optimizer": lambda: optim.LARS(lr=1.0)},
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_step_is_the_lines_that_it_stands_for(n, name):
    expected = thread_comm.run(n, lambda world: trained(world, "by hand", **CASES[name]))
    for way in ("python", "plan"):
        found = thread_comm.run(n, lambda world, way=way: trained(world, way, **CASES[name]))
        require_same_bits(found, expected)


def alone(build=convolutional, loss=loss_of_first, **options):
    """On one rank: net, trainer and a step by a plan."""
    net = build(0)
    world = thread_comm.run(1, lambda world: world)[0]
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **options)
    return net, trainer, planned(net, trainer, loss)


def batch(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, count)


def test_forward_and_loss_run_as_python_only_once(monkeypatch):
    calls = []
    net, _, step = alone(Branched, lambda output, y: (calls.append(1), loss_of_first(output, y))[1])
    forward = Branched.forward
    monkeypatch.setattr(Branched, "forward", lambda self, x: (calls.append(2), forward(self, x))[1])
    for number in range(5):
        step(*batch(seed=number))
    assert calls == [2, 1]
    step(*batch(count=3))
    assert calls == [2, 1] * 2, "another shape is another plan"
    assert net.first.weight.grad is not None


def test_what_is_returned_is_kept_and_on_no_tape():
    _, _, step = alone()
    kept = [step(*batch(seed=number)) for number in range(4)]
    copies = [(losses.asnumpy().copy(), output.asnumpy().copy()) for losses, output in kept]
    for number in range(4):
        step(*batch(seed=10 + number))
    for (losses, output), (a, b) in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(losses.data, a)
        np.testing.assert_array_equal(output.data, b)
        with raises(HpcdpError, operation="backward", got=(4,)):
            losses.backward()


@pytest.mark.parametrize("way", ["python", "plan"])
def test_hooks_of_a_program_see_each_gradient_when_it_is_complete(way):
    seen = {}
    for how in ("by hand", way):
        net = convolutional(0)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
        step, of = WAYS[how](net, trainer, loss_of_first), seen.setdefault(how, [])
        for param in net.parameters():
            own = param.grad_hook
            param.grad_hook = lambda p, own=own, of=of: (of.append((p.name, p.grad.copy())), own(p))
        for number in range(4):
            step(*batch(seed=number))
    assert [name for name, _ in seen[way]] == [name for name, _ in seen["by hand"]]
    for (_, a), (_, b) in zip(seen[way], seen["by hand"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_hook_that_raises_leaves_nothing_behind():
    (net, trainer, step), (same, _, plain) = alone(Branched), alone(Branched)
    for number in range(3):
        step(*batch(seed=number)), plain(*batch(seed=number))
    param = net.shared.weight
    own, param.grad_hook = param.grad_hook, lambda _: {}["mine"]
    with pytest.raises(KeyError, match="mine"):
        step(*batch(seed=3))
    param.grad_hook = own
    trainer.step(0)
    for number in range(4, 6):
        step(*batch(seed=number)), plain(*batch(seed=number))
    for a, b in zip(net.parameters(), same.parameters(), strict=True):
        np.testing.assert_array_equal(a.data, b.data)


def test_changes_are_noticed():
    """Parameters set by hand, one that is no longer trained, an attribute, another loss scale."""
    results = {}
    for way in ("by hand", "plan"):
        net = Branched(0)
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1, momentum=0.9), thread_comm.run(1, lambda world: world)[0],
            policy=hpcdp.Policy(unused="zero"),
        )  # fmt: skip
        step = WAYS[way](net, trainer, loss_of_first)
        for number in range(12):
            if number == 3:
                with trainer.changing_parameters():
                    net.first.weight *= 0.5
            elif number == 5:
                trainer.optimizer.lr = 0.01
            elif number == 6:
                trainer.loss_scale = 4.0
            elif number in (7, 8):
                net.last.bias.grad_req = "null" if number == 7 else "write"
            elif number == 9:
                net.shared = nn.Dense(8, 8, weight_init=nn.init.Xavier(9))  # which nobody trains
            step(*batch(seed=number))
        results[way] = [value.data.copy() for value in net.parameters()]
    for a, b in zip(*results.values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_parameter_without_a_gradient_is_an_error_each_time():
    class Unused(nn.Module):
        def __init__(self, seed):
            self.used, self.unused = nn.Dense(36, 3), nn.Dense(2, 2)

        def forward(self, x):
            return self.used(x.reshape(x.shape[0], 36))

    _, trainer, step = alone(Unused)
    for number in range(4):
        with raises(StaleGradientError, operation="step", where="rank 0"):
            step(*batch(seed=number))
    assert trainer.step_count == 0


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        (lambda output, y: F.softmax_cross_entropy(output, y).mean(), {"expected": (4,), "remedy": "mean()"}),
        (
            lambda output, y: output,
            {"expected": (4,), "got": (4, 3)},
        ),
        (lambda output, y: 3.0, {"expected": "Tensor"}),
    ],
)
def test_a_loss_that_is_not_one_a_sample_is_refused(loss, fields):
    for way in ("python", "plan"):
        net = convolutional(0)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
        with raises(ConfigError, operation="train step", where="loss", **fields):
            WAYS[way](net, trainer, loss)(*batch())


def test_what_cannot_be_traced_names_the_line_of_the_loss():
    _, _, step = alone(loss=lambda output, y: F.softmax_cross_entropy(output, y) * float(output.sum()))
    with raises(HpcdpError, operation="trace", got="float(tensor)", remedy="hybridize(False)"):
        step(*batch())
    step.hybridize(False)
    step(*batch())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, None), "net: expected a network, got "),
        ((convolutional(0), optim.SGD(lr=1)), "trainer: expected a Trainer, got "),
        ((convolutional(0), None, "l2"), "loss: expected a function of output and labels, got "),
    ],
)
def test_wrong_arguments(arguments, expected):
    _, trainer, _ = alone()
    arguments = [trainer if number and each is None else each for number, each in enumerate(arguments)]
    with pytest.raises(ConfigError) as caught:
        TrainStep(*arguments)
    assert expected in str(caught.value).replace("[", "").replace("]", "")


def test_plans_and_what_they_hold_go_with_the_step():
    _, _, step = alone()
    for number in range(4):
        step(*batch(seed=number))
    plan = weakref.ref(next(iter(step._hybrid._here.known.values())).plans[0])
    assert plan() is not None
    step.hybridize(False)
    gc.collect()
    assert plan() is None
    step(*batch())


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_gets_the_labels_as_they_are_where_nothing_is_traced(n):
    def squares(output, y):
        assert isinstance(y, np.ndarray)
        return F.l2_loss(output, np.eye(3, dtype=np.float32)[y])

    def job(world):
        net = convolutional(0)
        step = TrainStep(net, hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world), squares)
        return step(*batch(seed=world.rank))[0].asnumpy()

    for found in thread_comm.run(n, job):
        assert found.shape == (4,)


@pytest.mark.parametrize(
    ("n", "store"), [*((n, store) for n in (1, 2, 3) for store in (None, "dist_sync")), (1, "dist_async")]
)
def test_fit_hybridized_is_fit(n, store):
    """Of samples that ranks and batches do not divide. With dist_async no two runs of several ranks are alike."""
    x, y = batch(37)

    def job(world, hybridize):
        net = convolutional(0)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, kvstore=store)
        sampler = data.ShardedSampler(len(x), 8, world.size, world.rank, seed=4)
        loader = data.DataLoader(data.ArrayDataset(x, y), sampler, prefetch=0)
        records = fit(net, trainer, loader, epochs=3, world=world, hybridize=hybridize)
        told = [{name: each[name] for name in ("loss", "accuracy", "samples", "step")} for each in records]
        return told, [np.array(value) for value in net.state_dict().values()]

    found = [
        thread_comm.run(n, lambda world, hybridize=hybridize: job(world, hybridize)) for hybridize in (False, True)
    ]
    for (told, values), (told_too, others) in zip(*found, strict=True):
        assert told == told_too
        for a, b in zip(values, others, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_command_hybridizes_steps_and_evaluation(monkeypatch, tmp_path):
    told = []
    for number, flags in enumerate(([], ["--hybridize"])):
        settings = ("mlp", "--data", "digits", "--epochs", "2", "--run-dir", str(number), *flags)
        assert train_on_threads(monkeypatch, tmp_path, 2, *settings) == [0, 0]
        records = read_metrics(tmp_path / str(number) / "metrics.jsonl")
        told.append([[each.get(name) for name in ("loss", "accuracy", "test_loss", "step")] for each in records])
        assert ("hybridize = true" in (tmp_path / str(number) / "config.toml").read_text()) == bool(flags)
    assert told[0] == told[1]


@pytest.mark.parametrize("way", ["python", "plan"])
def test_gradients_go_on_into_what_has_made_the_input(way):
    """A part before the network, and an input of which the gradient is wanted; such steps have no plan."""

    def job(world):
        encoder, head = nn.Dense(6, 6, weight_init=nn.init.Xavier(1)), nn.Dense(6, 3, weight_init=nn.init.Xavier(2))
        trainer = hpcdp.Trainer(nn.Sequential(encoder, head).parameters(), optim.SGD(lr=0.1), world)
        step, seen = WAYS[kind](head, trainer, F.softmax_cross_entropy), []
        for number in range(4):
            x = np.random.default_rng(number).standard_normal((4, 6)).astype(np.float32)
            with autograd.record():
                hidden = encoder(x)
            step(hidden, np.arange(4) % 3)
            attached = autograd.Tensor(x)
            attached.attach_grad()
            with raises(StaleGradientError, operation="step", where="rank 0", got=0):
                step(attached, np.arange(4) % 3)
            seen += [encoder.weight.data.copy(), attached.grad.copy()]
        return seen

    kind = "by hand"
    wanted = thread_comm.run(1, job)[0]
    kind = way
    for a, b in zip(thread_comm.run(1, job)[0], wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("way", ["python", "plan"])
def test_labels_and_samples_may_be_lists(way):
    net = nn.Sequential(nn.Dense(2, 3))
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
    step = WAYS[way](net, trainer, F.softmax_cross_entropy)
    for _ in range(4):
        losses, output = step([[1.0, 2.0], [3.0, 4.0]], [0, 2])
        assert losses.shape == (2,) and output.shape == (2, 3)
    regress = WAYS[way](net, trainer, F.l2_loss)
    for _ in range(4):
        losses, _ = regress([[1.0, 2.0], [3.0, 4.0]], [[0.1] * 3] * 2)
        assert losses.dtype == np.float32


@pytest.mark.parametrize("way", ["python", "plan"])
def test_a_network_without_gradients_is_told_so_each_time(way):
    net, other = nn.Sequential(nn.Dense(36, 3)), nn.Dense(2, 2)
    trainer = hpcdp.Trainer(
        [*net.parameters(), *other.parameters()], optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0],
        policy=hpcdp.Policy(unused="zero"),
    )  # fmt: skip
    step = WAYS[way](net, trainer, F.softmax_cross_entropy)
    x, y = batch()
    for number in range(7):
        if number in (3, 5):
            for param in net.parameters():
                param.grad_req = "null" if number == 3 else "write"
        if number in (3, 4):
            with raises(HpcdpError, operation="backward", got=(4,)):
                step(x.reshape(4, 36), y)
        else:
            step(x.reshape(4, 36), y)
    assert trainer.step_count == 5


class Returning(nn.Module):
    def __init__(self, what):
        self.dense, self.what = nn.Dense(36, 3), what

    def forward(self, x):
        return self.what(self.dense(x.reshape(x.shape[0], 36)))


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (lambda y: [y, y * 2], list), (lambda y: (y,), tuple), (lambda y: Pair(y, y + 1), Pair),
        (lambda y: {"logits": y}, dict), (lambda y: (y, (y, None)), tuple), (lambda y: (y, 3), tuple),
    ],
)  # fmt: skip
def test_a_network_may_return_whatever_its_loss_takes(what, kind):
    """Planned are tensors, and tuples and lists of them; others are refused before anything is trained."""

    def loss(output, y):
        return F.softmax_cross_entropy(output["logits"] if isinstance(output, dict) else output[0], y)

    for way in ("python", "plan"):
        net = Returning(what)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
        step = WAYS[way](net, trainer, loss)
        for number in range(4):
            if (way == "plan" and kind is dict) or (kind is tuple and len(what(1)) > 1 and way == "plan"):
                with raises(ConfigError, operation="train step", where="net"):
                    step(*batch(seed=number))
                assert trainer.step_count == 0
                continue
            _, output = step(*batch(seed=number))
            assert type(output) is kind and trainer.step_count == number + 1
            first = output["logits"] if kind is dict else output[0]
            assert first.shape == (4, 3) and first.node is None


def test_a_plan_keeps_no_input():
    net = nn.Sequential(nn.Dense(6, 3))
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
    step = planned(nn.Sequential(nn.Tanh(), nn.ReLU(), net), trainer, F.softmax_cross_entropy)
    y = np.zeros(8000, np.int64)
    for _ in range(4):
        x = np.ones((8000, 6), np.float32)
        gone = weakref.ref(x)
        kept = step(x, y)
        del x
        assert gone() is None and kept[0].shape == (8000,)


@pytest.mark.parametrize("what", ["losses", "output"])
def test_large_results_of_chains_are_those_without_a_plan(what):
    """Which a plan writes where they are returned."""

    class Gated(nn.Module):
        def __init__(self):
            self.dense, self.head = nn.Dense(8, 512), nn.Dense(512, 3)

        def forward(self, x):
            h = self.dense(x)
            return self.head(F.relu(h)), (h * 2 + 1).sigmoid()

    seen = []
    for way in WAYS:
        rng = np.random.default_rng(5)
        net = nn.Dense(8, 1, weight_init=nn.init.Xavier(1)) if what == "losses" else Gated()
        for number, param in enumerate(net.parameters()):
            param.data[...] = np.random.default_rng(number).standard_normal(param.shape) / 8
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.01), thread_comm.run(1, lambda world: world)[0])
        step = WAYS[way](net, trainer, F.l2_loss if what == "losses" else loss_of_first)
        kept = []
        for _ in range(5):
            x = rng.standard_normal((20000 if what == "losses" else 64, 8)).astype(np.float32)
            y = x[:, :1] * 2 if what == "losses" else rng.integers(0, 3, 64)
            losses, output = step(x, y)
            kept += [losses, output[1] if what == "output" else output]
        seen.append([each.asnumpy() for each in kept])
    for found in seen[1:]:
        for a, b in zip(found, seen[0], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("way", ["python", "plan"])
@pytest.mark.parametrize("y", [None, 3, np.array(3)], ids=str)
def test_labels_that_are_none_for_each_sample_are_refused(way, y):
    net = convolutional(0)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
    with raises(ConfigError, operation="train step", where="y"):
        WAYS[way](net, trainer, F.softmax_cross_entropy)(batch()[0], y)


@pytest.mark.parametrize("hybridize", [False, True])
def test_fit_takes_networks_of_several_results(hybridize):
    net = Branched(0)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
    loader = data.DataLoader(data.ArrayDataset(*batch(32)), data.ShardedSampler(32, 8))
    (record,) = fit(net, trainer, loader, epochs=1, loss=loss_of_first, world=trainer.world, hybridize=hybridize)
    assert 0 <= record["accuracy"] <= 1
    assert evaluate(net, loader.dataset, trainer.world).count == 32


def test_fit_and_evaluate_refuse_results_without_an_accuracy():
    net = Returning(lambda y: {"logits": y})
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0])
    dataset = data.ArrayDataset(*batch(32))
    loader = data.DataLoader(dataset, data.ShardedSampler(32, 8))
    for call in (
        lambda: fit(
            net, trainer, loader, epochs=1, world=trainer.world,
            loss=lambda output, y: F.softmax_cross_entropy(output["logits"], y),
        ),
        lambda: evaluate(net, dataset, trainer.world),
    ):  # fmt: skip
        with raises(ConfigError, where="net", got="dict"):
            call()
