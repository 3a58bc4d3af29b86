"""ResNet-18 as in "Dive into Deep Learning", section 12.6, and as for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError
from ..functional import relu
from ..init import Initialiser, Xavier
from ..layers import Conv2D, Dense, Flatten, GlobalAvgPool2D, ReLU
from ..module import Module, Sequential
from ..regularisation import BatchNorm

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
    shape = tuple(input_shape)
    if len(shape) != 3 or min(shape) < 1 or num_classes < 1:
        raise ConfigError("resnet18", expected="input_shape (channels, height, width) and num_classes from 1 on",
                          got=f"{shape} and {num_classes}")  # fmt: skip
    if variant not in ("document", "cifar"):
        raise ConfigError("resnet18", where="variant", expected="document or cifar", got=repr(variant))
    weights, is_document = Xavier(seed), variant == "document"
    net = Sequential(
        Conv2D(shape[0], _WIDTHS[0], 3, padding=1, bias=is_document, weight_init=weights), BatchNorm(_WIDTHS[0]), ReLU()
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
