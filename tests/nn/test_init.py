import numpy as np
import pytest

from hpcdp.nn import init


@pytest.mark.parametrize("kind", [init.Xavier, init.Kaiming, init.Normal, init.Uniform])
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
    assert init.fans(shape) == fans


def test_distributions():
    shape = (300, 500)
    assert init.Xavier(0)(shape).std() == pytest.approx(np.sqrt(2 / 800), rel=0.02)
    assert np.abs(init.Xavier(0)(shape)).max() <= np.sqrt(6 / 800)
    assert init.Kaiming(0)(shape).std() == pytest.approx(np.sqrt(2 / 300), rel=0.02)
    assert init.Normal(0.3, seed=0)(shape).std() == pytest.approx(0.3, rel=0.02)
    assert init.Uniform(0.2, seed=0)(shape).max() == pytest.approx(0.2, rel=0.01)
    assert init.Uniform(0.2, seed=0)(shape).mean() == pytest.approx(0.0, abs=0.002)


def test_constants():
    np.testing.assert_array_equal(init.Zeros()((2, 3)), np.zeros((2, 3)))
    np.testing.assert_array_equal(init.Ones()((2,)), np.ones(2))
    np.testing.assert_array_equal(init.Constant(2.5)((2, 2), np.float64), np.full((2, 2), 2.5))
