"""The same bits on any number of ranks and nodes: what is trained, what is measured, what is refused."""

import contextlib
import copy
import json
import os
import subprocess
import sys
import threading
import time
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import standin
from pairs import pairs

from hpcdp import Policy, Trainer, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import threads
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler, VirtualShardSampler
from hpcdp.errors import ConfigError, DataError, HpcdpError, MismatchError, NonFiniteGradientError, StaleGradientError
from hpcdp.train import reproducible
from hpcdp.train.evaluate import evaluate
from hpcdp.train.fit import fit

RNG = np.random.default_rng(7)
IMAGES = RNG.standard_normal((75, 1, 6, 6)).astype(np.float32)
LABELS = RNG.integers(0, 4, 75)
"""Batches of 32 leave a last one of 11: fewer samples than 13 virtual shards."""
SET = ArrayDataset(IMAGES, LABELS)
WORLDS = [(1, None), (2, None), (3, None), (4, None), (8, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (7, 1), (8, 3)]
"""Ranks, and ranks per node."""


def network(dropout=0.3):
    net = nn.Sequential(
        nn.Conv2D(1, 5, 3, padding=1), nn.BatchNorm(5), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout, seed=3),
        nn.Dense(180, 24, activation="relu"), nn.Dropout(dropout, seed=3), nn.Dense(24, 4),
    )  # fmt: skip
    for number, param in enumerate(net.parameters()):
        param.data = (np.random.default_rng(number).standard_normal(param.shape) / 8 + 0.1).astype(np.float32)
    return net


def trainer_of(net, world, rule=None, **options):
    options = {"reproducible": True, "bucket_cap_mb": 0.01} | options
    return Trainer(net.parameters(), rule or optim.Adam(lr=0.01), world, **options)


def sampler_of(trainer, world, batch_size=32, **options):
    return VirtualShardSampler(len(SET), batch_size, trainer.virtual_shards, world.size, world.rank, **options)


def backward(net, x, y):
    if len(y):
        with record():
            losses = nn.functional.softmax_cross_entropy(net(x), y)
        losses.backward()


def train(net, trainer, batches):
    """Returns the network's parameters and buffers, to the bit."""
    for indices in batches:
        backward(net, IMAGES[indices], LABELS[indices])
        trainer.step(len(indices))
    return b"".join(np.array(array).tobytes() for array in net.state_dict().values())


def epoch(world, num=8, seed=1, **options):
    net = network()
    trainer = trainer_of(net, world, virtual_shards=num, **options)
    return train(net, trainer, sampler_of(trainer, world, seed=seed))


@pytest.fixture(scope="module")
def alone():
    """What one rank trains, by the number of virtual shards and the norm that gradients are clipped to."""
    return {(num, clip): threads.run(1, lambda world, num=num, clip=clip: epoch(world, num, clip_norm=clip))[0]
            for num in (8, 13) for clip in (None, 0.5)}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "num", "ways"),
    pairs(WORLDS, [8, 13], [(False, "shard", None), (True, "rank", 0.5), (True, "shard", None)]),
)
def test_the_number_of_ranks_and_nodes_changes_no_bit(layout, num, ways, alone):
    (ranks, per_node), (overlap, owner, clip) = layout, ways
    options = {"overlap": overlap, "owner": owner, "clip_norm": clip}
    found = threads.run(ranks, lambda world: epoch(world, num, **options), ranks_per_node=per_node)
    assert set(found) == {alone[num, clip]}


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_norms_of_layers_have_the_same_bits_too(owner):
    found = {
        ranks: threads.run(ranks, lambda world: epoch(world, rule=optim.LARS(lr=1.0), owner=owner), per_node)[0]
        for ranks, per_node in [(1, None), (2, None), (3, None), (3, 1), (4, 2)]
    }
    assert len(set(found.values())) == 1


def test_what_ought_to_make_a_difference_does(alone):
    assert len(set(alone.values())) == 4
    assert threads.run(1, lambda world: epoch(world, seed=2))[0] != alone[8, None]
    plain = threads.run(2, lambda world: epoch_without(world))
    assert len({each[-16:] for each in [*plain, *threads.run(1, epoch_without)]}) > 1


def epoch_without(world):
    """The same without reproducible: this is what rounding does on another number of ranks."""
    net = network(dropout=0)
    trainer = Trainer(net.parameters(), optim.Adam(lr=0.01), world)
    return train(net, trainer, ShardedSampler(len(SET), 32, world.size, world.rank, seed=1))


def test_the_sums_are_those_of_plain_training_but_for_rounding():
    def parameters(world, sampler, **options):
        net = nn.Sequential(nn.Flatten(), nn.Dense(36, 8, activation="relu"), nn.Dense(8, 4))
        for number, param in enumerate(net.parameters()):
            param.data = (np.random.default_rng(number).standard_normal(param.shape) / 4).astype(np.float32)
        train(net, trainer_of(net, world, optim.SGD(lr=0.1, momentum=0.9), **options), sampler(world))
        return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])

    plain = threads.run(1, lambda world: parameters(world, lambda world: ShardedSampler(75, 32), reproducible=False))[0]
    ours = threads.run(3, lambda world: parameters(world, lambda w: VirtualShardSampler(75, 32, 8, 3, w.rank)))
    np.testing.assert_allclose(ours[0], plain, rtol=2e-5, atol=2e-6)


def test_running_statistics_move_once_a_step_by_the_mean_over_all_samples():
    x = RNG.standard_normal((20, 3)).astype(np.float32)
    ends = [0, 4, 8, 12, 20]

    def moved(world):
        net = nn.Sequential(nn.BatchNorm(3, momentum=0.75), nn.Dense(3, 2))
        trainer = trainer_of(net, world, virtual_shards=4)
        for shard in trainer.own_virtual_shards:
            part = x[ends[shard] : ends[shard + 1]]
            backward(net, part, np.zeros(len(part), np.int64))
            trainer.step(len(part))
        return net[0].running_mean.data, net[0].running_var.data

    parts = [x[first:end].astype(np.float64) for first, end in pairwise(ends)]
    mean = sum(len(part) * part.mean(axis=0) for part in parts) / 20
    variance = sum(len(part) * part.var(axis=0) for part in parts) / 20
    for running_mean, running_var in threads.run(3, moved):
        np.testing.assert_allclose(running_mean, 0.25 * mean, atol=1e-6)
        np.testing.assert_allclose(running_var, 0.75 + 0.25 * variance, rtol=1e-5)


def test_what_is_dropped_depends_on_seed_step_and_place_alone():
    def dropped(world):
        net = nn.Sequential(nn.Dense(4, 1), nn.Dropout(0.5, seed=5))
        net[0].weight.data[...], net[0].bias.data[...] = 0, 1
        trainer, masks = trainer_of(net, world, optim.SGD(lr=0.0), virtual_shards=6), {}
        for step in range(3):
            for shard in trainer.own_virtual_shards:
                with record():
                    first, again = net(np.zeros((30, 4), "f4")), net(np.zeros((30, 4), "f4"))
                    loss = first.sum() + again.sum()
                loss.backward()
                masks[step, shard, 0], masks[step, shard, 1] = first.data.tobytes(), again.data.tobytes()
                trainer.step(30)
        return masks

    everyone = threads.run(4, dropped)
    assert {key: mask for masks in everyone for key, mask in masks.items()} == threads.run(1, dropped)[0]
    assert len(set(threads.run(1, dropped)[0].values())) == 3 * 6 * 2


@pytest.mark.parametrize(("before", "after"), [((2, None), (3, None)), ((4, 2), (1, None)), ((1, None), (5, 2))])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_restart_at_another_number_of_ranks_goes_on_with_the_same_bits(before, after, owner, tmp_path, alone):
    path = tmp_path / "states.npz"

    def some(world, first, last, values=None):
        net = network()
        trainer = trainer_of(net, world, owner=owner)
        if values is not None:
            net.load_state_dict(values)
            trainer.load_states(path)
        per_step = len(trainer.own_virtual_shards)
        end = None if last is None else last * per_step
        result = train(net, trainer, islice(sampler_of(trainer, world, seed=1), first * per_step, end))
        if last is not None:
            trainer.save_states(path)
        return result, {name: np.array(each) for name, each in net.state_dict().items()}

    _, values = threads.run(before[0], lambda world: some(world, 0, 2), ranks_per_node=before[1])[0]
    found = threads.run(after[0], lambda world: some(world, 2, None, values), ranks_per_node=after[1])
    assert {result for result, _ in found} == {alone[8, None]}


def test_states_of_another_number_of_virtual_shards_are_refused(tmp_path):
    def save(world, num):
        trainer = trainer_of(network(), world, virtual_shards=num)
        trainer.save_states(tmp_path / f"{num}.npz")
        trainer_of(network(), world, reproducible=False).save_states(tmp_path / "plain.npz")

    threads.run(2, lambda world: save(world, 5))

    def load(world):
        trainer = trainer_of(network(), world)
        trainer.load_states(tmp_path / "plain.npz")  # nothing is known against it
        trainer.load_states(tmp_path / "5.npz")

    with pytest.raises(DataError, match=r"expected states of 8 virtual shards, got states of 5.*virtual_shards=5"):
        threads.run(2, load)


def test_states_from_another_processor_are_taken_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "states.npz"
    threads.run(1, lambda world: trainer_of(network(), world).save_states(path))
    monkeypatch.setattr("hpcdp.train.trainer_states.arithmetic", lambda: "an abacus")
    with pytest.warns(
        UserWarning, match=r"saved where arithmetic was NumPy .*, and here it is an abacus: last bits may"
    ):
        threads.run(2, lambda world: trainer_of(network(), world).load_states(path))


def test_ranks_that_compute_differently_are_told(monkeypatch):
    kinds = iter(("hard", "soft", "soft"))
    monkeypatch.setattr(reproducible, "arithmetic", lambda: next(kinds))
    with pytest.raises(MismatchError, match=r"arithmetic (hard|soft) as on rank 0.*take nodes of one kind"):
        threads.run(3, lambda world: trainer_of(network(), world))


def test_reproducible_on_some_ranks_only_is_told():
    with pytest.raises(
        MismatchError, match=r"expected virtual_shards=8 as on rank 0, got virtual_shards=None on rank 1"
    ):
        threads.run(2, lambda world: trainer_of(network(), world, reproducible=world.rank == 0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reproducible": 1}, r"\[reproducible\]: expected True or False, got 1"),
        (
            {"reproducible": False, "virtual_shards": 8},
            r"\[virtual_shards\]: expected None without reproducible=True, got 8",
        ),
        ({"virtual_shards": True}, r"\[virtual_shards\]: expected an integer >= 1, got True"),
        ({"virtual_shards": 0}, r"\[virtual_shards\]: expected an integer >= 1, got 0"),
        ({"virtual_shards": 2.0}, r"\[virtual_shards\]: expected an integer >= 1, got 2.0"),
        ({"virtual_shards": 2}, r"\[virtual_shards\]: expected at least one for each of 3 ranks, got 2"),
        ({"compression": "2bit"}, r"\[compression\]: expected none, since what a node leaves out depends on"),
    ],
)
def test_settings_that_would_break_it_are_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        threads.run(3, lambda world: trainer_of(network(), world, **options))


def test_numbers_of_numpy_will_do():
    def one(world):
        trainer = trainer_of(network(), world, virtual_shards=np.int64(5))
        assert evaluate(network(), SET, world, num_parts=np.int64(5)).count == 75
        return trainer.virtual_shards

    assert threads.run(3, one, ranks_per_node=2) == [5, 5, 5]


def test_gradients_that_are_added_up_are_refused():
    net = network()
    net[0].weight.grad_req = "add"
    with pytest.raises(ConfigError, match=r"\[0.weight\]: expected grad_req='write', got grad_req='add'"):
        threads.run(1, lambda world: trainer_of(net, world))


def test_arrays_on_a_device_are_refused():
    net = nn.Sequential(nn.Dense(3, 2)).to(like=standin.asarray(np.zeros(1, np.float32)))
    with pytest.raises(
        ConfigError, match=r"\[params\]: expected NumPy arrays, since sums on devices have no fixed order"
    ):
        threads.run(1, lambda world: trainer_of(net, world))


@pytest.mark.parametrize("operation", ["no_sync", "allreduce_grads"])
def test_operations_that_have_no_fixed_order_are_refused(operation):
    def one(world):
        trainer = trainer_of(network(), world)
        if operation == "no_sync":
            with trainer.no_sync():
                pass
        else:
            trainer.allreduce_grads()

    with pytest.raises(ConfigError, match=f"{operation}: expected a Trainer without reproducible=True"):
        threads.run(2, one)


def test_dropout_without_a_seed_is_refused_and_with_a_plain_trainer_is_not():
    net = nn.Sequential(nn.Flatten(), nn.Dense(36, 4), nn.Dropout(0.5))

    def one(world, **options):
        trainer = trainer_of(net, world, **options)
        backward(net, IMAGES[:4], LABELS[:4])
        return trainer.step(4)

    with pytest.raises(ConfigError, match=r"Dropout \[seed\]: expected a number, since the trainer is reproducible"):
        threads.run(1, one)
    assert threads.run(1, lambda world: one(world, reproducible=False)) == [4]


def test_another_trainer_in_between_is_told():
    def one(world, other):
        trainer = trainer_of(network(), world)
        kept = trainer_of(network(), world, reproducible=other)
        trainer.step(0)
        return kept

    for other in (True, False):
        with pytest.raises(HpcdpError, match="step: expected no other Trainer made in this thread since"):
            threads.run(1, lambda world, other=other: one(world, other))


def test_a_trainer_that_is_gone_leaves_layers_as_they_were():
    def one(world):
        layer = nn.BatchNorm(2, momentum=0.5)
        trainer = trainer_of(nn.Sequential(layer), world)
        del trainer
        with record():
            layer(np.ones((4, 2), np.float32))
        return layer.running_mean.data.tolist()

    assert threads.run(1, one) == [[0.5, 0.5]]


def test_a_gradient_that_is_missing_in_any_virtual_shard_is_named_on_every_rank():
    def one(world, missing_in, policy):
        net = nn.Sequential(nn.Dense(2, 3), nn.Dense(3, 2), nn.Dense(3, 2))
        trainer = trainer_of(net, world, virtual_shards=5, policy=policy)
        for shard in trainer.own_virtual_shards:
            hidden = net[1] if shard == missing_in else net[2]
            with record():
                loss = sum((hidden(net[0](np.ones((1, 2), "f4"))), net[1](net[0](np.ones((1, 2), "f4")))), start=0.0)
            loss.backward()
            try:
                total = trainer.step(1)
            except StaleGradientError as error:
                return str(error)
        return total

    for missing_in in range(5):
        said = set(threads.run(2, lambda world, m=missing_in: one(world, m, Policy())))
        assert len(said) == 1, said
        assert "none for 2.weight, 2.bias" in said.pop()
        assert threads.run(2, lambda world, m=missing_in: one(world, m, Policy(unused="zero"))) == [5, 5]


def test_a_sum_that_is_not_finite_is_noticed():
    def one(world):
        net = network()
        trainer = trainer_of(net, world, policy=Policy(nonfinite="raise"))
        images = IMAGES[:8].copy()
        images[5] = np.inf
        for shard in trainer.own_virtual_shards:
            backward(net, images[shard : shard + 1], LABELS[shard : shard + 1])
            trainer.step(1)

    with np.errstate(all="ignore"), pytest.raises(NonFiniteGradientError):
        threads.run(3, one)


def test_steps_without_samples_change_nothing():
    def one(world):
        net = network()
        trainer = trainer_of(net, world)
        before = [np.array(param.data) for param in net.parameters()]
        totals = [trainer.step(0) for _ in trainer.own_virtual_shards]
        assert all(np.array_equal(a, param.data) for a, param in zip(before, net.parameters(), strict=True))
        backward(net, IMAGES[:2], LABELS[:2])
        totals += [trainer.step(2 if shard == 0 else 0) for shard in trainer.own_virtual_shards]
        return totals[-1], trainer.step_count

    assert threads.run(1, one) == [(2, 1)]


def test_layers_that_are_called_in_some_shards_only_or_twice_change_nothing():
    """Nor does a rank that has seen no layer yet, in a first batch with fewer samples than shards."""

    def one(world):
        net = nn.Sequential(nn.BatchNorm(3), nn.BatchNorm(3), nn.Dense(3, 2, weight_init=nn.init.Xavier(seed=0)))
        trainer = trainer_of(net, world, policy=Policy(unused="zero"))
        rng = np.random.default_rng(5)
        for step in range(3):
            data = rng.standard_normal((8, 4, 3)).astype("f4")
            for shard in trainer.own_virtual_shards:
                count = 0 if step == 0 and shard < 5 else 4
                if count:
                    with record():
                        x = net[0](net[0](data[shard])) if shard == 6 else data[shard]
                        loss = net[2](net[shard % 2](x)).sum()
                    loss.backward()
                trainer.step(count)
        return b"".join(np.array(each).tobytes() for each in net.state_dict().values())

    wanted = threads.run(1, one)[0]
    for ranks, per_node in ((2, None), (5, 2), (8, None), (8, 3)):
        assert set(threads.run(ranks, one, ranks_per_node=per_node)) == {wanted}


def test_a_layer_whose_parameters_the_trainer_does_not_have_is_refused():
    def one(world):
        net, other = network(), nn.BatchNorm(1)
        trainer = trainer_of(net, world)
        for _ in trainer.own_virtual_shards:
            backward(net, IMAGES[:4], LABELS[:4])
            if world.rank:
                with record():
                    other(IMAGES[:4])
            trainer.step(4)

    def caught(world):
        try:
            one(world)
        except HpcdpError as error:
            return str(error)

    said = threads.run(2, caught)
    assert said[0] == said[1] and said[0].startswith(
        "step: expected layers whose parameters the Trainer has, got a Batch"
    )


def test_layers_are_found_by_any_of_their_parameters():
    def one(world):
        first, shares, beta_alone = nn.BatchNorm(3), nn.BatchNorm(3), nn.BatchNorm(3)
        shares.gamma, shares.beta = first.gamma, first.beta
        replaced = copy.deepcopy(first)
        replaced.gamma = nn.Parameter(np.full(3, 2, "f4"))
        net = nn.Sequential(first, shares, replaced, beta_alone)
        params = [param for param in net.parameters() if param is not beta_alone.gamma]
        trainer = Trainer((param for param in params), optim.SGD(lr=0.1), world, reproducible=True, virtual_shards=4)
        for shard in trainer.own_virtual_shards:
            with record():
                loss = net(np.random.default_rng(shard).standard_normal((5, 3)).astype("f4")).sum()
            loss.backward()
            trainer.step(5)
        assert len({layer.running_mean.data.tobytes() for layer in net}) > 1
        return b"".join(np.array(each).tobytes() for each in net.state_dict().values())

    wanted = threads.run(1, one)[0]
    assert set(threads.run(3, one, ranks_per_node=2)) == {wanted}


@pytest.mark.parametrize("how", ["dropped", "stale", "rate"])
@pytest.mark.parametrize(("ranks", "per_node", "overlap"), [(2, None, False), (3, 2, True), (4, None, True)])
def test_steps_that_are_given_up_leave_no_trace(how, ranks, per_node, overlap, monkeypatch):
    """Although a rank may be far ahead of the one that still adds up what is dropped."""
    from hpcdp.collectives import fixed_tree

    fold = fixed_tree.fold

    def slowly(node, sums):
        if node == (0, 8):
            time.sleep(0.02 * (threading.get_ident() % 3))
        return fold(node, sums)

    monkeypatch.setattr(fixed_tree, "fold", slowly)

    def one(world, gives_up):
        net, rule = network(), optim.SGD(lr=0.1)
        trainer = trainer_of(net, world, rule, overlap=overlap, owner="shard")
        for step in range(3):
            if gives_up:
                rule.lr = 0.1 + (world.rank if how == "rate" else 0)
                for shard in trainer.own_virtual_shards:
                    if how != "stale" or shard != 7:
                        backward(net, IMAGES[shard::8], LABELS[shard::8])
                    with contextlib.suppress(StaleGradientError, MismatchError):
                        trainer.step(0 if how == "dropped" else 1)
                rule.lr = 0.1
            for shard in trainer.own_virtual_shards:
                part = slice(shard + 8 * step, 75, 24)
                backward(net, IMAGES[part], LABELS[part])
                trainer.step(len(LABELS[part]))
        return b"".join(np.array(each).tobytes() for each in net.state_dict().values())

    wanted = threads.run(1, lambda world: one(world, False))[0]
    assert set(threads.run(ranks, lambda world: one(world, True), ranks_per_node=per_node)) == {wanted}


def test_a_step_that_is_skipped_leaves_running_statistics():
    def one(world):
        net = network()
        trainer = trainer_of(net, world, policy=Policy(nonfinite="skip"))
        before = np.array(net[1].running_mean.data)
        images = IMAGES[:8].copy()
        images[5] = np.inf
        for shard in trainer.own_virtual_shards:
            backward(net, images[shard : shard + 1], LABELS[shard : shard + 1])
            trainer.step(1)
        assert trainer.num_nonfinite == 1
        return np.array_equal(net[1].running_mean.data, before)

    with np.errstate(all="ignore"):
        assert threads.run(2, one) == [True, True]


def test_gradients_that_are_to_be_added_up_later_are_refused_too():
    def one(world):
        net = network()
        trainer = trainer_of(net, world)
        net[0].weight.grad_req = "add"
        backward(net, IMAGES[:4], LABELS[:4])
        trainer.step(4)

    with pytest.raises(ConfigError, match=r"backward \[0.weight\]: expected grad_req='write' with reproducible=True"):
        threads.run(1, one)


@pytest.mark.parametrize("operation", ["save_states", "load_states"])
@pytest.mark.parametrize("began", ["a shard", "a backward"])
def test_states_are_not_saved_or_loaded_in_the_middle_of_a_step(operation, began, tmp_path):
    def one(world):
        net = network()
        trainer = trainer_of(net, world, overlap=True, virtual_shards=2 if began == "a backward" else 8)
        if began == "a shard":
            trainer.step(0)
        else:
            backward(net, IMAGES[:4], LABELS[:4])
        getattr(trainer, operation)(tmp_path / "states.npz")

    with pytest.raises(
        StaleGradientError, match=f"{operation}: expected the end of a step, got gradients of virtual shard"
    ):
        threads.run(2, one)
    assert not (tmp_path / "states.npz").exists()


def test_records_of_fit_and_evaluation_are_alike_on_any_number_of_ranks():
    def records(world, prefetch=2):
        net = network()
        trainer = trainer_of(net, world)
        loader = DataLoader(SET, sampler_of(trainer, world), prefetch=prefetch)
        found = fit(net, trainer, loader, epochs=2, world=world,
                    evaluate=lambda: evaluate(net, SET, world, 7, trainer.virtual_shards))  # fmt: skip
        names = ("loss", "accuracy", "samples", "test_loss", "test_accuracy", "step", "learning_rate")
        return [[each[name] for name in names] for each in found]

    wanted = threads.run(1, records)[0]
    assert wanted[0][2:3] + wanted[1][5:6] == [75, 6]
    for ranks, per_node in ((2, None), (3, 2), (8, None), (5, 1)):
        assert threads.run(ranks, records, ranks_per_node=per_node) == [wanted] * ranks


def test_a_loader_for_another_trainer_is_refused():
    def one(world, sampler, **options):
        net = network()
        fit(net, trainer_of(net, world, **options), DataLoader(SET, sampler, prefetch=0), epochs=1, world=world)

    sampler = ShardedSampler(75, 32)
    with pytest.raises(ConfigError, match="for shards 0 to 7 of 8, got one of whole batches"):
        threads.run(1, lambda world: one(world, sampler))
    for options in ({"virtual_shards": 5}, {"reproducible": False}):
        with pytest.raises(ConfigError, match="got that of a VirtualShardSampler for shards 0 to 7 of 8"):
            threads.run(1, lambda world, o=options: one(world, VirtualShardSampler(75, 32, 8), **o))
    said = "for shards 0 to 3 of 8, got that of a VirtualShardSampler for shards 4 to 7 of 8"
    with pytest.raises(ConfigError, match=said):
        threads.run(2, lambda world: one(world, VirtualShardSampler(75, 32, 8, 2, 1 - world.rank)))


@pytest.mark.parametrize("reproducible", [True, False])
def test_an_empty_data_set_is_refused(reproducible):
    def one(world, **options):
        net = network()
        trainer = trainer_of(net, world, **options)
        empty = ArrayDataset(IMAGES[:0], LABELS[:0])
        sampler = (
            VirtualShardSampler(0, 32, 8, world.size, world.rank) if trainer.virtual_shards else ShardedSampler(0, 32)
        )
        with pytest.raises(
            ConfigError, match=r"fit \[loader\]: expected an epoch of at least one batch, got none on any"
        ):
            fit(net, trainer, DataLoader(empty, sampler), epochs=1, world=world)

    threads.run(2, lambda world: one(world, reproducible=reproducible))


@pytest.mark.slow
def test_the_loss_curve_of_the_digits_is_the_same_on_real_ranks(tmp_path):
    """On 2, 4 and 8 of them: ``python -m hpcdp.benchmarks.reproducible``."""

    def curve(ranks, *flags, per_node=None):
        folder = tmp_path / f"{ranks}-{per_node}"
        mine = ("OMPI_", "PMIX_", "PMI_", "HPCDP_RANKS")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        if per_node:
            environment["HPCDP_RANKS_PER_NODE"] = str(per_node)
        command = [sys.executable, "-m", "hpcdp.cli", "train", "lenet", "--reproducible", "--batch-size", "128"]
        command += ["--epochs", "1", "--clip-norm", "5", "--ranks", str(ranks), "--run-dir", str(folder), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        names = ("kind", "step", "loss", "accuracy", "test_loss", "test_accuracy")
        return [[each.get(name) for name in names] for each in records if each["kind"] in ("step", "epoch")]

    wanted = curve(1)
    assert len(wanted) > 1
    assert curve(3, "--owner", "rank", per_node=2) == wanted
