import numpy as np
import pytest
from raises import raises

from hpcdp import nn
from hpcdp.errors import ConfigError
from hpcdp.nn import init as nn_init


@pytest.mark.parametrize("kind", [nn_init.Xavier, nn_init.Kaiming, nn_init.Normal, nn_init.Uniform])
def test_seeds_fix_the_values_and_calls_go_on(kind):
    first, same, other, fresh = kind(seed=1), kind(seed=1), kind(seed=2), kind()
    a, b = first((20, 30)), first((20, 30))
    np.testing.assert_array_equal(a, same((20, 30)))
    for different in (b, other((20, 30)), fresh((20, 30))):
        assert not np.array_equal(a, different)
    assert a.dtype == np.float32
    assert kind(seed=1)((2, 2), np.float64).dtype == np.float64


@pytest.mark.parametrize(("shape", "fans"), [((300, 200), (300, 200)), ((64, 32, 3, 5), (480, 960)), ((7,), (7, 7))])
def test_fans(shape, fans):
    assert nn_init.fans(shape) == fans


def test_distributions():
    shape = (300, 500)
    assert nn_init.Xavier(0)(shape).std() == pytest.approx(np.sqrt(2 / 800), rel=0.02)
    assert np.abs(nn_init.Xavier(0)(shape)).max() <= np.sqrt(6 / 800)
    assert nn_init.Kaiming(0)(shape).std() == pytest.approx(np.sqrt(2 / 300), rel=0.02)
    assert nn_init.Normal(0.3, seed=0)(shape).std() == pytest.approx(0.3, rel=0.02)
    assert nn_init.Uniform(0.2, seed=0)(shape).max() == pytest.approx(0.2, rel=0.01)
    assert nn_init.Uniform(0.2, seed=0)(shape).mean() == pytest.approx(0.0, abs=0.002)


def test_constants():
    np.testing.assert_array_equal(nn_init.Zeros()((2, 3)), np.zeros((2, 3)))
    np.testing.assert_array_equal(nn_init.Ones()((2,)), np.ones(2))
    np.testing.assert_array_equal(nn_init.Constant(2.5)((2, 2), np.float64), np.full((2, 2), 2.5))


LAYERS = [
    (lambda init: nn.Dense(3, 2, weight_init=init), (3, 2)),
    (lambda init: nn.Conv2D(3, 2, 1, weight_init=init), (2, 3, 1, 1)),
    (lambda init: nn.Embedding(3, 2, weight_init=init), (3, 2)),
    (lambda init: nn.LSTM(3, 2, weight_init=init), (3, 2)),
    (lambda init: nn.CausalSelfAttention(3, 1, weight_init=init), (3, 9)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_what_a_function_of_ones_own_gives_is_float32(make, shape):
    given = []

    def doubles(shape):
        given.append(np.random.default_rng(len(given)).standard_normal(shape))
        return given[-1]

    layer = make(doubles)
    assert {str(param.dtype) for param in layer.parameters()} == {"float32"}
    assert given[0].shape == shape
    first = layer.parameters()[0].data
    np.testing.assert_array_equal(first[..., : shape[-1]], given[0].astype(np.float32))


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize(
    ("init", "got"),
    [
        (lambda shape: np.zeros(shape[::-1]), "shape"),
        (lambda shape: 0.5, "()"),
        (nn_init.Xavier, "Xavier"),
        (lambda shape: None, "()"),
    ],
)
def test_values_of_another_shape_are_refused(make, shape, init, got):
    with raises(ConfigError, operation="parameter", where="weight_init", expected=shape, got=got):
        make(init)


@pytest.mark.parametrize("make", [make for make, _ in LAYERS])
def test_what_is_no_function_is_refused(make):
    with raises(ConfigError, operation="parameter", where="weight_init", got=0.1):
        make(0.1)


def test_a_layer_that_finds_out_its_size_says_then_what_does_not_fit():
    layer = nn.Dense(None, 2, weight_init=lambda shape: np.zeros((4, 2)))
    with raises(ConfigError, operation="parameter", where="weight_init", expected=(3, 2), got=(4, 2)):
        layer(np.ones((1, 3), np.float32))
