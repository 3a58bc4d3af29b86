"""A trainer's state: every rank has its part, all together have it whole, and any number of ranks goes on from it."""

import contextlib
import warnings

import numpy as np
import pytest
import standin
from pairs import pairs
from raises import raises
from whole_state import held, joined, restore
from written_gradients import Parameter

from hpcdp import autograd, checkpoint, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.bucket_layout import plan
from hpcdp.errors import ConfigError, StaleGradientError
from hpcdp.train.trainer import Trainer

SHAPES = {"conv.weight": (20, 1, 3, 3), "conv.bias": (20,), "dense.weight": (300, 41), "dense.bias": (7,), "scale": ()}
WORLDS = [(1, None), (2, None), (3, None), (4, 2), (4, 3), (3, 1), (3, [1, 2])]


def model(asarray=np.asarray):
    rng = np.random.default_rng(7)
    return [Parameter(name, asarray(rng.standard_normal(shape).astype("f4"))) for name, shape in SHAPES.items()]


def write(params, step, rank, asarray=np.asarray):
    rng = np.random.default_rng([step, rank])
    for param in params[::-1]:
        param.grad[...] = asarray(rng.standard_normal(param.data.shape).astype("f4"))
        param.grad_hook(param)


def train(trainer, params, world, steps):
    for _ in range(steps):
        write(params, trainer.step_count, world.rank)
        trainer.step(1)
    world.comm.barrier()


def values(params, world):
    world.comm.barrier()
    found = {param.name: np.array(param.data) for param in params}
    world.comm.barrier()
    return found


def make(world, owner="auto", optimizer=None, **settings):
    params = model()
    rule = optim.Adam(lr=0.01) if optimizer is None else optimizer()
    return params, Trainer(params, rule, world, owner=owner, **settings)


def sgd():
    return optim.SGD(lr=optim.WarmupSchedule(optim.MultiStepSchedule(0.1, (2, 4)), 3), momentum=0.9, nesterov=True)


def saved(n, per_node, owner="auto", optimizer=None, steps=3, **settings):
    """The state and the parameters of all ranks after some steps."""

    def rank(world):
        params, trainer = make(world, owner, optimizer, **settings)
        train(trainer, params, world, steps)
        return held(trainer.state_dict()), values(params, world)

    states, of_ranks = zip(*thread_comm.run(n, rank, ranks_per_node=per_node), strict=True)
    return joined(list(states)), of_ranks[0]


def gone_on(n, per_node, state, params_then, owner="auto", optimizer=None, steps=3, **settings):
    """The parameters and the state after some steps more."""

    def rank(world):
        params, trainer = make(world, owner, optimizer, **settings)
        for param in params:
            world.comm.barrier()
            param.data[...] = params_then[param.name]
        world.comm.barrier()
        restore(trainer, state, world)
        again = held(trainer.state_dict())
        train(trainer, params, world, steps)
        return again, held(trainer.state_dict()), values(params, world)

    again, states, of_ranks = zip(*thread_comm.run(n, rank, ranks_per_node=per_node), strict=True)
    return joined(list(again)), joined(list(states)), of_ranks[0]


def same(state, other, without=()):
    """Whether two states are the same to the bit."""
    assert list(state) == list(other)
    for key in state:
        if isinstance(state[key], dict):
            same(state[key], other[key])
        elif key not in without:
            np.testing.assert_array_equal(state[key], other[key], strict=isinstance(state[key], np.ndarray))


@pytest.mark.parametrize(
    ("layout", "owner", "optimizer"), pairs(WORLDS, ["rank", "shard"], [None, sgd, lambda: optim.SGD(lr=0.1)])
)
def test_the_same_ranks_go_on_with_the_same_bits(layout, owner, optimizer):
    n, per_node = layout
    state, params_then = saved(n, per_node, owner, optimizer)
    again, after, params_after = gone_on(n, per_node, state, params_then, owner, optimizer)
    straight, params_straight = saved(n, per_node, owner, optimizer, steps=6)
    same(again, state)
    same(after, straight)
    same(params_after, params_straight)


@pytest.mark.each_value
@pytest.mark.parametrize(("n", "per_node"), WORLDS)
@pytest.mark.parametrize(("owner", "then"), [("rank", "shard"), ("shard", "rank"), ("shard", "shard")])
def test_any_number_of_ranks_and_any_owner_take_it_over(n, per_node, owner, then):
    for m, m_per_node in [(1, None), (2, None), (3, 2), (4, 2)]:
        state, params_then = saved(n, per_node, owner, steps=2)
        same(gone_on(m, m_per_node, state, params_then, then, steps=0)[0], state)


@pytest.mark.parametrize("codec", ["2bit", "topk:ratio=0.2"])
@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (3, 2), (4, 2)])
def test_what_compression_has_not_sent_goes_on_with_the_same_bits(n, per_node, codec):
    state, params_then = saved(n, per_node, compression=codec)
    assert len(state["residuals"]["dense.weight"]) == 2 and np.any(state["residuals"]["dense.weight"])
    again, after, params_after = gone_on(n, per_node, state, params_then, compression=codec)
    straight, params_straight = saved(n, per_node, steps=6, compression=codec)
    same(again, state)
    same(after, straight)
    same(params_after, params_straight)
    again, _, _ = gone_on(3, 1, state, params_then, steps=0, compression=codec)
    for name, rows in again["residuals"].items():
        np.testing.assert_allclose(rows.sum(axis=0), state["residuals"][name].sum(axis=0), rtol=1e-5, atol=1e-6)


def test_residuals_without_compression_are_lost_with_a_warning_and_begin_at_zero_where_there_were_none():
    state, params_then = saved(2, 1, compression="2bit")
    with pytest.warns(UserWarning, match="what compression had not sent yet is lost"):
        gone_on(2, 1, state, params_then, steps=0)
    del state["residuals"]
    again, _, _ = gone_on(2, 1, state, params_then, steps=0, compression="2bit")
    assert not any(rows.any() for rows in again["residuals"].values())


@pytest.mark.parametrize(("then", "now"), [(None, 1), (1, None), (1, 2)])
def test_a_checkpoint_goes_on_with_compression_on_any_number_of_nodes(then, now, tmp_path):
    def rank(world, resumed):
        params, trainer = make(world, compression="topk")
        manager = checkpoint.Manager(tmp_path, world)
        if resumed:
            manager.restore(into={"trainer": trainer})
        train(trainer, params, world, 2)
        if not resumed:
            manager.save(trainer.step_count, {"trainer": trainer})
        return trainer.step_count

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "compression topk changes nothing|load_state_dict: what compression had not")
        assert thread_comm.run(3, lambda world: rank(world, False), ranks_per_node=then) == [2] * 3
        assert thread_comm.run(3, lambda world: rank(world, True), ranks_per_node=now) == [4] * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_updates_beside_the_next_forward_are_waited_for(overlap):
    """Parameters of a network wait for their updates; a state does, too."""

    def rank(world):
        net = nn.Sequential(nn.Dense(30, 40), nn.Dense(40, 5))
        params = net.parameters()
        for param in params:
            param.data[...] = np.random.default_rng(3).standard_normal(param.data.shape)
        trainer = Trainer(params, optim.Adam(), world, overlap=overlap)
        train(trainer, params, world, 3)
        return held(trainer.state_dict())

    state = joined(thread_comm.run(4, rank, ranks_per_node=2))
    assert state["step_count"] == 3 and all(each["m"].any() for each in state["states"].values())


def test_arrays_of_a_device():
    def rank(world, state):
        params = model(standin.asarray)
        trainer = Trainer(params, optim.Adam(), world)
        if state is not None:
            own = trainer.state_dict()
            for name, each in own["states"].items():
                each["m"].parts[0].values[...] = standin.asarray(state["states"][name]["m"].reshape(-1))
            trainer.load_state_dict(state | {"states": state["states"]})
        for _ in range(2):
            write(params, trainer.step_count, world.rank, standin.asarray)
            trainer.step(1)
        return held(trainer.state_dict())

    first = joined(thread_comm.run(2, lambda world: rank(world, None)))
    second = joined(thread_comm.run(2, lambda world: rank(world, first)))
    assert second["step_count"] == 4


def test_settings_come_back_too():
    def rank(world):
        _, trainer = make(world)
        trainer.optimizer.lr = 0.5
        trainer.loss_scale, trainer.num_nonfinite = 8.0, 3
        state = held(trainer.state_dict())
        _, other = make(world, optimizer=lambda: optim.Adam(lr=optim.CosineSchedule(0.1, 20), weight_decay=0.1))
        other.load_state_dict(state)
        return other.optimizer.config(), other.loss_scale, other.num_nonfinite

    config = optim.Adam(lr=0.5).config()
    assert thread_comm.run(2, rank) == [(config, 8.0, 3)] * 2


def test_what_is_no_tensor_is_refused_by_its_name():
    def rank(world):
        params, trainer = make(world)
        train(trainer, params, world, 1)
        state = trainer.state_dict()
        state["states"] = {param: {key: [1.0] for key in own} for param, own in state["states"].items()}
        with raises(ConfigError, operation="load_state_dict", where="conv.weight/m", got="list"):
            trainer.load_state_dict(state)

    thread_comm.run(2, rank)


def test_a_copy_in_memory_is_taken_back():
    def rank(world):
        params, trainer = make(world, "shard")
        train(trainer, params, world, 2)
        copy = held(trainer.state_dict())
        train(trainer, params, world, 1)
        trainer.load_state_dict(copy)
        return held(trainer.state_dict()), copy

    for n in (1, 3):
        after, before = zip(*thread_comm.run(n, rank), strict=True)
        same(joined(list(after)), joined(list(before)))


def test_another_layout_is_taken_with_one_warning_and_the_same_without(monkeypatch):
    state, params_then = saved(2, None)
    assert set(state["layout"]["slots"]) == set(SHAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gone_on(3, None, state, params_then, steps=0)
    monkeypatch.setattr(
        "hpcdp.data_parallel.bucket_trainer.plan", lambda params, cap, room_for: plan(params, 0.001, 0.001)
    )
    with pytest.warns(UserWarning, match="another layout of buckets") as warned:
        again, _, _ = gone_on(2, None, state, params_then, steps=0)
    assert len(warned) == 1
    same(again["states"], state["states"])


def test_virtual_shards_must_be_as_many_and_other_arithmetic_is_said(monkeypatch):
    state, params_then = saved(1, None, steps=0, reproducible=True, virtual_shards=5)
    with raises(ConfigError, operation="load_state_dict", where="virtual_shards", expected=8, got=5):
        gone_on(2, None, state, params_then, steps=0, reproducible=True)
    gone_on(2, None, state, params_then, steps=0)
    plain, params_then = saved(1, None, steps=0)
    gone_on(2, None, plain, params_then, steps=0, reproducible=True, virtual_shards=5)
    monkeypatch.setattr("hpcdp.data_parallel.deterministic.arithmetic", lambda: "an abacus")
    with pytest.warns(UserWarning, match="arithmetic was .* and here it is an abacus"):
        gone_on(2, None, state, params_then, steps=0, reproducible=True, virtual_shards=5)


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (lambda: optim.SGD(lr=0.1), {"where": "conv.bias"}),
        (optim.AdamW, {"where": "optimizer", "expected": "adamw"}),
    ],
)
def test_states_of_another_optimizer_are_refused(optimizer, fields):
    state, params_then = saved(1, None)
    with raises(ConfigError, operation="load_state_dict", **fields):
        gone_on(2, None, state, params_then, optimizer=optimizer)


def test_an_optimizer_takes_no_settings_of_another_state():
    rule = optim.SGD(lr=0.1)
    with raises(ConfigError, operation="load_state_dict", where="optimizer", expected="()", got="momentum"):
        rule.take_config(optim.SGD(lr=0.1, momentum=0.9).config())
    with raises(ConfigError, operation="load_state_dict", where="optimizer", expected="sgd", got="lr"):
        rule.take_config({"name": "sgd", "lr": 0.1, "momentum": 0.9})
    assert rule == optim.SGD(lr=0.1)


@pytest.mark.parametrize("operation", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("by", ["no_sync", "allreduce_grads"])
def test_gradients_that_a_later_update_wants_would_be_lost(operation, by):
    def rank(world):
        params, trainer = make(world)
        state = trainer.state_dict()
        arguments = () if operation == "state_dict" else (state,)
        if by == "no_sync":
            with trainer.no_sync():
                write(params, 0, world.rank)
                trainer.step(1)
        else:
            write(params, 0, world.rank)
            trainer.allreduce_grads()
        with raises(StaleGradientError, operation=operation):
            getattr(trainer, operation)(*arguments)
        trainer.step(0)
        getattr(trainer, operation)(*arguments)

    thread_comm.run(2, rank)


def test_a_step_whose_virtual_shards_are_not_all_computed_has_no_state():
    def rank(world):
        params, trainer = make(world, reproducible=True, virtual_shards=4)
        write(params, 0, world.rank)
        trainer.step(1)
        with raises(StaleGradientError, operation="state_dict"):
            trainer.state_dict()

    thread_comm.run(2, rank)


@pytest.mark.parametrize("state", [{}, {"step_count": 1}, None, []])
@pytest.mark.parametrize("settings", [{}, {"kvstore": "local"}])
def test_what_is_no_state_is_refused(state, settings):
    def job(world):
        settings_here = settings or {"world": world}
        trainer = Trainer(nn.Dense(2, 3).parameters(), optim.SGD(lr=0.1), **settings_here)
        with raises(ConfigError, operation="load_state_dict", where="a Trainer"):
            trainer.load_state_dict(state)

    thread_comm.run(1, job)


def test_a_network_is_not_its_parameters():
    with raises(ConfigError, operation="Trainer", where="params", expected="net.parameters()"):
        thread_comm.run(1, lambda world: Trainer(nn.Dense(2, 3), optim.SGD(lr=0.1), world=world))


@pytest.mark.parametrize(
    "how",
    [{"owner": "shard"}, {"owner": "rank", "overlap": True}, {"kvstore": "dist_sync", "update_on_kvstore": False}],
)
def test_parameters_keep_the_names_that_they_had_when_the_trainer_was_made(how):
    """A part's ``parameters()`` call them otherwise, and two of them alike."""

    def rank(world, looks):
        net = nn.Sequential(nn.Dense(6, 8), nn.Dense(8, 4))
        for number, param in enumerate(net.parameters()):
            param.data[...] = np.random.default_rng(number).normal(size=param.shape)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **how)
        for step in range(4):
            if looks:
                names = [param.name for part in net.modules() if part is not net for param in part.parameters()]
                assert names == ["weight", "bias"] * 2
            x = np.random.default_rng([step, world.rank]).normal(size=(5, 6)).astype("f4")
            with contextlib.nullcontext() if step % 2 else trainer.no_sync():
                with autograd.record():
                    loss = (net(x) ** 2).sum(axis=1)
                loss.backward()
                trainer.step(5)
        states = trainer.state_dict()["states"]
        return sorted(states), [param.data.copy() for param in net.parameters()]

    looked = thread_comm.run(2, lambda world: rank(world, True))
    expected = thread_comm.run(2, lambda world: rank(world, False))
    for (names, params), (same_names, same) in zip(looked, expected, strict=True):
        assert names == same_names == ["0.bias", "0.weight", "1.bias", "1.weight"]
        for found, value in zip(params, same, strict=True):
            np.testing.assert_array_equal(found, value)
