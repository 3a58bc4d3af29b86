"""A hybridized network on a GPU, or on `graphs_on_host`: its replays are what it does without a plan."""

import warnings

import numpy as np
import pytest
from graph_checks import arrays, needs_compiler, on_gpu, same
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.core.arrays import to_host
from hpcdp.errors import DataError
from hpcdp.kernels.cuda import Capturer
from hpcdp.train.trainer import Trainer

F = nn.functional
STEPS = 4
"""Traced, captured with its backward run once, backward captured, replayed."""
pytestmark = needs_compiler


class Branches(nn.Module):
    """Several results, a parameter used twice, one without its gradient, parts, and what is not recorded."""

    def __init__(self):
        self.weight = nn.Parameter(arrays(6, 6))
        self.bias = nn.Parameter(arrays(6))
        self.offset = Tensor(arrays(6, seed=4))

    def forward(self, x):
        h = (x @ self.weight + self.bias).tanh()
        h = autograd.where(h > 0.1, h * 2, F.relu(h @ self.weight) - self.offset)
        detached = h[:, 3:] * self.bias[3:].detach()
        parts = autograd.concatenate([h[:, :2], detached, x.max(axis=1, keepdims=True)], axis=1)
        with autograd.pause():
            unrecorded = h.sigmoid()
        return F.softmax(parts), (h.detach() + unrecorded - h.min(axis=0)).mean(), parts * 2


class WithLoss(nn.Module):
    """A network and its loss: forward and backward are a graph each."""

    def __init__(self, net):
        self.net = net

    def forward(self, x, labels):
        return F.softmax_cross_entropy(self.net(x), labels)


NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(nn.Dense(6, 1), nn.BatchNorm(1), nn.Dropout(0.4, 3), nn.Dense(1, 4)),
        (5, 6),
    ),
    "lenet": (lambda: nn.models.lenet((1, 12, 12)), (2, 1, 12, 12)),
    "max pool": (lambda: nn.Sequential(nn.Conv2D(2, 3, 3, 2, 1), nn.ReLU(), nn.MaxPool2D(2)), (2, 2, 7, 7)),
    "branches": (Branches, (4, 6)),
    "lstm": (lambda: nn.Sequential(nn.LSTM(3, 4), nn.LayerNorm(4), nn.Dense(4, 2)), (2, 5, 3)),
}  # fmt: skip


def made(build):
    """Two networks on the GPU with the same parameters."""
    import cupy

    nets = [build(), build()]
    for net in nets:
        for number, param in enumerate(net.parameters()):
            param.data[...] = arrays(*param.shape, seed=number) / 4
        net.to(like=cupy.zeros((1,), dtype=np.float32))
    nets[0].hybridize()
    return nets


def listed(found):
    return list(found) if isinstance(found, (tuple, list)) else [found]


def same_networks(net, plain):
    for (name, own), (_, other) in zip(net._tensors(), plain._tensors(), strict=True):
        assert name
        same(own.data, other.data)
        if own.grad is not None:
            same(own.grad, other.grad)


def called(net, x, seed=0, outputs=None):
    """What a recorded call gives, the gradient of its input, and other parameters from then on.

    Args:
        outputs: the numbers of those that backward begins from, None for all.
    """
    x = Tensor(on_gpu(x))
    x.attach_grad()
    with autograd.record():
        results = listed(net(x))
    chosen = [each for i, each in enumerate(results) if outputs is None or i in outputs]
    autograd.backward(chosen, [on_gpu(arrays(*each.shape, seed=seed + i)) for i, each in enumerate(chosen)])
    for param in net.parameters():
        param.data[...] = param.data - 0.01 * param.grad
    return [*(each.data for each in results), x.grad]


def compare(net, plain, *args, **kwargs):
    for own, other in zip(called(net, *args, **kwargs), called(plain, *args, **kwargs), strict=True):
        same(own, other)
    same_networks(net, plain)


@pytest.mark.parametrize("name", NETWORKS)
def test_replays_are_the_network_itself(gpu, name):
    build, shape = NETWORKS[name]
    net, plain = made(build)
    for number in range(STEPS):
        compare(net, plain, arrays(*shape, seed=number), number)
        y = on_gpu(arrays(*shape, seed=10 + number))
        for own, other in zip(listed(net(y)), listed(plain(y)), strict=True):
            same(own.data, other.data)
    assert len(gpu.launches) == 3 + 2 + 3  # recorded forwards, backwards and predictions


def test_tokens_stay_on_the_host(gpu):
    net, plain = made(lambda: nn.models.gpt((6,), 11, width=8, heads=2, layers=1))
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, 11, (2, 6))
        for each in (net, plain):
            with autograd.record():
                loss = F.softmax_cross_entropy(each(tokens), tokens)
            loss.backward()
        same_networks(net, plain)
    assert len(gpu.launches) == 3 + 2
    with autograd.record(), raises(DataError, operation="embedding", where="tokens", expected=[0, 10], got=[0, 11]):
        net(np.where(tokens == tokens.max(), 11, 0))


def test_dropout_draws_anew_in_each_replay(gpu):
    net, _ = made(lambda: nn.Sequential(nn.Dense(4, 40), nn.Dropout(0.5, 1)))
    x, seen = on_gpu(arrays(3, 4)), set()
    for _ in range(STEPS):
        with autograd.record():
            seen.add(net(x).asnumpy().tobytes())
    assert len(seen) == STEPS and len(gpu.launches) == STEPS - 1


@pytest.mark.parametrize("host", ["labels", "nothing"])
def test_a_step_with_its_loss_under_a_trainer(gpu, host):
    nets = made(lambda: WithLoss(nn.Sequential(nn.Dense(4, 6, activation="relu"), nn.Dense(6, 3))))
    rng = np.random.default_rng(0)
    schedule = optim.StepSchedule(0.1, every=2, factor=0.5)
    trainers = [Trainer(net.parameters(), optim.AdamW(lr=schedule), clip_norm=1.0) for net in nets]
    for number in range(STEPS + 1):
        x, labels = rng.standard_normal((5, 4)).astype("f4"), rng.integers(0, 3, 5)
        losses = []
        for net, trainer in zip(nets, trainers, strict=True):
            for _ in range(2 if number > 1 else 1):  # gradients of two batches are added up
                with trainer.no_sync():
                    with autograd.record():
                        loss = net(on_gpu(x), labels if host == "labels" else on_gpu(labels))
                    loss.backward()
                    trainer.step(len(x))
            with autograd.record():
                loss = net(on_gpu(x), labels if host == "labels" else on_gpu(labels))
            loss.backward()
            trainer.step(len(x))
            losses.append(loss.data)
        same(*losses)
        same_networks(*nets)
    assert gpu.launches


def test_other_shapes_have_graphs_of_their_own(gpu):
    net, plain = made(lambda: nn.Sequential(nn.Dense(6, 5), nn.Tanh()))
    for number in range(3 * STEPS):
        compare(net, plain, arrays(2 + number % 3, 6, seed=number), number)
    assert len(gpu.launches) == 3 * (3 + 2)


def test_new_arrays_are_captured_again(gpu):
    net, plain = made(Branches)
    for number in range(6 * STEPS):
        for each in (net, plain):
            if number == STEPS:
                each.weight.data = each.weight.data + 1
            if number == 2 * STEPS:
                each.weight.grad = on_gpu(np.zeros(each.weight.shape, np.float32))
            if number == 3 * STEPS:
                each.bias.attach_grad("add")
            if number in (0, 4 * STEPS):
                each.bias.attach_grad("null")
                each.bias.grad = on_gpu(np.zeros(each.bias.shape, np.float32))
            if number == 5 * STEPS:
                each.offset.data = each.offset.data * 2
        compare(net, plain, arrays(4, 6, seed=number), number)
    assert len(gpu.launches) == 23 + 2 + 5 * 3


def test_calls_before_the_backward_of_others(gpu):
    net, plain = made(lambda: nn.Sequential(nn.Dense(6, 5), nn.Tanh(), nn.Dense(5, 2)))
    for number in range(STEPS):
        found = []
        for each in (net, plain):
            with autograd.record():
                first, second = (each(on_gpu(arrays(3, 6, seed=2 * number + i))) for i in range(2))
            predicted = each(on_gpu(arrays(3, 6, seed=number)))
            second.backward(on_gpu(arrays(3, 2, seed=number)), retain_graph=True)
            grads = [param.grad.copy() for param in each.parameters()]
            second.backward(on_gpu(arrays(3, 2, seed=number + 1)))
            grads += [param.grad.copy() for param in each.parameters()]
            first.backward()
            grads += [param.grad.copy() for param in each.parameters()]
            found.append([first.data, second.data, predicted.data, *grads])
        for own, other in zip(*found, strict=True):
            same(own, other)


def test_results_are_not_overwritten(gpu):
    net, plain = made(lambda: nn.Sequential(nn.Dense(6, 5), nn.ReLU()))
    inputs = [on_gpu(arrays(3, 6, seed=number)) for number in range(STEPS)]
    for own, x in [(net(x), x) for x in inputs]:
        same(own.data, plain(x).data)


def test_some_outputs_and_some_gradients(gpu):
    net, plain = made(Branches)
    for number in range(2 * STEPS):
        compare(net, plain, arrays(4, 6, seed=number), number, outputs=(0, 2) if number % 2 else (1,))
    x = arrays(4, 6)
    for number in range(STEPS):
        found = []
        for each in (net, plain):
            with autograd.record():
                results = each(on_gpu(x + number))
            found.append(autograd.grad(results[0], [each.weight], on_gpu(arrays(4, 6, seed=number))))
        same(found[0][0], found[1][0])


class TwoHeads(nn.Module):
    def __init__(self):
        self.left, self.right = nn.Dense(6, 5), nn.Dense(6, 5)

    def forward(self, x):
        return self.left(x), self.right(x)


def test_a_backward_that_may_not_reach_all_parameters_has_no_graph(gpu):
    net, plain = made(TwoHeads)
    for number in range(STEPS):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compare(net, plain, arrays(3, 6, seed=number), number, outputs=(number % 2,))
            assert ["outputs that all depend on the same" in str(each.message) for each in told] == [True] * (
                number == 1
            )
    before = len(gpu.launches)
    for _ in range(2):
        same(net(on_gpu(arrays(3, 6)))[1].data, plain(on_gpu(arrays(3, 6)))[1].data)
    assert before == 0 and len(gpu.launches) == 1


def test_a_part_of_a_network(gpu):
    """Its input has other readers, whose gradients are added in the order of the tape, and it is called twice."""

    class Around(nn.Module):
        def __init__(self, part):
            self.part = part

        def forward(self, x):
            h = x * 3
            y = h + self.part(h) * h
            return y + self.part(h + 1) if twice else y

    parts = made(lambda: nn.Sequential(nn.Dense(5, 5), nn.Tanh()))
    net, plain = map(Around, parts)
    for number in range(3 * STEPS):
        twice = number // 2 % 2 == 1  # so gradients are written by one call, and added to by the other
        compare(net, plain, arrays(3, 5, seed=number), number)
    assert gpu.launches


def test_hooks_come_in_the_order_of_the_tape(gpu):
    nets, told = made(lambda: nn.models.mlp(6, 3, (5, 4))), []
    for net in nets:
        for param in net.parameters():
            param.grad_hook = lambda param: told.append((param.name, to_host(param.grad).copy()))
    for number in range(STEPS):
        told.clear()
        compare(*nets, arrays(3, 6, seed=number), number)
        assert len(told) == 12
        for (name, grad), (other_name, other_grad) in zip(told[:6], told[6:], strict=True):
            assert name == other_name
            same(grad, other_grad)


def test_another_stream_has_graphs_of_its_own(gpu):
    import cupy

    net, plain = made(lambda: nn.Dense(6, 5))
    x = on_gpu(arrays(3, 6))
    for _ in range(2):
        net(x)
    before = len(gpu.graphs)
    with cupy.cuda.Stream(non_blocking=True):
        same(net(x).data, plain(x).data)
        assert len(gpu.graphs) == before + 1
        net(x)
    net(x)
    assert len(gpu.graphs) == before + 1


class TakesRows(nn.Module):
    def forward(self, x):
        return x[[2, 0]]


class JoinsMany(nn.Module):
    def forward(self, x):
        return autograd.stack([x] * 9)


@pytest.mark.parametrize(("network", "operator"), [(TakesRows, "getitem"), (JoinsMany, "concatenate")])
def test_what_cannot_be_captured_goes_without_and_says_why(gpu, network, operator):
    net, plain = made(network)
    x = on_gpu(arrays(3, 6))
    net(x)
    with pytest.warns(RuntimeWarning) as told:
        found = net(x)
    assert [str(each.message) for each in told] == [
        f"hybridize: {network.__name__} runs without a CUDA graph; CUDA graph [{operator}]: expected "
        "kernel launches that do not wait for the GPU, got RuntimeError: the current stream is capturing, so H2D "
        "transfers are disallowed"
    ]
    same(found.data, plain(x).data)
    same(net(x).data, plain(x).data)
    assert not gpu.launches and not gpu.graphs


@pytest.mark.parametrize("part", ["forward", "plan"])
def test_without_memory_for_a_graph_it_goes_without(gpu, monkeypatch, part):
    def refuses(*_):
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    net, plain = made(lambda: nn.Sequential(nn.Dense(6, 5), nn.BatchNorm(5)))
    compare(net, plain, arrays(3, 6))
    monkeypatch.setattr(Capturer, "capture" if part == "forward" else "__init__", refuses)
    with pytest.warns(RuntimeWarning, match="Sequential runs without a CUDA graph; RuntimeError: cudaErrorMemoryAll"):
        compare(net, plain, arrays(3, 6, seed=1), 1)
    compare(net, plain, arrays(3, 6, seed=2), 2)
    assert not gpu.launches


def test_a_backward_that_cannot_be_captured(gpu, monkeypatch):
    net, plain = made(lambda: nn.Sequential(nn.Dense(6, 5), nn.Dense(5, 2)))
    for number in range(2):
        compare(net, plain, arrays(3, 6, seed=number), number)
    product = F.product

    def reads(a, b, out):
        float(a[0, 0])
        return product(a, b, out)

    monkeypatch.setattr(F, "product", reads)
    with pytest.warns(RuntimeWarning, match="backward runs without a CUDA graph; RuntimeError: the current stream is"):
        compare(net, plain, arrays(3, 6, seed=2), 2)
    compare(net, plain, arrays(3, 6, seed=3), 3)
    assert len(gpu.launches) == 3


def test_values_that_forward_needs_are_refused_as_on_a_cpu(gpu):
    class Chooses(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter(arrays(6))

        def forward(self, x):
            return x * self.weight if x.sum() > 0 else x

    net, _ = made(Chooses)
    with raises(Exception, operation="trace", got="bool(tensor)"):
        net(on_gpu(arrays(3, 6)))


def test_without_cublas_it_goes_without(gpu, monkeypatch):
    import ctypes

    from hpcdp.kernels import cuda

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    net, plain = made(lambda: nn.Dense(6, 5))
    x = on_gpu(arrays(3, 6))
    monkeypatch.setattr(cuda._here, "cublas", {})
    monkeypatch.setattr(ctypes, "CDLL", missing)
    same(net(x).data, plain(x).data)
    with pytest.warns(
        RuntimeWarning, match=r"products\]: expected CuPy's cuBLAS, got libcublas.so.1[0-9]: cannot open"
    ):
        same(net(x).data, plain(x).data)
    same(net(x).data, plain(x).data)


def test_an_export_is_that_of_a_cpu(gpu, tmp_path):
    net, _ = made(lambda: nn.Sequential(nn.Dense(6, 5, activation="relu"), nn.Dense(5, 2)))
    x = arrays(3, 6)
    wanted = net(on_gpu(x)).asnumpy()
    net.export(tmp_path / "net")
    loaded = nn.SymbolBlock.load(tmp_path / "net")
    np.testing.assert_allclose(loaded(x).data, wanted, rtol=1e-5)
    assert loaded(arrays(7, 6)).shape == (7, 2)


@pytest.mark.parametrize("has_input_there", [True, False])
def test_all_is_computed_and_captured_on_the_gpu_of_the_network(graphs_on_host, has_input_there):
    """Whatever GPU is current; tokens stay on the host, and a network has its GPU by its parameters."""
    import cupy

    net = nn.Sequential(nn.Dense(6, 4)) if has_input_there else nn.Sequential(nn.Embedding(7, 4), nn.Dense(4, 4))
    net.to(like=cupy.zeros((1,), dtype=np.float32))
    net.hybridize()
    x = cupy.asarray(arrays(5, 6)) if has_input_there else np.arange(5)
    graphs_on_host.device_of_arrays = 1
    graphs_on_host.computed_on.clear()
    for _ in range(STEPS):
        with autograd.record():
            y = net(x)
        y.backward()
    assert graphs_on_host.computed_on == {1} and graphs_on_host.num_graphs == 2
