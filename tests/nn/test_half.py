"""Operators of networks on floats of 16 bits: those in float32 of the same numbers, rounded once, forward and back."""

import gc
import warnings
import weakref

import numpy as np
import pytest
import standin
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor, operators, record
from hpcdp.core.arrays import dtype_of, to_host
from hpcdp.errors import DataError
from hpcdp.nn.functional import joint_batch_norm
from hpcdp.nn.layers import causal_attention, embedding, gelu, layer_norm, lstm

F = nn.functional
HALVES = {"float16": 0.01, "bfloat16": 0.08}
"""And how far they may be from float32 where a device adds up in them."""
TOKENS, LABELS = np.array([[3, 0, 1], [2, 2, 4]]), np.array([1, 0, 3])


def halves(*shape, seed=0, half="float16", dtype=None):
    """Numbers that ``half`` has, in ``dtype``."""
    x = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype_of(half))
    return x if dtype is None else x.astype(dtype)


OPERATORS = {
    "dense": (lambda x, w, b: F.dense(x, w, b, "relu"), [(5, 7), (7, 4), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1, "relu"), [(2, 3, 7, 6), (5, 3, 3, 3), (5,)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), [(2, 3, 7, 7)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(2, 3, 6, 6)]),
    "relu": (F.relu, [(3, 11)]),
    "softmax": (F.softmax, [(4, 9)]),
    "batch_norm": (lambda x, g, b: F.batch_norm(x, g, b, 1e-5)[0], [(6, 3, 4, 4), (3,), (3,)]),
    "batch_norm_by_running": (
        lambda x, g, b: F.batch_norm_by_running(x, g, b, *np.ones((2, 3), g.dtype), 1e-5), [(6, 3, 4, 4), (3,), (3,)]
    ),
    "joint_batch_norm": (
        lambda x, g, b: joint_batch_norm(x, g, b, 1e-5, lambda sums: None)[0], [(6, 3, 4, 4), (3,), (3,)]
    ),
    "layer_norm": (lambda x, g, b: layer_norm(x, g, b, 1e-5), [(4, 6), (6,), (6,)]),
    "gelu": (gelu, [(4, 6)]),
    "causal_attention": (lambda x: causal_attention(x, 2), [(2, 5, 12)]),
    "lstm": (lstm, [(2, 4, 3), (3, 8), (2, 8), (8,)]),
    "embedding": (lambda w: embedding(TOKENS, w), [(5, 4)]),
}  # fmt: skip


def computed(function, shapes, half, dtype=None):
    """The result, and the gradients of all operands."""
    given = [Tensor(halves(*shape, seed=i, half=half, dtype=dtype)) for i, shape in enumerate(shapes)]
    for each in given:
        each.attach_grad()
    with record():
        y = function(*given)
    y.backward(halves(*y.shape, seed=99, half=half, dtype=dtype))
    return [y.data, *(each.grad for each in given)]


@pytest.mark.each_value
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", OPERATORS)
def test_computed_in_float32_and_rounded_once(name, half):
    for ours, wide in zip(*(computed(*OPERATORS[name], half, dtype) for dtype in (None, "float32")), strict=True):
        assert ours.dtype == dtype_of(half)
        np.testing.assert_array_equal(ours, wide.astype(ours.dtype))


def test_what_operands_are_converted_to_goes_without_the_garbage_collector(monkeypatch):
    """Which does not know how large it is, nor that it may be a GPU's."""
    converted = []

    def tensor(array):
        converted.append(weakref.ref(array))
        return Tensor(array)

    monkeypatch.setattr("hpcdp.nn.module.Tensor", tensor)
    gc.disable()
    try:
        computed(*OPERATORS["dense"], "float16")
        assert len(converted) == 3 and not any(each() is not None for each in converted)
    finally:
        gc.enable()


@pytest.mark.parametrize("half", HALVES)
def test_a_loss_stays_float32_and_gives_gradients_of_16_bits(half):
    logits, same = (Tensor(halves(3, 5, half=half, dtype=dtype)) for dtype in (None, "float32"))
    for each in (logits, same):
        each.attach_grad()
        with record():
            loss = F.softmax_cross_entropy(each, LABELS)
        loss.backward(1024.0)
    assert loss.data.dtype == np.float32 and logits.grad.dtype == dtype_of(half)
    np.testing.assert_array_equal(logits.grad, same.grad.astype(logits.grad.dtype))


@pytest.mark.parametrize("half", HALVES)
def test_a_network_of_16_bits_keeps_what_normalizes_in_float32_and_takes_images_of_float32(half):
    net = nn.Sequential(nn.Conv2D(1, 4, 3), nn.BatchNorm(4), nn.Flatten(), nn.Dense(4 * 36, 3)).to(half)
    kinds = {name: str(array.dtype) for name, array in net.state_dict().items()}
    assert {name for name, kind in kinds.items() if kind == half} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert kinds["1.gamma"] == kinds["1.running_var"] == "float32"
    x = np.random.default_rng(1).standard_normal((2, 1, 8, 8)).astype("f4")
    with record():
        y = net(x)
    y.backward()
    assert y.dtype == dtype_of(half)
    with record():
        np.testing.assert_array_equal(net(x.astype(y.dtype)).data, y.data)
    assert {str(p.grad.dtype) for p in net.parameters()} == {half, "float32"}
    assert abs(net.state_dict()["1.running_mean"]).max() > 0
    back = net.to("float64").state_dict()
    assert {str(array.dtype) for array in back.values()} == {"float64"}


@pytest.mark.parametrize(
    ("model", "half"),
    [("lenet", "bfloat16"), ("gpt", "float16"), ("char_lstm", "bfloat16"), ("resnet18_cifar", "float16")],
)
def test_models_learn_from_gradients_near_those_of_float32(model, half):
    sequences = model in ("gpt", "char_lstm")
    shape = (8,) if sequences else (1, 28, 28) if model == "lenet" else (3, 16, 16)
    rng = np.random.default_rng(4)
    x = rng.integers(0, 10, (4, *shape)) if sequences else rng.standard_normal((12, *shape)).astype("f4")
    y = rng.integers(0, 10, (4, 8) if sequences else 12)
    found = []
    for dtype in ("float32", half):
        net = nn.models.create(model, input_shape=shape, num_classes=10, seed=0).to(dtype)
        with record():
            loss = F.softmax_cross_entropy(net(x), y)
        loss.backward(64.0)
        found.append((loss.data, {p.name: p.grad.astype("f8") / 64 for p in net.parameters()}))
    (losses, wide), (ours, narrow) = found
    np.testing.assert_allclose(ours, losses, rtol=0.02, atol=0.01)
    lengths = {name: np.linalg.norm(each) for name, each in wide.items()}
    longest = max(lengths.values())
    for name, each in wide.items():
        near = 0.05 if model == "gpt" else 0.2  # statistics of few numbers shake the ResNet, bfloat16 rounds more
        assert np.linalg.norm(narrow[name] - each) < near * lengths[name] + 0.002 * longest, name


@pytest.mark.parametrize(
    ("model", "half"),
    [("lenet", "float16"), ("lenet", "bfloat16"), ("normalized", "bfloat16"), ("gpt", "float16")],
)
def test_a_hybridized_network_does_the_same_to_the_bit_and_sees_updates(model, half):
    def made():
        if model == "normalized":
            return nn.Sequential(nn.Conv2D(1, 3, 3), nn.BatchNorm(3), nn.ReLU())
        shape = (6,) if model == "gpt" else (1, 12, 12)
        return nn.models.create(model, input_shape=shape, num_classes=10, seed=0)

    plain, planned = made(), made()
    planned.load_state_dict(plain.state_dict())
    for net in (plain, planned):
        net.to(half)
    planned.hybridize()
    rng = np.random.default_rng(2)
    for step in range(3):
        x = rng.integers(0, 10, (2, 6)) if model == "gpt" else rng.standard_normal((2, 1, 12, 12)).astype("f4")
        results = []
        for net in (plain, planned):
            with record():
                y = net(x)
            y.backward(halves(*y.shape, seed=step, half=half))
            results.append([y.data, *(p.grad.copy() for p in net.parameters()), *net.state_dict().values()])
            for p in net.parameters():
                p.data[...] -= (0.01 * p.grad.astype("f4")).astype(p.dtype)
        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("half", HALVES)
def test_asynchronous_calls_give_the_same(half):
    net, x = nn.models.lenet((1, 12, 12)).to(half), halves(2, 1, 12, 12, half=half)
    with autograd.asynchronous():
        ours = net(x).asnumpy()
    np.testing.assert_array_equal(ours, net(x).data)


@pytest.mark.parametrize(("half", "error"), HALVES.items())
def test_devices_multiply_halves_themselves(half, error):
    shapes, wide = OPERATORS["dense"][1], computed(*OPERATORS["dense"], half, "float32")
    given = [Tensor(standin.asarray(halves(*shape, seed=i, half=half))) for i, shape in enumerate(shapes)]
    for each in given:
        each.attach_grad()
    with record():
        y = OPERATORS["dense"][0](*given)
    y.backward(standin.asarray(halves(*y.shape, seed=99, half=half)))
    for ours, theirs in zip([y.data, *(each.grad for each in given)], wide, strict=True):
        assert ours.dtype == dtype_of(half)
        np.testing.assert_allclose(ours.to_host().astype("f4"), theirs, rtol=error, atol=error)


@pytest.mark.parametrize(("half", "error"), HALVES.items())
@pytest.mark.parametrize("name", ["conv2d", "max_pool2d", "softmax", "batch_norm", "layer_norm", "relu"])
def test_on_a_device(name, half, error):
    function, shapes = OPERATORS[name]
    ours = function(*(standin.asarray(halves(*shape, seed=i, half=half)) for i, shape in enumerate(shapes))).data
    theirs = function(*(halves(*shape, seed=i, half=half) for i, shape in enumerate(shapes))).data
    assert ours.dtype == dtype_of(half)
    np.testing.assert_allclose(ours.to_host().astype("f4"), theirs.astype("f4"), rtol=error, atol=error)


OPERATIONS = {
    "a half of it": lambda x, w: x * 0.5, "from one": lambda x, w: 1 - x, "over it": lambda x, w: 2.5 / (x * x + 1),
    "root": lambda x, w: abs(x) ** 0.5, "at least": lambda x, w: operators.maximum(x, 0.25),
    "where": lambda x, w: operators.where(x > 0, x, 0.0), "mean": lambda x, w: x.mean(axis=0),
    "tanh": lambda x, w: x.tanh(), "exp": lambda x, w: (x * 0.1).exp(), "product": lambda x, w: x @ w,
    "stack": lambda x, w: x.reshape(2, 2, 3) @ w,
}  # fmt: skip


@pytest.mark.parametrize("asarray", [np.asarray, standin.asarray])
@pytest.mark.parametrize(("half", "error"), HALVES.items())
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_16_bits_stay_in_them_also_with_numbers(name, half, error, asarray):
    found = []
    for dtype in (dtype_of(half), np.dtype("f4")):
        x, w = (Tensor(asarray(halves(*shape, half=half, dtype=dtype))) for shape in ((4, 3), (3, 5)))
        for each in (x, w):
            each.attach_grad()
        with record():
            y = OPERATIONS[name](x, w)
        y.backward()
        assert y.dtype == x.grad.dtype == dtype
        found.append([to_host(each).astype("f4") for each in (y.data, x.grad, w.grad)])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=error, atol=error)


@pytest.mark.parametrize("half", HALVES)
def test_sums_of_16_bits_are_added_up_in_float32(half):
    x = Tensor(np.ones((5000, 2), dtype_of(half)))
    x.attach_grad()
    bias = Tensor(np.zeros(2, x.dtype))
    bias.attach_grad()
    with record():
        y = (x + bias).sum(axis=0)
    y.backward()
    total = np.full(2, 5000).astype(y.dtype)  # in float16 they would end at 2048, in bfloat16 at 256
    np.testing.assert_array_equal(y.data, total)
    np.testing.assert_array_equal(bias.grad, total)
    assert y.dtype == bias.grad.dtype == dtype_of(half)


LARGE = 85 * 2.0**120
"""Of which three and half of 2**120 are half a unit above the largest bfloat16, and still a float32."""


@pytest.mark.parametrize(("half", "row"), [("float16", [300.0] * 3), ("bfloat16", [LARGE, LARGE, LARGE + 2.0**119])])
def test_what_is_too_large_becomes_infinite_without_a_word(half, row):
    x = Tensor(np.array([row, row], dtype_of(half)))
    w = Tensor(np.full((3, 2), row[0] if half == "float16" else 1, x.dtype))
    w.attach_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with record():
            y = F.dense(x, w)
        y.backward(np.full((2, 2), 200 if half == "float16" else 1, x.dtype))
    assert np.isinf(y.data).all() and np.isinf(w.grad).all() == (half == "float16")


def test_labels_are_checked_as_ever():
    with raises(DataError, operation="softmax_cross_entropy", where="labels", expected=[0, 4]):
        F.softmax_cross_entropy(halves(3, 5), np.array([0, 5, 1]))


@pytest.mark.parametrize("own", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("other", ["float16", "bfloat16", "float32", "float64"])
def test_a_network_loads_the_state_of_one_of_other_floats(own, other):
    given, net = (nn.Dense(3, 2, weight_init=nn.init.Normal(scale)) for scale in (1.0, 0.1))
    given.to(other)
    net.to(own)
    net.load_state_dict(given.state_dict())
    np.testing.assert_array_equal(net.weight.data, given.weight.data.astype(dtype_of(own)))
