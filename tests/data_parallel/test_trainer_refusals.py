"""What a trainer refuses, on every rank: settings, gradients that are missing or summed, and ranks that differ."""

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from written_gradients import SHAPES, backward, model

from hpcdp import nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.bucket_trainer import BucketTrainer
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError
from hpcdp.train.trainer import Trainer


@pytest.mark.parametrize("count", [-1, 2.5, "four", None])
def test_a_count_that_is_none_is_refused(count):
    with raises(ConfigError, operation="step", where="count", expected=0):
        thread_comm.run(1, lambda world: Trainer(model(0), optim.SGD(lr=0.1), world).step(count))


@pytest.mark.parametrize("kvstore", [None, "dist_sync"])
def test_what_is_no_optimizer_is_refused(kvstore):
    with raises(ConfigError, operation="Trainer", got="sgd"):
        thread_comm.run(1, lambda world: Trainer(model(0), "sgd", world, kvstore=kvstore))


@pytest.mark.parametrize("kvstore", [None, "dist_sync"])
def test_parameters_of_other_dtypes_are_refused(kvstore):
    layer = nn.Dense(3, 2)
    layer.weight.data = layer.weight.data.astype(np.longdouble)
    with raises(
        ConfigError,
        operation="Trainer",
        where="weight",
        expected=["float16", "bfloat16", "float32", "float64"],
        got="float128",
    ):
        thread_comm.run(1, lambda world: Trainer(layer.parameters(), optim.SGD(lr=0.1), world, kvstore=kvstore))


def test_an_update_without_the_sum_is_refused():
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        backward(params, 0, [0])
        trainer.update(1)

    with raises(StaleGradientError, operation="update", expected="allreduce_grads()"):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ({"owner": "server"}, {"where": "owner", "expected": ["auto", "rank", "shard"], "got": "server"}),
        (
            {"owner": np.array(["auto", "rank"])},
            {"where": "owner", "expected": ["auto", "rank", "shard"], "got": "array(['auto', 'rank'], dtype='<U4')"},
        ),
        ({"clip_norm": 0}, {"where": "clip_norm", "got": 0}),
        ({"clip_norm": 10**400}, {"where": "clip_norm", "expected": "positive"}),
    ],
)
def test_wrong_settings_are_refused_by_name(setting, fields):
    with raises(ConfigError, operation="Trainer", **fields):
        thread_comm.run(1, lambda world: Trainer(model(0), optim.SGD(lr=0.1), world, **setting))


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_setting_that_needs_a_state_which_nobody_keeps_is_told(owner):
    def rank(world):
        params, optimizer = model(0), optim.SGD(lr=0.1)
        trainer = Trainer(params, optimizer, world, owner=owner)
        backward(params, 0, [world.rank])
        trainer.step(1)
        optimizer.momentum = 0.9
        backward(params, 1, [world.rank])
        trainer.step(1)

    with raises(ConfigError, operation="sgd.update", where="state", expected="momentum"):
        thread_comm.run(2, rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_sums_are_neither_written_over_nor_summed_again_before_the_update(overlap):
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world, overlap=overlap)
        backward(params, world.rank, [0])
        trainer.allreduce_grads()
        with raises(StaleGradientError, operation="backward", where="dense.bias", expected="step()"):
            backward(params, world.rank, [1])
        for again in (trainer.allreduce_grads, lambda: trainer.step(1)):
            with raises(StaleGradientError, got="allreduce_grads()", remedy=["update(count)", "step(0)"]):
                again()
        trainer.step(0)
        assert trainer.step_count == 0
        backward(params, world.rank, [1])
        trainer.allreduce_grads()
        assert trainer.update(1) == world.size
        assert trainer.step_count == 1

    thread_comm.run(2, rank, ranks_per_node=1 if overlap else None)


def test_ranks_that_step_and_update_at_once_are_told_so():
    told = []

    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        backward(params, world.rank, [0])
        trainer.allreduce_grads()
        try:
            trainer.update(1) if world.rank else trainer.step(0)
        except MismatchError:
            told.append(world.rank)

    thread_comm.run(2, rank)
    assert sorted(told) == [0, 1]


def test_a_missing_gradient_is_an_error_on_every_rank():
    messages = []

    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        for param in params[1:] if world.rank == 1 else params:
            param.write(np.zeros(param.data.shape, "f4"))
        try:
            trainer.step(1)
        except StaleGradientError as error:
            messages.append(str(error))

    thread_comm.run(3, rank)
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "step [rank 1]" in messages[0]
    assert "got none for conv.weight" in messages[0]


def test_a_second_step_without_backward_is_an_error():
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        backward(params, 0, [0])
        trainer.step(1)
        trainer.step(1)

    with raises(StaleGradientError, operation="step", where="rank 0", got=["conv.weight", "conv.bias", "dense.weight"]):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (
            {"dense.bias": (8,)},
            {
                "where": "item 4 of 8 on rank 0",
                "expected": ["dense.bias", (7,), "float32", "rank 0"],
                "got": ["dense.bias", (8,), "float32", "rank 1"],
            },
        ),
        ({"extra": (1,)}, {"where": "item 5 of 8 on rank 0", "got": [(1,), "float32", "rank 1"]}),
    ],
)
def test_ranks_with_other_models_are_told_on_every_rank(change, fields):
    errors = []

    def rank(world):
        shapes = SHAPES | change if world.rank == 1 else SHAPES
        try:
            Trainer(model(0, shapes), optim.SGD(lr=0.1), world)
        except MismatchError as error:
            errors.append(error)

    thread_comm.run(3, rank)
    assert len(errors) == 3
    for error in errors:
        with raises(MismatchError, operation="Trainer", **fields):
            raise error


@pytest.mark.parametrize("kvstore", [None, "local", "dist_sync"])
def test_what_is_no_world_is_refused_by_name(kvstore):
    """Gluon's Trainer takes its optimizer's settings there."""
    with raises(
        ConfigError, operation="Trainer", where="world", expected=["hpcdp.init()", None], got=["learning_rate", 0.1]
    ):
        Trainer(model(0), optim.SGD(lr=0.1), {"learning_rate": 0.1}, kvstore=kvstore)


def test_other_settings_are_a_mismatch_too():
    with raises(
        MismatchError,
        operation="Trainer",
        where="item 5 of 8 on rank 0",
        expected=["lr", 0.1, "rank 0"],
        got=["lr", 0.2, "rank 1"],
    ):
        thread_comm.run(2, lambda world: Trainer(model(0), optim.SGD(lr=0.1 * (world.rank + 1)), world))


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (
            {"owner": "boss"},
            {"operation": "Trainer", "where": "owner", "expected": ["auto", "rank", "shard"], "got": "boss"},
        ),
        ({"clip_norm": 0}, {"operation": "Trainer", "where": "clip_norm", "got": 0}),
        ({"clip_norm": "1"}, {"operation": "Trainer", "where": "clip_norm", "got": "'1'"}),
        ({"overlap": "yes"}, {"operation": "Trainer", "where": "overlap", "expected": [False, None], "got": "yes"}),
        ({"overlap": 2}, {"operation": "Trainer", "where": "overlap", "expected": [False, None], "got": 2}),
        ({"bucket_cap_mb": "x"}, {"operation": "bucket plan", "where": "bucket_cap_mb", "got": "x"}),
        ({"compression": "3bit"}, {"operation": "compression", "expected": ["fp16", "bf16"], "got": "3bit"}),
        (
            {"policy": "skip"},
            {"operation": "Trainer", "where": "policy", "expected": ["Policy", "Policy(unused='zero')"], "got": "skip"},
        ),
        (
            {"policy": "skip", "loss_scale": "dynamic"},
            {"operation": "Trainer", "where": "policy", "expected": "Policy", "got": "skip"},
        ),
        ({"params": []}, {"operation": "Trainer", "where": "params", "expected": "parameter"}),
        ({"params": [1, 2]}, {"operation": "Trainer", "where": "params", "expected": "net.parameters()", "got": "int"}),
        ({"params": {"w": 1}}, {"operation": "Trainer", "where": "params", "got": "str"}),
        ({"params": [1], "kvstore": "dist_sync"}, {"operation": "Trainer", "where": "params", "got": "int"}),
        ({"params": 1}, {"operation": "Trainer", "where": "params", "got": "int"}),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, fields):
    arguments = {"params": model(0)} | arguments
    with raises(ConfigError, **fields):
        thread_comm.run(1, lambda world: Trainer(optimizer=optim.SGD(lr=0.1), world=world, **arguments))


@pytest.mark.parametrize("name", ["kvstore", "update_on_kvstore"])
def test_what_is_for_stores_is_refused_in_buckets_by_its_own_name(name):
    with raises(ConfigError, operation="Trainer", where=name, expected=None, got="local"):
        thread_comm.run(1, lambda world: BucketTrainer(model(0), optim.SGD(lr=0.1), world, **{name: "local"}))


def test_a_parameter_that_no_backward_of_an_accumulation_reached_is_an_error_that_names_it():
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1, weight_decay=0.1), world)
        used = params[:2] + params[3:]
        with trainer.no_sync():
            for param in used[::-1]:
                param.write(param.data)
            trainer.step(1)
        for param in used[::-1]:
            param.write(param.data)
        trainer.step(1)

    with raises(StaleGradientError, operation="step", where="rank 0", got="dense.weight"):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(
    ("what", "n", "overlap"), pairs(["learning rate 0.2", "loss scale 8.0"], [2, 3], [True, False])
)
def test_ranks_whose_settings_part_are_told_and_can_go_on(what, n, overlap):
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world, overlap=overlap)
        backward(params, 0, [world.rank])
        trainer.step(1)
        if world.rank == 1:
            trainer.optimizer.lr, trainer.loss_scale = (0.2, 1.0) if what.startswith("learning") else (0.1, 8.0)
        before = [param.data.copy() for param in params]
        backward(params, 1, [world.rank])
        with raises(MismatchError, operation="step", got=[what, "rank 1"]):
            trainer.step(1)
        assert all((param.data == was).all() for param, was in zip(params, before, strict=True))
        trainer.optimizer.lr, trainer.loss_scale = 0.1, 1.0
        backward(params, 1, [world.rank])
        assert trainer.step(1) == n

    thread_comm.run(n, rank)


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize("what", ["learning rate 0.2", "loss scale 8.0"])
def test_ranks_whose_settings_part_after_the_sum_are_told_and_can_go_on(what, owner):
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world, owner=owner)
        backward(params, 0, [world.rank])
        trainer.allreduce_grads()
        if world.rank == 1:
            trainer.optimizer.lr, trainer.loss_scale = (0.2, 1.0) if what.startswith("learning") else (0.1, 8.0)
        before = [param.data.copy() for param in params]
        with raises(MismatchError, operation="update", got=[what, "rank 1"]):
            trainer.update(1)
        assert all((param.data == was).all() for param, was in zip(params, before, strict=True))
        trainer.optimizer.lr, trainer.loss_scale = 0.1, 1.0
        backward(params, 1, [world.rank])
        trainer.allreduce_grads()
        assert trainer.update(1) == 2

    thread_comm.run(2, rank)


def test_ranks_whose_gradients_do_not_add_up_alike_are_told_so():
    def rank(world):
        params = model(0)
        params[1].grad_req = "add" if world.rank else "write"
        with raises(
            MismatchError, operation="Trainer", where="item 2 of 8 on rank 0", got=["grad_req='add'", "rank 1"]
        ):
            Trainer(params, optim.SGD(lr=0.1), world)

    thread_comm.run(2, rank)
