"""A pipeline gives the gradients of the unsplit model, on thread ranks and on real ones, however it is cut."""

import numpy as np
import pytest
from pairs import pairs
from pipelined_network import LOSS, STEPS, batch, joined, normal, stages, train, unsplit, values
from raises import raises

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of
from hpcdp.errors import ConfigError, DataError, UnsupportedError
from hpcdp.parallel import Pipeline
from hpcdp.parallel.pipeline import pieces
from hpcdp.train.trainer import Trainer


@pytest.mark.parametrize(
    ("on", "micro_batches", "schedule"),
    pairs([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 3), (4, 4)], [1, 3, 4, 100], ["gpipe", "1f1b"]),
)
def test_one_copy_gives_the_bits_of_the_unsplit_model(on, micro_batches, schedule):
    n, num_stages = on
    alone, losses = unsplit(micro_batches=micro_batches)
    results = thread_comm.run(n, lambda world: train(world, num_stages, micro_batches=micro_batches, schedule=schedule))
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

    found = [each for gradients in thread_comm.run(n, rank) for each in gradients]
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
        with raises(ConfigError, operation="graph", where="Pipeline"):
            net.graph()
        net.hybridize(False)
        assert [part._hybrid for _, part in net.children()] == [None] * len(kept)
        return found

    for plain, hybrid in thread_comm.run(n, job):
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

    assert thread_comm.run(2, job) == [True] * 2


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize(("n", "num_stages", "per_node"), [(4, 2, None), (4, 2, 2), (6, 2, 2), (6, 3, None), (6, 3, 4)])
def test_copies_give_the_gradient_of_the_global_batch(n, num_stages, per_node, clip_norm, owner):
    replicas = n // num_stages
    counts = [7, 0, 12][:replicas]
    alone, _ = unsplit(replicas, counts, clip_norm)
    results = thread_comm.run(
        n, lambda world: train(world, num_stages, counts, clip_norm=clip_norm, owner=owner), per_node
    )
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
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), thread_comm.run(1, lambda world: world)[0], clip_norm=0.5)
    for step in range(STEPS):
        x, y = (np.concatenate(each) for each in zip(*(batch(step, rank) for rank in range(replicas)), strict=True))
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
        trainer.step(len(x))
    for state in thread_comm.run(n, run):
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

    together = thread_comm.run(1, rank)[0]
    for before, loss, after, state in thread_comm.run(2, rank):
        np.testing.assert_array_equal(before, together[0])
        assert loss == together[1]
        np.testing.assert_array_equal(after, together[2])
        for name, part in state.items():
            np.testing.assert_array_equal(part, together[3][name])
    assert not np.array_equal(together[0], together[2])


@pytest.mark.mpi
def test_arrays_of_another_byte_order_pass_between_real_ranks():
    class Turns(nn.Module):
        def forward(self, x):
            return Tensor((x.data * 2).astype(">f4")[::-1])

    world = hpcdp.init()
    x = batch(0, 0)[0]
    with autograd.pause():
        found = Pipeline([Turns] * world.size, LOSS, world)(x).data
    np.testing.assert_array_equal(found, (x * 2**world.size)[:: (-1) ** world.size])


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

    first, second = thread_comm.run(2, rank)
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

    assert [each[1:] for each in thread_comm.run(3, rank)] == [(1, 0)] * 3


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

    went_on, restored = (thread_comm.run(n, lambda world, saves=n == 4: rank(world, saves)) for n in (4, 6))
    np.testing.assert_allclose(joined(restored, 2), joined(went_on, 2), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(joined(went_on, 2), unsplit()[0])


def test_pieces():
    assert pieces(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert pieces(2, 4) == [(0, 1), (1, 2)] and pieces(0, 4) == []


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.thorough), 4])
def test_backward_begins_with_the_loss_scale_in_16_bits_too(n):
    def rank(world, dtype, scale):
        net = Pipeline(stages(2), LOSS, world).to(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), net.replicas, loss_scale=scale)
        for step in range(8):
            net.step(trainer, *batch(step, net.replicas.rank))
        assert net(batch(0, 0)[0]).dtype == dtype_of(dtype)
        world.comm.barrier()
        return {name: np.array(part, "f4") for name, part in net.state_dict().items()}, trainer.loss_scale

    plain, scaled, halves, brains = (
        joined(thread_comm.run(n, lambda world, to=to: rank(world, *to)), 2)
        for to in (("float32", 1.0), ("float32", 1024.0), ("float16", 64.0), ("bfloat16", 1.0))
    )
    np.testing.assert_array_equal(plain, scaled)
    np.testing.assert_allclose(plain, halves, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(plain, brains, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"kvstore": "dist_sync"}])
def test_an_error_in_one_process_leaves_nothing_of_the_batch_behind(schedule, settings):
    def trained(fails):
        def rank(world):
            net = Pipeline(stages(2), LOSS, world, micro_batches=4, schedule=schedule)
            trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), net.replicas, **settings)
            for step in range(STEPS):
                x, y = batch(step, 0, 20)
                if fails and step == 1:
                    with raises(DataError, operation="softmax_cross_entropy", where="labels"):
                        net.step(trainer, *batch(7, 0, 20)[:1], np.where(np.arange(20) < 12, y, 99))
                    with raises(UnsupportedError, operation="forward", where="Dense(6, 12, activation='relu')"):
                        net(x[:, :5])
                net.step(trainer, x, y)
            return values(net), net(x).data

        return thread_comm.run(1, rank)[0]

    for expected, got in zip(trained(fails=False), trained(fails=True), strict=True):
        np.testing.assert_array_equal(got, expected)
