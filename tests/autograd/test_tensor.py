import copy
import pickle

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.errors import HpcdpError, UnsupportedError
from hpcdp.nn.functional import softmax_cross_entropy


def test_arrays_are_kept_and_lists_become_float32():
    x = np.arange(3)
    assert Tensor(x).data is x
    assert Tensor(Tensor(x)).data is x
    assert Tensor([1, 2]).dtype == np.float32
    assert Tensor(2.5).item() == 2.5
    device = standin.asarray(x)
    assert Tensor(device).data is device


@pytest.mark.parametrize("given", [None, [None], [[1.0, None]]])
def test_none_is_refused_and_not_nan(given):
    with raises(HpcdpError, operation="Tensor", got=given):
        Tensor(given)
    assert np.isnan(Tensor([np.nan, 1.0]).data).tolist() == [True, False]


@pytest.mark.parametrize("given", ["a", {}, [[1], [2, 3]], [1, "b"], object()])
def test_what_is_no_array_is_said_in_a_line(given):
    with raises(HpcdpError, operation="Tensor") as caught:
        Tensor(given)
    assert "\n" not in str(caught.value)


class Foreign:
    """An array of another library, which has dtypes of its own, as PyTorch."""

    def __init__(self, array, refuses=None):
        self.array, self.refuses = array, refuses
        self.shape, self.dtype = array.shape, f"foreign.{array.dtype}"

    def __array__(self, dtype=None, copy=None):
        if self.refuses is not None:
            raise self.refuses
        return self.array

    def __repr__(self):
        return "foreign"


def test_arrays_of_other_libraries_become_numpys():
    x = np.arange(3)
    assert type(Tensor(memoryview(x)).data) is np.ndarray
    assert Tensor(Foreign(x)).data is x
    net = nn.Sequential(nn.Dense(3, 2), nn.ReLU())
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for hybridized in (False, True):
        net.hybridize(hybridized)
        for _ in range(3):
            np.testing.assert_array_equal(net(Foreign(rows)).data, net(rows).data)
    labels = np.array([0, 2])
    np.testing.assert_array_equal(
        softmax_cross_entropy(rows, Foreign(labels)).data, softmax_cross_entropy(rows, labels).data
    )


@pytest.mark.parametrize("error", [RuntimeError("use detach()"), TypeError("use cpu()"), ValueError("closed")])
def test_what_another_library_refuses_is_told(error):
    with raises(HpcdpError, operation="Tensor", got="foreign", remedy=error):
        Tensor(Foreign(np.ones(2), error))


def test_it_looks_like_an_array():
    x = Tensor(np.arange(6.0).reshape(2, 3))
    assert (x.shape, x.ndim, x.size, len(x), x.dtype) == ((2, 3), 2, 6, 2, np.float64)
    assert x.T.shape == (3, 2)
    assert np.asarray(x) is x.data
    assert np.asarray(x, np.float32).dtype == np.float32
    copy = x.asnumpy()
    copy[:] = 0
    assert x.data.sum() == 15
    assert float(x[1, 2]) == x[1, 2].item() == 5.0
    assert int(x[1, 1]) == 4
    assert [row.data.tolist() for row in x] == x.data.tolist()


def test_numpy_operands_on_the_left_and_python_numbers_keep_the_dtype():
    x = Tensor(np.array([1.0, 2.0], np.float32))
    x.attach_grad()
    with autograd.record():
        for y in (np.ones(2, np.float32) + x, 2.0 * x, 1 - x, 3 / x, 2**x, np.float32(2) * x):
            assert isinstance(y, Tensor)
            assert y.dtype == np.float32
            assert y.node is not None
    np.testing.assert_array_equal((1 - x).data, [0.0, -1.0])
    np.testing.assert_array_equal((np.ones((3, 2), np.float32) @ x).data, [3.0, 3.0, 3.0])


def test_in_place_changes_keep_the_memory():
    x = Tensor(np.array([1.0, 2.0]))
    x.attach_grad()
    data, same = x.data, x
    x -= 0.5 * np.ones(2)
    x += Tensor([1.0, 1.0])
    x *= 2
    x /= 4
    x[0] = 7.0
    x[:] = x - 1
    assert x is same
    assert x.data is data
    np.testing.assert_array_equal(data, [6.0, 0.25])


def test_leaves_do_not_change_while_recording():
    x = Tensor([1.0, 2.0])
    x.attach_grad()
    with autograd.record():
        with raises(HpcdpError, operation="in-place change", remedy="autograd.pause()"):
            x += 1
        with raises(HpcdpError, operation="in-place change"):
            x[0] = 1.0
        with autograd.pause():
            x += 1
    np.testing.assert_array_equal(x.data, [2.0, 3.0])


def test_what_wants_a_gradient_is_not_written_into_another_tensor_while_recording():
    x, scale = Tensor([1.0, 2.0]), Tensor([3.0, 4.0])
    for leaf in (x, scale):
        leaf.attach_grad()
    place = Tensor([0.0, 0.0])
    with autograd.record():
        for value in (x * x, x):
            with raises(HpcdpError, operation="in-place change", remedy="value.detach()"):
                place[...] = value
        place[...] = (x * x).detach()
        y = place * scale
    y.backward()
    np.testing.assert_array_equal(scale.grad, [1.0, 4.0])
    np.testing.assert_array_equal(x.grad, [0.0, 0.0])


def test_recorded_results_do_not_change_before_backward():
    x = Tensor([1.0, 2.0])
    x.attach_grad()
    with autograd.record():
        y = x.exp()
        with autograd.pause(), raises(HpcdpError, operation="in-place change", got=[(2,), "recorded"]):
            y += 1
    before = y.asnumpy()
    with raises(HpcdpError, operation="in-place change", got=[(2,), "recorded"]):
        y *= 2
    with raises(HpcdpError, operation="in-place change", got=[(2,), "recorded"]):
        y[0] = 0.0
    y.backward()
    np.testing.assert_array_equal(x.grad, before)
    y *= 2
    y[0] = 0.0
    np.testing.assert_array_equal(y.data, [0.0, 2 * before[1]])


def test_sums_while_recording_are_new_tensors():
    x = Tensor([1.0, 2.0])
    x.attach_grad()
    total = Tensor([0.0, 0.0])
    zero = total.data
    with autograd.record():
        for _ in range(3):
            total += x * x
    total.backward()
    np.testing.assert_array_equal(x.grad, 6 * x.data)
    np.testing.assert_array_equal(zero, [0.0, 0.0])


def test_comparisons_are_elementwise_and_tensors_can_be_keys():
    x = Tensor([1.0, 2.0, 3.0])
    assert (x == 2.0).data.tolist() == [False, True, False]
    assert (x != 2.0).data.tolist() == [True, False, True]
    assert (x < x[1]).data.tolist() == [True, False, False]
    assert (x >= 2).data.tolist() == [False, True, True]
    assert (x <= 1).data.tolist() == [True, False, False]
    assert (x > 2).data.tolist() == [False, False, True]
    assert {x: 1}[x] == 1
    assert bool(x[0] == 1)


def test_repr_shows_values_and_what_it_is():
    x = Tensor([[1.0, 2.5]])
    assert repr(x) == "Tensor([[1. , 2.5]], shape=(1, 2), dtype=float32)"
    x.attach_grad("add")
    assert "grad_req='add'" in repr(x)
    with autograd.record():
        assert "recorded" in repr(x * 2)
    assert "[1., 2.]" in repr(Tensor(standin.asarray(np.array([1.0, 2.0]))))


def test_attaching_a_gradient_cuts_the_tape():
    x = Tensor([2.0])
    x.attach_grad()
    with autograd.record():
        y = x * x
        y.attach_grad()
        z = y * 3
    z.backward()
    np.testing.assert_array_equal(y.grad, [3.0])
    np.testing.assert_array_equal(x.grad, [0.0])


def test_integers_do_not_swallow_fractions_in_place():
    x = Tensor(np.arange(3))
    with raises(UnsupportedError, operation="in-place operation", expected="int64", got="float64"):
        x += 0.5
    x += 2
    assert x.asnumpy().tolist() == [2, 3, 4]


@pytest.mark.parametrize(("dtype", "other"), [(np.uint8, np.arange(3)), (bool, np.arange(3)), (np.float32, 1j)])
def test_what_does_not_fit_is_no_change_in_place(dtype, other):
    x = Tensor(np.ones(3, dtype))
    with raises(UnsupportedError, operation="in-place operation", expected=np.dtype(dtype)):
        x += other
    assert x.asnumpy().tolist() == [1, 1, 1]


def test_sums_over_all_axes_change_in_place():
    total, place = (Tensor(np.ones(3, np.float32)).sum() for _ in range(2))
    total += 2
    place[...] = 7
    assert (total.item(), place.item()) == (5.0, 7.0)
    assert total.dtype == np.float32


def test_a_tensor_without_axes_has_no_rows():
    assert [row.item() for row in Tensor([1.0, 2.0])] == [1.0, 2.0]
    for look in (list, sum):
        with pytest.raises(TypeError, match="iteration over a tensor without axes"):
            look(Tensor(2.0))


def test_complex_numbers_get_no_gradient():
    with raises(UnsupportedError, operation="attach_grad", where="dtype", expected="floats", got="complex64"):
        Tensor(np.ones(2, np.complex64)).attach_grad()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_recorded_tensors_are_on_no_tape(copied):
    class Keeps(nn.Module):
        def __init__(self):
            self.dense = nn.Dense(2, 2)

        def forward(self, x):
            self.kept = self.dense(x)
            return self.kept * 2

    leaf = Tensor([1.0, 2.0])
    leaf.attach_grad()
    with autograd.record():
        y = leaf * 3
    other = copied(y)
    assert (other.node, other.data.tolist()) == (None, [3, 6])
    with raises(HpcdpError, operation="backward", got=(2,)):
        other.backward()
    y.backward()
    assert leaf.grad.tolist() == [3, 3]
    if copied is copy.deepcopy:  # of a network that has kept a result, nothing but its value
        net = Keeps()
        with autograd.record():
            net(np.ones((1, 2), np.float32))
        made = copied(net)
        assert made.kept.node is None
        assert net.kept.node is not None
