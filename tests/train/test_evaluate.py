import math

import numpy as np
import pytest
from raises import raises

from hpcdp import nn
from hpcdp.autograd import is_recording, is_training
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.train import SyncBatchNorm
from hpcdp.train.chrome_trace import traced
from hpcdp.train.fit import fit
from hpcdp.train.metrics import Evaluation, evaluate


def dataset(n: int) -> ArrayDataset:
    rng = np.random.default_rng(n)
    return ArrayDataset(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 4, size=n))


def expected(x: np.ndarray, y: np.ndarray) -> tuple[int, float]:
    """Right answers and mean cross-entropy of a network that gives the first four inputs as scores."""
    scores = x[:, :4].astype(np.float64)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return int((scores.argmax(axis=1) == y).sum()), float(-np.log(chances[np.arange(len(y)), y]).mean())


def first_four() -> nn.Module:
    net = nn.Dense(6, 4)
    for param in net.parameters():
        param.data[...] = np.eye(6, 4) if param.ndim == 2 else 0
    return net


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_any_number_of_ranks_sees_every_sample_once(ranks, n):
    samples = dataset(n)
    results = thread_comm.run(ranks, lambda world: evaluate(first_four(), samples, world, batch_size=3))
    correct, loss = expected(samples.x, samples.y)
    assert set(results) == {results[0]}
    assert (results[0].correct, results[0].count) == (correct, n)
    assert results[0].accuracy == correct / n
    assert results[0].loss == pytest.approx(loss, rel=1e-5)


def test_no_samples_give_zeros():
    results = thread_comm.run(2, lambda world: evaluate(first_four(), dataset(0), world))
    assert results == [Evaluation(0.0, 0.0, 0, 0)] * 2


def test_the_perplexity_of_a_network_that_has_diverged_is_infinite():
    assert Evaluation(0.0, 2.0, 0, 1).perplexity == math.exp(2)
    assert Evaluation(0.0, 1000.0, 0, 1).perplexity == math.inf
    assert math.isnan(Evaluation(0.0, math.nan, 0, 1).perplexity)


@pytest.mark.parametrize("targets", [np.zeros((4, 1), "f4"), np.zeros((4, 4), "f4"), np.zeros(4, "f4")])
def test_labels_that_are_not_integers_are_refused_in_one_line(targets):
    samples = ArrayDataset(np.zeros((4, 6), np.float32), targets)
    with raises(UnsupportedError, operation="softmax_cross_entropy", remedy="evaluate(loss=...)"):
        thread_comm.run(1, lambda world: evaluate(first_four(), samples, world))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_regression_is_evaluated_by_its_own_loss(ranks):
    rng = np.random.default_rng(0)
    samples = ArrayDataset(rng.normal(size=(10, 6)).astype("f4"), rng.normal(size=(10, 4)).astype("f4"))
    found = thread_comm.run(ranks, lambda world: evaluate(first_four(), samples, world, 3, loss=nn.functional.l2_loss))
    expected = ((samples.x[:, :4] - samples.y) ** 2 / 2).mean()
    assert {each.count for each in found} == {10} and len({each.loss for each in found}) == 1
    assert found[0].loss == pytest.approx(expected, rel=1e-5) and math.isnan(found[0].accuracy)


def test_a_loss_has_all_outputs_and_softmax_the_first():
    class Two(nn.Module):
        def forward(self, x):
            return first_four()(x), x

    samples = dataset(5)
    (all_of_them,) = thread_comm.run(
        1, lambda world: evaluate(Two(), samples, world, loss=lambda out, y: out[1][:, 0] * 2)
    )
    assert all_of_them.loss == pytest.approx(2 * samples.x[:, 0].mean(), rel=1e-5)
    assert thread_comm.run(1, lambda world: evaluate(Two(), samples, world))[0].loss == pytest.approx(
        expected(samples.x, samples.y)[1], rel=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "fields"),
    [("l2", {"got": "l2"}),
     (lambda output, y: output.mean(), {"expected": (4,), "got": "()"})],
)  # fmt: skip
def test_what_is_no_loss_per_sample_is_refused(loss, fields):
    with raises(ConfigError, operation="evaluate", where="loss", **fields):
        thread_comm.run(1, lambda world: evaluate(first_four(), dataset(4), world, loss=loss))


@pytest.mark.parametrize("net", ["lenet", None, np.tanh])
def test_what_is_no_network_is_refused(net):
    with raises(ConfigError, operation="evaluate", where="net"):
        thread_comm.run(1, lambda world: evaluate(net, dataset(4), world))


def test_the_network_is_in_predict_mode():
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append((is_training(), is_recording()))
            return first_four()(x)

    thread_comm.run(1, lambda world: evaluate(Watched(), dataset(4), world))
    assert seen == [(False, False)]


def test_a_network_finds_its_shapes_when_it_is_evaluated():
    net = nn.Dense(None, 4)
    (result,) = thread_comm.run(1, lambda world: evaluate(net, dataset(5), world))
    assert result.count == 5
    assert net.weight.shape == (6, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda number: evaluate(first_four(), dataset(4), number),
        lambda number: fit(None, None, None, epochs=1, world=number),
        lambda number: SyncBatchNorm(3, world=number),
        lambda number: SyncBatchNorm.convert(first_four(), number),
        lambda number: traced("trace.json", number),
    ],
    ids=["evaluate", "fit", "SyncBatchNorm", "SyncBatchNorm.convert", "traced"],
)
@pytest.mark.parametrize("number", [0, 64])
def test_what_is_no_world_is_refused_by_name(call, number):
    with raises(ConfigError, where="world", expected="hpcdp.init()", got=number):
        call(number)
