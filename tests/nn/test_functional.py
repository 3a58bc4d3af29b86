"""Operations of networks: gradients against central differences, values and gradients against PyTorch, errors."""

import tempfile

import numpy as np
import pytest
import standin
from finite_differences import assert_gradients
from raises import raises

from hpcdp import autograd
from hpcdp.autograd import Tensor
from hpcdp.errors import DataError, UnsupportedError
from hpcdp.nn import functional
from hpcdp.nn.functional import joint_batch_norm
from hpcdp.nn.layers import gelu, layer_norm

RNG = np.random.default_rng(4)
IMAGES = RNG.standard_normal((2, 3, 7, 6))
LABELS = np.array([2, 0, 3, 3, 1])


def leaf(x):
    tensor = Tensor(x)
    tensor.attach_grad()
    return tensor


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(5, 4), (1, 4), (2, 3, 4), (4,)])
def test_dense(shape, activation):
    x, w, b = RNG.standard_normal(shape), RNG.standard_normal((4, 3)), RNG.standard_normal(3)
    expected = x @ w + b if activation is None else np.maximum(x @ w + b, 0)
    np.testing.assert_allclose(functional.dense(x, w, b, activation).data, expected)
    assert_gradients(lambda *each: functional.dense(*each, activation), x, w, b)
    assert_gradients(lambda *each: functional.dense(*each, activation=activation), x, w)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1), ((1, 3), (2, 0))])
def test_conv2d(stride, padding, activation):
    w, b = RNG.standard_normal((4, 3, 3, 2)), RNG.standard_normal(4)
    assert_gradients(lambda *each: functional.conv2d(*each, stride, padding, activation), IMAGES, w, b)
    assert_gradients(lambda *each: functional.conv2d(*each, None, stride, padding, activation), IMAGES, w)


@pytest.mark.parametrize("size", [(2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0))])
def test_pools(size):
    assert_gradients(lambda x: functional.avg_pool2d(x, *size), IMAGES)
    assert_gradients(lambda x: functional.max_pool2d(x, *size), IMAGES)


def test_activations_and_softmax():
    x = RNG.standard_normal((3, 5))
    for function in (functional.relu, functional.sigmoid, functional.tanh, functional.softmax):
        assert_gradients(function, x)
    np.testing.assert_array_equal(functional.relu(x).data, np.maximum(x, 0))
    np.testing.assert_allclose(functional.softmax(x + 1e4).data, np.exp(x) / np.exp(x).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 2)])
def test_batch_norm(shape):
    x, scale, shift = RNG.standard_normal(shape), RNG.uniform(0.5, 2, 3), RNG.standard_normal(3)
    assert_gradients(lambda *each: functional.batch_norm(*each, 1e-5)[0], x, scale, shift, rtol=1e-4, atol=1e-6)
    _, mean, variance = functional.batch_norm(x, scale, shift, 1e-5)
    axes = tuple(i for i in range(x.ndim) if i != 1)
    np.testing.assert_allclose(mean, x.mean(axis=axes))
    np.testing.assert_allclose(variance, x.var(axis=axes))


def test_dropout_scales_what_it_keeps_and_its_gradient_alike():
    x = leaf(RNG.standard_normal((200, 50)))
    with autograd.record():
        y = functional.dropout(x, 0.25, np.random.default_rng(1))
    kept = y.data != 0
    assert abs(kept.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y.data[kept], x.data[kept] / 0.75)
    y.backward()
    np.testing.assert_allclose(x.grad, kept / 0.75)


def test_losses_are_per_sample():
    logits, target = RNG.standard_normal((5, 4)), RNG.standard_normal((5, 2, 3))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        functional.softmax_cross_entropy(logits, LABELS).data, -np.log(chances[np.arange(5), LABELS])
    )
    assert_gradients(lambda x: functional.softmax_cross_entropy(x, LABELS), logits)
    found = functional.l2_loss(target + 2, target).data
    np.testing.assert_allclose(found, np.full(5, 2.0))
    assert_gradients(lambda x, y: functional.l2_loss(x, y), RNG.standard_normal((5, 2, 3)), target)
    for column in (target[:, 0, 0], target[:, :1, 0]):  # as many elements are never (5, 5)
        assert functional.l2_loss(np.zeros((5, 1)), column).data == pytest.approx(target[:, 0, 0] ** 2 / 2)
    for wrong in (target[:4], target[:, 0], 0.0, target[:, 0, :1].T):
        with raises(UnsupportedError, operation="l2_loss", expected=(5, 2, 3)):
            functional.l2_loss(target, wrong)
    assert_gradients(lambda x: functional.l2_loss(x, target[:, 0, 0]), RNG.standard_normal(5))


def test_cross_entropy_is_stable():
    logits = leaf(np.array([[1e4, 0.0, -1e4], [-1e30, 0.0, 1.0]], np.float32))
    with autograd.record():
        loss = functional.softmax_cross_entropy(logits, np.array([2, 2]))
    loss.backward()
    np.testing.assert_allclose(loss.data, [2e4, np.log1p(np.exp(-1))], rtol=1e-6)
    assert np.isfinite(logits.grad).all()
    np.testing.assert_allclose(logits.grad.sum(axis=1), 0, atol=1e-6)


def test_gradients_go_straight_into_the_bucket():
    x = Tensor(IMAGES.astype(np.float32))
    shapes = [(4, 3, 3, 3), (4,), (48, 5), (5,)]
    bucket = np.full(sum(int(np.prod(s)) for s in shapes), np.nan, np.float32)
    leaves, offset = [], 0
    for shape in shapes:
        tensor = leaf(RNG.standard_normal(shape).astype(np.float32))
        tensor.grad = bucket[offset : offset + tensor.size].reshape(shape)
        offset += tensor.size
        leaves.append(tensor)
    views = [tensor.grad for tensor in leaves]
    with autograd.record():
        h = functional.conv2d(x, *leaves[:2], padding=1, stride=2, activation="relu")
        y = functional.dense(h.reshape(2, -1), *leaves[2:])
    assert not np.isfinite(bucket).any()
    y.backward()
    assert np.isfinite(bucket).all()
    assert all(tensor.grad is view for tensor, view in zip(leaves, views, strict=True))


def test_a_layer_called_twice_before_backward():
    w = leaf(RNG.standard_normal((3, 3, 3, 3)))
    x = [RNG.standard_normal((40, 3, 16, 16)) for _ in range(2)]

    def gradient(inputs):
        with autograd.record():
            outs = [
                functional.conv2d(functional.conv2d(each, w, padding=1, activation="relu"), w, padding=1)
                for each in inputs
            ]
        autograd.backward(outs)
        return w.grad.copy()

    together = gradient(x)
    np.testing.assert_allclose(together, gradient(x[:1]) + gradient(x[1:]), rtol=1e-10, atol=1e-8)


def test_retained_tapes_survive_other_steps():
    w = leaf(RNG.standard_normal((8, 3, 3, 3)).astype(np.float32))
    x, other = (RNG.standard_normal((64, 3, 12, 12)).astype(np.float32) for _ in range(2))
    with autograd.record():
        y = functional.avg_pool2d(functional.conv2d(x, w, activation="relu"), 2)
    y.backward(retain_graph=True)
    first = w.grad.copy()
    for _ in range(3):
        with autograd.record():
            z = functional.avg_pool2d(functional.conv2d(other, w, activation="relu"), 2)
        z.backward()
    assert not np.array_equal(w.grad, first)
    y.backward()
    np.testing.assert_array_equal(w.grad, first)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (
            lambda: functional.dense(np.ones((2, 3)), np.ones((4, 5))),
            {"operation": "dense", "expected": "(..., in)", "got": [(2, 3), (4, 5)]},
        ),
        (
            lambda: functional.dense(np.ones((2, 3)), np.ones((3, 5), "f4")),
            {"operation": "dense", "where": "dtype", "got": ["float64", "float32"]},
        ),
        (
            lambda: functional.dense(np.ones((2, 3), int), np.ones((3, 5), int)),
            {"operation": "dense", "where": "dtype", "expected": ["float32", "float64"]},
        ),
        (
            lambda: functional.dense(np.ones((2, 3)), np.ones((3, 5)), activation="selu"),
            {"operation": "activation", "expected": ["relu", None], "got": "selu"},
        ),
        (lambda: functional.conv2d(np.ones((2, 3)), np.ones((1, 1, 1, 1))), {"operation": "conv2d", "got": (2, 3)}),
        (
            lambda: functional.conv2d(IMAGES, np.ones((1, 2, 3, 3))),
            {"operation": "conv2d", "got": [(2, 3, 7, 6), (1, 2, 3, 3)]},
        ),
        (
            lambda: functional.conv2d(IMAGES, np.ones((1, 3, 8, 3))),
            {"operation": "conv2d", "expected": (8, 3), "got": (7, 6)},
        ),
        (
            lambda: functional.conv2d(IMAGES, np.ones((1, 3, 3, 3)), stride=0),
            {"operation": "conv2d", "expected": (0, 0)},
        ),
        (
            lambda: functional.conv2d(IMAGES, np.ones((1, 3, 0, 3))),
            {"operation": "conv2d", "expected": [(0, 3), 1]},
        ),
        (lambda: functional.max_pool2d(IMAGES, 2, stride=0), {"operation": "max_pool2d", "expected": (0, 0)}),
        (lambda: functional.max_pool2d(IMAGES, 2, stride=(1, -1)), {"operation": "max_pool2d", "expected": (1, -1)}),
        (lambda: functional.max_pool2d(IMAGES, (2, 0), 1), {"operation": "max_pool2d", "expected": (2, 0)}),
        (lambda: functional.avg_pool2d(IMAGES, 0, 1), {"operation": "avg_pool2d", "expected": [(0, 0), (1, 1)]}),
        (lambda: functional.avg_pool2d(IMAGES, -1, 1), {"operation": "avg_pool2d", "expected": (-1, -1)}),
        (
            lambda: functional.avg_pool2d(IMAGES, 2.5),
            {"operation": "size of a window", "got": 2.5},
        ),
        (lambda: functional.avg_pool2d(IMAGES, (2, 2, 2)), {"operation": "size of a window", "got": (2, 2, 2)}),
        *(
            (
                lambda p=p: functional.dropout(IMAGES, p, RNG),
                {"operation": "dropout", "where": "p", "got": p},
            )
            for p in (1.0, 2.0, -0.5, np.nan)
        ),
        (
            lambda: functional.dropout(np.ones(3, int), 0.3, RNG),
            {"operation": "dropout", "where": "dtype", "expected": ["float32", "float64"], "got": "int64"},
        ),
        (lambda: functional.avg_pool2d(IMAGES, 9), {"operation": "avg_pool2d", "expected": (9, 9)}),
        (
            lambda: functional.max_pool2d(IMAGES, 2, padding=2),
            {"operation": "max_pool2d", "where": "padding", "expected": (2, 2), "got": (2, 2)},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 3)), np.ones(2)),
            {"operation": "softmax_cross_entropy", "expected": "(batch, ...)", "got": "float64"},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 3)), np.ones(3, int)),
            {"operation": "softmax_cross_entropy", "got": [(2, 3), (3,)]},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 3)), 1),
            {"operation": "softmax_cross_entropy", "got": [(2, 3), "()", "int64"]},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 3)), None),
            {"operation": "softmax_cross_entropy", "got": [(2, 3), "()", "object"]},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((6, 3)), np.ones((2, 3), int)),
            {"operation": "softmax_cross_entropy", "got": [(6, 3), (2, 3), "int64"]},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 3), int), np.ones(2, int)),
            {"operation": "softmax_cross_entropy", "where": "dtype", "got": "int64"},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 0)), np.ones(2, int)),
            {"operation": "softmax_cross_entropy", "got": [(2, 0), (2,), "int64"]},
        ),
        (
            lambda: functional.softmax_cross_entropy(np.ones((2, 3, 0)), np.ones((2, 3), int)),
            {"operation": "softmax_cross_entropy", "got": [(2, 3, 0), (2, 3)]},
        ),
        (
            lambda: functional.softmax(np.ones((2, 3), int)),
            {"operation": "softmax", "where": "dtype", "expected": ["float32", "float64"], "got": "int64"},
        ),
        (
            lambda: functional.conv2d(np.ones((1, 0, 8, 8)), np.ones((2, 0, 3, 3))),
            {"operation": "conv2d", "expected": [1, "(batch, in, height, width)"]},
        ),
        (
            lambda: functional.conv2d(IMAGES, np.ones((0, 3, 3, 3))),
            {"operation": "conv2d", "expected": [1, "(batch, in, height, width)"]},
        ),
        *(
            (
                lambda call=call: call(IMAGES.astype(">f8")),
                {"where": "dtype", "got": ">f8"},
            )
            for call in (
                functional.relu,
                gelu,
                functional.softmax,
                lambda x: functional.max_pool2d(x, 2),
                lambda x: functional.dropout(x, 0.5, RNG),
            )
        ),
    ],
)
def test_what_does_not_fit_is_said(call, fields):
    with raises(UnsupportedError, **fields):
        call()


def ones(*shapes):
    return [np.ones(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 3), (2,), (2,)],
        [(4, 3), (3,), (1,)],
        [(4, 3, 2), (3,), (3, 1)],
        [(4, 3), (4,), (3,)],
        [(4,), (4,), (4,)],
        [(), (1,), (1,)],
        [(4, 3), (), (3,)],
        [(4, 3), (3,), (3,), (2,), (3,)],
        [(4, 3), (3,), (3,), (3,), (1,)],
    ],
)
def test_batch_norm_takes_a_number_for_each_channel(shapes):
    """Not checked, kernels would go beyond the end of what is shorter."""
    x, scale, shift, *running = ones(*shapes)
    calls = [lambda: functional.batch_norm(x, scale, shift, 1e-5, *map(Tensor, running))]
    if running:
        calls.append(lambda: functional.batch_norm_by_running(x, scale, shift, *running, 1e-5))
    else:
        calls.append(lambda: joint_batch_norm(x, scale, shift, 1e-5, lambda sums: None))
    for call in calls:
        with raises(UnsupportedError, operation="batch_norm", got=list(shapes)):
            call()
    if not running:
        with raises(UnsupportedError, operation="batch_norm"):
            functional.batch_norm_by_running(x, scale, shift, scale, scale, 1e-5)


def test_labels_out_of_range_are_named():
    with raises(DataError, operation="softmax_cross_entropy", where="labels", expected=[0, 2], got=[-1, 1]):
        functional.softmax_cross_entropy(np.ones((2, 3)), np.array([-1, 1]))
    with raises(DataError, operation="softmax_cross_entropy", where="labels", expected=[0, 2], got=[0, 3]):
        functional.softmax_cross_entropy(standin.asarray(np.ones((2, 3))), np.array([0, 3]))
    assert functional.softmax_cross_entropy(np.ones((0, 3)), np.ones(0, int)).shape == (0,)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(2, 0), (2, 4, 0), (0,)])
def test_sums_of_no_features_are_zeros(shape, activation):
    x, w, b = leaf(np.ones(shape)), leaf(np.ones((0, 3))), leaf(np.arange(3.0))
    with autograd.record():
        y = functional.dense(x, w, b, activation)
    y.backward()
    np.testing.assert_array_equal(y.data, np.broadcast_to(b.data, (*shape[:-1], 3)))
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
    np.testing.assert_array_equal(b.grad, np.full(3, np.prod(shape[:-1])) if activation is None else b.grad)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(2, 0), (2, 3, 0), (0, 0)])
@pytest.mark.parametrize("operation", [functional.softmax, lambda x: layer_norm(x, np.ones(0), np.ones(0), 1e-5), gelu])
def test_what_normalizes_no_features_gives_none(operation, shape):
    x = leaf(np.ones(shape))
    with autograd.record():
        y = operation(x)
    y.backward()
    assert y.shape == x.grad.shape == shape


def test_integers_have_a_relu():
    np.testing.assert_array_equal(functional.relu(np.array([-1, 0, 2])).data, [0, 0, 2])


def test_device_arrays_give_the_same():
    x, w, b = IMAGES, RNG.standard_normal((4, 3, 3, 3)), RNG.standard_normal(4)
    scale, shift = RNG.uniform(0.5, 2, 4), RNG.standard_normal(4)

    def gradients(asarray, labels):
        leaves = [leaf(asarray(each)) for each in (x, w, b, scale, shift)]
        with autograd.record():
            h = functional.conv2d(leaves[0], leaves[1], leaves[2], 1, 1, "relu")
            h = functional.dropout(
                functional.batch_norm(h, leaves[3], leaves[4], 1e-5)[0], 0.3, np.random.default_rng(5)
            )
            h = functional.sigmoid(
                functional.tanh(functional.max_pool2d(functional.relu(h), 2)) + functional.avg_pool2d(h, 2)
            )
            loss = functional.softmax_cross_entropy(h.reshape(2, -1), labels) + functional.l2_loss(h, h * 0.5)
        loss.backward()
        return [loss.asnumpy()] + [
            np.array(each.grad if asarray is np.asarray else each.grad.to_host()) for each in leaves
        ]

    labels = np.array([1, 3])
    expected = gradients(np.asarray, labels)
    for where in (labels, standin.asarray(labels)):
        for ours, host in zip(gradients(standin.asarray, where), expected, strict=True):
            np.testing.assert_allclose(ours, host, rtol=1e-9, atol=1e-12)


def test_the_same_as_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    P = torch.nn.functional
    x, w, b = (each.astype(np.float32) for each in (IMAGES, RNG.standard_normal((4, 3, 3, 3)), RNG.standard_normal(4)))
    ours, theirs = (
        [leaf(each.copy()) for each in (x, w, b)],
        [torch.tensor(each, requires_grad=True) for each in (x, w, b)],
    )
    labels = np.array([1, 3])
    with autograd.record():
        h = functional.conv2d(*ours, stride=2, padding=1, activation="relu")
        h = functional.max_pool2d(h, 2, 1) + functional.avg_pool2d(h, 2, 1)
        loss = functional.softmax_cross_entropy(h.reshape(2, -1), labels)
    loss.backward()
    g = P.relu(P.conv2d(*theirs, stride=2, padding=1))
    g = P.max_pool2d(g, 2, 1) + P.avg_pool2d(g, 2, 1)
    peer = P.cross_entropy(g.reshape(2, -1), torch.from_numpy(labels), reduction="none")
    peer.sum().backward()
    np.testing.assert_allclose(loss.data, peer.detach().numpy(), rtol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.grad, other.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_one_leaf_as_two_operands_sums_its_gradients(grad_req):
    def gradient(operation, *values):
        tensors = [Tensor(value) for value in values]
        for each in tensors:
            each.attach_grad(grad_req)
        with autograd.record():
            result = operation(*tensors)
        result.backward(np.cos(np.arange(result.size)).reshape(result.shape))
        return [each.grad for each in tensors]

    def normalize(x, scale, shift):
        return functional.batch_norm(x, scale, shift, 1e-5)[0]

    w, square, v = RNG.standard_normal((3, 3, 2, 2)), RNG.standard_normal((4, 4)), RNG.standard_normal(3)
    (both,) = gradient(lambda w: functional.conv2d(w, w), w)
    np.testing.assert_allclose(both, sum(gradient(functional.conv2d, w, w)))
    (both,) = gradient(lambda w: functional.dense(w, w), square)
    np.testing.assert_allclose(both, sum(gradient(functional.dense, square, square)))
    _, both = gradient(lambda x, v: normalize(x, v, v), IMAGES, v)
    np.testing.assert_allclose(both, sum(gradient(normalize, IMAGES, v, v)[1:]))


OF_IMAGES = {
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 2),
    "max_pool2d": lambda x: functional.max_pool2d(x, 2),
    "relu": functional.relu,
    "sigmoid": functional.sigmoid,
    "tanh": functional.tanh,
    "dropout": lambda x: functional.dropout(x, 0.5, np.random.default_rng(0)),
    "softmax": functional.softmax,
    "l2_loss": lambda x: functional.l2_loss(x, np.zeros(x.shape)),
    "conv2d": lambda x, w, b: functional.conv2d(x, w, b, 1, 1, "relu"),
    "batch_norm": lambda x, scale, shift: functional.batch_norm(x, scale, shift, 1e-5)[0],
    "dense": lambda x, w, b: functional.dense(x.reshape(len(x), 126), w, b, "relu"),
    "softmax_cross_entropy": lambda x: functional.softmax_cross_entropy(x.reshape(len(x), 126), LABELS[: len(x)]),
}
PARAMETERS = {"conv2d": [(4, 3, 3, 3), (4,)], "batch_norm": [(3,), (3,)], "dense": [(126, 5), (5,)]}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OF_IMAGES)
def test_an_empty_batch_goes_forward_and_back(name):
    parameters = [leaf(RNG.standard_normal(shape)) for shape in PARAMETERS.get(name, [])]
    full = OF_IMAGES[name](leaf(IMAGES), *parameters)
    x = leaf(IMAGES[:0])
    for each in parameters:
        each.grad[...] = 7.0
    with autograd.record():
        y = OF_IMAGES[name](x, *parameters)
    assert y.shape == (0, *full.shape[1:])
    assert y.dtype == full.dtype
    y.backward()
    assert x.grad.shape == x.shape
    for each in parameters:
        np.testing.assert_array_equal(each.grad, np.zeros(each.shape))


def read_only(x):
    x = x.copy()
    x.setflags(write=False)
    return x


def unaligned(x):
    return np.frombuffer(b"?" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)


def in_a_file(x):
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", x)
        return np.load(f"{folder}/x.npy", mmap_mode="r")


@pytest.mark.parametrize("given", [read_only, unaligned, in_a_file])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_operands_and_heads_may_be_what_nobody_can_write(name, given):
    values = [IMAGES, *(RNG.standard_normal(shape) for shape in PARAMETERS.get(name, []))]
    found = []
    for form in (given, np.copy):
        operands = [leaf(form(value)) for value in values]
        with autograd.record():
            y = OF_IMAGES[name](*operands)
        y.backward(form(np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape)))
        found.append([y.data, *(each.grad for each in operands)])
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("size", [2, np.int64(2), (2, 2), [np.int32(2), 2]])
def test_sizes_may_be_integers_of_numpy(size):
    x = Tensor(np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype("f4"))
    found = functional.avg_pool2d(x, size).data
    np.testing.assert_array_equal(found, functional.avg_pool2d(x, (2, 2)).data)
    np.testing.assert_allclose(found, x.data.reshape(2, 3, 4, 2, 4, 2).mean((3, 5)), rtol=1e-5, atol=1e-7)
    assert functional.max_pool2d(x, size, size).shape == (2, 3, 4, 4)
