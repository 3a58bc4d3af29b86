"""Files of `save_states` of trainers on stores load on any number of ranks, with either place of the update."""

import numpy as np
import pytest
from raises import raises
from store_networks import backward, in_turn, network, rule, train, values_of

import hpcdp
from hpcdp import kvstore, nn
from hpcdp.comm import thread_comm
from hpcdp.core import files
from hpcdp.errors import DataError


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_states_go_on_on_any_number_of_ranks_and_with_either_updating(optimizer, there, tmp_path):
    whole = thread_comm.run(3, lambda world: train(world, optimizer, steps=5))[0]

    def part(world, steps, there, values=None):
        net = network()
        if values is not None:
            for param in net.parameters():
                param.data[...], values = values[: param.size].reshape(param.shape), values[param.size :]
        trainer = hpcdp.Trainer(net.parameters(), rule(optimizer), world, kvstore="dist_sync", update_on_kvstore=there)
        trainer.save_states(tmp_path / "fresh")  # of no step yet
        trainer.load_states(tmp_path / "fresh")
        assert trainer.step_count == 0
        if values is not None:
            trainer.load_states(tmp_path / "states")
            assert trainer.step_count == 3
            trainer.optimizer.lr = 0.05
        for step in steps:
            mine = in_turn(world, step)
            backward(net, step, mine)
            trainer.step(len(mine))
        if values is None:
            trainer.save_states(tmp_path / "states")
        return values_of(net)

    values = thread_comm.run(2, lambda world: part(world, range(3), there))[0]
    for found in thread_comm.run(3, lambda world: part(world, range(3, 5), not there, values), 2):
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("kind", "there"), [("dist_sync", True), ("dist_sync", False), ("dist_async", True)])
def test_a_state_of_some_parameters_or_of_none(kind, there, tmp_path):
    """Saved by a store of the same keys, of which one was updated, or none."""

    def rank(world, updated):
        net = network()
        store = kvstore.create("dist_sync", world)
        store.init([0, 1, 2], [param.data for param in net.parameters()][:3])
        store.set_optimizer(rule("sgd"))
        if updated:
            store.push(0, np.ones_like(store.pull(0).wait()))
            store.wait()
        store.save_optimizer_states(str(tmp_path / "some"))
        params = net.parameters()[:3]
        trainer = hpcdp.Trainer(params, rule("sgd"), world, kvstore=kind, update_on_kvstore=there)
        backward(net, 0, [0])
        trainer.step(1)
        trainer.load_states(tmp_path / "some")
        assert trainer.step_count == int(updated)
        trainer.save_states(tmp_path / "again")
        with np.load(tmp_path / "again") as states:
            for name in states.files:
                if name.endswith("/momentum"):
                    assert states[name].any() == (updated and name.startswith(f"{params[0].name}/"))

    for updated in (True, False):
        thread_comm.run(1, lambda world, u=updated: rank(world, u))


def test_states_of_another_model_are_refused_on_every_rank(tmp_path):
    def rank(world, hidden, there, load):
        net = nn.models.mlp(input_shape=5, num_classes=3, hidden=hidden)
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        backward(net, 0, [0])
        trainer.step(1)
        if not load:
            trainer.save_states(tmp_path / "states")
            return
        with raises(DataError, operation="load_states", where=f"{tmp_path}/states, 2.weight/momentum"):
            trainer.load_states(tmp_path / "states")

    for there in (True, False):
        thread_comm.run(2, lambda world, t=there: rank(world, (4, 6), t, False))
        thread_comm.run(2, lambda world, t=there: rank(world, (4, 5), t, True))


@pytest.mark.parametrize("options", [{"kvstore": "dist_sync"}, {"kvstore": "dist_sync", "update_on_kvstore": False}])
def test_trainers_with_and_without_a_store_load_each_others_files(options, tmp_path):
    def trained(world, options, path, steps=0):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("adam"), world, **options)
        for step in range(steps):
            mine = in_turn(world, step)
            backward(net, step, mine)
            trainer.step(len(mine))
        if not steps:
            trainer.load_states(path)
            assert trainer.step_count == 3
        trainer.save_states(tmp_path / "again" if not steps else path)

    def arrays(path):
        return files.read("read", path, "hpcdp/trainer", {"step_count": int}, "save_states")

    for saver, loader in ((options, {}), ({}, options), (options, {"kvstore": "dist_async"})):
        thread_comm.run(2, lambda world, saver=saver: trained(world, saver, tmp_path / "states", 3))
        thread_comm.run(3, lambda world, loader=loader: trained(world, loader, tmp_path / "states"))
        (header, before), (header_again, after) = arrays(tmp_path / "states"), arrays(tmp_path / "again")
        assert header == header_again and before.keys() == after.keys()
        assert before and all(np.array_equal(before[name], after[name]) for name in before)


def test_a_file_with_residuals_warns_that_a_store_drops_them(tmp_path):
    net = network()
    trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), kvstore="local")
    trainer.save_states(tmp_path / "states")
    with np.load(tmp_path / "states") as file:
        saved = dict(file)
    name = net.parameters()[0].name
    saved[f"{name}/residual"] = np.ones((2, *net.parameters()[0].shape), "f4")
    with open(tmp_path / "states", "wb") as opened:
        np.savez(opened, **saved)
    with pytest.warns(UserWarning, match="residuals") as warned:
        trainer.load_states(tmp_path / "states")
    assert warned[0].filename == __file__
