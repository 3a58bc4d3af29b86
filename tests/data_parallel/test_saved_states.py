"""What a trainer writes with save_states: other numbers of ranks and other owners go on from it; damage is refused."""

import numpy as np
import pytest
from raises import raises
from written_gradients import SHAPES, backward, model

from hpcdp import optim
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError
from hpcdp.train.trainer import Trainer


@pytest.mark.parametrize(("n", "per_node"), [(4, 2), (3, 2), (4, 3), (5, 2), (5, 3), (3, 1), (3, None), (1, None)])
def test_states_are_restored_on_other_numbers_of_ranks_and_owners(tmp_path, n, per_node):
    path = tmp_path / "states.npz"

    def rank(world, owner, load, save):
        params = model(0)
        trainer = Trainer(params, optim.AdamW(lr=0.01), world, owner=owner)
        if load:
            trainer.load_states(path)
        for step in range(trainer.step_count, trainer.step_count + 3):
            backward(params, step, range(world.rank, 6, world.size))
            trainer.step(len(range(world.rank, 6, world.size)))
        if save:
            trainer.save_states(path)
            trainer.load_states(path)
        states = [dict(state) for state in trainer.owner.states] if owner == "rank" else None
        return trainer.step_count, states

    thread_comm.run(n, lambda world: rank(world, "shard", False, True), ranks_per_node=per_node)
    step_count, straight = thread_comm.run(1, lambda world: rank(world, "rank", False, False))[0]
    assert step_count == 3

    def restored(world):
        trainer = Trainer(model(0), optim.AdamW(lr=0.01), world, owner="rank")
        trainer.load_states(path)
        assert trainer.step_count == 3
        return trainer.owner.states

    for states in thread_comm.run(3, restored):
        for state, expected in zip(states, straight, strict=True):
            for name in expected:
                np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("per_node", "compression"), [(None, None), (1, "topk")])
def test_a_parameter_without_axes_has_a_state_too(tmp_path, per_node, compression):
    path = tmp_path / "states.npz"

    def rank(world):
        params = model(0, {"temperature": (), "weight": (5,)})
        trainer = Trainer(params, optim.Adam(), world, compression=compression)
        for number, param in enumerate(params):
            param.write(np.full(param.data.shape, world.rank + number + 1.0, "f4"))
        trainer.step(1)
        trainer.save_states(path)
        again = Trainer(model(0, {"temperature": (), "weight": (5,)}), optim.Adam(), world, compression=compression)
        again.load_states(path)
        return [all(map(np.array_equal, a.values(), b.values())) and all(each.any() for each in b.values())
                for a, b in zip(trainer.owner.states, again.owner.states, strict=True)]  # fmt: skip

    assert all(map(all, thread_comm.run(2, rank, per_node)))
    with np.load(path) as file:
        assert file["temperature/m"].shape == ()


def test_states_of_another_model_or_a_damaged_file_are_refused_by_name(tmp_path):
    path = tmp_path / "states.npz"

    def save(world):
        Trainer(model(0), optim.SGD(lr=0.1, momentum=0.9), world).save_states(path)

    def load(world, shapes, optimizer, where=path):
        trainer = Trainer(model(0, shapes), optimizer, world)
        trainer.load_states(where)

    thread_comm.run(2, save)
    momentum = optim.SGD(lr=0.1, momentum=0.9)
    with raises(DataError, operation="load_states", where=f"{path}, dense.bias/momentum", expected=(8,), got=(7,)):
        thread_comm.run(2, lambda world: load(world, SHAPES | {"dense.bias": (8,)}, momentum))
    with raises(DataError, operation="load_states", where=path, expected="states"):
        thread_comm.run(2, lambda world: load(world, SHAPES, optim.Adam()))
    with raises(DataError, operation="load_states", where=tmp_path / "none.npz"):
        thread_comm.run(2, lambda world: load(world, SHAPES, momentum, tmp_path / "none.npz"))
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for damaged in (data[: len(data) // 2], b"", b"not a zip", flipped):
        path.write_bytes(damaged)
        with raises(DataError, operation="load_states", where=path, expected="save_states"):
            thread_comm.run(1, lambda world: load(world, SHAPES, momentum))


def test_states_that_cannot_be_written_are_an_error_on_every_rank(tmp_path):
    def rank(world):
        Trainer(model(0), optim.SGD(lr=0.1), world).save_states(tmp_path / "no" / "such" / "folder.npz")

    with raises(DataError, operation="save_states", where=tmp_path / "no/such/folder.npz"):
        thread_comm.run(2, rank)
