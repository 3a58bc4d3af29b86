"""The trainer over thread ranks and real ranks, on parameters whose gradients the tests write themselves."""

import numpy as np
import pytest
import standin
from pairs import pairs

import hpcdp
from hpcdp import optim
from hpcdp.arrays import to_host
from hpcdp.comm import threads
from hpcdp.errors import ConfigError, DataError, MismatchError, StaleGradientError
from hpcdp.train.trainer import Trainer

SHAPES = {"conv.weight": (20, 1, 3, 3), "conv.bias": (20,), "dense.weight": (300, 41), "dense.bias": (7,)}


class Parameter:
    """What the trainer asks of a parameter, without a tape."""

    def __init__(self, name, data):
        self.name, self.data, self.grad, self.grad_req, self.grad_hook = name, data, None, "write", None

    def write(self, gradient):
        if self.grad_req == "add":
            self.grad[...] = self.grad + gradient
        else:
            self.grad[...] = gradient
        self.grad_hook(self)


def model(seed, shapes=SHAPES, asarray=np.asarray):
    rng = np.random.default_rng(seed)
    return [Parameter(name, asarray(rng.standard_normal(s).astype("f4"))) for name, s in shapes.items()]


def sample_gradients(step, sample):
    rng = np.random.default_rng([step, sample])
    return [rng.standard_normal(shape).astype("f4") for shape in SHAPES.values()]


def backward(params, step, samples, asarray=np.asarray):
    sums = [np.zeros(shape, "f4") for shape in SHAPES.values()]
    for sample in samples:
        for total, gradient in zip(sums, sample_gradients(step, sample), strict=True):
            total += gradient
    for param, total in list(zip(params, sums, strict=True))[::-1]:
        param.write(asarray(total))


def train(world, optimizer="sgd", steps=6, split=None, owner="auto", clip_norm=None, asarray=np.asarray):
    """Six samples a step, dealt by ``split(world, step)``; the parameters at the end."""
    params = model(seed=world.rank, asarray=asarray)
    args = {"momentum": 0.9, "weight_decay": 0.01} if optimizer == "sgd" else {}
    trainer = Trainer(
        params, optim.create(optimizer, lr=0.1, **args), world,
        owner=owner, clip_norm=clip_norm, bucket_cap_mb=0.01,
    )  # fmt: skip
    for step in range(steps):
        mine = split(world, step) if split else range(world.rank, 6, world.size)
        if len(mine):
            backward(params, step, mine, asarray)
        assert trainer.step(len(mine)) == 6
    assert trainer.step(0) == 0  # nobody has samples: nothing happens
    assert trainer.step_count == steps
    world.comm.barrier()
    return np.concatenate([to_host(param.data).copy().reshape(-1) for param in params])


def all_to_the_last(world, step):
    return range(6) if world.rank == world.size - 1 else []


def uneven(world, step):
    owners = np.random.default_rng(step).integers(0, world.size, 6)
    return np.flatnonzero(owners == world.rank)


@pytest.mark.parametrize(
    ("layout", "split", "clip_norm"),
    pairs([(2, None), (3, None), (4, 2), (5, 2), (3, 1)], [None, all_to_the_last, uneven], [None, 0.7]),
)
def test_any_split_of_the_batch_gives_what_one_rank_gives(layout, split, clip_norm):
    n, per_node = layout
    alone = threads.run(1, lambda world: train(world, owner="rank", clip_norm=clip_norm))[0]
    every_rank, by_shards = (
        threads.run(n, lambda world, o=owner: train(world, split=split, owner=o, clip_norm=clip_norm), per_node)
        for owner in ("rank", "shard")
    )
    for result in every_rank + by_shards:
        np.testing.assert_array_equal(result, every_rank[0])
    np.testing.assert_allclose(every_rank[0], alone, rtol=1e-5, atol=1e-6)


def test_the_same_run_twice_gives_the_same_bits():
    first, second = (threads.run(3, lambda world: train(world, "adamw"))[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_one_step_by_hand():
    def rank(world):
        param = Parameter("w", np.array([1.0, 2.0], "f4") * (world.rank + 1))  # rank 0's values count
        trainer = Trainer([param], optim.SGD(lr=0.5), world)
        param.write(np.array([world.rank + 1.0, 10.0], "f4"))
        assert trainer.step(world.rank + 1) == 6
        return param.data.tolist()

    assert threads.run(3, rank) == [[1.0 - 0.5 * 6 / 6, 2.0 - 0.5 * 30 / 6]] * 3


def test_device_arrays_take_the_same_path():
    expected = threads.run(3, lambda world: train(world, owner="rank"))[0]
    results = threads.run(3, lambda world: train(world, owner="auto", asarray=standin.asarray))
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
        whole, parts = (threads.run(n, lambda world, m=micro: rank(world, m)) for micro in (False, True))
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

    by_step, by_hand = (threads.run(2, lambda world, h=by_hand: rank(world, h)) for by_hand in (False, True))
    np.testing.assert_array_equal(by_hand[0], by_step[0])
    np.testing.assert_allclose(by_step[0], threads.run(1, lambda world: rank(world, False))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [-1, 2.5, "four", None])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(ConfigError, match=r"step \[count\]: expected a number of samples, 0 or more"):
        threads.run(1, lambda world: Trainer(model(0), optim.SGD(lr=0.1), world).step(count))


@pytest.mark.parametrize("kvstore", [None, "dist_sync"])
def test_what_is_no_optimizer_is_refused(kvstore):
    with pytest.raises(ConfigError, match=r"Trainer: expected an optimizer, e\.g\. .*SGD\(lr=0\.1\), got 'sgd'"):
        threads.run(1, lambda world: Trainer(model(0), "sgd", world, kvstore=kvstore))


def test_an_update_without_the_sum_is_refused():
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        backward(params, 0, [0])
        trainer.update(1)

    with pytest.raises(StaleGradientError, match=r"expected gradients that allreduce_grads\(\) has summed"):
        threads.run(2, rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_sums_are_neither_written_over_nor_summed_again_before_the_update(overlap):
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.SGD(lr=0.1), world, overlap=overlap)
        backward(params, world.rank, [0])
        trainer.allreduce_grads()
        with pytest.raises(StaleGradientError, match=r"expected one backward before each step.*got another one"):
            backward(params, world.rank, [1])
        for again in (trainer.allreduce_grads, lambda: trainer.step(1)):
            with pytest.raises(StaleGradientError, match=r"call update\(count\), or step\(0\) to drop them"):
                again()
        trainer.step(0)
        assert trainer.step_count == 0
        backward(params, world.rank, [1])
        trainer.allreduce_grads()
        assert trainer.update(1) == world.size
        assert trainer.step_count == 1

    threads.run(2, rank, ranks_per_node=1 if overlap else None)


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

    threads.run(2, rank)
    assert sorted(told) == [0, 1]


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
            threads.run(n, lambda world, o=owner: rank(world, o), per_node)


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

    threads.run(3, rank)
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

    with pytest.raises(StaleGradientError, match=r"none for conv.weight, conv.bias, dense.weight"):
        threads.run(2, rank)


@pytest.mark.parametrize(("change", "message"), [
    ({"dense.bias": (8,)}, r"item 4 of 8 on rank 0\]: expected dense.bias \(7,\) float32 as on rank 0, "
                           r"got dense.bias \(8,\) float32 on rank 1"),
    ({"extra": (1,)}, r"item 5 of 8 on rank 0\]: expected optimizer .* got extra \(1,\) float32 on rank 1"),
])  # fmt: skip
def test_ranks_with_other_models_are_told_on_every_rank(change, message):
    errors = []

    def rank(world):
        shapes = SHAPES | change if world.rank == 1 else SHAPES
        try:
            Trainer(model(0, shapes), optim.SGD(lr=0.1), world)
        except MismatchError as error:
            errors.append(error)

    threads.run(3, rank)
    assert len(errors) == 3
    for error in errors:
        with pytest.raises(MismatchError, match=message):
            raise error


def test_other_settings_are_a_mismatch_too():
    with pytest.raises(MismatchError, match=r"'lr': 0.1.*on rank 0, got optimizer.*'lr': 0.2.*on rank 1"):
        threads.run(2, lambda world: Trainer(model(0), optim.SGD(lr=0.1 * (world.rank + 1)), world))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"owner": "boss"}, "expected auto or rank or shard, got 'boss'"),
    ({"clip_norm": 0}, "expected a positive norm, got 0"),
    ({"compression": "3bit"}, "expected one of fp16, bf16, 2bit, 1bit, topk, got '3bit'"),
    ({"params": []}, "expected at least one trainable parameter, got none"),
])  # fmt: skip
def test_wrong_arguments_are_refused(arguments, message):
    arguments = {"params": model(0)} | arguments
    with pytest.raises(ConfigError, match=message):
        threads.run(1, lambda world: Trainer(optimizer=optim.SGD(lr=0.1), world=world, **arguments))


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

    threads.run(2, rank)


def test_every_rank_has_all_of_it_where_each_updates_everything():
    def rank(world):
        trainer = Trainer(model(0), optim.Adam(), world, owner="rank")
        whole = sum(trainer.reducer.layout.counts) * 4
        assert trainer.nbytes == {"parameters": whole, "gradients": whole, "state": 2 * whole}

    threads.run(3, rank)


def test_an_owner_of_a_shard_keeps_its_part_of_the_state_and_parameters_once_per_node():
    def rank(world):
        params = model(0)
        trainer = Trainer(params, optim.Adam(), world, owner="shard")
        address = params[2].data.__array_interface__["data"][0]
        whole = sum(trainer.reducer.layout.counts) * 4
        assert trainer.nbytes == {"parameters": whole // 4, "gradients": whole, "state": trainer.owner.nbytes_state}
        return trainer.owner.nbytes_state, whole, address

    results = threads.run(4, rank)
    assert sum(state for state, _, _ in results) == 2 * results[0][1]
    assert max(state for state, _, _ in results) < 2 * results[0][1] / 3
    assert len({address for _, _, address in results}) == 1


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

    threads.run(n, lambda world: rank(world, "shard", False, True), ranks_per_node=per_node)
    step_count, straight = threads.run(1, lambda world: rank(world, "rank", False, False))[0]
    assert step_count == 3

    def restored(world):
        trainer = Trainer(model(0), optim.AdamW(lr=0.01), world, owner="rank")
        trainer.load_states(path)
        assert trainer.step_count == 3
        return trainer.owner.states

    for states in threads.run(3, restored):
        for state, expected in zip(states, straight, strict=True):
            for name in expected:
                np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-6)


def test_states_of_another_model_or_a_damaged_file_are_refused_by_name(tmp_path):
    path = tmp_path / "states.npz"

    def save(world):
        Trainer(model(0), optim.SGD(lr=0.1, momentum=0.9), world).save_states(path)

    def load(world, shapes, optimizer, where=path):
        trainer = Trainer(model(0, shapes), optimizer, world)
        trainer.load_states(where)

    threads.run(2, save)
    momentum = optim.SGD(lr=0.1, momentum=0.9)
    with pytest.raises(DataError, match=r"dense.bias/momentum\]: expected \(8,\), got \(7,\)"):
        threads.run(2, lambda world: load(world, SHAPES | {"dense.bias": (8,)}, momentum))
    with pytest.raises(DataError, match="expected states of adam, got states of sgd"):
        threads.run(2, lambda world: load(world, SHAPES, optim.Adam()))
    with pytest.raises(DataError, match="No such file"):
        threads.run(2, lambda world: load(world, SHAPES, momentum, tmp_path / "none.npz"))
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for damaged in (data[: len(data) // 2], b"", b"not a zip", flipped):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="expected a file of save_states"):
            threads.run(1, lambda world: load(world, SHAPES, momentum))


def test_states_that_cannot_be_written_are_an_error_on_every_rank(tmp_path):
    def rank(world):
        Trainer(model(0), optim.SGD(lr=0.1), world).save_states(tmp_path / "no" / "such" / "folder.npz")

    with pytest.raises(DataError, match="No such file or directory"):
        threads.run(2, rank)


@pytest.mark.mpi
@pytest.mark.parametrize("split", [None, all_to_the_last, uneven])
def test_real_ranks_give_what_one_rank_gives(split):
    world = hpcdp.init()
    alone = threads.run(1, lambda lonely: train(lonely, owner="rank"))[0]
    every_rank, by_shards = (train(world, split=split, owner=owner) for owner in ("rank", "shard"))
    np.testing.assert_array_equal(every_rank, by_shards)
    np.testing.assert_allclose(every_rank, alone, rtol=1e-5, atol=1e-6)


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

    with pytest.raises(StaleGradientError, match=r"got none for dense\.weight"):
        threads.run(2, rank)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("what", ["learning rate 0.2", "loss scale 8.0"])
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
        with pytest.raises(MismatchError, match=f"got {what} on rank 1; change them alike"):
            trainer.step(1)
        assert all((param.data == was).all() for param, was in zip(params, before, strict=True))
        trainer.optimizer.lr, trainer.loss_scale = 0.1, 1.0
        backward(params, 1, [world.rank])
        assert trainer.step(1) == n

    threads.run(n, rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "yes"}, "True, False or None, got 'yes'"),
        ({"overlap": 2}, "True, False or None, got 2"),
        ({"clip_norm": "1"}, "a positive norm, got '1'"),
        ({"bucket_cap_mb": "x"}, "a positive size, got 'x'"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_by_name(options, message):
    (world,) = threads.run(1, lambda world: world)
    with pytest.raises(ConfigError, match=message):
        Trainer(model(0), optim.SGD(lr=0.1), world, **options)


def test_gradients_that_add_up_by_themselves_are_not_reduced_beside_backward():
    def rank(world):
        params = model(0)
        params[1].grad_req = "add"
        with pytest.raises(ConfigError, match=r"\[conv.bias\]: expected grad_req='write' with overlap.*no_sync\(\)"):
            Trainer(params, optim.SGD(lr=0.1), world, overlap=True)
        trainer = Trainer(params, optim.SGD(lr=0.1), world)
        assert not trainer.reducer.overlap
        for samples in ([0], [1]):
            backward(params, world.rank, samples)
        found = params[1].grad.copy()
        np.testing.assert_allclose(found, sum(sample_gradients(world.rank, each)[1] for each in (0, 1)), rtol=1e-6)
        assert trainer.step(2) == 2 * world.size

    threads.run(3, rank, ranks_per_node=1)


def test_ranks_whose_gradients_do_not_add_up_alike_are_told_so():
    def rank(world):
        params = model(0)
        params[1].grad_req = "add" if world.rank else "write"
        with pytest.raises(MismatchError, match="grad_req='add' on rank 1"):
            Trainer(params, optim.SGD(lr=0.1), world)

    threads.run(2, rank)


@pytest.mark.parametrize(("ranks", "per_node"), [(3, 2), (5, 2), (3, [1, 2])])
def test_who_updates_is_alike_on_uneven_nodes(ranks, per_node, tmp_path):
    """A node of one rank shares nothing, and must still do as the others: states are gathered over all ranks."""

    def one(world):
        trainer = Trainer(model(1), optim.Adam(lr=0.1), world)
        trainer.save_states(tmp_path / "states.npz")
        return type(trainer.owner).__name__

    assert threads.run(ranks, one, ranks_per_node=per_node) == ["ShardOwner"] * ranks
    assert threads.run(2, one, ranks_per_node=1) == ["EveryRank"] * 2
