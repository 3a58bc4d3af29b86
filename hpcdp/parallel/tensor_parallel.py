"""Tensor parallelism: dense and convolution layers whose parameters are split over ranks.

A **column** layer computes part of the output channels from the full input. A **row** layer holds part of the input
channels, and its output is summed over the ranks. A column layer followed by a row layer communicates once in forward
and once in backward. Layers between them must act on each channel separately, as activations and pooling do.

A tensor is either **full**, with the same bits on all ranks, or each rank has **its channels**. All ranks must call, in
the same order, and so must their backwards. Losses are computed from full tensors on every rank, and the gradient of a
full tensor has the same bits on each.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..autograd import Tensor
from ..comm import World
from ..comm.communicator import bounds
from ..comm.consistency import require_same
from ..core.checks import instance, whole_number
from ..core.state import Cut
from ..errors import ConfigError
from ..nn import Conv2D, Dense, Module, Parameter, functional, module
from ..nn.init import Initialiser, Xavier, Zeros
from ..nn.layers import require_channels, window
from .functional import fan_out, gathered, own_channels, summed
from .pipeline import share_replica


class _SplitLayer(Module):
    is_traceable = False

    def _begin(self, parts: World, activation: str | None, arguments: str, **channels: int | None) -> None:
        """Check the arguments, which must be the same on all ranks of ``parts``, before parameters are drawn."""
        name = type(self).__name__
        instance(name, "parts", parts, World, "a World, such as split_world(...).parts")
        require_same(parts.comm, name, [arguments], "pass the same arguments on all ranks")
        share_replica(parts)
        require_channels(self, **channels)
        functional.is_relu(activation)
        self.parts, self.activation = parts, activation

    def describe(self) -> str:
        """Return the arguments and the part shown in ``repr``."""
        return f"{super().describe()}, part {self.parts.rank} of {self.parts.size}"


class ColumnDense(_SplitLayer, Dense):
    """`nn.Dense` of which each rank of ``parts`` computes part of the outputs.

    All ranks must construct and call it identically. The initial weight is drawn like that of `nn.Dense`, and each rank
    keeps its part. With a seeded ``weight_init`` it equals the unsplit layer on any number of ranks. Ranks may have
    different numbers of channels, at least one.

    Args:
        in_features: length of the full input's last axis; None takes it from the first input.
        out_features: length of the full output's last axis.
        parts: the ranks: see `split_world`.
        bias: whether to add a bias, split like the outputs.
        activation: "relu" or None.
        weight_init: initializer of the full weight, by default `nn.init.Xavier`.
        gather: whether every rank gets all outputs; False returns ``(batch, ..., own features)``.

    Raises:
        ConfigError: fewer channels than ranks.
        MismatchError: ranks construct it differently, or call it with inputs of different sizes.
    """

    def __init__(
        self,
        in_features: int | None,
        out_features: int,
        parts: World,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
        gather: bool = False,
    ) -> None:
        arguments = f"{in_features}, {out_features}, {bias=}, {activation=}, {gather=}"
        self._begin(parts, activation, arguments, in_features=in_features, out_features=out_features)
        self.gather = gather
        self._ends = _ends(self, "out_features", out_features, out_features, parts)
        self.weight = _own_part((in_features, out_features), 1, self._ends, parts, weight_init or Xavier())
        self.bias = _own_part((out_features,), 0, self._ends, parts, Zeros()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, ..., in_features)`` to ``(batch, ..., own or all out_features)``; all ranks must call."""
        y = super().forward(fan_out(x, self.parts))
        return gathered(y, -1, self._ends, self.parts) if self.gather else y


class RowDense(_SplitLayer, Dense):
    """`nn.Dense` of which each rank of ``parts`` holds part of the inputs; every rank gets all outputs.

    The full bias is on every rank and added once, after the sum. Construction and initial values are as in
    `ColumnDense`.

    Args:
        in_features: length of the full input's last axis.
        out_features: length of the output's last axis.
        parts: the ranks: see `split_world`.
        bias: whether to add a bias.
        activation: "relu" or None.
        weight_init: initializer of the full weight, by default `nn.init.Xavier`.
        scatter: whether inputs are full and each rank takes its part; False expects each rank's part, as from a column
            layer.
        channels: number of channels in the features, if `nn.Flatten` made them of images: the split is then between
            channels. None: as many as there are features.

    Raises:
        ConfigError: as `ColumnDense`, or ``channels`` does not divide ``in_features``.
        MismatchError: as `ColumnDense`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parts: World,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
        scatter: bool = False,
        channels: int | None = None,
    ) -> None:
        arguments = f"{in_features}, {out_features}, {bias=}, {activation=}, {scatter=}, {channels=}"
        self._begin(parts, activation, arguments, in_features=in_features, out_features=out_features)
        self.scatter = scatter
        self._ends = _ends(self, "in_features", in_features, in_features if channels is None else channels, parts)
        self.weight = _own_part((in_features, out_features), 0, self._ends, parts, weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_features,))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, ..., own or all in_features)`` to ``(batch, ..., out_features)``; all ranks must call."""
        own = own_channels(x, -1, self._ends, self.parts) if self.scatter else x
        self.check(own)
        y = summed(functional.dense(own, self.weight), self.parts)
        return _finished(y, self.bias, self.activation)


class ColumnConv2D(_SplitLayer, Conv2D):
    """`nn.Conv2D` of which each rank of ``parts`` computes part of the output channels: see `ColumnDense`.

    Args:
        in_channels: channels of the input; None takes them from the first input.
        out_channels: channels of the full output.
        kernel_size: as in `nn.Conv2D`.
        parts: the ranks: see `split_world`.
        stride: as in `nn.Conv2D`.
        padding: as in `nn.Conv2D`.
        bias: whether to add a bias, split like the outputs.
        activation: "relu" or None.
        weight_init: initializer of the full weight, by default `nn.init.Xavier`.
        gather: whether every rank gets all channels.

    Raises:
        ConfigError: as `ColumnDense`.
        MismatchError: as `ColumnDense`.
    """

    def __init__(
        self,
        in_channels: int | None,
        out_channels: int,
        kernel_size: functional.Size,
        parts: World,
        stride: functional.Size = 1,
        padding: functional.Size = 0,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
        gather: bool = False,
    ) -> None:
        sizes = f"{kernel_size=}, {stride=}, {padding=}"
        arguments = f"{in_channels}, {out_channels}, {sizes}, {bias=}, {activation=}, {gather=}"
        self._begin(parts, activation, arguments, in_channels=in_channels, out_channels=out_channels)
        self.gather = gather
        self._ends = _ends(self, "out_channels", out_channels, out_channels, parts)
        shape = (out_channels, in_channels, *window(self, "kernel_size", kernel_size, 1))
        self.weight = _own_part(shape, 0, self._ends, parts, weight_init or Xavier())
        self.bias = _own_part((out_channels,), 0, self._ends, parts, Zeros()) if bias else None
        self.stride, self.padding = window(self, "stride", stride, 1), window(self, "padding", padding, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, in_channels, height, width)`` to this rank's channels, or all; all ranks must call."""
        y = super().forward(fan_out(x, self.parts))
        return gathered(y, 1, self._ends, self.parts) if self.gather else y


class RowConv2D(_SplitLayer, Conv2D):
    """`nn.Conv2D` of which each rank of ``parts`` holds part of the input channels: see `RowDense`.

    Args:
        in_channels: channels of the full input.
        out_channels: channels of the output.
        kernel_size: as in `nn.Conv2D`.
        parts: the ranks: see `split_world`.
        stride: as in `nn.Conv2D`.
        padding: as in `nn.Conv2D`.
        bias: whether to add a bias.
        activation: "relu" or None.
        weight_init: initializer of the full weight, by default `nn.init.Xavier`.
        scatter: as in `RowDense`.

    Raises:
        ConfigError: as `ColumnDense`.
        MismatchError: as `ColumnDense`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: functional.Size,
        parts: World,
        stride: functional.Size = 1,
        padding: functional.Size = 0,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
        scatter: bool = False,
    ) -> None:
        sizes = f"{kernel_size=}, {stride=}, {padding=}"
        arguments = f"{in_channels}, {out_channels}, {sizes}, {bias=}, {activation=}, {scatter=}"
        self._begin(parts, activation, arguments, in_channels=in_channels, out_channels=out_channels)
        self.scatter = scatter
        self._ends = _ends(self, "in_channels", in_channels, in_channels, parts)
        shape = (out_channels, in_channels, *window(self, "kernel_size", kernel_size, 1))
        self.weight = _own_part(shape, 1, self._ends, parts, weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_channels,))) if bias else None
        self.stride, self.padding = window(self, "stride", stride, 1), window(self, "padding", padding, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's channels, or all, to ``(batch, out_channels, height, width)``; all ranks must call."""
        own = own_channels(x, 1, self._ends, self.parts) if self.scatter else x
        self.check(own)
        y = summed(functional.conv2d(own, self.weight, None, self.stride, self.padding), self.parts)
        return _finished(y, None if self.bias is None else self.bias.reshape(-1, 1, 1), self.activation)


def _ends(layer: Dense | Conv2D, where: str, features: int | None, channels: int | None, parts: World) -> list[int]:
    """Return the bounds of each rank's features, which are complete channels of nearly equal number."""
    name = type(layer).__name__
    expected = f"at least as many channels as the {parts.size} ranks"
    channels = whole_number(name, where, channels, parts.size, expected=expected)
    if features is None or features % channels:
        raise ConfigError(name, where=where, expected=f"a multiple of the {channels} channels", got=repr(features))
    return [end * (features // channels) for end in bounds(channels, parts.size)]


def _own_part(
    shape: tuple[int | None, ...], axis: int, ends: Sequence[int], parts: World, initial: Initialiser
) -> Parameter:
    """Return this rank's part of a parameter of ``shape``, whose full values are drawn."""
    first, last = ends[parts.rank], ends[parts.rank + 1]
    cut = Cut(axis, first, ends[-1])
    module.require_draw(initial)

    def draw(own: tuple[int, ...]) -> np.ndarray:
        full = module.drawn(initial, cut.whole(own))
        return np.array(full[(*(slice(None),) * axis, slice(first, last))], order="C")

    param = module.parameter((*shape[:axis], last - first, *shape[axis + 1 :]), draw, initial)
    param.cut = cut
    return param


def _finished(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Add the bias to the sum and apply the activation of a row layer."""
    y = y if bias is None else y + bias
    return functional.relu(y) if functional.is_relu(activation) else y
