import copy
import pickle

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.core.arrays import array_namespace
from hpcdp.errors import ConfigError, HpcdpError, UnsupportedError
from hpcdp.train.trainer import Trainer


class Block(nn.Module):
    def __init__(self):
        self.first = nn.Dense(3, 4, activation="relu")
        self.norm = nn.BatchNorm(4)
        self.scale = nn.Parameter(np.full(2, 0.5, np.float32))
        self.last = nn.Dense(4, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) * self.scale


def test_parameters_come_in_order_with_their_paths():
    net = nn.Sequential(Block(), nn.Sequential(nn.ReLU(), nn.Dense(2, 5, bias=False)))
    names = [
        "0.first.weight", "0.first.bias", "0.norm.gamma", "0.norm.beta", "0.scale", "0.last.weight", "0.last.bias",
        "1.1.weight",
    ]  # fmt: skip
    assert [name for name, _ in net.named_parameters()] == names
    assert [param.name for param in net.parameters()] == names
    assert next(param.name for param in net[0].parameters()) == "first.weight"
    assert [name for name, _ in net.named_buffers()] == ["0.norm.running_mean", "0.norm.running_var"]
    assert all(param.grad_req == "write" and param.grad.shape == param.shape for param in net.parameters())


def test_shared_parameters_come_once():
    class Twice(nn.Module):
        def __init__(self):
            self.a = nn.Dense(3, 3)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    net = Twice()
    assert [name for name, _ in net.named_parameters()] == ["a.weight", "a.bias"]
    calls = []
    for param in net.parameters():
        param.grad_hook = lambda found: calls.append(found.name)
    x = np.ones((2, 3), np.float32)
    with autograd.record():
        y = net(x)
    y.backward()
    assert sorted(calls) == ["a.bias", "a.weight"]
    weight = net.a.weight.data
    np.testing.assert_allclose(net.a.bias.grad, 2 + 2 * weight.sum(axis=1), rtol=1e-5)


def test_a_slice_is_a_network_of_the_same_layers():
    net = nn.Sequential(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 4), nn.Dense(4, 2))
    x = np.random.default_rng(3).standard_normal((5, 3)).astype(np.float32)
    first, last = net[:2], net[2:]
    np.testing.assert_array_equal(last(first(x)).data, net(x).data)
    assert [type(each) for each in net[::-2]] == [nn.Dense, nn.ReLU]
    assert last[0] is net[2]
    assert [name for name, _ in last.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(net[9:]) == 0


class InContainer(nn.Module):
    """The same layers as attributes, and in a container."""

    def __init__(self, container):
        self.first, self.last = nn.Dense(3, 4), nn.Dense(4, 2)
        self.layers = container(self.first, nn.Dense(4, 4))


@pytest.mark.parametrize(
    ("container", "named"),
    [
        (lambda *layers: list(layers), "list"),
        (lambda *layers: (3, [layers]), "tuple"),
        (lambda *layers: {"scale": layers[1].weight}, "dict"),
    ],
)
def test_parameters_in_a_container_are_told(container, named):
    net = nn.Sequential(nn.ReLU(), InContainer(container))
    with pytest.warns(UserWarning, match=rf"^1\.layers: parameters in a {named} are not registered") as told:
        names = [param.name for param in net.parameters()]
    assert names == ["1.first.weight", "1.first.bias", "1.last.weight", "1.last.bias"]
    assert len(told) == 1
    assert told[0].filename == __file__


def in_itself(*layers):
    container = [layers[0], {}]
    container[1]["again"] = container
    return container


@pytest.mark.parametrize(
    "container", [lambda *layers: [layers[0], "text", None], lambda *layers: {"of": layers[0]}, in_itself]
)
def test_containers_of_what_the_network_has_are_not_told(container, recwarn):
    assert len(InContainer(container).parameters()) == 4
    assert not recwarn.list


def test_hooks_run_from_the_last_layer_to_the_first():
    net = nn.Sequential(nn.Dense(3, 4, activation="relu"), nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 2))
    order = []
    for param in net.parameters():
        param.grad_hook = lambda found: order.append((found.name[0], found.grad.copy()))
    with autograd.record():
        y = net(np.ones((2, 3), np.float32))
    y.backward()
    assert [layer for layer, _ in order] == ["3", "3", "1", "1", "0", "0"]
    for param in net.parameters():  # complete when the hook ran: it is still the same
        assert any(seen.shape == param.shape and np.array_equal(seen, param.grad) for _, seen in order)


def test_state_goes_out_and_in():
    net, other = Block(), Block()
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    with autograd.train_mode():
        net(x)
    state = net.state_dict()
    assert list(state) == [
        "first.weight", "first.bias", "norm.gamma", "norm.beta", "norm.running_mean", "norm.running_var", "scale",
        "last.weight", "last.bias",
    ]  # fmt: skip
    assert state["scale"] is net.scale.data
    kept = other.first.weight.data
    other.load_state_dict(state)
    assert other.first.weight.data is kept
    np.testing.assert_array_equal(other(x).data, net(x).data)
    on_device = Block().to(like=standin.asarray(x))
    on_device.load_state_dict(state)
    np.testing.assert_allclose(on_device(standin.asarray(x)).asnumpy(), net(x).data, rtol=1e-6)


class Refusing:
    """A tensor of PyTorch's that wants a gradient is none of NumPy's."""

    shape = (2,)

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Use detach()")


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda s: s.pop("scale"), {"where": "scale", "expected": "the network", "got": "none"}),
        (lambda s: s.update(more=np.ones(1)), {"where": "more"}),
        (lambda s: s.update(scale=np.ones(3)), {"where": "scale", "expected": (2,), "got": (3,)}),
        (lambda s: s.update(scale=[1.0, 2.0]), {"where": "scale", "expected": (2,), "got": "list"}),
        (lambda s: s.update(scale=None), {"where": "scale", "expected": (2,), "got": "NoneType"}),
        (lambda s: s.update(scale=np.array(["1", "x"])), {"where": "scale", "expected": "float32", "got": "U1"}),
        (
            lambda s: s.update(scale=np.ones(2, complex)),
            {"where": "scale", "expected": "float32", "got": "complex128"},
        ),
        (lambda s: s.update(scale=Refusing()), {"where": "scale", "expected": (2,), "got": "detach()"}),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, fields):
    net = Block()
    state = {name: np.full_like(array, 7) for name, array in net.state_dict().items()}
    change(state)
    with raises(ConfigError, operation="load_state_dict", **fields):
        net.load_state_dict(state)
    assert not any((array == 7).any() for array in net.state_dict().values())


def test_a_network_may_have_more_in_its_state():
    class Versioned(Block):
        def state_dict(self):
            return {**super().state_dict(), "version": 3}

        def load_state_dict(self, state):
            super().load_state_dict({name: value for name, value in state.items() if name != "version"})

    net, other = Versioned(), Versioned()
    other.load_state_dict(net.state_dict())
    np.testing.assert_array_equal(other.last.weight.data, net.last.weight.data)


def test_a_state_has_numbers_without_axes():
    net, other = Block(), Block()
    for number, each in enumerate((net, other)):
        each.mean = Tensor(np.arange(3, dtype=np.float32) + number).mean()  # a number of NumPy's
        each.temperature = nn.Parameter(np.ones((), np.float32))
        each.temperature.data = each.temperature.data * (number + 2)
    other.load_state_dict(net.state_dict())
    assert (other.mean.item(), other.temperature.item()) == (1, 2)
    assert all(isinstance(array, np.ndarray) for array in other.state_dict().values())


class Tagged(nn.Parameter):
    def __init__(self, data, factor):
        super().__init__(data)
        self.factor = factor


class Slotted(nn.Parameter):
    __slots__ = ("factor",)

    def __init__(self, data, factor):
        super().__init__(data, grad_req="add")
        self.factor = factor


@pytest.mark.parametrize("kind", [Tagged, Slotted])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_parameters_have_what_a_subclass_adds(kind, copied):
    param = kind(np.arange(3.0), 0.1)
    param.grad_hook = param.data_hook = param.update_hook = lambda param: None
    found = copied(param)
    assert type(found) is kind and found.factor == 0.1 and found.grad_req == param.grad_req
    assert found.grad_hook is None and found.data_hook is None and found.update_hook is None
    param.data_hook = None
    np.testing.assert_array_equal(found.data, param.data)


def test_a_state_that_is_no_dict_is_refused():
    with raises(ConfigError, operation="load_state_dict", where="a network", expected="dict", got="list"):
        Block().load_state_dict([])


def test_other_dtypes_and_namespaces():
    net = Block().to(dtype=np.float64)
    assert {str(array.dtype) for array in net.state_dict().values()} == {"float64"}
    assert net(np.ones((2, 3))).dtype == np.float64
    net.to(like=standin.asarray(np.ones(1)))
    assert {array_namespace(param.data, param.grad) for param in net.parameters()} == {standin}


def test_indices_and_masks_stay_what_they_are_in_another_dtype():
    net = Block()
    net.rows, net.mask, net.shift = (Tensor(x) for x in (np.array([4097, 2]), np.array([True, False]), np.ones(2)))
    rows = net.rows.data
    net.to("float16")
    assert [each.dtype for each in (net.rows, net.mask, net.shift)] == [np.int64, np.bool_, np.float16]
    assert net.rows.data is not rows
    assert net.rows.data.tolist() == [4097, 2]


def test_a_dtype_without_gradients_is_refused_before_anything_changes():
    net = Block()
    with raises(ConfigError, operation="to", where="dtype", expected="float", got="int32"):
        net.to(np.int32)
    assert all(each.dtype == np.float32 for each in net.parameters())


def test_sequential_is_a_list_of_modules():
    net = nn.Sequential(nn.Dense(3, 4))
    net.add(nn.ReLU(), nn.Dense(4, 2))
    assert len(net) == 3
    assert [type(layer).__name__ for layer in net] == ["Dense", "ReLU", "Dense"]
    assert net[-1] is net[2]
    assert len(nn.Sequential()) == 0
    x = Tensor(np.ones((1, 3), np.float32))
    assert nn.Sequential()(x) is x
    with raises(ConfigError, operation="Sequential", expected="modules", got=3):
        net.add(3)


def test_what_is_added_after_a_deletion_replaces_nothing():
    net = nn.Sequential(nn.Dense(2, 2), nn.ReLU(), nn.Flatten())
    delattr(net, "0")
    net.add(nn.Tanh())
    assert [type(part).__name__ for part in net] == ["ReLU", "Flatten", "Tanh"]


def test_repr_lists_the_layers():
    net = nn.Sequential(nn.Dense(3, 4, activation="relu"), nn.Sequential(nn.Flatten(), nn.Dense(4, 2, bias=False)))
    assert repr(net) == (
        "Sequential(\n  (0): Dense(3, 4, activation='relu')\n  (1): Sequential(\n    (0): Flatten()\n"
        "    (1): Dense(4, 2, bias=False)\n  )\n)"
    )


def test_a_module_without_forward_says_so():
    class Nothing(nn.Module):
        pass

    with raises(ConfigError, operation="Nothing", expected="forward(self, x)"):
        Nothing()(np.ones(1))


@pytest.mark.parametrize("value", [2.0, np.float32(2.0), np.float64(2.0), np.full((), 2.0, "f4")])
def test_a_parameter_of_one_number(value):
    """As a learned temperature."""
    net = nn.Module()
    net.scale = nn.Parameter(value)
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.5))
    with trainer.changing_parameters():
        net.scale *= 3
    with autograd.record():
        loss = net.scale * np.ones(4, net.scale.dtype)
    loss.backward()
    trainer.step(4)
    assert net.scale.shape == () and float(net.scale) == 5.5 and isinstance(net.scale.data, np.ndarray)


def test_a_parameter_is_frozen_by_the_right_word_alone():
    param = nn.Parameter(np.ones(2, np.float32))
    with raises(HpcdpError, operation="Parameter", where="grad_req", got="nul"):
        param.grad_req = "nul"
    assert param.grad_req == "write"
    param.grad_req = "null"


def test_a_parameter_stays_one():
    """Or it would silently be trained no more."""
    net = nn.Dense(2, 2)
    weight, before = net.weight, net.weight.asnumpy()
    net.weight **= 2
    net.weight *= 0.5
    assert net.weight is weight
    np.testing.assert_allclose(weight.data, before**2 / 2, rtol=1e-6)
    for values in (net.weight * 0.5, before):
        with raises(UnsupportedError, operation="Dense", where="weight", expected=["Parameter", None], remedy="[...]"):
            net.weight = values
    net.weight, net.bias = nn.Parameter(before), None
    assert [each.name for each in net.parameters()] == ["weight"]
