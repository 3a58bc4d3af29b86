"""Networks on sequences of tokens, hybridized: the same bits, new lengths, ranks, and export."""

import copy

import numpy as np
import pytest
from raises import raises

from hpcdp import autograd, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError
from hpcdp.nn.jit.executor import Plan
from hpcdp.nn.models import Block
from hpcdp.train.trainer import Trainer

F = nn.functional
NUM_TOKENS = 7
MODELS = {
    "char_lstm": lambda: nn.models.char_lstm((5,), NUM_TOKENS, width=6, size=16, layers=2),
    "gpt": lambda: nn.models.gpt((5,), NUM_TOKENS, width=12, heads=3, layers=2),
}


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, NUM_TOKENS, shape)


def arrays(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pair(net):
    plain = copy.deepcopy(net)
    net.hybridize()
    return net, plain


def recorded(net, x, labels=None):
    """The result, and gradients of all parameters, and of ``x`` where it is a tensor that has one."""
    with autograd.record():
        y = net(x)
        loss = (y * y * 0.5).sum() if labels is None else F.softmax_cross_entropy(y, labels)
    loss.backward()
    grads = [param.grad.copy() for param in net.parameters()]
    return [y.data, *grads, *([x.grad] if isinstance(x, Tensor) else [])]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_models_are_the_same_bits_at_every_length(name, dtype, monkeypatch):
    net, plain = pair(MODELS[name]().to(dtype=dtype))
    made, forwards = [], []
    init, forward = Plan.__init__, type(net).forward
    monkeypatch.setattr(Plan, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    monkeypatch.setattr(type(net), "forward", lambda self, x: forwards.append(self is net) or forward(self, x))
    shapes = [(1, 5), (3, 4), (2, 1)]
    for seed in range(4):
        for shape in shapes:
            x, y = tokens(*shape, seed=seed), tokens(*shape, seed=seed + 50)
            assert_same(recorded(net, x, y), recorded(plain, x, y))
            assert_same([net(x).data], [plain(x).data])
    assert len(made) == 2 * len(shapes) == sum(forwards)  # traced once for each shape and mode, and replayed


LAYERS = {
    "lstm": lambda: nn.LSTM(6, 5, nn.init.Xavier(1)),
    "layer norm": lambda: nn.LayerNorm(6),
    "gelu": lambda: nn.GELU(),
    "attention": lambda: nn.CausalSelfAttention(6, 2, nn.init.Xavier(1)),
    "block": lambda: Block(6, 3, nn.init.Normal(0.3, 1)),
}


class WithLabels(nn.Module):
    def __init__(self, labels):
        self.labels, self.dense = labels, nn.Dense(6, NUM_TOKENS)

    def forward(self, x):
        return F.softmax_cross_entropy(self.dense(x), self.labels)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 2)])
@pytest.mark.parametrize("kind", [np.asarray, Tensor])
def test_labels_may_be_an_attribute(shape, kind):
    net, plain = pair(WithLabels(kind(tokens(*shape))))
    for seed in range(3):
        x = arrays(*shape, 6, seed=seed)
        assert_same(recorded(net, x), recorded(plain, x))
        assert_same([net(x).data], [plain(x).data])
    assert net.graph().names[-1] == "labels"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", ["rows", "transposed", "empty"])
def test_layers_are_the_same_bits_with_gradients_of_their_input(name, dtype, layout):
    net, plain = pair(LAYERS[name]().to(dtype=dtype))
    for param, other in zip(net.parameters(), plain.parameters(), strict=True):
        param.data[...] += arrays(*param.shape, seed=9, dtype=dtype) * 0.1
        other.data[...] = param.data
    for seed in range(4):
        values = arrays(0 if layout == "empty" else 3, 4, 6, seed=seed, dtype=dtype)
        if layout == "transposed":
            values = arrays(6, 4, 3, seed=seed, dtype=dtype).T
        both = []
        for each in (net, plain):
            x = Tensor(values)
            x.attach_grad()
            both.append(recorded(each, x))
        assert_same(*both)
        assert_same([net(values).data], [plain(values).data])


def test_results_and_states_of_earlier_calls_stay():
    net, plain = pair(MODELS["char_lstm"]())
    given = [tokens(2, 5, seed=seed) for seed in range(5)]
    for mode in (autograd.predict_mode, autograd.record):
        with mode():
            found = [net(x) for x in given]
            expected = [plain(x) for x in given]
        assert_same([y.data for y in found], [y.data for y in expected])
    autograd.backward(found)
    autograd.backward(expected)
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_dropout_between_layers_draws_as_without_a_plan():
    net, plain = pair(
        nn.Sequential(nn.Embedding(NUM_TOKENS, 6), nn.Dropout(0.3, seed=4), nn.LSTM(6, 5), nn.Dropout(0.5, seed=5))
    )
    for seed in range(5):
        assert_same(recorded(net, tokens(2, 4, seed=seed)), recorded(plain, tokens(2, 4, seed=seed)))


def test_a_wrong_token_is_found_in_a_replay():
    net, _ = pair(MODELS["gpt"]())
    for seed in range(3):
        net(tokens(2, 4, seed=seed))
    for wrong in (-1, NUM_TOKENS):
        with raises(DataError, operation="embedding", where="tokens", expected=[0, 6], got=wrong):
            net(np.array([[0, 1, 2, 3], [0, 1, 2, wrong]]))
    net(tokens(2, 4))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"overlap": True, "bucket_cap_mb": 0.001}])
def test_training_on_ranks_is_the_same_bits(name, n, options):
    def job(world, hybrid):
        net = MODELS[name]()
        if hybrid:
            net.hybridize()
        trainer = Trainer(net.parameters(), optim.Adam(lr=0.01), world, **options)
        for step in range(4):
            count = 1 + (world.rank + step) % 3
            x = tokens(count, 5, seed=10 * step + world.rank)
            with autograd.record():
                loss = F.softmax_cross_entropy(net(x[:, :-1]), x[:, 1:])
            loss.backward()
            trainer.step(count)
        return [np.array(param.data) for param in net.parameters()]

    pairs = zip(thread_comm.run(n, lambda w: job(w, True)), thread_comm.run(n, lambda w: job(w, False)), strict=True)
    for found, expected in pairs:
        assert_same(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_predicts_and_learns_the_same(name, tmp_path):
    net, plain = pair(MODELS[name]())
    net(tokens(2, 4))
    net.export(tmp_path / "net")
    loaded = nn.SymbolBlock.load(tmp_path / "net")
    loaded.hybridize()
    for seed in range(4):
        x, y = tokens(1 + seed % 2, 4, seed=seed), tokens(1 + seed % 2, 4, seed=seed + 50)
        assert_same([loaded(x).data], [plain(x).data])
        assert_same(recorded(loaded, x, y), recorded(plain, x, y))
    with raises(
        ConfigError, operation="SymbolBlock", where="inputs", expected=["int64", "(batch, 4)"], got=["int64", (1, 1)]
    ):
        loaded(tokens(1, 1))  # learned places of another length would be broadcast
    with raises(ConfigError, operation="SymbolBlock", where="inputs", expected=["int64", "(batch, 4)"], got="float32"):
        loaded(arrays(2, 4))
    assert ("embedding" in net.graph().summary()) and ("lstm" in repr(net).lower() or "gpt" in repr(net).lower())
