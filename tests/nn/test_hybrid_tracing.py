"""What cannot be traced is refused, by one line that names the line of the user's code."""

import copy
import inspect
import logging
import re
import statistics

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.errors import HpcdpError

OUTSIDE = Tensor(np.ones(3, np.float32))


class Uses(nn.Module):
    def __init__(self, what):
        self.__dict__["what"] = what
        self.scale = nn.Parameter(np.ones(3, np.float32))

    def forward(self, x):
        y = x * self.scale
        return self.what(self, y)


def changed(self, y):
    y += 1
    return y


def written(self, y):
    y[0] = 1
    return y


def assigned(self, y):
    self.last = y
    return y


def branch(self, y):
    return y if y.sum() > 0 else -y


REFUSED = {
    "item": (lambda self, y: y * y.sum().item(), "tensor.item()"),
    "float": (lambda self, y: y * float(y.sum()), "float(tensor)"),
    "int": (lambda self, y: y * int(y.sum()), "int(tensor)"),
    "if": (branch, "bool(tensor)"),
    "print": (lambda self, y: print(y) or y, "text"),
    "format": (lambda self, y: f"{y}" and y, "text"),
    "format with digits": (lambda self, y: f"{y.sum():.3f}" and y, "text"),
    "asnumpy": (lambda self, y: y * y.asnumpy().mean(), "tensor.asnumpy()"),
    "numpy": (lambda self, y: y * np.asarray(y), "NumPy"),
    "data": (lambda self, y: y * y.data, "tensor.data"),
    "attach_grad": (lambda self, y: y.attach_grad() or y, "tensor.attach_grad"),
    "backward": (lambda self, y: y.backward() or y, "tensor.backward"),
    "backward of several": (lambda self, y: autograd.backward([y]) or y, "tensor.backward"),
    "grad": (lambda self, y: y * autograd.grad(y, self.scale), "autograd.grad"),
    "grad of an input": (lambda self, y: autograd.grad(self.scale, y), "autograd.grad"),
    "in place": (changed, "change"),
    "setitem": (written, "change"),
    "mask": (lambda self, y: y[y > 0], "mask"),
    "a tensor of it": (lambda self, y: Tensor(y) * 2, "Tensor(tensor)"),
    "a log": (lambda self, y: logging.getLogger("a").critical("%s", y) or y, "text"),
    "a copy": (lambda self, y: copy.deepcopy(y), []),
    "a mean": (lambda self, y: y * statistics.fmean(y[0]), "float(tensor)"),
    "array": (lambda self, y: y + np.random.default_rng(0).random(3), (3,)),
    "tensor": (lambda self, y: y + OUTSIDE, (3,)),
    "a list of tensors": (
        lambda self, y: y - [y, y],
        "list",
    ),
    "a dict": (lambda self, y: y + {}, "dict"),
    "assignment": (assigned, "Uses.last"),
    "item of a parameter": (lambda self, y: y * self.scale.asnumpy().max().item(), "tensor.asnumpy()"),
    "if of a parameter": (lambda self, y: y if self.scale[0] > 0 else -y, "bool(tensor)"),
    "print of a parameter": (lambda self, y: print(self.scale) or y, "text"),
    "a parameter as an array": (lambda self, y: y * np.asarray(self.scale).max(), "NumPy"),
    "own operation": (lambda self, y: autograd.on_tape(y.data * 2, (y,), None), "tensor.data"),
}


class InAList(nn.Module):
    def __init__(self):
        self.layers = [nn.Dense(3, 3), nn.Dense(3, 3)]

    def forward(self, x):
        return self.layers[1](self.layers[0](x))  # here


def test_layers_in_a_list_are_refused_where_they_are_called():
    net = InAList()
    net.hybridize()
    with raises(HpcdpError, operation="trace", remedy="list") as error:
        net(np.ones((2, 3), np.float32))
    lines, first = inspect.getsourcelines(InAList.forward)
    assert f"trace [{__file__}:{first + len(lines) - 1}]" in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("recording", [False, True])
def test_what_a_replay_would_not_see_is_refused_where_it_stands(name, recording):
    what, got = REFUSED[name]
    net = Uses(what)
    net.hybridize()
    mode = autograd.record() if recording else autograd.pause()
    with raises(HpcdpError, operation="trace", got=got) as error, mode:
        net(np.ones((2, 3), np.float32))
    text = str(error.value)
    found = re.search(r"trace \[(.*?):(\d+)\]", text)
    assert found and found[1] == __file__, text
    lines, first = inspect.getsourcelines(what)
    assert first <= int(found[2]) < first + len(lines), text
    assert "\n" not in text
    assert net.scale.data.sum() == 3  # and the thread traces no more
    net.hybridize(False)
    if name in ("item", "float", "if", "asnumpy", "data", "mask", "tensor"):
        net(np.ones((2, 3), np.float32))


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_catches_the_error_is_refused_all_the_same(name):
    what, got = REFUSED[name]

    def caught(self, y):
        try:
            return what(self, y)
        except Exception:
            return y * 3

    net = Uses(caught)
    net.hybridize()
    for _ in range(2):
        with raises(HpcdpError, operation="trace", got=got):
            net(np.ones((2, 3), np.float32))
    net.hybridize(False)
    assert isinstance(net(np.ones((2, 3), np.float32)), Tensor)


@pytest.mark.parametrize(
    ("what", "got"),
    [
        (lambda self, y: {"y": y}, "dict"),
        (lambda self, y: None, "None"),
        (lambda self, y: (y, [y, y]), "list in a tuple"),
        (lambda self, y: [y, None], "None in a list"),
    ],
)
def test_what_is_not_a_tensor_is_not_returned(what, got):
    line = inspect.getsourcelines(Uses.forward)[1]
    net = Uses(what)
    net.hybridize()
    for _ in range(2):
        with raises(HpcdpError, operation="trace", where=f"{__file__}:{line}", got=got):
            net(np.ones(3, np.float32))


def test_of_a_container_the_line_that_calls_it_is_named():
    net = nn.Sequential(Uses(lambda self, y: {"y": y}))
    net.hybridize()
    line = inspect.currentframe().f_lineno + 2
    with raises(HpcdpError, operation="trace", where=f"{__file__}:{line}", got="dict"):
        net(np.ones(3, np.float32))


def test_a_tensor_that_is_kept_beyond_its_call_is_refused():
    kept = []
    net = Uses(lambda self, y: kept.append(y) or y + kept[0])
    net.hybridize()
    net(np.ones(3, np.float32))
    with raises(HpcdpError, operation="trace", got="tensor.__add__"):
        net(np.ones((2, 3), np.float32))
    for look in (lambda: kept[0] * 2, kept[0].asnumpy, lambda: print(kept[0])):
        with raises(HpcdpError, operation="trace", expected="current", remedy="hybridize(False)"):
            look()


def test_a_penalty_on_gradients_within_forward_is_refused_where_it_stands():
    def penalty(self, y):
        with autograd.record():
            z = (self.scale * self.scale).sum()
        return y * Tensor(autograd.grad(z, self.scale))

    net = Uses(penalty)
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(net(x).data, 2 * x)
    net.hybridize()
    line = inspect.getsourcelines(penalty)[1] + 3
    with raises(HpcdpError, operation="trace", where=f"{__file__}:{line}", got="autograd.grad"):
        net(x)


def test_shapes_numbers_and_rows_are_known_while_tracing():
    def shapes(self, y):
        rows = [row * len(y) for row in y]
        assert y.ndim == 2 and y.dtype == np.float32 and y.size == 6 and y.T.shape == (3, 2)
        return autograd.stack(rows) * np.float32(2) + np.float64(y.shape[0]) + 1 / y.shape[1]

    net, plain = Uses(shapes), Uses(shapes)
    net.hybridize()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        found, expected = net(x).data, plain(x).data
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


IN_LISTS = {
    "nested": lambda self, y: y[[[0, 1], [1, 0]]],
    "two": lambda self, y: y[[[0], [1]], [[1, 2]]] * 2.0,
    "tuples": lambda self, y: y[((0, 1), (1, 0))],
    "of NumPy": lambda self, y: y[[np.int64(1), 0, 1], : np.int64(2)],
    "range": lambda self, y: y[:, range(2)],
    "none": lambda self, y: y[[]],
    "operand": lambda self, y: y - [[1.0], [2]],
    "small": lambda self, y: y * [np.float32(1), np.float32(2), np.float32(0.3)],
    "chain": lambda self, y: nn.functional.relu(y.astype("float64") * 2.0 + [1.0, 2.0, 3.0]) * 3.0,
}


@pytest.mark.parametrize("name", IN_LISTS)
def test_numbers_in_lists_are_constants(name):
    net, plain = Uses(IN_LISTS[name]), Uses(IN_LISTS[name])
    net.hybridize()
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((2, 3)).astype(np.float32)
        predicted, expected = net(x), plain(x)
        assert predicted.dtype == expected.dtype
        np.testing.assert_array_equal(predicted.data, expected.data)
        for each in (net, plain):
            with autograd.record():
                y = each(x)
            y.backward()
        np.testing.assert_array_equal(net.scale.grad, plain.scale.grad)


class Counts(nn.Module):
    """Changes a tensor of its own in place."""

    def __init__(self, how):
        self.seen = Tensor(np.zeros(2, np.float32))
        self.__dict__["how"] = how

    def forward(self, x):
        self.how(self.seen)
        return x + 1


def overwritten(seen):
    seen[...] = 3


def added(seen):
    seen += 1


@pytest.mark.parametrize("how", [overwritten, added])
def test_state_that_a_replay_would_not_change_is_refused(how):
    net = Counts(how)
    net(np.ones(2, np.float32))
    net.hybridize()
    with raises(HpcdpError, operation="trace", got="change", remedy="hybridize(False)"):
        net(np.ones(2, np.float32))
    net.hybridize(False)
    net(np.ones(2, np.float32))


def test_a_constant_list_of_truth_values_is_no_mask_of_values():
    class Kept(nn.Module):
        def __init__(self):
            self.keep = [True, False, True]

        def forward(self, x):
            return x[self.keep] * 2

    net, x = Kept(), np.arange(12, dtype="f4").reshape(3, 4)
    net.hybridize()
    for keep in ([True, False, True], [False, True, False], [True, False, True]):
        net.keep[:] = keep
        for _ in range(3):
            np.testing.assert_array_equal(net(x).data, x[keep] * 2)
