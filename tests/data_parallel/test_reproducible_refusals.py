"""What a reproducible run refuses, by name: settings, states, arrays, loaders, and ranks that differ."""

import numpy as np
import pytest
import standin
from raises import raises
from reproducible_networks import IMAGES, LABELS, SET, backward, network, trainer_of

from hpcdp import nn
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler, VirtualShardSampler
from hpcdp.data_parallel import deterministic
from hpcdp.errors import ConfigError, DataError, MismatchError
from hpcdp.train.fit import fit


def test_states_of_another_number_of_virtual_shards_are_refused(tmp_path):
    def save(world, num):
        trainer = trainer_of(network(), world, virtual_shards=num)
        trainer.save_states(tmp_path / f"{num}.npz")
        trainer_of(network(), world, reproducible=False).save_states(tmp_path / "plain.npz")

    thread_comm.run(2, lambda world: save(world, 5))

    def load(world):
        trainer = trainer_of(network(), world)
        trainer.load_states(tmp_path / "plain.npz")  # nothing is known against it
        trainer.load_states(tmp_path / "5.npz")

    with raises(DataError, operation="load_states", where=tmp_path / "5.npz", expected=8, got=5):
        thread_comm.run(2, load)


def test_states_from_another_processor_are_taken_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "states.npz"
    thread_comm.run(1, lambda world: trainer_of(network(), world).save_states(path))
    monkeypatch.setattr("hpcdp.data_parallel.deterministic.arithmetic", lambda: "an abacus")
    with pytest.warns(
        UserWarning, match=r"saved where arithmetic was NumPy .*, and here it is an abacus: last bits may"
    ):
        thread_comm.run(2, lambda world: trainer_of(network(), world).load_states(path))


def test_ranks_that_compute_differently_are_told(monkeypatch):
    kinds = iter(("hard", "soft", "soft"))
    monkeypatch.setattr(deterministic, "arithmetic", lambda: next(kinds))
    with raises(MismatchError, operation="Trainer(reproducible=True)", where="item 1 of 1 on rank 0"):
        thread_comm.run(3, lambda world: trainer_of(network(), world))


def test_reproducible_on_some_ranks_only_is_told():
    with raises(
        MismatchError,
        operation="Trainer",
        where="item 12 of 12 on rank 0",
        expected=["virtual_shards=8", "rank 0"],
        got=["virtual_shards=None", "rank 1"],
    ):
        thread_comm.run(2, lambda world: trainer_of(network(), world, reproducible=world.rank == 0))


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"reproducible": 1}, {"operation": "Trainer", "where": "reproducible", "expected": False, "got": 1}),
        (
            {"reproducible": False, "virtual_shards": 8},
            {"operation": "Trainer", "where": "virtual_shards", "expected": "reproducible=True", "got": 8},
        ),
        ({"virtual_shards": True}, {"operation": "Trainer", "where": "virtual_shards", "expected": 1, "got": True}),
        ({"virtual_shards": 0}, {"operation": "Trainer", "where": "virtual_shards", "expected": 1, "got": 0}),
        ({"virtual_shards": 2.0}, {"operation": "Trainer", "where": "virtual_shards", "expected": 1, "got": 2.0}),
        (
            {"virtual_shards": 2},
            {"operation": "Trainer(reproducible=True)", "where": "virtual_shards", "expected": 3, "got": 2},
        ),
        ({"compression": "2bit"}, {"operation": "Trainer(reproducible=True)", "where": "compression"}),
    ],
)
def test_settings_that_would_break_it_are_refused_by_name(options, fields):
    with raises(ConfigError, **fields):
        thread_comm.run(3, lambda world: trainer_of(network(), world, **options))


def test_gradients_that_are_added_up_are_refused():
    net = network()
    net[0].weight.grad_req = "add"
    with raises(
        ConfigError,
        operation="Trainer(reproducible=True)",
        where="0.weight",
        expected="grad_req='write'",
        got="grad_req='add'",
    ):
        thread_comm.run(1, lambda world: trainer_of(net, world))


def test_arrays_on_a_device_are_refused():
    net = nn.Sequential(nn.Dense(3, 2)).to(like=standin.asarray(np.zeros(1, np.float32)))
    with raises(ConfigError, operation="Trainer(reproducible=True)", where="params", expected="NumPy"):
        thread_comm.run(1, lambda world: trainer_of(net, world))


@pytest.mark.parametrize("operation", ["no_sync", "allreduce_grads"])
def test_operations_that_have_no_fixed_order_are_refused(operation):
    def one(world):
        trainer = trainer_of(network(), world)
        if operation == "no_sync":
            with trainer.no_sync():
                pass
        else:
            trainer.allreduce_grads()

    with raises(ConfigError, operation=operation, expected=["Trainer", "reproducible=True"]):
        thread_comm.run(2, one)


def test_gradients_that_are_to_be_added_up_later_are_refused_too():
    def one(world):
        net = network()
        trainer = trainer_of(net, world)
        net[0].weight.grad_req = "add"
        backward(net, IMAGES[:4], LABELS[:4])
        trainer.step(4)

    with raises(
        ConfigError, operation="backward", where="0.weight", expected=["grad_req='write'", "reproducible=True"]
    ):
        thread_comm.run(1, one)


def test_a_loader_for_another_trainer_is_refused():
    def one(world, sampler, **options):
        net = network()
        fit(net, trainer_of(net, world, **options), DataLoader(SET, sampler, prefetch=0), epochs=1, world=world)

    sampler = ShardedSampler(75, 32)
    with raises(ConfigError, operation="fit", where="loader", expected=[0, 7, 8]):
        thread_comm.run(1, lambda world: one(world, sampler))
    for options in ({"virtual_shards": 5}, {"reproducible": False}):
        with raises(ConfigError, operation="fit", where="loader", got=["VirtualShardSampler", 0, 7, 8]):
            thread_comm.run(1, lambda world, o=options: one(world, VirtualShardSampler(75, 32, 8), **o))
    with raises(ConfigError, operation="fit", where="loader", expected=[0, 3, 8], got=["VirtualShardSampler", 4, 7, 8]):
        thread_comm.run(2, lambda world: one(world, VirtualShardSampler(75, 32, 8, 2, 1 - world.rank)))


@pytest.mark.parametrize("reproducible", [True, False])
def test_an_empty_data_set_is_refused(reproducible):
    def one(world, **options):
        net = network()
        trainer = trainer_of(net, world, **options)
        empty = ArrayDataset(IMAGES[:0], LABELS[:0])
        sampler = (
            VirtualShardSampler(0, 32, 8, world.size, world.rank) if trainer.virtual_shards else ShardedSampler(0, 32)
        )
        with raises(ConfigError, operation="fit", where="loader", remedy="batch_size"):
            fit(net, trainer, DataLoader(empty, sampler), epochs=1, world=world)

    thread_comm.run(2, lambda world: one(world, reproducible=reproducible))
