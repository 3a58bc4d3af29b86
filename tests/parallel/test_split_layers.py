"""Layers of which each rank has some channels compute what the unsplit ones do, on thread ranks and on real ones."""

import numpy as np
import pytest
import standin
from raises import raises
from split_networks import convolutions, mlp, normal, own, whole_numbers

import hpcdp
from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError
from hpcdp.parallel import ColumnConv2D, ColumnDense, RowConv2D, RowDense, functional

SHAPES = {mlp: (9, 6), convolutions: (5, 1, 8, 8)}


def through(net, x, gy):
    """Result, gradient of ``x``, and those of the parameters by name."""
    source = Tensor(x)
    source.attach_grad()
    with autograd.record():
        y = net(source)
    y.backward(gy)
    return y.data, source.grad, {name: param.grad for name, param in net.named_parameters()}


def compared(world, make, draw, check):
    rng = np.random.default_rng(7)
    x, gy = (draw(rng)(shape) for shape in (SHAPES[make], (SHAPES[make][0], 4)))
    split, whole = make(world, draw), make(None, draw)
    y, dx, gradients = through(split, x, gy)
    expected, dx_expected, whole_gradients = through(whole, x, gy)
    check(y, expected)
    check(dx, dx_expected)
    values = dict(whole.named_parameters())
    assert list(gradients) == list(whole_gradients)
    for name, param in split.named_parameters():
        np.testing.assert_array_equal(param.data, own(values[name].data, param))
        check(gradients[name], own(whole_gradients[name], param))
        assert param.data.base is None  # the rest of the weights is not held


@pytest.mark.parametrize("make", [mlp, convolutions])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_results_and_gradients_are_those_of_the_unsplit_network_to_the_bit_where_sums_are_exact(n, make):
    thread_comm.run(n, lambda world: compared(world, make, whole_numbers, np.testing.assert_array_equal))


@pytest.mark.parametrize("make", [mlp, convolutions])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_and_within_rounding_elsewhere(n, make):
    def check(found, expected):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)

    thread_comm.run(n, lambda world: compared(world, make, normal, check))


@pytest.mark.parametrize("make", [mlp, convolutions])
def test_on_a_device(make):
    def rank(world):
        net, x, gy = make(world), normal(8)(SHAPES[make]), normal(9)((SHAPES[make][0], 4))
        expected = through(net, x, gy)
        net.to(like=standin.asarray(x))
        found = through(net, standin.asarray(x), standin.asarray(gy))
        pairs = [
            *zip(found[:2], expected[:2], strict=True),
            *((found[2][name], expected[2][name]) for name in found[2]),
        ]
        for ours, values in pairs:
            np.testing.assert_allclose(ours.to_host(), values, rtol=1e-4, atol=1e-5)

    thread_comm.run(3, rank)


@pytest.mark.mpi
@pytest.mark.parametrize("make", [mlp, convolutions])
def test_on_real_ranks(make):
    world = hpcdp.init()
    if world.size > 4:
        pytest.skip("needs no more ranks than the smallest layer has features, 4")
    compared(world, make, whole_numbers, np.testing.assert_array_equal)


@pytest.mark.each_value
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("make", [mlp, convolutions])
def test_gradients_by_central_differences(n, make):
    """Each element of each rank's part in its turn, while all ranks compute."""

    def rank(world):
        net = make(world, lambda seed: normal(seed, "f8"))
        net.to("f8")
        x, gy = normal(8, "f8")((2, *SHAPES[make][1:])), normal(9, "f8")((2, 4))
        _, _, gradients = through(net, x, gy)
        params = dict(net.named_parameters())
        rng = np.random.default_rng(3)
        for name, param in params.items():
            for owner in range(n if param.cut is not None else 1):
                everywhere = param.cut is None
                flat = param.data.reshape(-1)
                (size,) = {each for at, each in enumerate(world.comm.allgather_json(flat.size)) if at == owner}
                for at in rng.choice(size, min(6, size), replace=False):
                    moves = everywhere or owner == world.rank
                    values = []
                    for step in (1e-6, -1e-6):
                        flat[at if moves else 0] += step * moves
                        values.append(float((net(x).data * gy).sum()))
                        flat[at if moves else 0] -= step * moves
                    if moves:
                        found = (values[0] - values[1]) / 2e-6
                        np.testing.assert_allclose(gradients[name].reshape(-1)[at], found, rtol=1e-4, atol=1e-7)

    thread_comm.run(n, rank)


def test_a_column_and_a_row_layer_exchange_once_forward_and_once_backward(monkeypatch):
    real, sizes = functional.collectives.allreduce, []

    def noted(x, op, world, out):
        sizes.append(x.shape)
        return real(x, op, world, out=out)

    monkeypatch.setattr(functional.collectives, "allreduce", noted)

    def rank(world):
        net = nn.Sequential(ColumnDense(6, 8, world), nn.Tanh(), RowDense(8, 4, world))
        through(net, np.ones((3, 6), "f4"), np.ones((3, 4), "f4"))

    thread_comm.run(2, rank)
    assert sorted(sizes) == [(3, 4), (3, 4), (3, 6), (3, 6)]


def test_an_open_number_of_inputs_is_settled_by_the_first_input():
    def rank(world):
        dense, conv = ColumnDense(None, 5, world, weight_init=normal(1)), ColumnConv2D(None, 5, 3, world)
        assert dense(np.ones((2, 7), "f4")).shape == (2, dense.weight.shape[1])
        whole = normal(1)((7, 5))
        np.testing.assert_array_equal(dense.weight.data, own(whole, dense.weight))
        assert conv(np.ones((2, 4, 3, 3), "f4")).shape[1] == conv.weight.shape[0] and conv.weight.cut.total == 5

    thread_comm.run(3, rank)


def test_empty_batches():
    def rank(world):
        net = convolutions(world)
        y, dx, gradients = through(net, np.empty((0, 1, 8, 8), "f4"), np.empty((0, 4), "f4"))
        assert y.shape == (0, 4) and dx.shape == (0, 1, 8, 8) and not any(each.any() for each in gradients.values())

    thread_comm.run(2, rank)


def test_it_says_what_it_is():
    def rank(world):
        column, row = ColumnDense(6, 10, world, activation="relu"), RowDense(10, 4, world, bias=False)
        return [repr(layer) for layer in (column, row, RowConv2D(3, 5, 3, world))]

    assert thread_comm.run(3, rank)[1] == [
        "ColumnDense(6, 3, activation='relu', part 1 of 3)", "RowDense(3, 4, bias=False, part 1 of 3)",
        "RowConv2D(1, 5, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), part 1 of 3)",
    ]  # fmt: skip


def test_a_network_with_such_layers_is_called_as_usual_where_it_is_hybridized():
    def rank(world):
        net, x = mlp(world), normal(4)((3, 6))
        before = net(x).data
        net.hybridize()
        np.testing.assert_array_equal(net(x).data, before)

    thread_comm.run(2, rank)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (
            lambda w: ColumnDense(6, 2, w),
            {"operation": "ColumnDense", "where": "out_features", "expected": 3, "got": 2},
        ),
        (lambda w: RowDense(2, 6, w), {"operation": "RowDense", "where": "in_features", "expected": 3, "got": 2}),
        (
            lambda w: RowDense(None, 6, w),
            {"operation": "RowDense", "where": "in_features", "expected": [3, "ranks"], "got": None},
        ),
        (
            lambda w: RowDense(10, 6, w, channels=4),
            {"operation": "RowDense", "where": "in_features", "expected": 4, "got": 10},
        ),
        (
            lambda w: ColumnConv2D(3, 2, 3, w),
            {"operation": "ColumnConv2D", "where": "out_channels", "expected": 3, "got": 2},
        ),
        (lambda w: RowConv2D(2, 3, 3, w), {"operation": "RowConv2D", "where": "in_channels", "expected": 3, "got": 2}),
        (
            lambda w: RowDense(None, 6, w, channels=3),
            {"operation": "RowDense", "where": "in_features", "expected": [3, "multiple"], "got": None},
        ),
        (
            lambda w: RowDense(12, None, w),
            {"operation": "RowDense", "where": "out_features", "expected": 1, "got": None},
        ),
        (
            lambda w: ColumnDense(-1, 4, w),
            {"operation": "ColumnDense", "where": "in_features", "expected": 1, "got": -1},
        ),
        (
            lambda w: ColumnDense(4, 4.5, w),
            {"operation": "ColumnDense", "where": "out_features", "expected": 1, "got": 4.5},
        ),
        (lambda w: RowConv2D(3, 4, 0, w), {"operation": "RowConv2D", "where": "kernel_size", "expected": 1}),
        (lambda w: ColumnConv2D(3, 4, 3, w, 0), {"operation": "ColumnConv2D", "where": "stride", "expected": 1}),
        (
            lambda w: ColumnDense(6, 6, 3),
            {"operation": "ColumnDense", "where": "parts", "expected": ["World", "split_world(...)"], "got": 3},
        ),
    ],
)
def test_sizes_that_cannot_be_split(make, fields):
    with raises(ConfigError, **fields):
        thread_comm.run(3, make)


def test_an_activation_that_there_is_not_is_refused_where_the_layer_is_made():
    with raises(UnsupportedError, operation="activation", expected=["relu", None], got="swish"):
        thread_comm.run(2, lambda world: ColumnDense(6, 8, world, activation="swish"))


def test_sizes_may_be_integers_of_numpy():
    def rank(world):
        two, six = np.int64(2), np.int32(6)
        dense = [ColumnDense(two, six, world), RowDense(six, two, world, channels=two)]
        convolutions = [ColumnConv2D(two, six, 3, world), RowConv2D(six, two, 3, world)]
        return [layer.weight.shape for layer in [*dense, *convolutions]]

    assert thread_comm.run(2, rank) == [[(2, 3), (3, 2), (3, 2, 3, 3), (2, 3, 3, 3)]] * 2


def test_ranks_that_disagree():
    with raises(MismatchError, operation="ColumnDense", where="item 1 of 1 on rank 0", got=[6, 9, "bias=True"]):
        thread_comm.run(2, lambda world: ColumnDense(6, 8 + world.rank, world))
    with pytest.raises(MismatchError):
        thread_comm.run(2, lambda world: RowDense(8, 5, world, scatter=True)(np.ones((3 + world.rank, 8), "f4")))


def test_inputs_of_other_sizes():
    def rank(world):
        with raises(
            UnsupportedError,
            operation="forward",
            where=f"RowDense(5, 4, part {world.local_rank} of 2)",
            expected="(batch, 5)",
            got=(3, 10),
        ):
            RowDense(10, 4, world)(np.ones((3, 10), "f4"))
        with raises(UnsupportedError, operation="own_channels", expected=[10, -1], got=(3, 9)):
            RowDense(10, 4, world, scatter=True)(np.ones((3, 9), "f4"))
        with raises(UnsupportedError, operation="own_channels", expected=[4, 1]):
            RowConv2D(4, 4, 3, world, scatter=True)(np.ones((3, 3, 8, 8), "f4"))
        with raises(UnsupportedError, operation="activation", expected=["relu", None]):
            RowDense(10, 4, world, activation="gelu")(np.ones((3, 5), "f4"))

    thread_comm.run(2, rank)
