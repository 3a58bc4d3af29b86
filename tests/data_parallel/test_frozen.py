"""Parameters that no rank uses in a step, or that are frozen in mid-run, keep their values and their states."""

import contextlib
import copy

import numpy as np
import pytest
from pairs import pairs
from raises import raises

import hpcdp
from hpcdp import Policy, autograd, kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import MismatchError, StaleGradientError

SHAPES = {"all": (3, 7), "in turn": (5, 9), "frozen": (2, 11), "seldom": (33, 2), "mixed": (4, 4)}
"""Of the parameters; shards begin and end within them."""
STEPS = 6
RULES = {
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda: optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "decay": lambda: optim.SGD(lr=0.1, weight_decay=0.1),
    "adam": lambda: optim.Adam(lr=0.01, weight_decay=0.1),
    "adamw": lambda: optim.AdamW(lr=optim.ExponentialSchedule(0.01, 0.5), weight_decay=0.1),
    "lars": lambda: optim.LARS(lr=0.5, momentum=0.9, weight_decay=0.1, trust=0.01),
}


class Net(nn.Module):
    def __init__(self, dtype="f4"):
        for number, (name, shape) in enumerate(SHAPES.items()):
            values = np.random.default_rng(number).integers(-8, 8, shape).astype(dtype) / 4
            setattr(self, name, nn.Parameter(values))

    def losses(self, factors):
        """One a sample, whose gradients are small whole numbers, so that sums are exact in any order."""
        parts = [(getattr(self, name) * factor).sum(axis=(1, 2)) for name, factor in factors.items()]
        return sum(parts[1:], parts[0])


def uses(name, step, rank, n):
    return {
        "all": True,
        "in turn": step % 2 == 0 and rank == step // 2 % n,
        "frozen": step not in (2, 3),
        "seldom": step in (1, 4) and rank == n - 1,
        "mixed": step != 5 and (rank + step) % 2 == 0,
    }[name]


def factors_of(step, rank, count, n, dtype="f4"):
    rng = np.random.default_rng([step, rank])
    drawn = {name: rng.integers(-3, 4, (count, *shape)).astype(dtype) for name, shape in SHAPES.items()}
    return {name: factor for name, factor in drawn.items() if uses(name, step, rank, n)}


def count_of(step, rank, n):
    return 0 if n > 1 and rank == step % n else 1 + (rank + step) % 3


def used_by_any(step, n):
    """What any rank that has samples uses."""
    working = [rank for rank in range(n) if count_of(step, rank, n)]
    return [name for name in SHAPES if any(uses(name, step, rank, n) for rank in working)]


def expected(rule, n):
    """The same on one array a parameter: a rule updates what was used, and counts its updates of each by itself."""
    net, states, steps = Net(), {}, dict.fromkeys(SHAPES, 0)
    for step in range(STEPS):
        total = sum(count_of(step, rank, n) for rank in range(n))
        now = copy.copy(rule)
        now.lr = rule.learning_rate(step + 1)
        for name in used_by_any(step, n):
            flat = getattr(net, name).data.reshape(-1)
            gradient = np.zeros_like(flat)
            for rank in range(n):
                factor = factors_of(step, rank, count_of(step, rank, n), n).get(name)
                gradient += 0 if factor is None else factor.sum(axis=0).reshape(-1)
            states.setdefault(name, rule.init_state(flat))
            steps[name] += 1
            now.update(flat, gradient, states[name], step=steps[name], scale=1.0 / total)
    return {name: getattr(net, name).data for name in SHAPES}


def train(world, rule, micro=False, **options):
    net, n = Net(), world.size
    trainer = hpcdp.Trainer(net.parameters(), rule, world, policy=Policy(unused="zero"), **options)
    for step in range(STEPS):
        net.frozen.grad_req = "write" if uses("frozen", step, 0, 1) else "null"
        for _ in trainer.own_virtual_shards[1:]:
            trainer.step(0)
        count = count_of(step, world.rank, n)
        pieces = [slice(0, 1), slice(1, None)] if micro and count > 1 else [slice(None)]
        for number, piece in enumerate(pieces if count else ()):
            factors = {name: factor[piece] for name, factor in factors_of(step, world.rank, count, n).items()}
            factors.setdefault("frozen", np.ones((len(factors["all"]), *SHAPES["frozen"]), "f4"))
            is_last = number == len(pieces) - 1
            with contextlib.nullcontext() if is_last else trainer.no_sync():
                with autograd.record():
                    losses = net.losses(factors)
                losses.backward()
                if not is_last:
                    trainer.step(len(losses))
        last = len(range(count)[pieces[-1]])
        assert trainer.step(last) == sum(count_of(step, rank, n) for rank in range(n))
        assert net.frozen.grad_req == ("write" if uses("frozen", step, 0, 1) else "null")
    return {name: np.array(getattr(net, name).data) for name in SHAPES}


LAYOUTS = [(1, None), (2, None), (3, None), (3, 1), (4, 2)]
WAYS = {
    "rank": {"owner": "rank"},
    "shard": {"owner": "shard"},
    "auto": {},
    "rank, overlap": {"owner": "rank", "overlap": True},
    "shard, overlap": {"owner": "shard", "overlap": True},
    "clipped": {"clip_norm": 1e9},
    "accumulated": {"micro": True},
    "fp16": {"compression": "fp16"},
    "reproducible": {"reproducible": True},
    "dist_sync": {"kvstore": "dist_sync"},
    "dist_device_sync": {"kvstore": "dist_device_sync"},
    "sums of dist_sync": {"kvstore": "dist_sync", "update_on_kvstore": False},
    "accumulated on a store": {"kvstore": "dist_sync", "micro": True},
}


@pytest.mark.filterwarnings("ignore:compression fp16 changes nothing")
@pytest.mark.parametrize(("layout", "rule", "way"), pairs(LAYOUTS, RULES, WAYS))
def test_what_no_rank_uses_keeps_its_value_and_its_state(layout, rule, way):
    n, nodes = layout
    is_store = "kvstore" in WAYS[way]
    if rule == "lars" and is_store:
        pytest.skip("stores update parts")
    if rule == "adamw" and is_store and WAYS[way].get("update_on_kvstore", True):
        pytest.skip("there a schedule counts the updates of each key")
    found = thread_comm.run(n, lambda world: train(world, RULES[rule](), **WAYS[way]), nodes)
    for name, values in expected(RULES[rule](), n).items():
        for each in found:
            if rule == "lars" or is_store:  # stores add up gradients that are divided already
                np.testing.assert_allclose(each[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(each[name], values, err_msg=name)


def step_of(trainer, net, factors, count=2):
    with autograd.record():
        losses = net.losses({name: np.broadcast_to(factor, (count, *SHAPES[name])) for name, factor in factors.items()})
    losses.backward(trainer.loss_scale)
    return trainer.step(count)


ALL = dict.fromkeys(SHAPES, np.float32(2))
LESS = {name: factor for name, factor in ALL.items() if name not in ("frozen", "seldom")}


def values_of(net):
    return {name: np.array(getattr(net, name).data) for name in SHAPES}


@pytest.mark.parametrize("options", [{"owner": "rank"}, {"owner": "shard", "overlap": True}, {"kvstore": "dist_sync"}])
def test_a_parameter_that_all_ranks_freeze_needs_no_policy(options):
    def rank(world):
        net = Net()
        trainer = hpcdp.Trainer(net.parameters(), RULES["momentum"](), world, **options)
        step_of(trainer, net, ALL)
        net.frozen.grad_req = net.seldom.grad_req = "null"
        before = values_of(net)
        step_of(trainer, net, ALL)
        step_of(trainer, net, LESS)
        after = values_of(net)
        assert [name for name in SHAPES if np.array_equal(before[name], after[name])] == ["frozen", "seldom"]
        net.seldom.grad_req = "write"
        with raises(StaleGradientError, operation="step", where="rank 0", got="seldom", remedy="backward()"):
            step_of(trainer, net, LESS)
        step_of(trainer, net, ALL)
        assert not np.array_equal(net.seldom.data, after["seldom"])
        np.testing.assert_array_equal(net.frozen.data, after["frozen"])

    thread_comm.run(3, rank)


@pytest.mark.parametrize("options", [{}, {"kvstore": "dist_sync"}])
def test_ranks_that_freeze_other_parameters_are_told_or_count_as_zero(options):
    def rank(world):
        net = Net()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=1.0), world, **options)
        net.frozen.grad_req = "null" if world.rank == 1 else "write"
        before = values_of(net)
        with raises(
            MismatchError,
            operation="step",
            where="item 1 of 1 on rank 0",
            expected=["grad_req='null'", "rank 0"],
            remedy="grad_req",
        ):
            step_of(trainer, net, ALL)
        assert all(np.array_equal(values, before[name]) for name, values in values_of(net).items())
        net = Net()
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=1.0), world, policy=Policy(unused="zero"), **options)
        net.frozen.grad_req = "null" if world.rank == 1 else "write"
        assert step_of(trainer, net, ALL) == 6
        np.testing.assert_allclose(net.all.data, before["all"] - 2, rtol=1e-6)
        np.testing.assert_allclose(net.frozen.data, before["frozen"] - 2 * 4 / 6, rtol=1e-6)

    thread_comm.run(3, rank)


@pytest.mark.parametrize("way", ["rank", "shard", "sums of dist_sync"])
def test_states_remember_how_often_a_parameter_was_updated(tmp_path, way):
    """Else Adam's bias corrections would be those of other steps."""

    def rank(world):
        def made():
            net = Net()
            options = {**WAYS[way], "policy": Policy(unused="zero")}
            return net, hpcdp.Trainer(net.parameters(), RULES["adam"](), world, **options)

        net, trainer = made()
        for factors in (LESS, ALL, LESS):
            step_of(trainer, net, factors)
        path = tmp_path / "states.npz"
        trainer.save_states(path)
        state, values = copy.deepcopy(trainer.state_dict()), values_of(net)
        step_of(trainer, net, ALL)
        for load in (lambda again: again.load_states(path), lambda again: again.load_state_dict(state)):
            again, other = made()
            with other.changing_parameters():
                for name, value in values.items():
                    getattr(again, name).data[...] = value
            load(other)
            step_of(other, again, ALL)
            for name, value in values_of(net).items():
                np.testing.assert_array_equal(getattr(again, name).data, value, err_msg=name)

    thread_comm.run(2, rank)


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_worker_of_dist_async_pushes_nothing_of_what_it_does_not_use(staleness):
    """And holds nobody back by that."""

    def rank(world):
        net = Net()
        store = kvstore.create("dist_async", world, staleness=staleness)
        trainer = hpcdp.Trainer(
            net.parameters(), RULES["momentum"](), world, kvstore=store, policy=Policy(unused="zero")
        )
        before = values_of(net)
        for _ in range(4):
            step_of(trainer, net, ALL if world.rank == 0 else {"all": ALL["all"], "mixed": ALL["mixed"]})
        trainer.synchronize()
        return before, values_of(net)

    for nodes in (None, 1):
        (before, after), *others = thread_comm.run(3, rank, nodes)
        for name in ("in turn", "frozen", "seldom"):  # which rank 0 alone has pushed, its part of three
            rule, flat = RULES["momentum"](), before[name].reshape(-1)
            state, gradient = rule.init_state(flat), np.full(flat.size, 2 * 2, "f4")
            for step in range(4):
                rule.update(flat, gradient, state, step=step + 1, scale=1 / 6)
            np.testing.assert_allclose(after[name].reshape(-1), flat, rtol=1e-5)
        for _, other in others:
            for name in SHAPES:
                np.testing.assert_array_equal(other[name], after[name])


@pytest.mark.parametrize("codec", ["1bit", "2bit:threshold=0.75", "topk:ratio=0.3"])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_not_sent_of_a_parameter_waits_until_it_is_used(codec, overlap):
    def rank(world):
        net = Net()
        options = {"compression": codec, "overlap": overlap, "policy": Policy(unused="zero"), "owner": "rank"}
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=1.0), world, **options)
        factors = {name: np.random.default_rng(world.rank).standard_normal(SHAPES[name]).astype("f4") for name in ALL}

        def unsent(name):
            return trainer.state_dict()["residuals"][name].parts[0].values.copy()

        step_of(trainer, net, factors)
        kept, before = unsent("frozen"), values_of(net)
        assert kept.any()
        for _ in range(2):
            step_of(trainer, net, {name: factors[name] for name in LESS})
        np.testing.assert_array_equal(unsent("frozen"), kept)
        np.testing.assert_array_equal(net.frozen.data, before["frozen"])
        step_of(trainer, net, factors)
        assert not np.array_equal(unsent("frozen"), kept)

    thread_comm.run(2, rank, 1)


@pytest.mark.parametrize("store", [None, "local"])
def test_a_warning_of_unused_parameters_points_at_the_call_of_step(store):
    def rank(world):
        used, unused = (nn.Parameter(np.ones(3, "f4"), name=name) for name in ("used", "unused"))
        trainer = hpcdp.Trainer([used, unused], optim.SGD(lr=0.1), world, kvstore=store, policy=Policy(unused="warn"))
        with autograd.record():
            losses = used * 2.0
        losses.backward()
        with pytest.warns(UserWarning, match="no gradient for unused") as caught:
            trainer.step(3)
        return [warning.filename for warning in caught]

    assert thread_comm.run(1, rank) == [[__file__]]
