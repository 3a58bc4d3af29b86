import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel.gradient_policy import Policy
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.train.trainer import Trainer


def test_one_array_is_one_layer():
    rng = np.random.default_rng(2)
    param, grad = rng.standard_normal(50).astype("f4"), rng.standard_normal(50).astype("f4")
    expected = param - 0.5 * 0.01 * np.linalg.norm(param) / np.linalg.norm(grad / 4) * grad / 4
    rule = optim.LARS(lr=0.5, momentum=0.0, trust=0.01)
    rule.update(param, grad, rule.init_state(param), step=1, scale=0.25)
    np.testing.assert_allclose(param, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("squares", [(0.0, 4.0), (4.0, 0.0)])
def test_without_a_length_the_factor_is_one(squares):
    rule = optim.LARS(lr=0.5, trust=0.01, weight_decay=0.1)
    assert rule.of_layer(1, 0.25, squares) == (optim.SGD(0.5, 0.9, weight_decay=0.1), 0.25)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("weight", "bad"), [(1.0, np.nan), (1.0, np.inf), (np.nan, 1.0), (np.inf, 1.0)])
def test_norms_that_are_not_finite_go_on_into_the_weights(weight, bad, weight_decay):
    """As of other rules: whether such a step is made at all is the trainer's policy."""
    rule = optim.LARS(lr=0.5, trust=0.01, weight_decay=weight_decay)
    param, grad = np.array([weight, 1.0, 1.0], "f4"), np.array([bad, 1.0, 1.0], "f4")
    with np.errstate(invalid="ignore"):
        rule.update(param, grad, rule.init_state(param), step=1)
    assert not np.isfinite(param[0])


@pytest.mark.parametrize(("policy", "num", "is_finite"), [("ignore", 0, 0), ("count", 1, 0), ("skip", 1, 1)])
def test_a_trainer_goes_by_its_policy(policy, num, is_finite):
    net = nn.Dense(3, 2)

    def rank(world):
        trainer = Trainer(net.parameters(), optim.LARS(0.1), world, policy=Policy(nonfinite=policy))
        with autograd.record():
            losses = softmax_cross_entropy(net(np.array([[np.nan, 1, 1]], "f4")), np.array([0]))
        losses.backward()
        trainer.step(1)
        return trainer.num_nonfinite

    assert thread_comm.run(1, rank) == [num]
    assert np.isfinite(net.weight.data).all() == is_finite


def test_a_schedule_gives_the_rate_of_the_step():
    rule = optim.LARS(lr=optim.StepSchedule(1.0, every=2, factor=0.5))
    assert [rule.of_layer(step, 1.0, None)[0].lr for step in (1, 2, 3)] == [1.0, 1.0, 0.5]


def test_it_travels_by_name():
    rule = optim.LARS(lr=2.0, weight_decay=0.1)
    assert rule.config() == {
        "name": "lars", "lr": 2.0, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "trust": 0.001
    }  # fmt: skip
    assert optim.from_config(rule.config()) == rule
    with raises(ConfigError, operation="LARS", where="trust", expected=0, got=0):
        optim.LARS(lr=2.0, trust=0)


def test_the_rate_grows_with_the_batch():
    assert optim.linear_scaling(0.1, 1024) == pytest.approx(0.4)
    assert optim.linear_scaling(0.1, 32, base_batch_size=64) == pytest.approx(0.05)
    for wrong, where in (((-0.1, 32), "lr"), ((0.1, 0), "batch_size"), ((0.1, 32, 0), "base_batch_size"),
                         ((0.1, 32.5), "batch_size")):  # fmt: skip
        with raises(ConfigError, operation="linear_scaling", where=where):
            optim.linear_scaling(*wrong)


@pytest.mark.parametrize(("shape", "of_gradient"), [((2, 2), (2, 2)), ((4,), (5,)), ((4,), (2, 2))])
def test_other_than_flat_arrays_of_one_shape_are_refused(shape, of_gradient):
    rule = optim.LARS(lr=1.0)
    state = rule.init_state(np.ones(4, "f4"))
    with raises(UnsupportedError, operation="lars update", expected=[(4,), "float32"]):
        rule.update(np.ones(shape, "f4"), np.ones(of_gradient, "f4"), state, step=1)
