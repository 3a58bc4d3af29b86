"""LSTM, embedding, layer normalization, GELU and causal attention: gradients, PyTorch's values, errors."""

import numpy as np
import pytest
import standin
from finite_differences import assert_gradients
from raises import raises

from hpcdp import autograd, nn
from hpcdp.autograd import Tensor
from hpcdp.errors import ConfigError, DataError, UnsupportedError
from hpcdp.nn import layers as sequence
from hpcdp.nn.functional import softmax_cross_entropy

RNG = np.random.default_rng(8)


def normal(*shape):
    return RNG.standard_normal(shape)


@pytest.mark.parametrize(("batch", "time", "features", "size"), [(1, 1, 1, 1), (2, 4, 3, 5), (3, 2, 5, 2)])
def test_gradients_of_an_lstm(batch, time, features, size):
    arrays = [normal(batch, time, features), normal(features, 4 * size), normal(size, 4 * size), normal(4 * size)]
    assert_gradients(sequence.lstm, *arrays)


def test_gradients_of_two_lstms_one_on_the_other():
    weights = [normal(2, 12), normal(3, 12), normal(12), normal(3, 8), normal(2, 8), normal(8)]

    def both(x, *w):
        return sequence.lstm(sequence.lstm(x, *w[:3]), *w[3:])

    assert_gradients(both, normal(2, 3, 2), *(each / 2 for each in weights))


def test_gradients_of_an_embedding_whose_tokens_repeat():
    numbers = np.array([[2, 0, 2], [2, 1, 1]])
    assert_gradients(lambda weight: sequence.embedding(numbers, weight), normal(4, 3))


def test_gradients_of_layer_norm_and_gelu():
    assert_gradients(lambda *each: sequence.layer_norm(*each, 1e-3), normal(2, 3, 4), normal(4), normal(4))
    assert_gradients(sequence.gelu, 2 * normal(3, 4, 2))


@pytest.mark.parametrize(("batch", "time", "width", "heads"), [(1, 1, 2, 1), (2, 4, 6, 3), (2, 3, 4, 1)])
def test_gradients_of_attention(batch, time, width, heads):
    assert_gradients(lambda x: sequence.causal_attention(x, heads), normal(batch, time, 3 * width))


def test_gradients_of_the_loss_of_several_labels():
    labels = np.array([[0, 3, 1], [2, 2, 0]])
    logits = normal(2, 3, 4)
    assert_gradients(lambda x: softmax_cross_entropy(x, labels), logits)
    each = softmax_cross_entropy(logits.reshape(6, 4), labels.reshape(-1)).data
    np.testing.assert_allclose(softmax_cross_entropy(logits, labels).data, each.reshape(2, 3).mean(axis=1))


def test_no_place_sees_what_comes_after_it():
    layers = (nn.CausalSelfAttention(8, 2), nn.LSTM(8, 8))
    for layer in layers:
        x = normal(2, 5, 8).astype(np.float32)
        before = layer(x).data.copy()
        x[:, 3] += 1
        after = layer(x).data
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert (np.abs(before - after).max(axis=(0, 2))[3:] > 1e-4).all()


def test_an_lstm_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    layer = nn.LSTM(5, 7)
    peer = torch.nn.LSTM(5, 7, batch_first=True)
    names = {"weight_ih_l0": layer.weight.data.T, "weight_hh_l0": layer.recurrent_weight.data.T}
    with torch.no_grad():
        for name, values in names.items():
            getattr(peer, name).copy_(torch.from_numpy(np.ascontiguousarray(values)))
        peer.bias_ih_l0.copy_(torch.from_numpy(layer.bias.data))
        peer.bias_hh_l0.zero_()
    x = normal(3, 6, 5).astype(np.float32)
    theirs = torch.from_numpy(x).requires_grad_()
    y, _ = peer(theirs)
    (y * y).sum().backward()
    mine = Tensor(x)
    mine.attach_grad()
    with autograd.record():
        out = layer(mine)
        total = (out * out).sum()
    total.backward()
    np.testing.assert_allclose(out.data, y.detach().numpy(), rtol=1e-5, atol=1e-6)
    pairs = [
        (mine.grad, theirs.grad), (layer.weight.grad.T, peer.weight_ih_l0.grad),
        (layer.recurrent_weight.grad.T, peer.weight_hh_l0.grad), (layer.bias.grad, peer.bias_ih_l0.grad),
    ]  # fmt: skip
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_attention_layer_norm_and_gelu_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    parts = normal(2, 5, 12).astype(np.float32)
    theirs = torch.from_numpy(parts).requires_grad_()
    queries, keys, values = theirs.view(2, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
    seen = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    seen = seen.transpose(1, 2).reshape(2, 5, 4)
    y = torch.nn.functional.gelu(torch.nn.functional.layer_norm(seen, (4,)), approximate="tanh")
    (y * y).sum().backward()
    mine = Tensor(parts)
    mine.attach_grad()
    with autograd.record():
        out = sequence.gelu(nn.LayerNorm(4)(sequence.causal_attention(mine, 2)))
        total = (out * out).sum()
    total.backward()
    np.testing.assert_allclose(out.data, y.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine.grad, theirs.grad.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.LSTM(3, 4), (2, 3, 3)), (nn.CausalSelfAttention(4, 2), (2, 3, 4)), (nn.LayerNorm(3), (2, 3))],
    ids=lambda each: type(each).__name__,
)
def test_layers_work_on_a_device(layer, shape):
    x = normal(*shape).astype(np.float32)
    host = layer(x).data
    grads = gradients(layer, x)
    layer.to(like=standin.asarray(np.zeros(1, np.float32)))
    there = layer(standin.asarray(x)).data
    np.testing.assert_allclose(there.to_host(), host, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients(layer, standin.asarray(x)), grads, strict=True):
        np.testing.assert_allclose(a.to_host(), b, rtol=1e-4, atol=1e-5)


def gradients(layer, x):
    with autograd.record():
        y = layer(x)
    y.backward()
    return [param.grad for param in layer.parameters()]


def test_empty_batches_have_gradients_of_zero():
    none = np.empty((0, 5), np.int64)
    for net in (nn.models.char_lstm(size=8, width=4), nn.models.gpt((5,), width=8, layers=1)):
        with autograd.record():
            losses = softmax_cross_entropy(net(none), none)
        assert losses.shape == (0,)
        losses.backward()
        assert not any(param.grad.any() for param in net.parameters())


def test_errors_are_said():
    with raises(UnsupportedError, operation="forward", where="LSTM(3, 4)", expected="(batch, time, 3)"):
        nn.LSTM(3, 4)(np.zeros((2, 3), np.float32))
    with raises(UnsupportedError, operation="lstm", expected="(batch, time, in)"):
        sequence.lstm(*(np.zeros(shape, "f4") for shape in ((2, 3, 4), (4, 8), (3, 8), (8,))))
    with raises(ConfigError, operation="LSTM", where="in_features", expected=1, got=0):
        nn.LSTM(0, 4)
    with raises(DataError, operation="embedding", where="tokens", expected=[0, 3], got=[-1, 4]):
        nn.Embedding(4, 2)(np.array([4, -1]))
    with raises(UnsupportedError, operation="embedding", got="float32"):
        nn.Embedding(4, 2)(np.zeros(3, np.float32))
    with raises(UnsupportedError, operation="embedding", expected="(number, features)", got=(4,)):
        sequence.embedding(np.array([1]), np.zeros(4, np.float32))
    with raises(UnsupportedError, operation="causal_attention", expected=3):
        sequence.causal_attention(np.zeros((1, 2, 8), np.float32), 2)
    with raises(UnsupportedError, operation="causal_attention", expected=[0, 2], got=(1, 2, 0)):
        sequence.causal_attention(np.zeros((1, 2, 0), np.float32), 2)
    with raises(ConfigError, operation="CausalSelfAttention", where="heads", expected=6, got=4):
        nn.CausalSelfAttention(6, 4)
    with raises(UnsupportedError, operation="layer_norm", expected="(..., features)"):
        nn.LayerNorm(3)(np.zeros((2, 4), np.float32))


def test_layers_say_what_they_are():
    assert repr(nn.LSTM(3, 4)) == "LSTM(3, 4)"
    assert repr(nn.Embedding(7, 2)) == "Embedding(7, 2)"
    assert repr(nn.LayerNorm(4)) == "LayerNorm(4, eps=1e-05)"
