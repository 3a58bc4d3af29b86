"""The models that hpcdp knows by name.

Networks by name.

LeNet as in "Dive into Deep Learning", section 12.5.

Multilayer perceptrons.

A language model of characters with an LSTM.

A small GPT.

ResNet-18 as in "Dive into Deep Learning", section 12.6, and as for CIFAR.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.checks import lengths, one_of, whole_number, whole_numbers
from ..errors import ConfigError, UnsupportedError
from .functional import relu
from .init import Initialiser, Normal, Xavier
from .layers import (
    GELU,
    LSTM,
    AvgPool2D,
    BatchNorm,
    CausalSelfAttention,
    Conv2D,
    Dense,
    Embedding,
    Flatten,
    GlobalAvgPool2D,
    LayerNorm,
    ReLU,
)
from .module import Module, Sequential
from .parameter import Parameter

_SMALLEST, _INTENDED = 4, 28
_IMAGE = ("channels", "height", "width")


def lenet(input_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10, seed: int | None = 0) -> Sequential:
    """Two convolutions with average pooling, two dense layers; 129,068 parameters for ``(1, 28, 28)`` and 10 classes.

    Smaller images are padded with zeros, as far as 28 x 28 asks, by the first convolution.

    Args:
        input_shape: (channels, height, width) of a sample, at least 4 x 4.
        seed: of the initial weights; None takes fresh entropy.

    Raises:
        ConfigError: the images are too small or no images.
    """
    channels, height, width = lengths("lenet", "input_shape", input_shape, _IMAGE)
    whole_numbers("lenet", 1, num_classes=num_classes)
    whole_numbers("lenet", _SMALLEST, height=height, width=width)
    top, left = (max(0, (_INTENDED - size + 1) // 2) for size in (height, width))
    features = 50 * _pooled(height + 2 * top) * _pooled(width + 2 * left)
    weights = Xavier(seed)
    return Sequential(
        Conv2D(channels, 20, 3, padding=(top, left), activation="relu", weight_init=weights),
        AvgPool2D(2),
        Conv2D(20, 50, 5, activation="relu", weight_init=weights),
        AvgPool2D(2),
        Flatten(),
        Dense(features, 128, activation="relu", weight_init=weights),
        Dense(128, num_classes, weight_init=weights),
    )


def _pooled(size: int) -> int:
    """What both convolutions and both poolings leave of a height or width."""
    return ((size - 2) // 2 - 4) // 2


def mlp(
    input_shape: Sequence[int] | int = (784,),
    num_classes: int = 10,
    hidden: Sequence[int] = (256, 128),
    seed: int | None = 0,
) -> Sequential:
    """Dense layers with ReLU between them, on flattened samples.

    Args:
        input_shape: of a sample, any number of axes, or its number of elements.
        hidden: widths of the hidden layers.
        seed: of the initial weights; None takes fresh entropy.

    Raises:
        ConfigError: a width is below 1.
    """
    widths = [math.prod(np.atleast_1d(input_shape).tolist()), *hidden, num_classes]
    for width in widths:
        whole_number("mlp", "width", width, 1)
    weights = Xavier(seed)
    net = Sequential(Flatten())
    for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        activation = "relu" if number < len(widths) - 1 else None
        net.add(Dense(before, after, activation=activation, weight_init=weights))
    return net


def char_lstm(
    input_shape: Sequence[int] = (64,),
    num_classes: int = 65,
    seed: int | None = 0,
    width: int = 64,
    size: int = 256,
    layers: int = 1,
) -> Sequential:
    """Scores of the next token at each place: embedding, LSTMs, a dense layer (Graves 2013, section 2).

    Tokens ``(batch, time)``, integers, become ``(batch, time, num_classes)``; any ``time``.

    Args:
        input_shape: (time,) of a sample.
        num_classes: how many tokens there are.
        seed: of the initial weights; None takes fresh entropy.
        width: of the embedding.
        size: of each LSTM.

    Raises:
        ConfigError: samples that are no sequences of tokens, or a number below 1.
    """
    lengths("char_lstm", "input_shape", input_shape, ("time",))
    whole_numbers("char_lstm", 1, num_classes=num_classes, width=width, size=size, layers=layers)
    weights = Xavier(seed)
    net = Sequential(Embedding(num_classes, width, Normal(1 / width**0.5, seed)))
    for number in range(layers):
        net.add(LSTM(size if number else width, size, weights))
    net.add(Dense(size, num_classes, weight_init=weights))
    return net


class Block(Module):
    """Attention, then a network for each place, each added to what goes in (Radford et al. 2019, section 2.3)."""

    def __init__(self, width: int, heads: int, weight_init: Initialiser) -> None:
        self.norm1 = LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, weight_init)
        self.norm2 = LayerNorm(width)
        self.feed = Sequential(
            Dense(width, 4 * width, weight_init=weight_init), GELU(), Dense(4 * width, width, weight_init=weight_init)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(Module):
    """Scores of the next token at each place; see `gpt`."""

    def __init__(self, context: int, num_tokens: int, width: int, heads: int, layers: int, seed: int | None) -> None:
        weights = Normal(0.02, seed)
        self.tokens = Embedding(num_tokens, width, weights)
        self.places = Parameter(weights((context, width)))
        self.blocks = Sequential(*(Block(width, heads, weights) for _ in range(layers)))
        self.norm = LayerNorm(width)

    def forward(self, x: Any) -> Any:
        if x.ndim != 2 or x.shape[1] > len(self.places):
            raise UnsupportedError(
                "forward", where="GPT", expected=f"tokens (batch, at most {len(self.places)})", got=tuple(x.shape)
            )
        hidden = self.tokens(x) + self.places[: x.shape[1]]
        return self.norm(self.blocks(hidden)) @ self.tokens.weight.T


def gpt(
    input_shape: Sequence[int] = (64,),
    num_classes: int = 65,
    seed: int | None = 0,
    width: int = 128,
    heads: int = 4,
    layers: int = 3,
) -> GPT:
    """A decoder of tokens: ``(batch, time)``, integers, become scores ``(batch, time, num_classes)``.

    Normalised before attention and network (Radford et al. 2019), GELU, learnt places, and the embedding's weights
    again in the last product (Press and Wolf 2017), which so has no parameters of its own.

    Args:
        input_shape: (time,) of a sample, the most that it takes.
        num_classes: how many tokens there are.
        seed: of the initial weights, normal with deviation 0.02; None takes fresh entropy.
        heads: divides ``width``.

    Raises:
        ConfigError: samples that are no sequences of tokens, a number below 1, heads that do not divide the width.
    """
    (time,) = lengths("gpt", "input_shape", input_shape, ("time",))
    whole_numbers("gpt", 1, num_classes=num_classes, width=width, heads=heads, layers=layers)
    return GPT(time, num_classes, width, heads, layers, seed)


_WIDTHS = (64, 128, 256, 512)


class Residual(Module):
    """``relu(x + f(x))``, where ``f`` is two normalised convolutions (He et al. 2016, figure 2).

    Args:
        stride: of the first convolution; where it is not 1, or the channels change, ``x`` goes through a convolution of
            1 x 1 with that stride.
        bias: whether convolutions have one, which the normalisation after them takes away again.
        normalises_shortcut: whether that of the shortcut is normalised, too.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, bias: bool = True,
        normalises_shortcut: bool = False, weight_init: Initialiser | None = None,
    ) -> None:  # fmt: skip
        weights = weight_init or Xavier()
        self.conv1 = Conv2D(in_channels, out_channels, 3, stride, padding=1, bias=bias, weight_init=weights)
        self.norm1 = BatchNorm(out_channels)
        self.conv2 = Conv2D(out_channels, out_channels, 3, padding=1, bias=bias, weight_init=weights)
        self.norm2 = BatchNorm(out_channels)
        self.shortcut: Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = Conv2D(in_channels, out_channels, 1, stride, bias=bias, weight_init=weights)
            if normalises_shortcut:
                self.shortcut = Sequential(self.shortcut, BatchNorm(out_channels))

    def forward(self, x: Any) -> Any:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet18(
    input_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10, seed: int | None = 0, variant: str = "document"
) -> Sequential:
    """Eight residual blocks after one convolution of 3 x 3, for small images; no pooling before the last one.

    Args:
        input_shape: (channels, height, width) of a sample.
        seed: of the initial weights; None takes fresh entropy.
        variant: "document", whose convolutions have biases and whose shortcuts are not normalised, 11,175,818 learnt
            parameters for one channel and ten classes; or "cifar", without biases and with normalised shortcuts, as
            for CIFAR-10 usually, 11,173,962 for three channels.

    Raises:
        ConfigError: another variant, or no images.
    """
    channels, _, _ = lengths("resnet18", "input_shape", input_shape, _IMAGE)
    whole_numbers("resnet18", 1, num_classes=num_classes)
    one_of("resnet18", "variant", variant, ("document", "cifar"))
    weights, is_document = Xavier(seed), variant == "document"
    net = Sequential(
        Conv2D(channels, _WIDTHS[0], 3, padding=1, bias=is_document, weight_init=weights), BatchNorm(_WIDTHS[0]), ReLU()
    )
    before = _WIDTHS[0]
    for width in _WIDTHS:
        blocks = Sequential()
        for number in range(2):
            stride = 2 if number == 0 and width != _WIDTHS[0] else 1
            blocks.add(Residual(before, width, stride, is_document, not is_document, weights))
            before = width
        net.add(blocks)
    net.add(GlobalAvgPool2D(), Flatten(), Dense(before, num_classes, weight_init=weights))
    return net


def resnet18_cifar(input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, seed: int | None = 0) -> Sequential:
    """`resnet18` of the variant "cifar"."""
    return resnet18(input_shape, num_classes, seed, "cifar")


MODELS: dict[str, Callable[..., Module]] = {
    "char_lstm": char_lstm,
    "gpt": gpt,
    "lenet": lenet,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18_cifar": resnet18_cifar,
}


def create(name: str, **kwargs: Any) -> Module:
    """The network called ``name``, e.g. ``create("lenet", input_shape=(1, 28, 28), num_classes=10, seed=0)``.

    Raises:
        ConfigError: there is no such network, or it does not take an argument or input of that kind.
    """
    one_of("model", None, name, MODELS)
    try:
        return MODELS[name](**kwargs)
    except TypeError as error:
        raise ConfigError("model", where=name, got=f"{kwargs}: {error}") from error


__all__ = ["MODELS", "char_lstm", "create", "gpt", "lenet", "mlp", "resnet18", "resnet18_cifar"]
