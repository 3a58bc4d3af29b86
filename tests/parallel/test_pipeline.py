"""A pipeline gives the gradients of the unsplit model, on thread ranks and on real ones, however it is cut."""

import itertools

import numpy as np
import pytest

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.comm import threads
from hpcdp.errors import ConfigError, DataError, MismatchError
from hpcdp.parallel import Pipeline
from hpcdp.parallel.pipeline import pieces
from hpcdp.train.trainer import Trainer

LOSS = nn.functional.softmax_cross_entropy
BATCH, STEPS = 22, 3


def normal(seed):
    return lambda shape: np.random.default_rng(seed).normal(0, 0.3, shape).astype("f4")


def stages(num_stages):
    """Functions that make the stages of a network of 4 layers, the same ones however they are spread."""

    def layer(i):
        widths = [6, 12, 9, 10, 4]
        return nn.Dense(widths[i], widths[i + 1], activation="relu" if i < 3 else None, weight_init=normal(i))

    cuts = [4 * stage // num_stages for stage in range(num_stages + 1)]
    return [
        lambda first=first, last=last: nn.Sequential(*map(layer, range(first, last)))
        for first, last in itertools.pairwise(cuts)
    ]


def batch(step, replica, count=BATCH):
    rng = np.random.default_rng([step, replica])
    return rng.normal(size=(count, 6)).astype("f4"), rng.integers(0, 4, count)


def values(net):
    return np.concatenate([each.copy().reshape(-1) for each in net.state_dict().values()])


def train(world, num_stages, counts=None, micro_batches=4, schedule="1f1b", clip_norm=None, owner="auto"):
    """Parameters of this rank's stages, by stage, and losses, after a few steps; ``counts`` are samples by replica."""
    net = Pipeline(stages(num_stages), LOSS, world, micro_batches=micro_batches, schedule=schedule)
    settings = {"clip_norm": clip_norm, "owner": owner}
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), net.replicas, **settings)
    replica = net.replicas.rank
    losses = []
    for step in range(STEPS):
        x, y = batch(step, replica, BATCH if counts is None else counts[replica])
        losses.append(net.step(trainer, x, y))
    world.comm.barrier()
    return {name: part for name, part in net.state_dict().items()}, losses


def unsplit(replicas=1, counts=None, clip_norm=None, micro_batches=1):
    """The same on one rank, with the batches of all replicas, cut into micro-batches."""
    net = nn.Sequential(*(make() for make in stages(1)))
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), threads.run(1, lambda world: world)[0],
                      clip_norm=clip_norm, owner="rank")  # fmt: skip
    losses = []
    for step in range(STEPS):
        losses.append([])
        held = [batch(step, each, BATCH if counts is None else counts[each]) for each in range(replicas)]
        parts = [(x[first:last], y[first:last]) for x, y in held for first, last in pieces(len(x), micro_batches)]
        for number, (x, y) in enumerate(parts):
            with autograd.record():
                loss = LOSS(net(x), y)
            if number < len(parts) - 1:
                with trainer.no_sync():
                    loss.backward()
                    trainer.step(len(x))
            else:
                loss.backward()
                trainer.step(len(x))
            losses[-1].append(loss.data.sum(dtype="f8"))
    return values(net), [sum(each) for each in losses]


def joined(results, num_stages):
    """One copy's parameters in the order of the unsplit model, of each replica; they must not differ."""
    copies = {}
    for state, _ in results:
        for name, part in state.items():
            copies.setdefault(name, []).append(part)
    for parts in copies.values():
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
    assert {int(name.partition(".")[0]) for name in copies} == set(range(num_stages))
    return np.concatenate([copies[name][0].reshape(-1) for name in sorted(copies, key=_place)])


def _place(name):
    stage, layer, what = name.split(".")
    return int(stage), int(layer), ["weight", "bias"].index(what)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 100])
@pytest.mark.parametrize(("n", "num_stages"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 3), (4, 4)])
def test_one_copy_gives_the_bits_of_the_unsplit_model(n, num_stages, micro_batches, schedule):
    alone, losses = unsplit(micro_batches=micro_batches)
    results = threads.run(n, lambda world: train(world, num_stages, micro_batches=micro_batches, schedule=schedule))
    np.testing.assert_array_equal(joined(results, num_stages), alone)
    for _, found in results:
        np.testing.assert_allclose(found, losses, rtol=1e-6)


class Around(nn.Module):
    """Hands its input on beside its result, and a parameter, as a connection around it does."""

    def __init__(self):
        self.body, self.shift = nn.Dense(12, 12, weight_init=normal(1)), nn.Parameter(np.ones(12, "f4"))

    def forward(self, h):
        return self.body(h), h, self.shift


class Joins(nn.Module):
    def __init__(self):
        self.body = nn.Dense(12, 4, weight_init=normal(2))

    def forward(self, g, h, shift):
        return self.body(g * h + shift)


class Unsplit(nn.Module):
    def __init__(self):
        self.first, self.around, self.joins = nn.Dense(6, 12, weight_init=normal(0)), Around(), Joins()

    def forward(self, x):
        return self.joins(*self.around(self.first(x)))


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("n", "micro_batches"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_gradients_go_around_stages_and_to_parameters_that_are_handed_on(n, micro_batches, hybrid):
    x, y = batch(0, 0)
    whole = Unsplit()
    with autograd.record():
        total = LOSS(whole(x), y).sum()
    total.backward()

    def rank(world):
        made = [lambda: nn.Dense(6, 12, weight_init=normal(0)), Around, Joins]
        net = Pipeline(made, LOSS, world, micro_batches=micro_batches)
        net.hybridize(hybrid)
        before = [each.data.copy() for each in net.parameters()]
        net.step(Trainer(net.parameters(), optim.SGD(lr=1.0), net.replicas), x, y)
        return [(old - each.data) * len(x) for old, each in zip(before, net.parameters(), strict=True)]

    found = [each for gradients in threads.run(n, rank) for each in gradients]
    for gradient, parameter in zip(found, whole.parameters(), strict=True):
        np.testing.assert_allclose(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_hybridized_it_gives_the_same_bits(n):
    def job(world):
        found = []
        for hybrid in (False, True):
            net = Pipeline(stages(2), LOSS, world)
            net.hybridize(hybrid)
            trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
            losses = [net.step(trainer, *batch(step, 0)) for step in range(2)]
            found.append([*losses, *(net(batch(step, 1)[0]).asnumpy() for step in range(3)), values(net)])
        kept = [part.graph() for _, part in net.children()]  # which raises where a stage was not hybridized
        with pytest.raises(ConfigError, match=r"^graph \[Pipeline\]: expected a stage, .*, got all of them$"):
            net.graph()
        net.hybridize(False)
        assert [part._hybrid for _, part in net.children()] == [None] * len(kept)
        return found

    for plain, hybrid in threads.run(n, job):
        for expected, got in zip(plain, hybrid, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_network_with_a_pipeline_in_it_is_called_as_usual():
    def job(world):
        net = nn.Sequential(Pipeline(stages(2), LOSS, world))
        expected = net(batch(0, 0)[0]).asnumpy()
        net.hybridize()
        for _ in range(2):
            np.testing.assert_array_equal(net(batch(0, 0)[0]).asnumpy(), expected)
        return True

    assert threads.run(2, job) == [True] * 2


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize(("n", "num_stages", "per_node"), [(4, 2, None), (4, 2, 2), (6, 2, 2), (6, 3, None), (6, 3, 4)])
def test_copies_give_the_gradient_of_the_global_batch(n, num_stages, per_node, clip_norm, owner):
    replicas = n // num_stages
    counts = [7, 0, 12][:replicas]
    alone, _ = unsplit(replicas, counts, clip_norm)
    results = threads.run(n, lambda world: train(world, num_stages, counts, clip_norm=clip_norm, owner=owner), per_node)
    np.testing.assert_allclose(joined(results, num_stages), alone, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("without", [0, 1, 2])
@pytest.mark.parametrize(("n", "owner"), [(1, "auto"), (3, "rank"), (6, "shard")])
def test_a_stage_may_have_no_parameters(n, owner, without):
    def made():
        dense = [nn.Dense(6, 6, weight_init=normal(1)), nn.Dense(6, 6, weight_init=normal(2))]
        return [*dense[:without], nn.Tanh(), *dense[without:]]

    def run(world):
        net = Pipeline(made(), LOSS, world, micro_batches=3)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas, clip_norm=0.5, owner=owner)
        for step in range(STEPS):
            net.step(trainer, *batch(step, net.replicas.rank))
        trainer.load_state_dict(trainer.state_dict())
        world.comm.barrier()
        return {name: part.copy() for name, part in net.state_dict().items()}

    net, replicas = nn.Sequential(*made()), max(1, n // 3)
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), threads.run(1, lambda world: world)[0], clip_norm=0.5)
    for step in range(STEPS):
        x, y = (np.concatenate(each) for each in zip(*(batch(step, rank) for rank in range(replicas)), strict=True))
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
        trainer.step(len(x))
    for state in threads.run(n, run):
        for name, part in state.items():
            np.testing.assert_allclose(part, net.state_dict()[name], rtol=2e-5, atol=2e-6)


@pytest.mark.mpi
def test_on_real_ranks():
    world = hpcdp.init()
    for num_stages in {world.size, world.size // 2 if world.size % 2 == 0 else world.size}:
        state, _ = train(world, num_stages, clip_norm=0.1)
        alone, _ = unsplit(max(1, world.size // num_stages), clip_norm=0.1)
        everyone = world.comm.allgather_json({name: part.tolist() for name, part in state.items()})
        results = [({name: np.array(part, "f4") for name, part in each.items()}, []) for each in everyone]
        np.testing.assert_allclose(joined(results, num_stages), alone, rtol=2e-5, atol=2e-6)


def test_several_tensors_pass_between_stages_and_integers_have_no_gradient():
    class First(nn.Module):
        def __init__(self):
            self.dense = nn.Dense(6, 5, weight_init=normal(1))

        def forward(self, x):
            return self.dense(x), x, (x > 0).astype(np.int32)

    class Second(nn.Module):
        def __init__(self):
            self.dense = nn.Dense(5, 4, weight_init=normal(2))

        def forward(self, h, x, positive):
            assert positive.dtype == np.int32
            return self.dense(h * 2) + x.sum(axis=1, keepdims=True) * positive.sum(axis=1, keepdims=True).astype("f4")

    def rank(world):
        net = Pipeline([First, Second], LOSS, world, micro_batches=3)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        x, y = batch(0, 0)
        before = net(x).data.copy()
        loss = net.step(trainer, x, y)
        world.comm.barrier()
        return before, loss, net(x).data, {name: part.copy() for name, part in net.state_dict().items()}

    together = threads.run(1, rank)[0]
    for before, loss, after, state in threads.run(2, rank):
        np.testing.assert_array_equal(before, together[0])
        assert loss == together[1]
        np.testing.assert_array_equal(after, together[2])
        for name, part in state.items():
            np.testing.assert_array_equal(part, together[3][name])
    assert not np.array_equal(together[0], together[2])


def test_a_frozen_stage_passes_on_and_is_not_changed():
    def rank(world):
        net = Pipeline(stages(2), LOSS, world)
        if net.replicas.model_comm.rank == 0:
            for param in net.parameters()[:-1]:
                param.attach_grad("null")
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        before = [param.data.copy() for param in net.parameters()]
        net.step(trainer, *batch(0, 0))
        return [np.array_equal(param.data, old) for param, old in zip(net.parameters(), before, strict=True)]

    first, second = threads.run(2, rank)
    assert first == [True, True, True, False] and second == [False] * 4


def test_a_nan_in_one_stage_skips_the_step_in_all():
    def rank(world):
        net = Pipeline(stages(3), LOSS, world)
        policy = hpcdp.Policy(nonfinite="skip")
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas, policy=policy)
        before = values(net)
        x, y = batch(0, 0)
        if net.replicas.model_comm.rank == 0:
            net.parameters()[0].data[0, 0] = np.nan
        net.step(trainer, x, y)
        return np.array_equal(values(net), before, equal_nan=True), trainer.num_nonfinite, trainer.step_count

    assert [each[1:] for each in threads.run(3, rank)] == [(1, 0)] * 3


def test_each_stage_has_checkpoints_that_another_number_of_copies_restores(tmp_path):
    def rank(world, saves):
        net = Pipeline(stages(2), LOSS, world)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), net.replicas)
        x, y = batch(0, 0)
        mine = slice(net.replicas.rank, None, net.replicas.size)
        stage = net.replicas.model_comm.rank
        manager = hpcdp.checkpoint.Manager(tmp_path / f"stage-{stage}", net.replicas)
        if saves:
            net.step(trainer, x[mine], y[mine])
            manager.save(1, {"net": net, "trainer": trainer})
        else:
            manager.restore(into={"net": net, "trainer": trainer})
        manager.close()
        net.step(trainer, x[mine], y[mine])
        world.comm.barrier()
        return {name: part.copy() for name, part in net.state_dict().items()}, None

    went_on, restored = (threads.run(n, lambda world, saves=n == 4: rank(world, saves)) for n in (4, 6))
    np.testing.assert_allclose(joined(restored, 2), joined(went_on, 2), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(joined(went_on, 2), unsplit()[0])


@pytest.mark.parametrize(
    ("n", "settings", "says"),
    [
        (3, {}, "1 rank, or a multiple of the 2 stages, got 3 ranks"),
        (2, {"schedule": "2f2b"}, "one of gpipe, 1f1b, got '2f2b'"),
        (2, {"micro_batches": 0}, "an integer >= 1, got 0"),
        (2, {"micro_batches": 1.5}, "an integer >= 1, got 1.5"),
    ],
)
def test_what_cannot_be(n, settings, says):
    with pytest.raises(ConfigError, match=says):
        threads.run(n, lambda world: Pipeline(stages(2), LOSS, world, **settings))


def test_ranks_that_say_different_things():
    with pytest.raises(MismatchError, match="micro_batches"):
        threads.run(2, lambda world: Pipeline(stages(2), LOSS, world, micro_batches=world.rank + 1))


def test_a_trainer_of_another_world_and_labels_that_are_missing():
    def rank(world):
        net = Pipeline(stages(2), LOSS, world)
        x, y = batch(0, 0)
        with pytest.raises(MismatchError, match=r"for the stages of a pipeline, .*, pass their replicas as the world"):
            Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        with pytest.raises(ConfigError, match="pipeline's replicas"):
            net.step(Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas.split(0)), x, y)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        with pytest.raises(DataError, match="22 and 21"):
            net.step(trainer, x, y[1:])

    threads.run(2, rank)
    with pytest.raises(ConfigError, match=r"stages\[1\]"):
        threads.run(1, lambda world: Pipeline([*stages(1), lambda: None], LOSS, world))
    with pytest.raises(ConfigError, match=r"stages\]: expected a list of modules, got Sequential"):
        threads.run(1, lambda world: Pipeline(nn.Sequential(), LOSS, world))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_reproducible_trainer_is_refused(micro_batches):
    def rank(world):
        net = Pipeline(stages(2), LOSS, world, micro_batches=micro_batches)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas, reproducible=True)
        with pytest.raises(ConfigError, match="one without reproducible=True, got one of 8 virtual shards"):
            net.step(trainer, *batch(0, 0))

    threads.run(4, rank)


def test_pieces():
    assert pieces(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert pieces(2, 4) == [(0, 1), (1, 2)] and pieces(0, 4) == []


@pytest.mark.parametrize("n", [1, 2, 4])
def test_backward_begins_with_the_loss_scale_in_float16_too(n):
    def rank(world, dtype, scale):
        net = Pipeline(stages(2), LOSS, world).to(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas, loss_scale=scale)
        for step in range(8):
            net.step(trainer, *batch(step, net.replicas.rank))
        world.comm.barrier()
        return {name: np.array(part, "f4") for name, part in net.state_dict().items()}, trainer.loss_scale

    plain, scaled, halves = (
        joined(threads.run(n, lambda world, to=to: rank(world, *to)), 2)
        for to in (("float32", 1.0), ("float32", 1024.0), ("float16", 64.0))
    )
    np.testing.assert_array_equal(plain, scaled)
    np.testing.assert_allclose(plain, halves, rtol=0.02, atol=0.02)


class Head(nn.Module):
    """Scores by a weight that is an earlier layer's, as of tied embeddings."""

    def __init__(self, first):
        self.weight = first.weight

    def forward(self, h):
        return h @ self.weight


def tied(kind):
    """Three stages, of which the first and the last have a parameter in common."""
    first = nn.Dense(6, 6, activation="relu", weight_init=normal(3))
    last = nn.Dense(6, 4, weight_init=normal(4))
    if kind == "module":
        return [nn.Sequential(first), nn.Tanh(), nn.Sequential(first, last)]
    if kind == "devices":
        return [nn.Replicas(first, [hpcdp.cpu(0), hpcdp.cpu(1)]), nn.Tanh(), nn.Sequential(first, last)]
    return [first, nn.Tanh(), nn.Sequential(Head(first), last)]


TIED = {"module": "0.0.weight", "parameter": "0.weight", "devices": "0.weight"}
REMEDY = "; give each stage layers of its own, or put those that share a parameter into one stage"


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("n", [3, 6])
def test_a_parameter_of_two_stages_on_different_ranks_is_refused_on_all(kind, n):
    def rank(world):
        with pytest.raises(ConfigError) as found:
            Pipeline(tied(kind), LOSS, world)
        return str(found.value)

    expected = "each parameter in one stage, where stages are on different ranks"
    got = f"'{TIED[kind]}' of stage 0 in stage 2, too, as '2.0.weight'"
    assert threads.run(n, rank) == [f"Pipeline [stages]: expected {expected}, got {got}{REMEDY}"] * n


@pytest.mark.parametrize("which", [0, 1])
def test_a_function_that_makes_what_another_stage_has_is_refused_on_all(which):
    def rank(world):
        dense = nn.Dense(6, 6)
        stages = [dense, dense]
        stages[which] = lambda: dense
        with pytest.raises(ConfigError) as found:
            Pipeline(stages, LOSS, world)
        return str(found.value)

    first, second = threads.run(2, rank)
    assert first == second and "got '0.weight' of stage 0 in stage 1, too, as '1.weight'" in first
    assert first.startswith(f"rank {which}: Pipeline [stages]: ")


def test_modules_without_parameters_may_be_in_several_stages():
    activation = nn.Tanh()
    made = [nn.Sequential(nn.Dense(6, 4, weight_init=normal(1)), activation), activation]
    results = threads.run(2, lambda world: Pipeline(made, LOSS, world)(batch(0, 0)[0]).asnumpy())
    expected = nn.Sequential(*made)(batch(0, 0)[0]).asnumpy()
    for found in results:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("settings", [{"owner": "rank"}, {"owner": "shard"}, {"overlap": True}, {"kvstore": "local"}])
@pytest.mark.parametrize("hybrid", [False, True])
def test_in_one_process_stages_may_share_a_parameter(kind, micro_batches, settings, hybrid):
    def trained(world, pipelined):
        net = nn.Sequential(*tied(kind))
        if pipelined:
            net = Pipeline(tied(kind), LOSS, world, micro_batches=micro_batches)
            net.hybridize(hybrid)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **settings)
        for step in range(STEPS):
            x, y = batch(step, 0)
            if pipelined:
                net.step(trainer, x, y)
                continue
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            trainer.step(len(x))
        trainer.synchronize()
        return [param.data.copy() for param in net.parameters()]

    ((found, expected),) = threads.run(1, lambda world: (trained(world, True), trained(world, False)))
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda scores, y: LOSS(scores, y).mean(), r"shape \(\); leave out \.mean\(\) or \.sum\(\)"),
        (lambda scores, y: LOSS(scores, y).reshape(-1, 1), r"shape \(1, 1\); take the mean of each sample"),
    ],
)
def test_a_loss_that_is_not_per_sample_is_refused(n, loss, got):
    def rank(world):
        net = Pipeline(stages(2), loss, world, micro_batches=22)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas)
        net.step(trainer, *batch(0, net.replicas.rank))

    with pytest.raises(ConfigError, match=rf"^Pipeline.step \[loss\]: expected one a sample, shape \(1,\), got {got}"):
        threads.run(n, rank)


@pytest.mark.parametrize(("loss", "got"), [(lambda *_: None, "a NoneType"), (lambda *_: 0.5, "a float")])
def test_a_loss_that_is_no_tensor_is_refused(loss, got):
    def rank(world):
        net = Pipeline(stages(2), loss, world, micro_batches=22)
        net.step(Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas), *batch(0, net.replicas.rank))

    with pytest.raises(ConfigError, match=rf"^Pipeline.step \[loss\]: expected a Tensor, got {got}; return what "):
        threads.run(2, rank)
