"""Copies of a network on GPUs compute where they are, forward and backward, whatever GPU is current.

On the stand-in, which refuses what is computed on one GPU with arrays of another.
"""

import contextlib

import numpy as np
import pytest
from gpu_on_host import streams as gpu_streams
from raises import raises

from hpcdp import autograd, data, nn
from hpcdp.autograd import on_tape
from hpcdp.core.arrays import Device, Streams, gpu
from hpcdp.errors import ArrayMixError
from hpcdp.nn.functional import softmax_cross_entropy

RNG = np.random.default_rng(5)
X, Y = RNG.standard_normal((12, 6)).astype(np.float32), RNG.integers(0, 4, 12)
GPUS = [gpu(1), gpu(2), gpu(3)]


def network():
    start = nn.init.Xavier(seed=1)
    first, last = nn.Dense(6, 8, activation="relu", weight_init=start), nn.Dense(8, 4, weight_init=start)
    return nn.Sequential(first, nn.BatchNorm(8), nn.Dropout(0.0), last)


def gradients(net):
    return [each.grad if isinstance(each.grad, np.ndarray) else each.grad.to_host() for each in net.parameters()]


def on_the_host(pieces):
    """Losses and gradients of as many pieces, each with statistics of its own."""
    net = network()
    with autograd.record():
        losses = [
            softmax_cross_entropy(net(x), y) for x, y in zip(np.split(X, pieces), np.split(Y, pieces), strict=True)
        ]
    autograd.backward(losses)
    return np.concatenate([each.data for each in losses]), gradients(net)


@pytest.mark.parametrize("current", [1, 3])
def test_a_batch_is_computed_in_pieces_on_all_of_them(gpus_on_host, current):
    net = network().to(GPUS[0])
    replicas = nn.Replicas(net, GPUS)
    gpu(current).use()
    with autograd.record():
        losses = softmax_cross_entropy(replicas(GPUS[0].put(X)), GPUS[0].put(Y))
    losses.backward()
    expected, expected_gradients = on_the_host(3)
    assert Device.of(losses.data) == GPUS[0]
    np.testing.assert_allclose(losses.data.to_host(), expected, rtol=1e-5, atol=1e-6)
    for param, mine, wanted in zip(net.parameters(), gradients(net), expected_gradients, strict=True):
        assert Device.of(param.grad) == GPUS[0]
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [1, 2])
def test_results_of_less_samples_than_gpus_are_on_the_first(gpus_on_host, samples):
    gpu(1).use()
    replicas = nn.Replicas(network().to(GPUS[0]), GPUS)
    found = replicas(GPUS[0].put(X[:samples]))
    assert Device.of(found.data) == GPUS[0]
    np.testing.assert_allclose(found.data.to_host(), network()(X[:samples]).data, rtol=1e-5, atol=1e-6)


class Meets(nn.Module):
    """Computes on its GPU until others have come as far, forward or back."""

    def __init__(self, gpus, until):
        self.weight = nn.Parameter(np.ones((2, 6), np.float32))
        self.gpus, self.until, self.come = gpus, until, set()

    def meet(self, way):
        here = way, self.gpus.current()
        awaited = self.until.get(here)
        self.gpus.push(0, lambda: self.come.add(here), lambda: awaited is None or awaited in self.come)

    def forward(self, x):
        y = x + self.weight
        self.meet("forward")

        def pullback(gy, dx):
            self.meet("back")
            dx.add(gy)

        return on_tape(y.data, (y,), pullback)


def test_gpus_compute_their_pieces_side_by_side(gpus_on_host, monkeypatch):
    monkeypatch.setattr(gpu_streams, "LIMIT_S", 3.0)
    gpu(1).use()
    until = {("forward", 1): ("forward", 2), ("back", 2): ("back", 1)}
    net = Meets(gpus_on_host, until).to(GPUS[0])
    x = GPUS[0].put(X[:4])
    with autograd.record():
        y = nn.Replicas(net, GPUS[:2])(x)
    y.backward()
    np.testing.assert_array_equal(y.data.to_host(), X[:4] + 1)
    np.testing.assert_array_equal(net.weight.grad.to_host(), np.full((2, 6), 2))


def test_pieces_and_losses_of_a_program_are_where_their_operands_are(gpus_on_host):
    net = network().to(GPUS[0])
    replicas = nn.Replicas(net, GPUS)
    gpu(1).use()
    with Streams(gpu(1)).stream():  # late, as those of the others are not
        xs, ys = (data.split_and_load(each, GPUS) for each in (X, Y))
        with autograd.record():
            losses = [softmax_cross_entropy(replicas.on(d)(x), y) for d, x, y in zip(GPUS, xs, ys, strict=True)]
        assert [Device.of(each.data) for each in losses] == GPUS
        autograd.backward(losses)
        found = gradients(net)
    for mine, wanted in zip(found, on_the_host(3)[1], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)


def test_what_tensors_do_is_done_where_they_are(gpus_on_host):
    gpu(1).use()
    x = autograd.Tensor(gpu(2).put(X))
    x.attach_grad()
    with autograd.record():
        y = (x * 2).sum() + x[1:].mean()
    y.backward()
    assert {Device.of(each) for each in (y.data, x.grad, *autograd_grads(x))} == {gpu(2)}
    x -= 0.5
    x[0] = 1.0
    assert x.data.to_host()[1, 1] == X[1, 1] - np.float32(0.5) and x.data.to_host()[0, 0] == 1


def test_operators_compute_on_a_gpu_that_not_the_first_operand_is_on(gpus_on_host):
    gpu(1).use()
    x = autograd.Tensor(gpu(2).put(X))
    embedding = nn.Embedding(9, 4).to(gpu(2))
    with autograd.record():
        results = [np.float32(0.5) * x, np.float32(2) - x, embedding(Y)]
    assert {Device.of(each.data) for each in results} == {gpu(2)}
    np.testing.assert_array_equal(results[1].asnumpy(), 2 - X)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_operands_on_several_devices_are_refused_by_name(gpus_on_host, asynchronous):
    def losses(net, x, y):
        return softmax_cross_entropy(net(x), y)

    net, dense = nn.Sequential(nn.Dense(6, 4)).to(gpu(2)), nn.Dense(6, 4).to(gpu(2))
    x, there = X, autograd.Tensor(gpu(2).put(X))
    wrong = {
        ("dense", "gpu(1)"): lambda: dense(gpu(1).put(X)),
        ("softmax_cross_entropy", "gpu(1)"): lambda: losses(net, gpu(2).put(X), gpu(1).put(Y)),
        ("dense", "host"): lambda: dense(X),
        ("add", "host"): lambda: there + x,
        ("subtract", "host"): lambda: x - there,
        ("compare", "host"): lambda: there == x,
        ("where", "host"): lambda: autograd.where(x > 0, there, there),
    }
    for (operation, other), call in wrong.items():
        how = autograd.asynchronous() if asynchronous else contextlib.nullcontext()
        with raises(ArrayMixError, operation=operation, got=[other, "gpu(2)"]), how:
            call()


@pytest.mark.parametrize("of", [list, np.array, lambda seed: gpu(1).put(np.array(seed))], ids=["list", "host", "other"])
def test_the_gradient_of_a_head_comes_to_where_that_is(gpus_on_host, of):
    x = autograd.Tensor(gpu(2).put(X[0]))
    x.attach_grad()
    with autograd.record():
        y = x * 2
    seed = np.arange(6, dtype=np.float32)
    y.backward(of(seed.tolist()) if of is list else of(seed))
    np.testing.assert_array_equal(x.grad.to_host(), 2 * seed)


def test_values_that_are_written_come_to_where_the_tensor_is(gpus_on_host):
    gpu(1).use()
    there, here = autograd.Tensor(gpu(2).put(X)), autograd.Tensor(X.copy())
    for number, values in enumerate([X[0] + 1, (X[1] + 1).tolist(), gpu(0).put(X[2] + 1), gpu(1).put(X[3] + 1)]):
        there[number] = values
        here[number] = autograd.Tensor(values)
    for found in (there, here):
        np.testing.assert_array_equal(found.asnumpy()[:4], X[:4] + 1)
        np.testing.assert_array_equal(found.asnumpy()[4:], X[4:])
    assert Device.of(there.data) == gpu(2) and type(here.data) is np.ndarray


def test_a_network_is_cast_and_loaded_where_it_is(gpus_on_host):
    gpu(1).use()
    net, other = network().to(gpu(2)), network()
    other.load_state_dict({name: each + 1 for name, each in other.state_dict().items()})
    net.to("float16").load_state_dict(other.to("float16").state_dict())
    for name, found in net.state_dict().items():
        assert Device.of(found) == gpu(2)
        np.testing.assert_array_equal(found.to_host(), other.state_dict()[name])


def test_what_is_read_was_computed_by_the_stream_of_its_gpu(gpus_on_host):
    """CuPy reads by the one that is current on the current GPU."""
    x = autograd.Tensor(gpu(2).put(X))
    with Streams(gpu(0)).stream():
        y = x + x
        np.testing.assert_array_equal(y.asnumpy(), 2 * X)


def test_what_heads_are_given_is_added_up_where_they_are(gpus_on_host):
    gpu(1).use()
    x = autograd.Tensor(gpu(2).put(X))
    x.attach_grad("add")
    with autograd.record():
        y = x * 2
    autograd.backward([y, y, x])
    np.testing.assert_array_equal(x.grad.to_host(), np.full_like(X, 5))


def autograd_grads(x):
    with autograd.record():
        y, z = x * 3, x * 1
    return autograd.grad(y, [x, x, y], retain_graph=True) + autograd.grad(z, [x])
