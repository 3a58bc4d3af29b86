"""The trainer over thread ranks and real ranks, on parameters whose gradients the tests write themselves."""

import warnings

import numpy as np
import pytest
import standin
from pairs import pairs
from raises import raises
from written_gradients import Parameter, all_to_the_last, backward, model, sample_gradients, train, uneven

import hpcdp
from hpcdp import nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.train.trainer import Trainer


@pytest.mark.parametrize(
    ("layout", "split", "clip_norm"),
    pairs([(2, None), (3, None), (4, 2), (5, 2), (3, 1)], [None, all_to_the_last, uneven], [None, 0.7]),
)
def test_any_split_of_the_batch_gives_what_one_rank_gives(layout, split, clip_norm):
    n, per_node = layout
    alone = thread_comm.run(1, lambda world: train(world, owner="rank", clip_norm=clip_norm))[0]
    every_rank, by_shards = (
        thread_comm.run(n, lambda world, o=owner: train(world, split=split, owner=o, clip_norm=clip_norm), per_node)
        for owner in ("rank", "shard")
    )
    for result in every_rank + by_shards:
        np.testing.assert_array_equal(result, every_rank[0])
    np.testing.assert_allclose(every_rank[0], alone, rtol=1e-5, atol=1e-6)


def test_the_same_run_twice_gives_the_same_bits():
    first, second = (thread_comm.run(3, lambda world: train(world, "adamw"))[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16])
def test_settings_may_be_numbers_of_numpy(number):
    def trained(number):
        values = np.random.default_rng(1)
        dense, norm = nn.Dense(4, 8), nn.BatchNorm(8, momentum=number(0.5), eps=number(0.25))
        net = nn.Sequential(dense, norm, nn.Dropout(number(0.25), seed=3), nn.Dense(8, 2))
        for param in net.parameters():
            param.data[...] = values.standard_normal(param.data.shape)
        compression = hpcdp.Compression(hpcdp.compression.TwoBit(number(0.5)), feedback=number(0.5))
        trainer = Trainer(
            net.parameters(), optim.SGD(lr=0.5), thread_comm.run(1, lambda world: world)[0], compression=compression,
            clip_norm=number(0.5), loss_scale=number(2), bucket_cap_mb=number(1),
        )  # fmt: skip
        for _ in range(2):
            with record():
                losses = nn.functional.softmax_cross_entropy(net(values.random((8, 4), "f4")), np.arange(8) % 2)
            losses.backward(trainer.loss_scale)
            trainer.step(8)
        return [param.data for param in net.parameters()]

    for ours, expected in zip(trained(number), trained(float), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, expected)


def test_one_step_by_hand():
    def rank(world):
        param = Parameter("w", np.array([1.0, 2.0], "f4") * (world.rank + 1))  # rank 0's values count
        trainer = Trainer([param], optim.SGD(lr=0.5), world)
        param.write(np.array([world.rank + 1.0, 10.0], "f4"))
        assert trainer.step(world.rank + 1) == 6
        return param.data.tolist()

    assert thread_comm.run(3, rank) == [[1.0 - 0.5 * 6 / 6, 2.0 - 0.5 * 30 / 6]] * 3


def test_device_arrays_take_the_same_path():
    expected = thread_comm.run(3, lambda world: train(world, owner="rank"))[0]
    results = thread_comm.run(3, lambda world: train(world, owner="auto", asarray=standin.asarray))
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)


def test_accumulated_batches_are_one_batch():
    def rank(world, micro):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1, momentum=0.9), world)
        for step in range(3):
            mine = list(range(world.rank, 6, world.size))
            if micro:
                with trainer.no_sync():
                    for sample in mine[:-1]:
                        backward(params, step, [sample])
                        trainer.step(1)
                backward(params, step, mine[-1:])
                assert trainer.step(1) == 6
            else:
                backward(params, step, mine)
                assert trainer.step(len(mine)) == 6
        assert all(param.grad_req == "write" for param in params)
        world.comm.barrier()
        return np.concatenate([param.data.reshape(-1) for param in params])

    for n in (1, 2):
        whole, parts = (thread_comm.run(n, lambda world, m=micro: rank(world, m)) for micro in (False, True))
        np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5, atol=1e-6)


def test_accumulated_batches_before_allreduce_grads_count_too():
    def rank(world, by_hand):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        mine = list(range(world.rank, 6, world.size))
        with trainer.no_sync():
            with trainer.no_sync():
                backward(params, 0, mine[:1])
                trainer.step(1)
            backward(params, 0, mine[1:2])
            trainer.step(1)
        backward(params, 0, mine[2:])
        if by_hand:
            trainer.allreduce_grads()
            assert trainer.update(len(mine[2:])) == 6
        else:
            assert trainer.step(len(mine[2:])) == 6
        assert trainer.step_count == 1
        world.comm.barrier()
        return np.concatenate([param.data.reshape(-1) for param in params])

    by_step, by_hand = (thread_comm.run(2, lambda world, h=by_hand: rank(world, h)) for by_hand in (False, True))
    np.testing.assert_array_equal(by_hand[0], by_step[0])
    np.testing.assert_allclose(
        by_step[0], thread_comm.run(1, lambda world: rank(world, False))[0], rtol=1e-5, atol=1e-6
    )


def test_gradients_can_be_changed_between_sum_and_update():
    def rank(world, owner):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world, owner=owner)
        start = [param.data.copy() for param in params]
        world.comm.barrier()
        backward(params, 0, range(world.rank, 6, world.size))
        trainer.allreduce_grads()
        total = [sum(g) for g in zip(*(sample_gradients(0, s) for s in range(6)), strict=True)]
        for param, expected in zip(params, total, strict=True):
            np.testing.assert_allclose(param.grad, expected, rtol=1e-5, atol=1e-5)
            param.grad *= 2
        assert trainer.update(len(range(world.rank, 6, world.size))) == 6
        for param, before, gradient in zip(params, start, total, strict=True):
            np.testing.assert_allclose(param.data, before - 0.1 * 2 * gradient / 6, rtol=1e-4, atol=1e-5)

    for n, per_node in [(1, None), (3, None), (4, 2)]:
        for owner in ("rank", "shard"):
            thread_comm.run(n, lambda world, o=owner: rank(world, o), per_node)


def test_frozen_parameters_are_left_alone():
    def rank(world):
        params = model(0)
        params[2].grad_req = "null"
        before = params[2].data.copy()
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        for param in params[:2] + params[3:]:
            param.write(np.ones(param.data.shape, "f4"))
        trainer.step(1)
        np.testing.assert_array_equal(params[2].data, before)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_values_that_may_only_be_read_are_taken_and_left_as_they_are(owner):
    def rank(world):
        given = np.frombuffer((np.array([1.0, 2.0], "f4") * (world.rank + 1)).tobytes(), "f4")  # rank 0's count
        param = Parameter("w", given)
        trainer = Trainer([param], optim.SGD(lr=0.5), world, owner=owner)
        param.write(np.array([world.rank + 1.0, 10.0], "f4"))
        trainer.step(1)
        world.comm.barrier()
        assert np.array_equal(given, np.array([1.0, 2.0], "f4") * (world.rank + 1))
        return param.data.tolist()

    assert thread_comm.run(3, rank) == [[1.0 - 0.5 * 6 / 3, 2.0 - 0.5 * 30 / 3]] * 3


@pytest.mark.parametrize("kvstore", [None, "dist_sync"])
def test_a_parameter_that_is_unfrozen_later_is_not_trained_and_said_to_be_so_once(kvstore):
    def rank(world):
        net = nn.Sequential(nn.Dense(2, 3), nn.Dense(3, 2))
        below = net.parameters()[:2]
        for param in below:
            param.grad_req = "null"
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.5), world, kvstore=kvstore)
        before, said = [param.data.copy() for param in below], []
        for req in ("null", "write", "write"):
            for param in below:
                param.grad_req = req
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with record():
                    losses = net(np.ones((1, 2), np.float32)).sum(axis=1)
                losses.backward()
            said.append(sorted(str(each.message).split(",")[0] for each in caught))
            trainer.step(1)
        return said, all(map(np.array_equal, before, (param.data for param in below)))

    expected = [[], ["0.bias has a gradient", "0.weight has a gradient"], []]
    assert thread_comm.run(1, rank) == [(expected, True)]


def test_every_rank_has_all_of_it_where_each_updates_everything():
    def rank(world):
        trainer = Trainer(model(0), optim.Adam(), world, owner="rank")
        whole = sum(trainer.reducer.layout.counts) * 4
        assert trainer.nbytes == {"parameters": whole, "gradients": whole, "state": 2 * whole}

    thread_comm.run(3, rank)


def test_an_owner_of_a_shard_keeps_its_part_of_the_state_and_parameters_once_per_node():
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.Adam(), world, owner="shard")
        address = params[2].data.__array_interface__["data"][0]
        whole = sum(trainer.reducer.layout.counts) * 4
        assert trainer.nbytes == {"parameters": whole // 4, "gradients": whole, "state": trainer.owner.nbytes_state}
        return trainer.owner.nbytes_state, whole, address

    results = thread_comm.run(4, rank)
    assert sum(state for state, _, _ in results) == 2 * results[0][1]
    assert max(state for state, _, _ in results) < 2 * results[0][1] / 3
    assert len({address for _, _, address in results}) == 1


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize("split", [None, all_to_the_last, uneven])
def test_real_ranks_give_what_one_rank_gives(split):
    world = hpcdp.init()
    alone = thread_comm.run(1, lambda lonely: train(lonely, owner="rank"))[0]
    every_rank, by_shards = (train(world, split=split, owner=owner) for owner in ("rank", "shard"))
    np.testing.assert_array_equal(every_rank, by_shards)
    np.testing.assert_allclose(every_rank, alone, rtol=1e-5, atol=1e-6)


def test_gradients_that_add_up_by_themselves_are_not_reduced_beside_backward():
    def rank(world):
        params = model(0)
        params[1].grad_req = "add"
        with raises(
            ConfigError, operation="Trainer", where="conv.bias", expected="grad_req='write'", remedy="no_sync()"
        ):
            Trainer(params, optim.SGD(lr=0.1), world, overlap=True)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        assert not trainer.reducer.overlap
        for samples in ([0], [1]):
            backward(params, world.rank, samples)
        found = params[1].grad.copy()
        np.testing.assert_allclose(found, sum(sample_gradients(world.rank, each)[1] for each in (0, 1)), rtol=1e-6)
        assert trainer.step(2) == 2 * world.size

    thread_comm.run(3, rank, ranks_per_node=1)


@pytest.mark.parametrize(("ranks", "per_node"), [(3, 2), (5, 2), (3, [1, 2])])
def test_who_updates_is_alike_on_uneven_nodes(ranks, per_node, tmp_path):
    """A node of one rank shares nothing, and must still do as the others: states are gathered over all ranks."""

    def one(world):
        trainer = Trainer(model(1), optim.Adam(lr=0.1), world)
        trainer.save_states(tmp_path / "states.npz")
        return type(trainer.owner).__name__

    assert thread_comm.run(ranks, one, ranks_per_node=per_node) == ["ShardedUpdate"] * ranks
    assert thread_comm.run(2, one, ranks_per_node=1) == ["Replicated"] * 2
