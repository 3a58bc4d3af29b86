"""The trainer on stores: the numbers of the trainer without one, and what a store refuses."""

import numpy as np
import pytest
from pairs import pairs

import hpcdp
from hpcdp import kvstore, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import threads
from hpcdp.errors import ConfigError, DataError, MismatchError, StaleGradientError
from hpcdp.kvstore.together import serve
from hpcdp.train.bucket_trainer import BucketTrainer
from hpcdp.train.policy import Policy
from hpcdp.train.store_trainer import StoreTrainer

WORLDS = [(1, None), (2, None), (3, None), (4, None), (2, 1), (3, 1), (3, 2), (4, 2)]
"""Ranks, and ranks per node."""
SYNC = ("dist_sync", "dist_device_sync")
BATCH = 7


def network(seed=0):
    return nn.models.mlp(input_shape=5, num_classes=3, hidden=(4, 6), seed=seed)


def samples(step):
    rng = np.random.default_rng([1, step])
    return rng.standard_normal((BATCH, 5)).astype("f4"), rng.integers(0, 3, BATCH)


def backward(net, step, mine):
    x, y = samples(step)
    with record():
        loss = nn.functional.softmax_cross_entropy(net(x[mine]), y[mine])
    loss.backward()


def in_turn(world, step):
    return np.arange(world.rank, BATCH, world.size)


def uneven(world, step):
    """Some ranks may have none."""
    return np.flatnonzero(np.random.default_rng(step).integers(0, world.size, BATCH) == world.rank)


def all_to_the_last(world, step):
    return np.arange(BATCH) if world.rank == world.size - 1 else np.arange(0)


def rule(name):
    if name == "schedule":
        return optim.SGD(lr=optim.WarmupSchedule(optim.ConstantSchedule(0.2), steps=4), momentum=0.9)
    return optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01) if name == "sgd" else optim.Adam(lr=0.01)


def values_of(net):
    return np.concatenate([param.asnumpy().reshape(-1) for param in net.parameters()])


def train(world, optimizer="sgd", split=in_turn, steps=5, by_hand=False, **options):
    """The parameters after some steps of a batch of `BATCH` samples, dealt by ``split``."""
    net = network(seed=world.rank)  # rank 0's values count
    trainer = hpcdp.Trainer(net.parameters(), rule(optimizer), world, **options)
    for step in range(steps):
        mine = split(world, step)
        if len(mine):
            backward(net, step, mine)
        if by_hand:
            trainer.allreduce_grads()
            assert trainer.update(len(mine)) == BATCH
        else:
            assert trainer.step(len(mine)) == BATCH
        if step == 2:
            trainer.optimizer.lr = 0.05
    assert trainer.step(0) == 0  # nobody has samples: nothing happens
    assert trainer.step_count == steps
    trainer.synchronize()  # nothing is missing here, and nothing may change
    assert trainer.step_count == steps
    assert trainer.statistics() == {}
    return values_of(net)


@pytest.mark.parametrize(
    ("layout", "split", "optimizer"), pairs(WORLDS, [in_turn, uneven, all_to_the_last], ["sgd", "adam", "schedule"])
)
def test_a_store_gives_what_buckets_give(layout, split, optimizer):
    ranks, per_node = layout
    expected = threads.run(ranks, lambda world: train(world, optimizer, split), per_node)[0]
    for there in (True, False):
        found = threads.run(
            ranks,
            lambda world, t=there: train(world, optimizer, split, kvstore="dist_sync", update_on_kvstore=t),
            per_node,
        )
        for each in found:
            np.testing.assert_array_equal(each, found[0])
            np.testing.assert_allclose(each, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["local", "device", "dist", *SYNC])
@pytest.mark.parametrize("there", [None, True, False])
def test_every_kind_trains_on_one_rank(kind, there):
    expected = threads.run(1, train)[0]
    found = threads.run(1, lambda world: train(world, kvstore=kind, update_on_kvstore=there))[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_compression_is_the_stores(kind):
    def rank(world, compression):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind, compression=compression)
        backward(net, 0, in_turn(world, 0))
        world.barrier()
        trainer.step(len(in_turn(world, 0)))
        if kind == "dist_async":
            trainer.synchronize()
        return values_of(net)

    for ranks, per_node in [(2, None), (3, 1)]:
        plain, half, few = (
            threads.run(ranks, lambda world, c=codec: rank(world, c), per_node) for codec in (None, "fp16", "topk")
        )
        assert 0 < np.abs(half[0] - plain[0]).max() < 1e-4 < np.abs(few[0] - plain[0]).max()
        for others in (half, few):
            for each in others:
                np.testing.assert_array_equal(each, others[0])


def test_a_local_store_starts_no_mpi(monkeypatch):
    monkeypatch.setattr("hpcdp.train.store_trainer.init", lambda: pytest.fail("a local store needs no ranks"))
    net = network()
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), kvstore="local")
    before = values_of(net)
    backward(net, 0, range(3))
    gradients = np.concatenate([param.grad.reshape(-1) for param in net.parameters()])
    assert trainer.step(3) == 3
    np.testing.assert_allclose(values_of(net), before - 0.1 * gradients / 3, rtol=1e-5, atol=1e-6)


def test_a_local_store_beside_other_ranks_is_refused_without_mpi_too(monkeypatch):
    """Each rank would train a model of its own."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"Trainer \[kvstore\]: expected a dist store on 3 ranks, got local"):
        hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), kvstore="local")


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, None), (4, 2)])
def test_gradients_can_be_changed_between_sum_and_update(ranks, per_node):
    expected = threads.run(ranks, lambda world: train(world, split=uneven), per_node)[0]

    def rank(world):
        return train(world, split=uneven, by_hand=True, kvstore="dist_sync", update_on_kvstore=False)

    for found in threads.run(ranks, rank, per_node):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("there", [True, False])
def test_accumulated_batches_are_one_batch(there):
    def rank(world, micro):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        for step in range(3):
            mine = in_turn(world, step)
            if micro:
                with trainer.no_sync():
                    for sample in mine[:-1]:
                        backward(net, step, [sample])
                        trainer.step(1)
                mine = mine[-1:]
            backward(net, step, mine)
            assert trainer.step(len(mine)) == BATCH
        assert all(param.grad_req == "write" for param in net.parameters())
        return values_of(net)

    for ranks in (1, 3):
        whole, parts = (threads.run(ranks, lambda world, m=micro: rank(world, m)) for micro in (False, True))
        np.testing.assert_allclose(parts[0], whole[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_states_go_on_on_any_number_of_ranks_and_with_either_updating(optimizer, there, tmp_path):
    whole = threads.run(3, lambda world: train(world, optimizer, steps=5))[0]

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

    values = threads.run(2, lambda world: part(world, range(3), there))[0]
    for found in threads.run(3, lambda world: part(world, range(3, 5), not there, values), 2):
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("there", [True, False])
def test_a_state_of_some_parameters_or_of_none(kind, there, tmp_path):
    """Saved by a store of the same keys, of which one was updated, or none."""

    def rank(world, updated):
        if kind == "dist_async" and not there:
            return
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
                    assert states[name].any() == (updated and name.startswith("int:0/"))

    for updated in (True, False):
        threads.run(1, lambda world, u=updated: rank(world, u))


def test_states_of_another_model_are_refused_on_every_rank(tmp_path):
    def rank(world, hidden, there, load):
        net = nn.models.mlp(input_shape=5, num_classes=3, hidden=hidden)
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        backward(net, 0, [0])
        trainer.step(1)
        if not load:
            trainer.save_states(tmp_path / "states")
            return
        with pytest.raises(DataError, match=r"load_states|load_optimizer_states"):
            trainer.load_states(tmp_path / "states")

    for there in (True, False):
        threads.run(2, lambda world, t=there: rank(world, (4, 6), t, False))
        threads.run(2, lambda world, t=there: rank(world, (4, 5), t, True))


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

    threads.run(3, rank)
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "step [rank 1]: expected a gradient for every parameter since the last step" in messages[0]


def test_a_missing_gradient_on_a_local_store_is_an_error():
    trainer = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), kvstore="local")
    with pytest.raises(StaleGradientError, match=r"step \[rank 0\].*remedy|call backward"):
        trainer.step(1)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_unused_parameters_may_count_as_zero(kind):
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind, policy=Policy(unused="zero"))
        before = values_of(net)
        for param in net.parameters():
            param.grad[...] = 5  # of an earlier step
        trainer.step(1)
        np.testing.assert_array_equal(values_of(net), before)

    threads.run(1, rank)


def test_frozen_parameters_are_no_keys():
    def rank(world):
        net = network()
        frozen, *others = net.parameters()
        frozen.grad_req = "null"
        before = frozen.data.copy()
        store = kvstore.create("dist_sync", world)
        hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=store)
        assert store.keys == list(range(len(others)))
        backward(net, 0, [0])
        np.testing.assert_array_equal(frozen.data, before)

    threads.run(2, rank)


def test_a_loss_scale_is_divided_away_and_ranks_must_agree_on_it():
    def rank(world, scale):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync")
        trainer.loss_scale = scale
        x, y = samples(0)
        with record():
            loss = nn.functional.softmax_cross_entropy(net(x[[world.rank]]), y[[world.rank]])
        loss.backward(np.full(1, scale, "f4"))
        trainer.step(1)
        return values_of(net)

    plain, scaled = (threads.run(2, lambda world, s=s: rank(world, s))[0] for s in (1.0, 64.0))
    np.testing.assert_allclose(scaled, plain, rtol=2e-5, atol=2e-6)
    with pytest.raises(MismatchError, match=r"loss scale 1\.0 as on rank 0, got loss scale 2.0 on rank 1"):
        threads.run(2, lambda world: rank(world, 1.0 + world.rank))


def test_learning_rates_that_differ_are_told():
    def rank(world, there):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=there)
        trainer.optimizer.lr = 0.1 * (world.rank + 1)
        backward(net, 0, [0])
        trainer.step(1)

    for there in (True, False):
        with pytest.raises(MismatchError, match=r"learning rate 0\.1 as on rank 0, got learning rate 0.2 on rank 1"):
            threads.run(2, lambda world, t=there: rank(world, t))


def test_learning_rates_that_differ_after_the_sum_are_told_too():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), rule("sgd"), world, kvstore="dist_sync", update_on_kvstore=False)
        backward(net, 0, [0])
        trainer.allreduce_grads()
        trainer.optimizer.lr = 0.1 * (world.rank + 1)
        trainer.update(1)

    with pytest.raises(MismatchError, match=r"update .*learning rate 0\.1 as on rank 0, got learning rate 0.2 on rank"):
        threads.run(2, rank)


@pytest.mark.parametrize(("ranks", "per_node", "num_servers"), [(1, None, 0), (3, None, 0), (3, 2, 0), (2, None, 1)])
@pytest.mark.parametrize("kind", [None, "dist_sync", "dist_async"])
def test_what_is_written_to_parameters_counts_when_it_is_taken(kind, ranks, per_node, num_servers):
    def rank(world, there):
        net = network()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, kvstore=kind, update_on_kvstore=there
        )
        backward(net, 0, [0])
        trainer.step(1)
        world.barrier()
        for param in net.parameters():
            param.data[...] = 7 + (world.rank if there else 0)  # rank 0's counts
        world.barrier()
        trainer.take_parameters()
        trainer.optimizer.lr = 0.0
        backward(net, 0, [0])
        trainer.step(1)
        if kind == "dist_async":
            trainer.synchronize()
        assert (values_of(net) == 7).all()
        world.barrier()

    for there in (True, False) if kind == "dist_sync" else (None if kind is None else True,):
        threads.run(ranks, lambda world, t=there: rank(world, t), per_node, num_servers, serve)


@pytest.mark.parametrize("there", [True, False])
def test_parameters_are_arrays_of_the_ranks_own(there):
    def rank(world):
        net = network()
        BucketTrainer(net.parameters(), optim.SGD(lr=0.1), world)  # they are shared now
        hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=there)
        world.barrier()
        for param in net.parameters():
            param.data[...] = world.rank
        world.barrier()
        assert all((param.data == world.rank).all() for param in net.parameters())

    threads.run(2, rank)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_the_first_layers_come_first(kind):
    """Which the next forward reads first."""

    def rank(world):
        net, given = network(), {}
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        pushpull = trainer.store.pushpull

        def notes(key, value, out=None, priority=0):
            given[key] = priority
            pushpull(key, value, out, priority)

        trainer.store.pushpull = notes
        backward(net, 0, [0])
        trainer.step(1)
        assert len(given) > 2 and sorted(given, key=given.get, reverse=True) == sorted(given)
        assert len(set(given.values())) == len(given)

    threads.run(1, rank)


def test_which_trainer_it_is():
    def rank(world):
        in_buckets = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world)
        on_a_store = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")
        assert type(in_buckets) is BucketTrainer and type(on_a_store) is StoreTrainer
        assert isinstance(in_buckets, hpcdp.Trainer) and isinstance(on_a_store, hpcdp.Trainer)
        assert on_a_store.store.kind == "dist_sync"
        values = sum(param.data.nbytes for param in network().parameters())
        assert on_a_store.nbytes == {"parameters": values, "gradients": values}

    threads.run(2, rank)


def test_time_that_somebody_waits_for_a_value_counts_as_communication():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")
        for step in range(3):
            backward(net, step, [world.rank])
            trainer.step(1)
        assert trainer.stats.steps == 3
        assert 0 < trainer.stats.exposed_s == trainer.stats.total_s
        assert trainer.stats.hidden_share == 0

    threads.run(2, rank)


@pytest.mark.parametrize(("options", "message"), [
    ({"owner": "shard"}, r"\[owner\]: expected 'auto' with a kvstore, got 'shard'"),
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
        threads.run(2, lambda world: hpcdp.Trainer(optimizer=optim.SGD(lr=0.1), world=world, **arguments))
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
        (with_an_updater, "expected a store without keys and updater, got one with an updater"),
        (of_another_trainer, r"expected a store without keys and updater, got keys \[0, 1, 2\]"),
        (of_one_process, "expected a dist store on 2 ranks, got local"),
    ]:

        def rank(world, make=make):
            hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=make(world))

        with pytest.raises(ConfigError, match=message):
            threads.run(2, rank)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_store_that_updates_neither_sums_nor_takes_updates(kind):
    def rank(world):
        trainer = hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore=kind)
        for operation, call in (("allreduce_grads", trainer.allreduce_grads), ("update", lambda: trainer.update(1))):
            with pytest.raises(ConfigError, match=rf"{operation}: expected a store that only sums.*call step"):
                call()

    threads.run(1, rank)


def test_sums_are_neither_written_over_nor_summed_again_before_the_update():
    def rank(world):
        net = network()
        trainer = hpcdp.Trainer(
            net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=False
        )
        with pytest.raises(StaleGradientError, match=r"expected gradients that allreduce_grads\(\) has summed"):
            trainer.update(1)
        backward(net, 0, [world.rank])
        trainer.allreduce_grads()
        with pytest.raises(StaleGradientError, match=r"expected one backward before each step.*got another one"):
            backward(net, 0, [world.rank])
        for again in (trainer.allreduce_grads, lambda: trainer.step(1), trainer.no_sync().__enter__):
            with pytest.raises(StaleGradientError, match=r"call update\(count\), or step\(0\) to drop them"):
                again()
        trainer.step(0)
        assert trainer.step_count == 0
        backward(net, 0, [world.rank])
        trainer.allreduce_grads()
        assert trainer.update(1) == world.size

    threads.run(2, rank)


def test_ranks_with_other_models_or_settings_are_told():
    def with_other_layers(world):
        net = nn.models.mlp(input_shape=5, num_classes=3, hidden=(4 + world.rank,))
        hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync")

    def with_other_updates(world):
        there = world.rank == 0
        hpcdp.Trainer(network().parameters(), optim.SGD(lr=0.1), world, kvstore="dist_sync", update_on_kvstore=there)

    for rank in (with_other_layers, with_other_updates):
        with pytest.raises(MismatchError, match=r"on rank 0, got .* on rank 1"):
            threads.run(2, rank)
