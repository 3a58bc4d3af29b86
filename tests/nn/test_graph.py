"""What a graph says of itself: a table, a drawing; what rewriting leaves of it; how much memory a plan needs."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn
from hpcdp.errors import ConfigError
from hpcdp.nn.jit.executor import Plan
from hpcdp.nn.jit.graph import rewritten


def zeros(*shape):
    return np.zeros(shape, np.float32)


def graph_of(net, *inputs):
    net.hybridize()
    net(*inputs)
    return net.graph()


def test_a_summary_counts_operations_parameters_and_bytes():
    graph = graph_of(nn.models.lenet(), zeros(2, 1, 28, 28))
    lines = graph.summary().splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["operation", "reads", "shape", "parameters", "bytes"],
        ["input", "0", "2x1x28x28", "6,272"],
    ]
    assert lines[2].split() == [
        "0",
        "conv2d",
        "+",
        "relu,",
        "stride",
        "1x1",
        "input",
        "0,",
        "2x20x26x26",
        "200",
        "108,160",
    ]
    assert lines[3].split() == ["0.weight,", "0.bias"]
    assert lines[-1] == "7 operations, 129,068 parameters, 181,504 bytes of results; returns 6"
    tied = nn.Dense(3, 3)
    assert "12 parameters" in graph_of(nn.Sequential(tied, nn.Tanh(), tied), zeros(1, 3)).summary()


@pytest.mark.parametrize("make", [
    lambda: (nn.models.resnet18((1, 32, 32)), zeros(2, 1, 32, 32)),
    lambda: (nn.models.gpt((5,), 7, width=12, heads=3, layers=2), zeros(2, 4).astype(int)),
])  # fmt: skip
def test_a_summary_fits_into_80_columns_and_has_every_name(make):
    net, x = make()
    graph = graph_of(net, x)
    text = graph.summary()
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.split(r"[\s,]+|(?<=\.)", text))
    assert {part for name in graph.names for part in re.split(r"(?<=\.)", name)} <= words


@pytest.mark.parametrize("ending", ["svg", pytest.param("png", marks=pytest.mark.thorough)])
def test_a_drawing_shows_every_operation(ending, tmp_path):
    net = nn.models.resnet18((1, 4, 4))
    path = tmp_path / f"net.{ending}"
    graph = graph_of(net, zeros(1, 1, 4, 4))
    graph.draw(path)
    if ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    root = ElementTree.parse(path).getroot()
    boxes = [each for each in root.iter() if str(each.get("id", "")).startswith("patch_")]
    assert len(boxes) >= len(graph.nodes) + 1
    with raises(ConfigError, operation="draw", where=tmp_path / "absent/net.svg"):
        graph.draw(tmp_path / "absent" / "net.svg")


def operators(graph):
    return [node.operator + "+relu" * (node.attributes.get("activation") == "relu") for node in graph.nodes]


@pytest.mark.parametrize("name", ["graph.xyz", "graph"])
def test_a_drawing_of_another_kind_is_refused(name, tmp_path):
    net = nn.Sequential(nn.Dense(4, 3))
    net.hybridize()
    net(np.ones((2, 4), np.float32))
    with raises(ConfigError, operation="draw", where="path", got="graph"):
        net.graph().draw(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_activations_join_what_they_follow_alone():
    net = nn.Sequential(nn.Conv2D(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dense(8, 3), nn.ReLU(), nn.ReLU())
    graph = graph_of(net, zeros(1, 1, 4, 4))
    assert operators(graph) == ["conv2d", "relu", "reshape", "dense", "relu", "relu"]
    assert operators(rewritten(graph)) == ["conv2d+relu", "reshape", "dense+relu", "relu"]

    class Both(nn.Module):
        def __init__(self):
            self.layer = nn.Dense(3, 3)

        def forward(self, x):
            y = self.layer(x)
            return y + nn.functional.relu(y)

    assert operators(rewritten(graph_of(Both(), zeros(1, 3)))) == ["dense", "relu", "add"]


class Products(nn.Module):
    """Products with and without what can be added to them in place."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.weight, self.bias = (nn.Parameter(rng.standard_normal(s).astype(np.float32)) for s in ((4, 4), (4,)))
        self.row, self.wide = nn.Parameter(zeros(1, 4) + 1), nn.Parameter(zeros(4) + 0.5)
        self.table = rng.standard_normal((3, 4, 4)).astype(np.float32)

    def forward(self, x):
        x = nn.functional.relu(x @ self.weight + self.bias)  # affine + relu
        x = self.wide + x @ self.table  # affine of a stack of matrices
        x = (x @ self.weight + self.bias).tanh() * 0.5  # affine, which goes on as a chain
        y = x @ self.weight
        z = x * 2  # another operator between
        z = z + (y + self.bias)
        two = z @ self.weight
        return two + self.bias + two.sum(), z[0, 0] @ self.weight + self.bias, z @ self.weight + self.row


@pytest.mark.parametrize("shape", [(5, 4), (3, 1, 4), (3, 5, 4)])
def test_biases_join_products_to_the_same_bits(shape):
    net, plain = Products(), Products()
    graph = graph_of(net, zeros(*shape))
    joined = ["affine+relu", "affine", "affine", "tanh", "multiply", "matmul", "multiply", "add", "add", "matmul",
              "add", "sum", "add", "getitem", "affine", "matmul", "add"]  # fmt: skip
    assert operators(rewritten(graph)) == joined
    for seed in range(4):
        found = []
        for each in (net, plain):
            x = autograd.Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
            x.attach_grad()
            hooks = []
            for param in each.parameters():
                param.grad_hook = lambda param, hooks=hooks: hooks.append(param.name)
            with autograd.record():
                results = each(x)
                heads = [each.transpose() for each in results]
            autograd.backward(heads)
            found.append([*(each.data for each in (*results, *each(x))), x.grad, np.array(hooks)])
            found[-1] += [param.grad for param in each.parameters()]
        for own, other in zip(*found, strict=True):
            np.testing.assert_array_equal(own, other)


def test_a_bias_of_another_dtype_is_added_as_usual():
    class Mixed(nn.Module):
        def __init__(self):
            self.weight, self.bias = nn.Parameter(zeros(4, 4) + 0.1), nn.Parameter(np.full(4, 0.1))

        def forward(self, x):
            return x @ self.weight + self.bias

    net = Mixed()
    assert operators(rewritten(graph_of(net, zeros(2, 4)))) == ["matmul", "add"]
    assert net(zeros(2, 4) + 1).dtype == np.float64


def test_what_nobody_needs_is_left_out():
    class Wasteful(nn.Module):
        def forward(self, x):
            (x * 2).exp().sum()
            return x + 1

    assert operators(graph_of(Wasteful(), zeros(2))) == ["add"]


def test_memory_is_used_again_when_its_last_reader_is_done():
    net = nn.Sequential(*[nn.Tanh() for _ in range(20)])
    x = autograd.Tensor(np.random.default_rng(0).standard_normal((50, 50)).astype(np.float32))
    graph = graph_of(net, x)
    plan, kept = Plan(graph, [x], False), Plan(graph, [x], True)
    assert plan.nbytes == 2 * x.data.nbytes  # the input's copy, and a result that is written over and over
    assert kept.nbytes == 21 * x.data.nbytes
    np.testing.assert_array_equal(plan.first([x]).data, kept.first([x]).data)
    pools = nn.Sequential(*[nn.AvgPool2D(3, 1, 1) for _ in range(20)])
    x = autograd.Tensor(zeros(2, 3, 20, 20))
    assert Plan(graph_of(pools, x), [x], False).nbytes == 3 * x.data.nbytes  # what is read is not written over


class Chain(nn.Module):
    """Elementwise operations on whole arrays, rows, columns and numbers, some of them read again later."""

    def __init__(self, shape):
        rng = np.random.default_rng(1)
        self.row = autograd.Tensor(rng.standard_normal(shape[-1]).astype(np.float32))
        self.column = autograd.Tensor(rng.standard_normal((*shape[-3:-1], 1)).astype(np.float32))

    def forward(self, x, y):
        a = x * 0.5 + y
        b = autograd.maximum(a - self.row, -1.5)
        c = abs(b * self.column) + 0.25
        d = (c.sqrt() - a) / (c + 1)
        return nn.functional.relu(-d) * b, autograd.minimum(d, y)


@pytest.mark.parametrize("shape", [(3, 9, 31, 33), (1, 1, 50, 70)])
def test_chains_that_write_over_what_they_read_are_the_same_bits(shape):
    net, plain = Chain(shape), Chain(shape)
    net.hybridize()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x, y = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        for own, other in zip(net(x, y), plain(x, y), strict=True):
            np.testing.assert_array_equal(own.data.view(np.uint32), other.data.view(np.uint32))


def test_results_that_are_read_late_or_through_views_are_kept():
    class Late(nn.Module):
        def forward(self, x):
            first = x * 2
            view = first.reshape(-1).reshape(*x.shape).T.T
            y = x
            for _ in range(6):
                y = (y + 1).tanh()
            return y + view, first

    net, plain = Late(), Late()
    net.hybridize()
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((30, 40)).astype(np.float32)
        for own, other in zip(net(x), plain(x), strict=True):
            np.testing.assert_array_equal(own.data, other.data)


def test_modules_side_by_side():
    net = nn.HybridConcurrent(nn.Dense(4, 3), nn.Sequential(nn.Dense(4, 2), nn.Tanh()))
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    expected = np.concatenate([part(x).data for _, part in net.children()], axis=1)
    net.hybridize()
    for _ in range(3):
        np.testing.assert_array_equal(net(x).data, expected)
    assert nn.HybridConcurrent(nn.Dense(4, 3), nn.Dense(4, 3), axis=0)(x).shape == (10, 3)
    with raises(ConfigError, operation="HybridConcurrent", where="axis", got="x"):
        nn.HybridConcurrent(nn.Dense(4, 3), axis="x")
