"""What a trainer on a store refuses, on every rank: settings, stores, gradients, and ranks that differ."""

import numpy as np
import pytest
from store_networks import backward, network, rule

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.policy import Policy
from hpcdp.errors import ConfigError, MismatchError, StaleGradientError


def test_a_local_store_beside_other_ranks_is_refused_without_mpi_too(monkeypatch):
    """Each rank would train a model of its own."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"Trainer \[kvstore\]: expected a dist store on 3 ranks, got local"):
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
    with pytest.raises(StaleGradientError, match=r"step \[rank 0\]: expected a gradient for every .*; call backward"):
        trainer.step(1)


def test_learning_rates_that_differ_are_told():
    def rank(world, there):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        trainer.optimizer.lr = 0.1 * (world.rank + 1)
        backward(net, 0, [0])
        trainer.step(1)

    for there in (True, False):
        with pytest.raises(MismatchError, match=r"learning rate 0\.1 as on rank 0, got learning rate 0.2 on rank 1"):
            thread_comm.run(2, lambda world, t=there: rank(world, t))


def test_learning_rates_that_differ_after_the_sum_are_told_too():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=False)
        backward(net, 0, [0])
        trainer.allreduce_grads()
        trainer.optimizer.lr = 0.1 * (world.rank + 1)
        trainer.update(1)

    with pytest.raises(MismatchError, match=r"update .*learning rate 0\.1 as on rank 0, got learning rate 0.2 on rank"):
        thread_comm.run(2, rank)


@pytest.mark.parametrize(("options", "message"), [
    ({"owner": "shard"}, r"\[owner\]: expected 'auto' with a kvstore, got 'shard'"),
    ({"owner": np.array(["auto", "rank"])}, r"\[owner\]: expected 'auto' with a kvstore, got array"),
    ({"loss_scale": np.ones(2)}, r"\[loss_scale\]: expected a positive number, or 'dynamic', got array"),
    ({"bucket_cap_mb": 2.0}, r"\[bucket_cap_mb\]: expected None with a kvstore, got 2.0"),
    ({"clip_norm": 1.0}, r"\[clip_norm\]: expected None with a kvstore, got 1.0"),
    ({"overlap": True}, r"\[overlap\]: expected None with a kvstore, got True"),
    ({"reproducible": True}, r"\[reproducible\]: expected False with a kvstore, got True"),
    ({"virtual_shards": 8}, r"\[virtual_shards\]: expected None with a kvstore, got 8"),
    ({"policy": Policy(nonfinite="skip")}, r"\[policy\]: expected nonfinite='ignore' with a kvstore, got 'skip'"),
    ({"policy": "skip"}, r"\[policy\]: expected a Policy, e\.g\. Policy\(unused='zero'\), got 'skip'"),
    ({"kvstore": "dist_snyc"}, r"\[kvstore\]: expected a KVStore or one of local, .*, got 'dist_snyc'"),
    ({"kvstore": 3}, r"\[kvstore\]: expected a KVStore or one of local, .*, got 3"),
    ({"kvstore": None, "update_on_kvstore": True}, r"\[update_on_kvstore\]: expected None without a kvstore, got True"),
    *[({"update_on_kvstore": wrong}, "update_on_kvstore.: expected True, False or None") for wrong in (0, "no", [1])],
    ({"params": []}, "expected at least one trainable parameter, got none"),
    ({"params": [*network(1).parameters(), *network(2).parameters()]}, r"\[params\]: expected different names, got '"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(options, message):
    arguments = {"params": network().parameters(), "kvstore": "dist_sync"} | options
    with pytest.raises(ConfigError, match=message) as refused:
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

    for make, message in [
        (with_a_key, r"expected a store without keys and updater, got keys \['mine'\]"),
        (with_an_updater, "expected a store without keys and updater, got a store with an updater"),
        (of_another_trainer, r"expected a store without keys and updater, got keys \[0, 1, 2\]"),
        (of_one_process, "expected a dist store on 2 ranks, got local"),
    ]:

        def rank(world, make=make):
            hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=make(world))

        with pytest.raises(ConfigError, match=message):
            thread_comm.run(2, rank)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_store_that_updates_neither_sums_nor_takes_updates(kind):
    def rank(world):
        trainer = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        for operation, call in (("allreduce_grads", trainer.allreduce_grads), ("update", lambda: trainer.update(1))):
            with pytest.raises(ConfigError, match=rf"{operation}: expected a store that only sums.*call step"):
                call()

    thread_comm.run(1, rank)


def test_sums_are_neither_written_over_nor_summed_again_before_the_update():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=False
        )
        with pytest.raises(StaleGradientError, match=r"expected gradients summed by allreduce_grads\(\)"):
            trainer.update(1)
        backward(net, 0, [world.rank])
        trainer.allreduce_grads()
        with pytest.raises(StaleGradientError, match=r"expected one backward pass before each step.*got another one"):
            backward(net, 0, [world.rank])
        for again in (trainer.allreduce_grads, lambda: trainer.step(1), trainer.no_sync().__enter__):
            with pytest.raises(StaleGradientError, match=r"call update\(count\), or step\(0\) to drop them"):
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
        with pytest.raises(MismatchError, match=r"on rank 0, got .* on rank 1"):
            thread_comm.run(2, rank)
