"""What a trainer on a store refuses, on every rank: settings, stores, gradients, and ranks that differ."""

import numpy as np
import pytest
from raises import raises
from store_networks import backward, network, rule

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.gradient_policy import Policy
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError


def test_a_local_store_beside_other_ranks_is_refused_without_mpi_too(monkeypatch):
    """Each rank would train a model of its own."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with raises(ConfigError, operation="Trainer", where="kvstore", expected=3, got="local"):
        hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), kvstore="local")


def test_a_missing_gradient_is_an_error_on_every_rank_and_the_next_step_a_new_one():
    messages = []

    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")
        if world.rank != 1:
            backward(net, 0, [world.rank])
        try:
            trainer.step(1)
        except StaleGradientError as error:
            messages.append(str(error))
        backward(net, 0, [world.rank])
        assert trainer.step(1) == 3

    thread_comm.run(3, rank)
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "step [rank 1]: expected a gradient for every parameter since the last step" in messages[0]


def test_a_missing_gradient_on_a_local_store_is_an_error():
    trainer = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), kvstore="local")
    with raises(StaleGradientError, operation="step", where="rank 0", remedy="backward()"):
        trainer.step(1)


def test_learning_rates_that_differ_are_told():
    def rank(world, there):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        trainer.optimizer.lr = 0.1 * (world.rank + 1)
        backward(net, 0, [0])
        trainer.step(1)

    for there in (True, False):
        with raises(
            MismatchError,
            operation="step",
            where="item 1 of 2 on rank 0",
            expected=[0.1, "rank 0"],
            got=[0.2, "rank 1"],
        ):
            thread_comm.run(2, lambda world, t=there: rank(world, t))


def test_learning_rates_that_differ_after_the_sum_are_told_too():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=False)
        backward(net, 0, [0])
        trainer.allreduce_grads()
        trainer.optimizer.lr = 0.1 * (world.rank + 1)
        trainer.update(1)

    with raises(
        MismatchError, operation="update", where="item 1 of 2 on rank 0", expected=[0.1, "rank 0"], got=[0.2, "rank 1"]
    ):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"owner": "shard"}, {"where": "owner", "expected": "auto", "got": "shard"}),
        ({"owner": np.array(["auto", "rank"])}, {"where": "owner", "expected": "auto"}),
        ({"loss_scale": np.ones(2)}, {"where": "loss_scale", "expected": "dynamic"}),
        ({"bucket_cap_mb": 2.0}, {"where": "bucket_cap_mb", "expected": None, "got": 2.0}),
        ({"clip_norm": 1.0}, {"where": "clip_norm", "expected": None, "got": 1.0}),
        ({"overlap": True}, {"where": "overlap", "expected": None, "got": True}),
        ({"reproducible": True}, {"where": "reproducible", "expected": False, "got": True}),
        ({"virtual_shards": 8}, {"where": "virtual_shards", "expected": None, "got": 8}),
        ({"policy": Policy(nonfinite="skip")}, {"where": "policy", "expected": "nonfinite='ignore'", "got": "skip"}),
        ({"policy": "skip"}, {"where": "policy", "expected": "Policy(unused='zero')", "got": "skip"}),
        ({"kvstore": "dist_snyc"}, {"where": "kvstore", "expected": ["KVStore", "local"], "got": "dist_snyc"}),
        ({"kvstore": 3}, {"where": "kvstore", "expected": ["KVStore", "local"], "got": 3}),
        (
            {"kvstore": None, "update_on_kvstore": True},
            {"where": "update_on_kvstore", "expected": None, "got": True},
        ),
        *[
            ({"update_on_kvstore": wrong}, {"where": "update_on_kvstore", "expected": [True, False, None]})
            for wrong in (0, "no", [1])
        ],
        ({"params": []}, {"where": "params"}),
        ({"params": [*network(1).parameters(), *network(2).parameters()]}, {"where": "params"}),
    ],
)
def test_wrong_arguments_are_refused_by_name(options, fields):
    arguments = {"params": network().parameters(), "kvstore": "dist_sync"} | options
    with raises(ConfigError, operation="Trainer", **fields) as refused:
        thread_comm.run(2, lambda world: hpcdp.Trainer(optimizer=optim.SGD(lr=0.1), world=world, **arguments))
    assert "\n" not in str(refused.value).partition("\nraised on")[0]


def test_stores_that_others_use_are_refused():
    def with_a_key(world):
        store = kvstore.create("dist_sync", world)
        store.init("mine", np.zeros(3, "f4"))
        return store

    def with_an_updater(world):
        store = kvstore.create("dist_sync", world)
        store.set_optimizer(optim.SGD(lr=0.1))
        return store

    def of_another_trainer(world):
        store = kvstore.create("dist_sync", world)
        hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=store)
        return store

    def of_one_process(world):
        return kvstore.create("local")

    for make, fields in [
        (with_a_key, {"got": "['mine']"}),
        (with_an_updater, {"got": "updater", "remedy": "Trainer"}),
        (of_another_trainer, {"got": "[0, 1, 2]"}),
        (of_one_process, {"expected": 2, "got": "local"}),
    ]:

        def rank(world, make=make):
            hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=make(world))

        with raises(ConfigError, operation="Trainer", where="kvstore", **fields):
            thread_comm.run(2, rank)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_store_that_updates_neither_sums_nor_takes_updates(kind):
    def rank(world):
        trainer = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        for operation, call in (("allreduce_grads", trainer.allreduce_grads), ("update", lambda: trainer.update(1))):
            with raises(ConfigError, operation=operation, remedy="step(count)"):
                call()

    thread_comm.run(1, rank)


def test_sums_are_neither_written_over_nor_summed_again_before_the_update():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=False
        )
        with raises(StaleGradientError, operation="update", expected="allreduce_grads()"):
            trainer.update(1)
        backward(net, 0, [world.rank])
        trainer.allreduce_grads()
        with raises(StaleGradientError, operation="backward", where="3.weight", expected="step()"):
            backward(net, 0, [world.rank])
        for again in (trainer.allreduce_grads, lambda: trainer.step(1), trainer.no_sync().__enter__):
            with raises(StaleGradientError, got="allreduce_grads()", remedy=["update(count)", "step(0)"]):
                again()
        trainer.step(0)
        assert trainer.step_count == 0
        backward(net, 0, [world.rank])
        trainer.allreduce_grads()
        assert trainer.update(1) == world.size

    thread_comm.run(2, rank)


def test_ranks_with_other_models_or_settings_are_told():
    def with_other_layers(world):
        net = nn.models.mlp(input_shape=5, num_classes=3, hidden=(4 + world.rank,))
        hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")

    def with_other_updates(world):
        there = world.rank == 0
        hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=there)

    for rank in (with_other_layers, with_other_updates):
        with raises(MismatchError, operation="Trainer", expected="rank 0", got="rank 1"):
            thread_comm.run(2, rank)
