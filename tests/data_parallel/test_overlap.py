"""Training with reductions under backward and updates under the next forward: the same bits, and nothing forgotten."""

import functools
import threading
import time
import warnings

import numpy as np
import pytest
from pairs import pairs
from raises import raises

import hpcdp
from hpcdp import Policy, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, NonFiniteGradientError, StaleGradientError

WIDTH = 400  # so that the first bucket, of 1 MiB, does not hold all
NODES = [(2, None), (3, None), (2, 1), (3, 1), (4, 2), (5, 2)]
SPLITS = {
    "even": lambda n, rank, step: 2,
    "uneven": lambda n, rank, step: 1 + (rank + step) % 3,
    "one has none": lambda n, rank, step: 0 if rank == n - 1 else 2,
}


class Net(nn.Module):
    """One layer is used twice, one by some ranks in some steps only, one is frozen."""

    def __init__(self):
        self.first = nn.Dense(6, WIDTH)
        self.twice = nn.Dense(WIDTH, WIDTH)
        self.sometimes = nn.Dense(WIDTH, WIDTH)
        self.frozen = nn.Dense(WIDTH, WIDTH)
        self.last = nn.Dense(WIDTH, 3)
        for param in self.frozen.parameters():
            param.grad_req = "null"

    def forward(self, x, with_all=True):
        x = nn.functional.relu(self.first(x))
        x = nn.functional.relu(self.twice(nn.functional.relu(self.twice(x))))
        x = self.frozen(x)
        return self.last(x + self.sometimes(x) if with_all else x)


@functools.cache
def start(number, shape):
    return np.random.default_rng(number).standard_normal(shape) / 20


def batch(step, rank, count, micro=0):
    rng = np.random.default_rng([step, rank, micro])
    return rng.standard_normal((count, 6)).astype("f4"), rng.integers(0, 3, count)


def backward(net, x, y, with_all=True):
    with record():
        loss = nn.functional.softmax_cross_entropy(net(x, with_all), y)
    loss.backward()


def train(world, split="even", steps=3, with_all=None, micro=1, optimizer=None, late=None, **options):
    """The parameters after some steps, flat; a bucket for each layer."""
    net = Net()
    for number, param in enumerate(net.parameters()):
        param.data[...] = start(number, param.shape)
    rule = optim.SGD(lr=0.05, momentum=0.9) if optimizer is None else optimizer()
    trainer = hpcdp.Trainer(net.parameters(), rule, world, bucket_cap_mb=0.006, **options)
    assert len(trainer.reducer.buckets) >= 3
    for step in range(steps):
        if late is not None:
            time.sleep(late(world.rank, step))
        count = SPLITS[split](world.size, world.rank, step)
        with_rest = with_all is None or with_all(world.rank, step)
        for number in range(micro):
            x, y = batch(step, world.rank, count, number)
            if number < micro - 1:
                with trainer.no_sync():
                    if count:
                        backward(net, x, y, with_rest)
                    trainer.step(count)
            else:
                if count:
                    backward(net, x, y, with_rest)
                trainer.step(count)
    return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])


@functools.cache
def samples_of_all(split, n, steps=3):
    """The same training on one rank that gets everybody's samples."""

    def rank(world):
        net = Net()
        for number, param in enumerate(net.parameters()):
            param.data[...] = start(number, param.shape)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.05, momentum=0.9), world)
        for step in range(steps):
            parts = [batch(step, r, SPLITS[split](n, r, step)) for r in range(n)]
            x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
            backward(net, x, y)
            trainer.step(len(y))
        return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])

    return thread_comm.run(1, rank)[0]


@pytest.mark.parametrize(("layout", "split", "owner"), pairs(NODES, SPLITS, ["rank", "shard"]))
def test_the_parameters_do_not_depend_on_overlap(layout, split, owner):
    n, nodes = layout
    at_the_end, meanwhile = (
        thread_comm.run(n, lambda world, o=o: train(world, split, owner=owner, overlap=o).tobytes(), nodes)
        for o in (False, True)
    )
    assert len({*at_the_end, *meanwhile}) == 1
    found = np.frombuffer(meanwhile[0], "f4")
    np.testing.assert_allclose(found, samples_of_all(split, n), rtol=2e-3, atol=2e-5)


OPTIONS = {
    "clipped": {"clip_norm": 0.05},
    "accumulated": {"micro": 3},
    "one that counts": {"policy": Policy(nonfinite="count")},
    "unused": {"policy": Policy(unused="zero"), "with_all": lambda rank, step: (rank + step) % 2 == 0},
    "unused by all": {"policy": Policy(unused="zero"), "with_all": lambda rank, step: step > 1},
    "adam": {"optimizer": lambda: optim.AdamW(lr=0.01)},
    "late": {"late": lambda rank, step: 0.004 * ((rank + step) % 3)},
}


@pytest.mark.parametrize(
    ("layout", "options", "way"),
    pairs([(3, 1), (4, 2), (3, None)], OPTIONS, [(True, "shard"), (False, "rank"), (True, "rank")]),
)
def test_nor_with_options(layout, options, way):
    n, nodes = layout
    runs = [
        thread_comm.run(
            n, lambda world, o=o, w=w: train(world, "uneven", owner=w, overlap=o, **OPTIONS[options]), nodes
        )
        for o, w in ((False, "shard"), way)
    ]
    assert len({result.tobytes() for run in runs for result in run}) == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_unused_parameters_are_an_error_that_names_them_and_the_next_step_is_right(owner, overlap):
    def rank(world):
        net = Net()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1), world, bucket_cap_mb=0.006, owner=owner, overlap=overlap
        )
        trained = [param for param in net.parameters() if param.grad_req != "null"]
        before = np.concatenate([np.array(p.data).reshape(-1) for p in trained])
        backward(net, *batch(0, world.rank, 2), with_all=world.rank != 1)
        with raises(
            StaleGradientError, operation="step", where="rank 1", got="sometimes.weight", remedy="Policy(unused='zero')"
        ):
            trainer.step(2)
        after = np.concatenate([np.array(p.data).reshape(-1) for p in trained])
        np.testing.assert_array_equal(before, after)
        backward(net, *batch(1, world.rank, 2))
        assert trainer.step(2) == 2 * world.size
        return np.concatenate([np.array(p.data).reshape(-1) for p in trained]).tobytes()

    assert len(set(thread_comm.run(3, rank, 1))) == 1


def test_unused_parameters_are_named_once_where_asked():
    def rank(world):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(world, policy=Policy(unused="warn"), with_all=lambda rank, step: False)
        return [str(each.message) for each in told if "no gradient" in str(each.message)]

    assert thread_comm.run(1, rank)[0] == [
        "rank 0: no gradient for sometimes.weight, sometimes.bias: counted as zero; left alone where no rank has one"
    ]


NOT_FINITE = {
    "ignore": ([True, False, False], 0, 3),
    "count": ([True, False, False], 2, 3),
    "skip": ([True, True, True], 1, 2),
    "raise": ([True, True, True], 1, 2),
}
"""What is finite after each of three steps, how many were not, and how many updates there were."""


@pytest.mark.parametrize(
    ("layout", "nonfinite", "bad", "overlap", "clip_norm"),
    pairs([(1, None), (3, None), (3, 1), (4, 2)], NOT_FINITE, [np.nan, np.inf, -np.inf], [False, True], [None, 1e3]),
)
def test_gradients_that_are_not_finite(layout, nonfinite, bad, overlap, clip_norm):
    """On one rank only, in the second of three steps; each rank counts, skips or raises alike, also where it clips."""
    n, nodes = layout

    def rank(world):
        net = Net()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1), world, bucket_cap_mb=0.006, overlap=overlap,
            policy=Policy(nonfinite=nonfinite), clip_norm=clip_norm,
        )  # fmt: skip
        finite = []
        for step in range(3):
            x, y = batch(step, world.rank, 2)
            if step == 1 and world.rank == world.size - 1:
                x[0, 0] = bad
            with np.errstate(invalid="ignore"):
                backward(net, x, y)
            if nonfinite == "raise" and step == 1:
                with raises(NonFiniteGradientError, operation="step", where="step 2"):
                    trainer.step(2)
            else:
                trainer.step(2)
            finite.append(all(np.isfinite(np.array(param.data)).all() for param in net.parameters()))
        return finite, trainer.num_nonfinite, trainer.step_count

    assert thread_comm.run(n, rank, nodes) == [NOT_FINITE[nonfinite]] * n


def test_a_loss_scale_is_divided_out():
    def rank(world, scale):
        net = Net()
        for number, param in enumerate(net.parameters()):
            param.data[...] = start(number, param.shape)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, clip_norm=0.2)
        trainer.loss_scale = scale
        for step in range(3):
            x, y = batch(step, world.rank, 2)
            with record():
                loss = nn.functional.softmax_cross_entropy(net(x), y) * np.float32(scale)
            loss.backward()
            trainer.step(2)
        return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])

    plain, scaled = (thread_comm.run(2, lambda world, s=s: rank(world, s))[0] for s in (1.0, 1024.0))
    np.testing.assert_array_equal(plain, scaled)  # a power of two rounds nothing


def after_turns(world, **options):
    """Of a GAN: the generator's backward writes gradients of the discriminator, too."""
    makes, judges = (nn.models.mlp(input_shape=4, num_classes=4, hidden=(9,), seed=seed) for seed in (1, 2))
    trainers = [
        hpcdp.Trainer(makes.parameters(), optim.SGD(lr=0.1), world),
        hpcdp.Trainer(judges.parameters(), optim.SGD(lr=0.1), world, **options),
    ]
    for step in range(3):
        x = np.random.default_rng(step).standard_normal((6, 4)).astype("f4")[world.rank :: world.size]
        for trainer, made in ((trainers[1], lambda x: x), (trainers[0], makes)):
            with record():
                loss = nn.functional.softmax_cross_entropy(judges(made(x)), np.ones(len(x), int))
            loss.backward()
            trainer.step(len(x))
    world.barrier()
    return [param.asnumpy() for net in (makes, judges) for param in net.parameters()]


def test_networks_that_train_in_turn_through_each_other_are_told_what_to_do_and_then_do():
    with raises(StaleGradientError, operation="backward", where="2.weight", remedy=["Trainer", "overlap=False"]):
        thread_comm.run(2, after_turns, 1)
    expected = thread_comm.run(1, after_turns)[0]
    for found in thread_comm.run(2, lambda world: after_turns(world, overlap=False), 1):
        for ours, alone in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-6)


def test_a_policy_that_is_none_is_refused():
    with raises(ConfigError, operation="Policy", where="unused", expected=["error", "warn", "zero"], got="ignore"):
        Policy(unused="ignore")
    with raises(
        ConfigError, operation="Policy", where="nonfinite", expected=["ignore", "count", "skip", "raise"], got="zero"
    ):
        Policy(nonfinite="zero")


def test_the_next_forward_begins_while_updates_go_on_and_who_reads_a_parameter_waits():
    def rank(world):
        gate = threading.Event()

        class Held(optim.SGD):
            def update(self, *args, **kwargs):
                assert gate.wait(30)
                return super().update(*args, **kwargs)

        net = Net()
        trainer = hpcdp.Trainer(net.parameters(), Held(lr=0.1), world, bucket_cap_mb=0.006, overlap=True)
        weight = net.first.weight
        before = weight.data.copy()
        backward(net, *batch(0, world.rank, 2))
        trainer.step(2)
        assert not gate.is_set()  # it has returned, and no parameter has been updated
        opens = threading.Timer(0.1, gate.set)
        opens.start()
        changed = not np.array_equal(weight.data, before)
        waited = gate.is_set()
        opens.join()
        return changed, waited

    assert thread_comm.run(2, rank, 1) == [(True, True)] * 2


@pytest.mark.parametrize("what", ["zeros", "backward"])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_what_they_were_while_an_update_reads_them(overlap, what):
    """A program makes them zero after a step, or goes back through what it has recorded before it."""

    class Late(optim.SGD):
        def update(self, *args, **kwargs):
            changed.wait(0.05)  # by then a program that does not wait is ready
            super().update(*args, **kwargs)

    changed = threading.Event()

    def rank(world):
        net = nn.Dense(3, 2)
        net.weight[...] = net.bias[...] = 1.0
        trainer = hpcdp.Trainer(net.parameters(), Late(lr=1.0), world, overlap=overlap, owner="shard")
        x = np.full((1, 3), world.rank + 1.0, np.float32)
        with record():
            losses = [net(x).sum(), net(100 * x).sum()]
        losses[0].backward()
        trainer.step(1)
        if what == "zeros":
            for param in net.parameters():
                param.grad[...] = 0
        else:
            losses[1].backward()
        changed.set()
        return np.array(net.weight.data), np.array(net.bias.data)

    for weight, bias in thread_comm.run(2, rank, ranks_per_node=1):
        np.testing.assert_array_equal(weight, np.full(weight.shape, 1.0 - 1.5, np.float32))
        np.testing.assert_array_equal(bias, np.zeros(2, np.float32))


def test_a_thread_that_reads_parameters_late_does_not_end_the_update_of_the_next_step():
    def rank(world):
        param = nn.Parameter(np.full(9, 5, "f4"), name="w")
        trainer = hpcdp.Trainer([param], optim.SGD(lr=0.5), world, overlap=True)
        milestones, has_come, goes_on = trainer.reducer.scheduler._milestones, threading.Event(), threading.Event()
        wait = milestones.wait

        def step():
            param.grad[...] = 1 + world.rank
            param.grad_hook(param)
            trainer.step(1)

        def late(*args):
            wait(*args)
            if threading.current_thread() is reader:
                has_come.set()
                goes_on.wait(30)

        step()
        reader, milestones.wait = threading.Thread(target=lambda: param.data), late
        reader.start()
        assert has_come.wait(30)
        step()
        goes_on.set()
        reader.join()
        assert param.data_hook is not None  # whoever reads it now waits for the second update
        step()
        return param.data.tolist()

    assert thread_comm.run(2, rank, 1) == [[5 - 3 * 0.5 * 1.5] * 9] * 2


def test_an_update_uses_the_settings_of_its_step():
    """The learning rate is changed when `step` has returned, while updates may be under way."""

    def rank(world, overlap):
        rule = optim.SGD(lr=0.1)
        net = Net()
        for number, param in enumerate(net.parameters()):
            param.data[...] = start(number, param.shape)
        trainer = hpcdp.Trainer(net.parameters(), rule, world, bucket_cap_mb=0.006, overlap=overlap)
        for step in range(4):
            backward(net, *batch(step, world.rank, 2))
            trainer.step(2)
            rule.lr = 0.1 / (step + 2)
        return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()]).tobytes()

    runs = [thread_comm.run(3, lambda world, o=o: rank(world, o), 1) for o in (False, True)]
    assert len({result for run in runs for result in run}) == 1


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_real_ranks_get_the_same_bits_with_and_without_overlap(owner):
    world = hpcdp.init()
    runs = [train(world, "uneven", steps=2, owner=owner, overlap=o).tobytes().hex() for o in (False, True)]
    everyone = world.comm.allgather_json(runs)
    assert len({each for rank in everyone for each in rank}) == 1
