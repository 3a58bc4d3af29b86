import gc
import threading
import weakref

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import autograd
from hpcdp.autograd import Tensor, on_tape
from hpcdp.errors import HpcdpError


def leaf(values, grad_req="write"):
    tensor = Tensor(np.array(values, np.float64))
    tensor.attach_grad(grad_req)
    return tensor


def test_a_list_as_an_index_may_change_before_backward():
    x, index = Tensor(np.zeros(4, "f4")), [0, 1]
    x.attach_grad()
    with autograd.record():
        y = x[index]
    index[0] = 3
    y.backward()
    np.testing.assert_array_equal(x.grad, [1, 1, 0, 0])


def test_ones_are_the_seed_so_that_gradients_are_sums():
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    with autograd.record():
        y = (x * x).sum(axis=1)
    y.backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data)


def test_head_gradients_weigh_the_heads():
    x = leaf([1.0, 2.0, 3.0])
    with autograd.record():
        y, z = x * 2, x * x
    autograd.backward([y, z], [np.array([1.0, 0.0, 2.0]), None])
    np.testing.assert_array_equal(x.grad, np.array([2.0, 0.0, 4.0]) + 2 * x.data)


def test_what_is_used_several_times_sums_its_gradients():
    x = leaf([2.0, 3.0])
    with autograd.record():
        y = x + x
        z = y * y + y + x * y
    z.backward()  # z = 4x^2 + 2x + 2x^2
    np.testing.assert_allclose(x.grad, 12 * x.data + 2)


def test_gradients_are_written_into_the_array_that_is_there():
    x, w = leaf(np.ones((4, 3))), leaf(np.ones((3, 2)))
    bucket = np.full(20, 7.0)
    w.grad = bucket[5:11].reshape(3, 2)
    view, data = w.grad, w.data
    for scale in (1.0, 2.0):
        with autograd.record():
            y = (scale * x) @ w
        y.backward()
        assert w.grad is view
        np.testing.assert_array_equal(bucket[5:11], np.full(6, 4 * scale))
        np.testing.assert_array_equal(np.delete(bucket, slice(5, 11)), np.full(14, 7.0))
    assert w.data is data


def test_a_gradient_in_strided_memory_is_written_in_place_too():
    x, w = leaf(np.ones((4, 3))), leaf(np.ones((3, 2)))
    w.grad = np.zeros((2, 3)).T
    view = w.grad
    with autograd.record():
        y = x @ w
    y.backward()
    assert w.grad is view
    np.testing.assert_array_equal(view, np.full((3, 2), 4.0))


@pytest.mark.parametrize(("grad_req", "expected"), [("write", 3.0), ("add", 6.0)])
def test_write_overwrites_and_add_adds(grad_req, expected):
    x = leaf([1.0, 1.0], grad_req)
    for _ in range(2):
        with autograd.record():
            y = x * 2 + x
        y.backward()
    np.testing.assert_array_equal(x.grad, [expected, expected])


def test_null_leaves_the_gradient_alone():
    x, w = leaf([1.0]), leaf([2.0], "null")
    with autograd.record():
        y = x * w
    y.backward()
    assert w.grad is None
    np.testing.assert_array_equal(x.grad, [2.0])


def test_the_request_that_holds_at_backward_counts():
    x = leaf([1.0])
    with autograd.record():
        y = x * 3
    x.grad_req = "add"
    x.grad[:] = 10
    y.backward()
    np.testing.assert_array_equal(x.grad, [13.0])


def test_an_unknown_request_lists_the_valid_ones():
    with raises(HpcdpError, operation="attach_grad", where="grad_req", got="wrte"):
        Tensor([1.0]).attach_grad("wrte")


def test_a_second_backward_needs_retain_graph():
    x = leaf([3.0])
    with autograd.record():
        y = x * x
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad, [6.0])
    with raises(HpcdpError, operation="backward", remedy="retain_graph=True"):
        y.backward()


def test_what_was_not_recorded_has_no_backward():
    x = leaf([3.0])
    with raises(HpcdpError, operation="backward", remedy="autograd.record()"):
        (x * x).backward()
    with autograd.record(), autograd.pause():
        y = x * x
    with raises(HpcdpError, operation="backward", got=(1,)):
        y.backward()


def test_detached_tensors_stop_the_gradient():
    x = leaf([3.0])
    with autograd.record():
        y = x * (x * x).detach()
    y.backward()
    np.testing.assert_array_equal(x.grad, [9.0])


def test_a_head_gradient_of_another_shape_is_refused():
    x = leaf([1.0, 2.0])
    with autograd.record():
        y = x * 2
    with raises(HpcdpError, operation="backward", where="head_grads", expected=(2,), got=(3,)):
        y.backward(np.ones(3))


def test_hooks_run_when_a_gradient_is_complete_last_layer_first():
    x = Tensor(np.ones((2, 3)))
    weights = [leaf(np.full((3, 3), 0.5)) for _ in range(3)]
    shared = leaf(np.ones((3, 3)))
    events = []

    def product(a, w, name):
        def pullback(gy, da, dw):
            events.append(f"backward {name}")
            if da is not None:
                da.add(gy @ w.data.T)
            dw.add(a.data.T @ gy)

        return on_tape(a.data @ w.data, (a, w), pullback)

    for i, w in enumerate(weights):
        w.grad_hook = lambda found, i=i: events.append(f"ready {i}: {found is weights[i]}")
    shared.grad_hook = lambda found: events.append(f"shared ready {found.grad.sum():.0f}")
    with autograd.record():
        h = product(x, shared, "shared early")
        for i, w in enumerate(weights):
            h = product(h, w, i)
        h = product(h, shared, "shared late")
    h.backward()
    assert events[:-2] == [
        "backward shared late", "backward 2", "ready 2: True", "backward 1", "ready 1: True", "backward 0",
        "ready 0: True",
    ]  # fmt: skip
    expected, _ = autograd_free_gradient(x.data, [w.data for w in weights], shared.data)
    assert events[-2:] == ["backward shared early", f"shared ready {expected.sum():.0f}"]


def autograd_free_gradient(x, weights, shared):
    """The gradient of sum(x @ s @ w0 @ w1 @ w2 @ s) with respect to s, and the product before the last s."""
    before = x @ shared
    for w in weights:
        before = before @ w
    late = before.T @ np.ones((len(x), 3))
    gy = np.ones((len(x), 3)) @ shared.T
    for w in reversed(weights):
        gy = gy @ w.T
    return late + x.T @ gy, before


def test_a_hook_runs_once_with_gradients_that_add():
    w = leaf([1.0, 2.0], "add")
    calls = []
    w.grad_hook = lambda found: calls.append(found.grad.copy())
    for _ in range(2):
        with autograd.record():
            y = w * w + w
        y.backward()
    np.testing.assert_array_equal(calls, [[3.0, 5.0], [6.0, 10.0]])


def test_a_leaf_whose_operation_adds_nothing_gets_zeros():
    x = leaf([5.0])
    x.grad[:] = 9
    with autograd.record():
        y = on_tape(np.ones(1), (x,), lambda gy, dx: None)
    y.backward()
    np.testing.assert_array_equal(x.grad, [0.0])


def test_grad_returns_gradients_and_touches_none():
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    calls = []
    w.grad_hook = calls.append
    x.grad[:], w.grad[:] = 5.0, 6.0
    with autograd.record():
        h = x * w
        y = h * h
    dx, dh = autograd.grad(y, [x, h], retain_graph=True)
    np.testing.assert_array_equal(dh, 2 * x.data * w.data)
    np.testing.assert_array_equal(dx, 2 * x.data * w.data**2)
    single = autograd.grad(y, w, head_grads=np.array([1.0, 10.0]))
    np.testing.assert_array_equal(single, 2 * x.data**2 * w.data * [1, 10])
    np.testing.assert_array_equal(x.grad, [5.0, 5.0])
    np.testing.assert_array_equal(w.grad, [6.0, 6.0])
    assert not calls


def test_what_grad_returns_shares_no_memory():
    x, z = leaf([1.0]), leaf([1.0])
    with autograd.record():
        y = x + z
    seed = np.ones(1)
    dx, dz = autograd.grad(y, [x, z], head_grads=seed)
    dx += 1
    assert dz == seed == 1.0


def test_grad_of_what_the_heads_do_not_depend_on_is_zero():
    x, other = leaf([1.0]), leaf([1.0, 1.0])
    with autograd.record():
        y = x * 2
    np.testing.assert_array_equal(autograd.grad(y, other), [0.0, 0.0])


def test_grad_of_what_was_never_attached_is_refused():
    x = leaf([1.0])
    with autograd.record():
        y = x * 2
    with raises(HpcdpError, operation="grad", where="variables", remedy="attach_grad()"):
        autograd.grad(y, Tensor([1.0]))


def test_gradients_of_gradients_are_refused():
    x = leaf([1.0])
    with autograd.record():
        y = x * x
    (gradient,) = autograd.grad(y, [x], retain_graph=True)
    with raises(HpcdpError, operation="backward", expected="tensors", got="ndarray"):
        autograd.grad(gradient, x)
    with raises(HpcdpError, operation="grad", expected="tensors", got="ndarray"):
        autograd.grad(y, [gradient])
    with raises(HpcdpError, operation="backward", expected="tensors", got="ndarray"):
        autograd.backward([y, gradient])


def test_deep_graphs_do_not_recurse():
    x = leaf([1.0])
    with autograd.record():
        y = x
        for _ in range(50_000):
            y = y + x
    y.backward(retain_graph=True)
    np.testing.assert_array_equal(x.grad, [50_001.0])
    del y
    gc.collect()


def test_backward_frees_what_the_tape_held():
    x = leaf(np.ones(10))
    saved = np.zeros(10)
    alive = weakref.ref(saved)
    with autograd.record():
        y = x * saved
        z = y.sum()
    del saved
    z.backward(retain_graph=True)
    assert alive() is not None
    z.backward()
    assert alive() is None
    assert y.node is not None


def test_results_of_predictions_keep_nothing_alive():
    x = leaf(np.ones(10))
    y = x * 2
    alive = weakref.ref(y)
    z = y + 1
    del y
    assert alive() is None
    np.testing.assert_array_equal(z.data, np.full(10, 3.0))


def test_threads_have_tapes_of_their_own():
    results = {}

    def work(number):
        x = leaf(np.arange(50.0) + number)
        for _ in range(100):
            with autograd.record():
                y = (x * x * number).sum()
            y.backward()
        results[number] = np.array_equal(x.grad, 2 * number * x.data)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_device_arrays_take_the_same_way():
    x = Tensor(standin.asarray(np.array([[1.0, 2.0], [3.0, 4.0]])))
    x.attach_grad()
    grad = x.grad
    with autograd.record():
        y = ((x @ x.T) * 2.0 + x[0]).exp().sum(axis=1)
    with raises(HpcdpError, operation="in-place change"), autograd.record():
        x[0] = 1.0
    y.backward(retain_graph=True)
    assert x.grad is grad
    host = leaf([[1.0, 2.0], [3.0, 4.0]])
    with autograd.record():
        z = ((host @ host.T) * 2.0 + host[0]).exp().sum(axis=1)
    z.backward()
    np.testing.assert_allclose(grad.to_host(), host.grad)
    with pytest.raises(TypeError, match="NumPy array met a stand-in array"):
        y.backward(np.ones(2))


def test_a_variable_that_is_asked_for_twice_gets_two_arrays():
    x = Tensor(np.array([1.0, 2.0]))
    x.attach_grad()
    with autograd.record():
        z = x * x
    first, second = autograd.grad(z, [x, x])
    np.testing.assert_array_equal(first, [2.0, 4.0])
    np.testing.assert_array_equal(second, first)
    assert first is not second
