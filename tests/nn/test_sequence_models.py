"""The character LSTM and the small GPT: shapes, parameters, learning, any number of ranks."""

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, ShardedSampler
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.train.metrics import evaluate
from hpcdp.train.trainer import Trainer

TOKENS = np.random.default_rng(4).integers(0, 7, size=(13, 6))
SMALL = {
    "char_lstm": lambda: nn.models.char_lstm((5,), 7, width=6, size=16, layers=2),
    "gpt": lambda: nn.models.gpt((5,), 7, width=12, heads=3, layers=2),
}


def sizes(net):
    return sum(param.size for param in net.parameters())


def test_parameters_are_as_many_as_there_should_be():
    net = nn.models.create("char_lstm", input_shape=(64,), num_classes=62, seed=0)
    assert sizes(net) == 62 * 64 + (64 + 256 + 1) * 4 * 256 + 257 * 62
    net = nn.models.create("gpt", input_shape=(64,), num_classes=62, seed=0)
    layer = 2 * 2 * 128 + 129 * 3 * 128 + 129 * 128 + 129 * 512 + 513 * 128
    assert sizes(net) == (62 + 64) * 128 + 3 * layer + 2 * 128
    assert "tokens.weight" in dict(net.named_parameters())


@pytest.mark.parametrize("name", SMALL)
def test_scores_are_made_for_each_place(name):
    net = SMALL[name]()
    scores = net(TOKENS[:3, :4]).data
    assert scores.shape == (3, 4, 7)
    assert np.isfinite(scores).all()
    again = SMALL[name]()(TOKENS[:3, :4]).data
    np.testing.assert_array_equal(scores, again)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_any_number_of_ranks_has_the_gradient_of_the_global_batch(name, owner):
    def job(world):
        net = SMALL[name]()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.5, momentum=0.9), world=world, owner=owner, clip_norm=0.3)
        sampler = ShardedSampler(len(TOKENS), 5, world.size, world.rank, seed=2)
        for _ in range(2):
            for indices in sampler:
                part = TOKENS[indices]
                with autograd.record():
                    losses = softmax_cross_entropy(net(part[:, :-1]), part[:, 1:])
                losses.backward()
                trainer.step(len(part))
        return [np.array(param.data) for param in net.parameters()]

    (alone,) = thread_comm.run(1, job)
    started = [param.data for param in SMALL[name]().parameters()]
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(alone, started, strict=True))
    for ranks in (2, 3):
        for each in thread_comm.run(ranks, job):
            for a, b in zip(each, alone, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_perplexity_falls(name):
    """Of a text in which each token says which one follows, but for one in seven."""
    rng = np.random.default_rng(1)
    text = np.zeros(1501, np.int64)
    for i in range(1, len(text)):
        text[i] = (3 * text[i - 1] + 1) % 7 if rng.random() < 6 / 7 else rng.integers(7)
    pieces = np.stack([text[i : i + 6] for i in range(0, 1495, 5)])
    train, test = ArrayDataset(pieces[:200, :-1], pieces[:200, 1:]), ArrayDataset(pieces[200:, :-1], pieces[200:, 1:])

    def job(world):
        net = SMALL[name]()
        trainer = Trainer(net.parameters(), optim.AdamW(lr=0.01), world=world, clip_norm=1.0)
        found = [evaluate(net, test, world)]
        for epoch in range(6):
            sampler = ShardedSampler(len(train), 20, world.size, world.rank, seed=epoch)
            for indices in sampler:
                x, y = train[indices]
                with autograd.record():
                    losses = softmax_cross_entropy(net(x), y)
                losses.backward()
                trainer.step(len(y))
        return [*found, evaluate(net, test, world)]

    before, after = thread_comm.run(2, job)[0]
    assert 6 < before.perplexity < 9
    assert after.perplexity < 3.2  # of what is known of the next token alone it is 2.3
    assert after.accuracy > 0.75
    assert after.perplexity == pytest.approx(np.exp(after.loss))


def test_what_is_impossible_is_said():
    for name in SMALL:
        with raises(ConfigError, operation=name, where="input_shape", expected=["(time,)", 1]):
            nn.models.create(name, input_shape=(1, 28, 28), num_classes=10, seed=0)
    with raises(ConfigError, operation="CausalSelfAttention", where="heads", expected=12, got=5):
        nn.models.gpt((5,), 7, width=12, heads=5)
    with raises(UnsupportedError, operation="forward", where="GPT", expected=5, got=(3, 6)):
        SMALL["gpt"]()(TOKENS[:3])
