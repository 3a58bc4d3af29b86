"""Tensor parallelism: layers whose parameters are split over ranks.

What passes between the ranks that compute layers together: each exchange of a forward has its own in backward.

A tensor is **whole**, and alike on all these ranks, or each has **its channels** of it. All of them must call, alike
and in the same order, and so must their backwards. Losses are of whole tensors: every rank computes the same one, and
the gradient of a whole tensor is whole, and the same bits, on each.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3: `fan_out` is f of figure 3, and `summed` is g.

Dense and convolution layers of which each of several ranks holds and computes a part of the channels.

A **column** layer has a part of the outputs, of a whole input; a **row** layer a part of the inputs, and its output is
summed over the ranks. A column layer followed by a row layer exchanges once in forward and once in backward; what lies
between must go channel by channel, as activations and pooling do.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..autograd import Gradient, Tensor, on_tape
from ..collectives import allgather, allreduce
from ..comm import World
from ..comm.communicator import bounds
from ..comm.consistency import require_same
from ..core.arrays import Array, array_namespace
from ..core.checks import instance, whole_number
from ..core.state import Cut
from ..errors import ConfigError, UnsupportedError
from ..kernels.buffers import empty
from ..nn import Conv2D, Dense, Parameter, functional, module
from ..nn.init import Initialiser, Xavier, Zeros
from ..nn.layers import require_channels, window
from .pipeline import share_replica


def fan_out(x: Tensor, parts: World) -> Tensor:
    """``x``, whole, of which each rank computes something else; backward sums what these add to its gradient."""
    if parts.size == 1:
        return x

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(allreduce(gy, "sum", parts, out=dx.empty()))

    return on_tape(x.data, (x,), pullback)


def summed(x: Tensor, parts: World) -> Tensor:
    """The sum over the ranks, whole; the gradient of each ``x`` is that of the sum."""
    if parts.size == 1:
        return x
    total = empty(x.shape, x.dtype, array_namespace(x.data))

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(gy)

    return on_tape(allreduce(x.data, "sum", parts, out=total), (x,), pullback)


def gathered(x: Tensor, axis: int, ends: Sequence[int], parts: World) -> Tensor:
    """Whole, of which each rank has its channels; in backward each takes those of the gradient.

    Args:
        axis: of the channels.
        ends: where the channels of each rank begin, and the last ones end.
    """
    if parts.size == 1:
        return x
    own = _own(axis % x.ndim, ends, parts)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(array_namespace(gy).ascontiguousarray(gy[own]))

    return on_tape(_join(x.data, axis, ends, parts), (x,), pullback)


def own_channels(x: Tensor, axis: int, ends: Sequence[int], parts: World) -> Tensor:
    """This rank's channels of ``x``, which is whole; backward gathers those of the gradient. The rest is as `gathered`.

    Raises:
        UnsupportedError: ``x`` has another number of channels.
    """
    if x.ndim < 2 or x.shape[axis] != ends[-1]:
        expected = f"{ends[-1]} channels along axis {axis}, to be split over {parts.size} ranks"
        raise UnsupportedError("own_channels", expected=expected, got=tuple(x.shape))
    if parts.size == 1:
        return x

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            dx.add(_join(gy, axis, ends, parts))

    own = x.data[_own(axis % x.ndim, ends, parts)]
    return on_tape(array_namespace(own).ascontiguousarray(own), (x,), pullback)


def _own(axis: int, ends: Sequence[int], parts: World) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(ends[parts.rank], ends[parts.rank + 1]))


def _join(own: Array, axis: int, ends: Sequence[int], parts: World) -> Array:
    """All ranks' channels, in their order. Ranks may have different numbers of them, an allgather may not."""
    xp = array_namespace(own)
    counts = [ends[rank + 1] - ends[rank] for rank in range(parts.size)]
    channels = xp.moveaxis(own, axis, 0)
    room = xp.zeros((parts.size, max(counts), *channels.shape[1:]), dtype=own.dtype)
    room[parts.rank, : counts[parts.rank]] = channels
    allgather(room[parts.rank], parts, out=room)
    whole = xp.concatenate([room[rank, :count] for rank, count in enumerate(counts)])
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, axis))


class ColumnDense(Dense):
    """`nn.Dense` of which each rank of ``parts`` computes some of the outputs. All must make it, and call it, alike.

    Initial values are this rank's of the whole weight, drawn as `nn.Dense` draws it: with a seeded ``weight_init``
    those of the unsplit layer, on any number of ranks. Ranks may have different numbers of channels, but each has one.

    Args:
        parts: the ranks: see `split_world`.
        gather: give all outputs to every rank. False: each goes on with its own, ``(batch, ..., own features)``.

    The others are those of `nn.Dense`, of the whole layer.

    Raises:
        ConfigError: fewer channels than ranks.
        MismatchError: the ranks have made it differently, or call it with inputs of different sizes.
    """

    is_traceable = False

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
        _require_alike(self, parts, f"{in_features}, {out_features}, {bias=}, {activation=}, {gather=}")
        require_channels(self, in_features=in_features, out_features=out_features)
        functional.is_relu(activation)
        self.parts, self.gather = parts, gather
        self._ends = _ends(self, "out_features", out_features, out_features, parts)
        self.weight = _own_part((in_features, out_features), 1, self._ends, parts, weight_init or Xavier())
        self.bias = _own_part((out_features,), 0, self._ends, parts, Zeros()) if bias else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(fan_out(x, self.parts))
        return gathered(y, -1, self._ends, self.parts) if self.gather else y

    def describe(self) -> str:
        return super().describe() + _part(self.parts)


class RowDense(Dense):
    """`nn.Dense` of which each rank of ``parts`` has some of the inputs; every rank gets all outputs.

    The bias is whole on every rank, and added once. What is said of `ColumnDense` is so here.

    Args:
        scatter: inputs are whole, and each rank takes its own of them. False: each has its own, as a column layer
            leaves them.
        channels: inputs are so many channels of as many features each, as `nn.Flatten` makes of images, and are split
            between channels. None: as many as there are features.

    Raises:
        ConfigError: as `ColumnDense`, or ``channels`` do not divide the features.
    """

    is_traceable = False

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
        said = f"{in_features}, {out_features}, {bias=}, {activation=}, {scatter=}, {channels=}"
        _require_alike(self, parts, said)
        require_channels(self, in_features=in_features, out_features=out_features)
        functional.is_relu(activation)
        self.parts, self.scatter = parts, scatter
        self._ends = _ends(self, "in_features", in_features, in_features if channels is None else channels, parts)
        self.weight = _own_part((in_features, out_features), 0, self._ends, parts, weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_features,))) if bias else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        own = own_channels(x, -1, self._ends, self.parts) if self.scatter else x
        self.check(own)
        y = summed(functional.dense(own, self.weight), self.parts)
        return _finished(y, self.bias, self.activation)

    def describe(self) -> str:
        return super().describe() + _part(self.parts)


class ColumnConv2D(Conv2D):
    """`nn.Conv2D` of which each rank of ``parts`` computes some of the output channels: see `ColumnDense`.

    Args:
        parts, gather: as `ColumnDense`; the others are those of `nn.Conv2D`, of the whole layer.

    Raises:
        ConfigError, MismatchError: as `ColumnDense`.
    """

    is_traceable = False

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
        _require_alike(self, parts, f"{in_channels}, {out_channels}, {sizes}, {bias=}, {activation=}, {gather=}")
        require_channels(self, in_channels=in_channels, out_channels=out_channels)
        functional.is_relu(activation)
        self.parts, self.gather = parts, gather
        self._ends = _ends(self, "out_channels", out_channels, out_channels, parts)
        shape = (out_channels, in_channels, *window(self, "kernel_size", kernel_size, 1))
        self.weight = _own_part(shape, 0, self._ends, parts, weight_init or Xavier())
        self.bias = _own_part((out_channels,), 0, self._ends, parts, Zeros()) if bias else None
        self.stride, self.padding = window(self, "stride", stride, 1), window(self, "padding", padding, 0)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(fan_out(x, self.parts))
        return gathered(y, 1, self._ends, self.parts) if self.gather else y

    def describe(self) -> str:
        return super().describe() + _part(self.parts)


class RowConv2D(Conv2D):
    """`nn.Conv2D` of which each rank of ``parts`` has some of the input channels: see `RowDense`.

    Args:
        parts, scatter: as `RowDense`; the others are those of `nn.Conv2D`, of the whole layer.

    Raises:
        ConfigError, MismatchError: as `ColumnDense`.
    """

    is_traceable = False

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
        _require_alike(self, parts, f"{in_channels}, {out_channels}, {sizes}, {bias=}, {activation=}, {scatter=}")
        require_channels(self, in_channels=in_channels, out_channels=out_channels)
        functional.is_relu(activation)
        self.parts, self.scatter = parts, scatter
        self._ends = _ends(self, "in_channels", in_channels, in_channels, parts)
        shape = (out_channels, in_channels, *window(self, "kernel_size", kernel_size, 1))
        self.weight = _own_part(shape, 1, self._ends, parts, weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_channels,))) if bias else None
        self.stride, self.padding = window(self, "stride", stride, 1), window(self, "padding", padding, 0)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        own = own_channels(x, 1, self._ends, self.parts) if self.scatter else x
        self.check(own)
        y = summed(functional.conv2d(own, self.weight, None, self.stride, self.padding), self.parts)
        return _finished(y, None if self.bias is None else self.bias.reshape(-1, 1, 1), self.activation)

    def describe(self) -> str:
        return super().describe() + _part(self.parts)


def _require_alike(layer: Dense | Conv2D, parts: World, said: str) -> None:
    name = type(layer).__name__
    instance(name, "parts", parts, World, "a world, that of split_world(...).parts")
    require_same(parts.comm, name, [said], "make it alike on all ranks")
    share_replica(parts)


def _ends(layer: Dense | Conv2D, where: str, features: int | None, channels: int | None, parts: World) -> list[int]:
    """Where the features of each rank begin, and the last ones end: whole channels of nearly equal number."""
    name = type(layer).__name__
    expected = f"at least as many channels as the {parts.size} ranks"
    channels = whole_number(name, where, channels, parts.size, expected=expected)
    if features is None or features % channels:
        raise ConfigError(name, where=where, expected=f"a multiple of the {channels} channels", got=repr(features))
    return [end * (features // channels) for end in bounds(channels, parts.size)]


def _own_part(
    shape: tuple[int | None, ...], axis: int, ends: Sequence[int], parts: World, initial: Initialiser
) -> Parameter:
    """This rank's part of a parameter of ``shape``, whose values are drawn whole."""
    first, last = ends[parts.rank], ends[parts.rank + 1]
    cut = Cut(axis, first, ends[-1])
    module.require_draw(initial)

    def draw(own: tuple[int, ...]) -> np.ndarray:
        whole = module.drawn(initial, cut.whole(own))
        return np.array(whole[(*(slice(None),) * axis, slice(first, last))], order="C")

    param = module.parameter((*shape[:axis], last - first, *shape[axis + 1 :]), draw, initial)
    param.cut = cut
    return param


def _finished(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """What a row layer does with the sum, once."""
    y = y if bias is None else y + bias
    return functional.relu(y) if functional.is_relu(activation) else y


def _part(parts: World) -> str:
    return f", part {parts.rank} of {parts.size}"
