"""Steps of virtual shards that are dropped, refused, empty or not finite, where training is reproducible."""

import contextlib
import threading
import time

import numpy as np
import pytest
from raises import raises
from reproducible_networks import IMAGES, LABELS, backward, network, trainer_of

from hpcdp import Policy, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.errors import HpcdpError, MismatchError, NonFiniteGradientError, StaleGradientError


def test_another_trainer_in_between_is_told():
    def one(world, other):
        trainer = trainer_of(network(), world)
        kept = trainer_of(network(), world, reproducible=other)
        trainer.step(0)
        return kept

    for other in (True, False):
        with raises(HpcdpError, operation="step", expected="Trainer"):
            thread_comm.run(1, lambda world, other=other: one(world, other))


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
        said = set(thread_comm.run(2, lambda world, m=missing_in: one(world, m, Policy())))
        assert len(said) == 1, said
        assert "none for 2.weight, 2.bias" in said.pop()
        assert thread_comm.run(2, lambda world, m=missing_in: one(world, m, Policy(unused="zero"))) == [5, 5]


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
        thread_comm.run(3, one)


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

    assert thread_comm.run(1, one) == [(2, 1)]


@pytest.mark.parametrize("how", ["dropped", "stale", "rate"])
@pytest.mark.parametrize(("ranks", "per_node", "overlap"), [(2, None, False), (3, 2, True), (4, None, True)])
@pytest.mark.thorough
def test_steps_that_are_given_up_leave_no_trace(how, ranks, per_node, overlap, monkeypatch):
    """Although a rank may be far ahead of the one that still adds up what is dropped."""
    from hpcdp.data_parallel import deterministic

    fold = deterministic.fold

    def slowly(node, sums):
        if node == (0, 8):
            time.sleep(0.02 * (threading.get_ident() % 3))
        return fold(node, sums)

    monkeypatch.setattr(deterministic, "fold", slowly)

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

    wanted = thread_comm.run(1, lambda world: one(world, False))[0]
    assert set(thread_comm.run(ranks, lambda world: one(world, True), ranks_per_node=per_node)) == {wanted}


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
        assert thread_comm.run(2, one) == [True, True]


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

    with raises(StaleGradientError, operation=operation):
        thread_comm.run(2, one)
    assert not (tmp_path / "states.npz").exists()
