import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.nn import functional

RNG = np.random.default_rng(8)
IMAGES = RNG.standard_normal((2, 3, 9, 8)).astype(np.float32)


def test_layers_compute_what_their_functions_do():
    conv = nn.Conv2D(3, 4, (3, 2), stride=2, padding=(1, 0), activation="relu")
    assert conv.weight.shape == (4, 3, 3, 2)
    expected = functional.conv2d(IMAGES, conv.weight, conv.bias, 2, (1, 0), "relu").data
    np.testing.assert_array_equal(conv(IMAGES).data, expected)
    assert expected.shape == (2, 4, 5, 4)
    np.testing.assert_array_equal(nn.MaxPool2D(3, 2, 1)(IMAGES).data, functional.max_pool2d(IMAGES, 3, 2, 1).data)
    np.testing.assert_array_equal(nn.AvgPool2D(2)(IMAGES).data, functional.avg_pool2d(IMAGES, 2, 2).data)
    np.testing.assert_allclose(nn.GlobalAvgPool2D()(IMAGES).data, IMAGES.mean(axis=(2, 3), keepdims=True), rtol=1e-5)
    flat = nn.Flatten()(IMAGES)
    np.testing.assert_array_equal(flat.data, IMAGES.reshape(2, -1))
    assert nn.Flatten()(IMAGES[:0]).shape == (0, 216)
    dense = nn.Dense(216, 5)
    np.testing.assert_allclose(dense(flat).data, flat.data @ dense.weight.data, rtol=1e-5, atol=1e-5)
    for layer, function in (
        (nn.ReLU(), functional.relu),
        (nn.Sigmoid(), functional.sigmoid),
        (nn.Tanh(), functional.tanh),
    ):
        np.testing.assert_array_equal(layer(flat).data, function(flat).data)


def test_a_layer_without_bias_has_none():
    layer = nn.Conv2D(3, 2, 1, bias=False)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    np.testing.assert_allclose(
        layer(IMAGES).data, np.einsum("nchw,oc->nohw", IMAGES, layer.weight.data[:, :, 0, 0]), atol=1e-5
    )


@pytest.mark.parametrize(
    ("layer", "shape", "fields"),
    [
        (nn.Dense(4, 2), (3, 5), {"where": "Dense(4, 2)", "expected": "(batch, 4)", "got": (3, 5)}),
        (nn.Dense(4, 2), (4,), {"where": "Dense(4, 2)", "got": (4,)}),
        (
            nn.Conv2D(3, 2, 3, padding=1),
            (1, 4, 5, 5),
            {
                "where": "Conv2D(3, 2, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))",
                "expected": "(batch, 3, height, width)",
                "got": (1, 4, 5, 5),
            },
        ),
        (
            nn.Conv2D(3, 2, 5, padding=1),
            (1, 3, 2, 8),
            {
                "where": "Conv2D(3, 2, kernel_size=(5, 5), stride=(1, 1), padding=(1, 1))",
                "expected": 3,
                "got": (1, 3, 2, 8),
            },
        ),
        (
            nn.MaxPool2D(3),
            (1, 3, 2, 8),
            {"where": "MaxPool2D((3, 3), stride=(3, 3), padding=(0, 0))", "expected": 3, "got": (1, 3, 2, 8)},
        ),
        (nn.AvgPool2D(3), (3, 8, 8), {"where": "AvgPool2D((3, 3), stride=(3, 3), padding=(0, 0))", "got": (3, 8, 8)}),
        (nn.GlobalAvgPool2D(), (3, 8), {"where": "GlobalAvgPool2D()", "got": (3, 8)}),
        (
            nn.BatchNorm(3),
            (5, 4),
            {"where": "BatchNorm(3, momentum=0.9, eps=1e-05)", "expected": "(batch, 3, ...)", "got": (5, 4)},
        ),
    ],
)
def test_wrong_shapes_are_named_with_the_layer(layer, shape, fields):
    with raises(UnsupportedError, operation="forward", **fields):
        layer(np.ones(shape, np.float32))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2D(3, 4, 3, activation="relu"),
        nn.MaxPool2D(2),
        nn.AvgPool2D(2),
        nn.GlobalAvgPool2D(),
        nn.BatchNorm(3),
        nn.Dropout(0.5, seed=1),
        nn.Sequential(nn.Flatten(), nn.Dense(108, 5)),
        nn.ReLU(),
        nn.Sigmoid(),
        nn.Tanh(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_an_empty_batch_goes_forward_and_back(layer):
    images = Tensor(IMAGES[:, :, :6, :6])
    full = layer(images)
    before = {name: value.copy() for name, value in layer.state_dict().items()}
    x = Tensor(images.data[:0])
    x.attach_grad()
    for each in layer.parameters():
        each.grad[...] = 7.0
    with autograd.record():
        y = layer(x)
    assert y.shape == (0, *full.shape[1:])
    y.backward()
    for each in layer.parameters():
        np.testing.assert_array_equal(each.grad, np.zeros(each.shape))
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what the layers hold is not finite
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "layer",
    [nn.Conv2D(3, 4, 3), nn.BatchNorm(3), nn.LayerNorm(6), nn.Dense(6, 2)],
    ids=lambda layer: type(layer).__name__,
)
def test_the_gradients_of_no_samples_are_zero_whatever_the_layer_holds(layer, value):
    state = {name: np.full_like(each, value) for name, each in layer.state_dict().items()}
    layer.load_state_dict(state)
    for is_training in (True, False):
        for each in layer.parameters():
            each.grad[...] = 7.0
        x = np.zeros((0, 6) if isinstance(layer, nn.Dense) else (0, 3, 6, 6), np.float32)
        with autograd.record(train_mode=is_training):
            y = layer(Tensor(x))
        y.backward()
        for each in layer.parameters():
            np.testing.assert_array_equal(each.grad, np.zeros(each.shape))
    for name, each in layer.state_dict().items():
        np.testing.assert_array_equal(each, state[name])


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("layer", [nn.ReLU(), nn.GELU(), nn.MaxPool2D(2, 1), nn.BatchNorm(1), nn.LayerNorm(2)])
def test_the_gradient_of_a_mean_of_one_element_or_none_goes_back(layer, n):
    """It can only be read, and is contiguous all the same."""
    x = Tensor(RNG.standard_normal((n, 1, 2, 2)).astype(np.float32))
    x.attach_grad()
    with autograd.record():
        y = layer(x)
        if y.size > 1:
            y = y[:, :, :1, :1]
        loss = y.mean(axis=(2, 3))
    loss.backward()
    assert x.grad.shape == (n, 1, 2, 2)
    assert n == 0 or np.isfinite(x.grad).all()


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: nn.Dense(10, None), {"operation": "Dense", "where": "out_features", "expected": 1, "got": None}),
        (lambda: nn.Dense("a", 3), {"operation": "Dense", "where": "in_features", "expected": 1, "got": "a"}),
        (lambda: nn.Conv2D(3, None, 3), {"operation": "Conv2D", "where": "out_channels", "expected": 1, "got": None}),
        (
            lambda: nn.Conv2D(3, 4, (1, 2, 3)),
            {"operation": "Conv2D", "where": "kernel_size", "expected": 1},
        ),
        (lambda: nn.Conv2D(3, 4, 3, stride=0), {"operation": "Conv2D", "where": "stride", "expected": 1, "got": 0}),
        (
            lambda: nn.Conv2D(3, 4, 3, padding=-1),
            {"operation": "Conv2D", "where": "padding", "expected": 0, "got": -1},
        ),
        (lambda: nn.MaxPool2D(0), {"operation": "MaxPool2D", "where": "kernel_size", "expected": 1}),
        (lambda: nn.MaxPool2D(True), {"operation": "MaxPool2D", "where": "kernel_size", "expected": 1, "got": True}),
        (lambda: nn.LayerNorm(4, eps="a"), {"operation": "LayerNorm", "where": "eps", "expected": 0, "got": "a"}),
        (
            lambda: nn.LayerNorm(4, eps=-1e-5),
            {"operation": "LayerNorm", "where": "eps", "expected": 0, "got": "-1e-05"},
        ),
        (
            lambda: nn.CausalSelfAttention("a", 2),
            {"operation": "CausalSelfAttention", "where": "width", "expected": 1, "got": "a"},
        ),
        (
            lambda: nn.CausalSelfAttention(4, 2.0),
            {"operation": "CausalSelfAttention", "where": "heads", "expected": 1, "got": 2.0},
        ),
        (lambda: nn.HybridConcurrent(axis=1.0), {"operation": "HybridConcurrent", "where": "axis", "got": 1.0}),
        (lambda: nn.LSTM(4, None), {"operation": "LSTM", "where": "size", "expected": 1, "got": None}),
        (lambda: nn.Embedding(None, 4), {"operation": "Embedding", "where": "num_tokens", "expected": 1, "got": None}),
        (lambda: nn.BatchNorm("a"), {"operation": "BatchNorm", "where": "channels", "expected": 1, "got": "a"}),
        (
            lambda: nn.BatchNorm(3, momentum=2),
            {"operation": "BatchNorm", "where": "momentum", "expected": "[0, 1]", "got": 2},
        ),
        (lambda: nn.BatchNorm(3, momentum="0.9"), {"operation": "BatchNorm", "where": "momentum", "got": "'0.9'"}),
        (lambda: nn.BatchNorm(3, eps=0), {"operation": "BatchNorm", "where": "eps", "expected": 0, "got": 0}),
        (lambda: nn.BatchNorm(3, eps=float("nan")), {"operation": "BatchNorm", "where": "eps", "got": "nan"}),
        (lambda: nn.LayerNorm(0), {"operation": "LayerNorm", "where": "features", "expected": 1, "got": 0}),
        (lambda: nn.Dropout("a"), {"operation": "Dropout", "where": "p", "expected": [0, 1], "got": "a"}),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(make, fields):
    with raises(ConfigError, **fields):
        make()


@pytest.mark.parametrize(
    "make", [lambda: nn.Dense(3, 4, activation="gelu"), lambda: nn.Conv2D(3, 4, 3, activation="gelu")]
)
def test_an_activation_that_is_none_is_refused_when_the_layer_is_made(make):
    with raises(UnsupportedError, operation="activation", expected=["relu", None], got="gelu"):
        make()


def test_sizes_may_be_numpys_integers():
    one, two, three = map(np.int64, (1, 2, 3))
    sides = nn.HybridConcurrent(nn.MaxPool2D(two), nn.AvgPool2D([two, 2], stride=two), axis=one)
    net = nn.Sequential(nn.Conv2D(three, two, (three, one), stride=two, padding=[one, 0]), sides)
    assert net[0](IMAGES).shape == (2, 2, 5, 4)
    assert net(IMAGES).shape == (2, 4, 2, 2)
    assert nn.models.lenet(np.array([3, 9, 8]), num_classes=two)(IMAGES).shape == (2, 2)
    assert nn.models.mlp(np.prod(IMAGES.shape[1:]), three)(IMAGES).shape == (2, 3)
