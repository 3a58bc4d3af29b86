"""Layers, and the sequence operators behind them: LSTM, embedding, layer normalization, GELU and causal attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..autograd import Gradient, Tensor, as_tensor, is_training, on_tape
from ..autograd.tape import Call, operator
from ..core.arrays import Array, is_host
from ..core.checks import number, whole_number, whole_numbers
from ..core.environment import replica_number
from ..errors import ConfigError, DataError, UnsupportedError
from ..kernels import empty
from ..kernels.cuda import fill, matmul_of
from ..kernels.matmul import multiply
from . import functional, module
from .functional import Pair, Size, alike, called, contiguous, kernels_for, misshapen, refreshed
from .init import Initialiser, Normal, Ones, Xavier, Zeros
from .module import Module, Parameter, in_float32
from .virtual_shards import KeepsStatistics, entered_shard


def refused_input(layer: Module, expected: str, x: Tensor) -> UnsupportedError:
    """Return the error for an input ``x`` of the wrong shape."""
    return UnsupportedError("forward", where=repr(layer), expected=f"input of shape {expected}", got=tuple(x.shape))


def require_channels(layer: Module, **numbers: int | None) -> None:
    """Raise `ConfigError` unless all numbers are integers >= 1; those named ``in_...`` may be None."""
    checked = {where: number for where, number in numbers.items() if number is not None or not where.startswith("in_")}
    whole_numbers(type(layer).__name__, 1, **checked)


def window(layer: Module, where: str, size: Size, least: int) -> Pair:
    """Return ``size`` as (vertical, horizontal); `ConfigError` unless both are integers >= ``least``."""
    sizes = size if isinstance(size, Sequence) and len(size) == 2 else (size, size)
    expected = f"an integer >= {least}, or two of them"
    first, last = (
        whole_number(type(layer).__name__, where, length, least, expected=expected, shown=size) for length in sizes
    )
    return first, last


class Dense(Module):
    """Fully connected layer: ``activation(x @ weight + bias)``.

    Parameters are ``weight`` of shape ``(in_features, out_features)`` and ``bias`` of shape ``(out_features,)``,
    float32 until `Module.to`.

    Args:
        in_features: length of the input's last axis; None takes it from the first input.
        out_features: length of the output's last axis.
        bias: whether to add a bias.
        activation: "relu" or None.
        weight_init: initializer of the weight, by default `init.Xavier`; the bias starts at 0.

    Raises:
        ConfigError: a number of features below 1.
    """

    def __init__(
        self,
        in_features: int | None,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
    ) -> None:
        require_channels(self, in_features=in_features, out_features=out_features)
        self.weight = module.parameter((in_features, out_features), weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_features,))) if bias else None
        self.activation = activation
        functional.is_relu(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, ..., in_features)`` to ``(batch, ..., out_features)``."""
        self.check(x)
        return functional.dense(x, self.weight, self.bias, self.activation)

    def check(self, x: Tensor) -> None:
        """Raise `UnsupportedError` for inputs of the wrong shape; the first input sets deferred dimensions."""
        shape = x.shape
        if len(shape) >= 2:
            module.settle(self.weight, shape[-1])
        if len(shape) < 2 or shape[-1] != self.weight.shape[0]:
            raise refused_input(self, f"(batch, {self.weight.shape[0]})", x)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        return ", ".join(str(n) for n in module.shape_of(self.weight)) + _options(self)


class Conv2D(Module):
    """2-D convolution (cross-correlation): ``activation(weight * x + bias)``.

    Parameters are ``weight`` of shape ``(out_channels, in_channels, kernel height, kernel width)`` and ``bias`` of
    shape ``(out_channels,)``, float32 until `Module.to`.

    Args:
        in_channels: channels of the input; None takes them from the first input.
        out_channels: channels of the output.
        kernel_size: one number or (vertical, horizontal); so are ``stride`` and ``padding``.
        stride: step between windows.
        padding: zeros added on both sides.
        bias: whether to add a bias.
        activation: "relu" or None.
        weight_init: initializer of the weight, by default `init.Xavier`; the bias starts at 0.

    Raises:
        ConfigError: a number below 1, or a padding below 0.
    """

    def __init__(
        self,
        in_channels: int | None,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
    ) -> None:
        require_channels(self, in_channels=in_channels, out_channels=out_channels)
        kernel = window(self, "kernel_size", kernel_size, 1)
        self.stride, self.padding = window(self, "stride", stride, 1), window(self, "padding", padding, 0)
        self.weight = module.parameter((out_channels, in_channels, *kernel), weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_channels,))) if bias else None
        self.activation = activation
        functional.is_relu(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, in_channels, height, width)`` to ``(batch, out_channels, out height, out width)``."""
        self.check(x)
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.activation)

    def check(self, x: Tensor) -> None:
        """Raise `UnsupportedError` for inputs of the wrong shape; the first input sets deferred dimensions."""
        if x.ndim == 4:
            module.settle(self.weight, x.shape[1])
        _, channels, height, width = self.weight.shape
        if x.ndim != 4 or x.shape[1] != channels:
            raise refused_input(self, f"(batch, {channels}, height, width)", x)
        top, left = self.padding
        if x.shape[2] + 2 * top < height or x.shape[3] + 2 * left < width:
            raise refused_input(self, f"(batch, {channels}, >= {height - 2 * top}, >= {width - 2 * left})", x)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        out, channels, *kernel = module.shape_of(self.weight)
        return (
            f"{channels}, {out}, kernel_size={tuple(kernel)}, stride={self.stride}, padding={self.padding}"
            + _options(self)
        )


def _options(layer: Dense | Conv2D) -> str:
    text = "" if layer.bias is not None else ", bias=False"
    return text if layer.activation is None else f"{text}, activation={layer.activation!r}"


class _Pool(Module):
    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        self.kernel_size = window(self, "kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else window(self, "stride", stride, 1)
        self.padding = window(self, "padding", padding, 0)

    def check(self, x: Tensor) -> None:
        """Raise `UnsupportedError` unless ``x`` has 4 axes and holds at least one window."""
        least = tuple(k - 2 * p for k, p in zip(self.kernel_size, self.padding, strict=True))
        if x.ndim != 4 or x.shape[2] < least[0] or x.shape[3] < least[1]:
            raise refused_input(self, f"(batch, channels, >= {least[0]}, >= {least[1]})", x)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2D(_Pool):
    """Max pooling over windows of ``(batch, channels, height, width)``.

    Args:
        kernel_size: one number or (vertical, horizontal); so are ``stride`` and ``padding``.
        stride: step between windows; None is ``kernel_size``.
        padding: padding on both sides, at most half of the window; never the maximum.

    Raises:
        ConfigError: a window or stride below 1, or a padding below 0.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to ``(batch, channels, out height, out width)``."""
        self.check(x)
        return functional.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2D(_Pool):
    """Average pooling over windows of ``(batch, channels, height, width)``.

    Args:
        kernel_size: one number or (vertical, horizontal); so are ``stride`` and ``padding``.
        stride: step between windows; None is ``kernel_size``.
        padding: zeros on both sides, which count in the mean.

    Raises:
        ConfigError: a window or stride below 1, or a padding below 0.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to ``(batch, channels, out height, out width)``."""
        self.check(x)
        return functional.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class GlobalAvgPool2D(Module):
    """Mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to ``(batch, channels, 1, 1)``."""
        if x.ndim != 4:
            raise refused_input(self, "(batch, channels, height, width)", x)
        return x.mean(axis=(2, 3), keepdims=True)


class Flatten(Module):
    """Flattening of all axes but the batch axis."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, ...)`` to ``(batch, elements of a sample)``; 2-D input is returned unchanged."""
        return x if x.ndim == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))


class ReLU(Module):
    """Elementwise ``max(x, 0)``, for any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `functional.relu` of ``x``."""
        return functional.relu(x)


class Sigmoid(Module):
    """Elementwise ``1 / (1 + exp(-x))``, for any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `functional.sigmoid` of ``x``."""
        return functional.sigmoid(x)


class Tanh(Module):
    """Elementwise hyperbolic tangent, for any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `functional.tanh` of ``x``."""
        return functional.tanh(x)


class BatchNorm(KeepsStatistics, Module):
    """Batch normalization of each channel (Ioffe and Szegedy 2015).

    Training normalizes with the mean and biased variance of the batch and updates the buffers ``running_mean`` and
    ``running_var``: ``running = momentum * running + (1 - momentum) * batch``. Prediction uses the buffers. Under a
    reproducible `Trainer` the batch is a virtual shard. The running statistics are then updated once per step, by the
    mean over all its samples and calls.

    Parameters ``gamma`` and ``beta`` and both buffers have shape ``(channels,)`` and stay float32 in 16-bit networks.

    Args:
        channels: length of axis 1 of the input ``(batch, channels, ...)``; None takes it from the first input.
        momentum: weight of the old running statistics.
        eps: number added to the variance.

    Raises:
        ConfigError: ``channels`` below 1, ``momentum`` outside [0, 1], or ``eps`` not above 0.
    """

    keeps_float32 = True

    def __init__(self, channels: int | None, momentum: float = 0.9, eps: float = 1e-5) -> None:
        whole_numbers("BatchNorm", 1, channels=1 if channels is None else channels)
        self.momentum = number("BatchNorm", "momentum", momentum, least=0, most=1)
        self.eps = number("BatchNorm", "eps", eps, above=0)
        self.gamma, self.beta = module.parameter((channels,), Ones()), module.parameter((channels,), Zeros())
        self.running_mean, self.running_var = Tensor(Zeros()((channels or 0,))), Tensor(Ones()((channels or 0,)))

    def statistics(self) -> tuple[Tensor, ...]:
        """Return the running mean and variance."""
        return self.running_mean, self.running_var

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``(batch, channels, ...)``; the result has the same shape."""
        if x.ndim >= 2 and not self.running_mean.shape[0]:  # a Trainer may know the other shapes from other ranks
            channels = x.shape[1]
            self.running_mean, self.running_var = Tensor(Zeros()((channels,))), Tensor(Ones()((channels,)))
            module.settle(self.gamma, channels)
            module.settle(self.beta, channels)
        channels = self.gamma.shape[0]
        if x.ndim < 2 or x.shape[1] != channels:
            raise refused_input(self, f"(batch, {channels}, ...)", x)
        if is_training():
            return self.by_batch(x)
        return self.by_running(x)

    def by_batch(self, x: Tensor) -> Tensor:
        """Normalize ``x`` by its own statistics and update the running ones; an empty batch has none."""
        if not x.size:
            return self.by_running(x)
        shard = entered_shard()
        if shard is None:
            moved = self.running_mean, self.running_var, self.momentum
            return functional.batch_norm(x, self.gamma, self.beta, self.eps, *moved)[0]
        y, mean, variance = functional.batch_norm(x, self.gamma, self.beta, self.eps)
        shard.note(self.running_mean, mean)
        shard.note(self.running_var, variance)
        return y

    def by_running(self, x: Tensor) -> Tensor:
        """Normalize ``x`` by the running statistics."""
        return functional.batch_norm_by_running(x, self.gamma, self.beta, self.running_mean, self.running_var, self.eps)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        return f"{module.shape_of(self.gamma)[0]}, momentum={self.momentum}, eps={self.eps}"


class Dropout(Module):
    """Dropout: in training, sets elements to zero with probability ``p`` and divides the others by ``1 - p``.

    In prediction the input is returned unchanged.

    The generator is seeded with ``seed`` and the number of the replica when the layer first draws. Replicas therefore
    drop different elements, and the same ones in every run with as many replicas. Ranks of one replica (tensor or
    pipeline parallelism) drop the same elements. Replica 0 draws like a single process. A layer that has drawn before
    `hpcdp.init` keeps its generator. Under a reproducible `Trainer`, which requires a seed, the mask depends only on
    the seed, the step and the sample's position in the global batch.

    Args:
        p: probability in [0, 1).
        seed: an integer >= 0; None takes fresh entropy on each rank.

    Raises:
        ConfigError: ``p`` or ``seed`` is out of range; in a call, no seed under a reproducible trainer.
    """

    def __init__(self, p: float = 0.5, seed: int | None = None) -> None:
        self.p = number("Dropout", "p", p, least=0, below=1)
        self.seed = None if seed is None else whole_number("Dropout", "seed", seed, 0)
        self.generator = np.random.default_rng(seed)
        """The layer's generator; its state is saved in checkpoints."""
        self._beginning = _Beginning(seed, self.generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with dropout, in the same shape."""
        if self.p == 0 or not is_training():
            return x
        return functional.dropout(x, self.p, self._drawn_from())

    def _drawn_from(self) -> np.random.Generator:
        shard = entered_shard()
        if shard is None:
            self._beginning.enter(self.generator)
            return self.generator
        if self.seed is None:
            raise ConfigError(
                "Dropout", where="seed", expected="an integer seed, since the trainer is reproducible", got=None,
                remedy=f"pass Dropout({self.p:g}, seed=...)",
            )  # fmt: skip
        return shard.generator(self.seed)

    def describe(self) -> str:
        """Return the argument shown in ``repr``."""
        return str(self.p)


class _Beginning:
    """Initial state of a seeded generator, which depends on the replica that draws first.

    Networks are often built before the world, so the replica is looked up at the first draw. A generator that has
    drawn, or was restored from a checkpoint, is left as it is. This is a separate object because a traced forward may
    not assign attributes of a layer.
    """

    def __init__(self, seed: int | None, generator: np.random.Generator) -> None:
        self._seed, self._replica = seed, 0
        self._state = None if seed is None else generator.bit_generator.state

    def enter(self, generator: np.random.Generator) -> None:
        """Seed a generator that has not drawn yet from the seed and the replica; replica 0 uses the seed alone."""
        replica = replica_number()
        if replica == self._replica or self._state is None:
            return
        self._replica = replica
        if generator.bit_generator.state == self._state:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(replica,) if replica else ())
            generator.bit_generator.state = self._state = np.random.PCG64(sequence).state


_PADDING = 16
"""Elements of padding between weight rows: at power-of-two strides rows evict each other from the cache."""


@operator("lstm", ("x", "weight", "recurrent_weight", "bias"))
@in_float32()
def lstm(x: Any, weight: Any, recurrent_weight: Any, bias: Any) -> Tensor:
    """Run an LSTM over a whole sequence, from zero state, as one operation.

    Each time step is one product, of its input and the previous hidden state with both weights, and one pass over the
    gates; backward likewise. The weight gradients are one product over all steps.

    Args:
        x: shape ``(batch, time, in)``.
        weight: shape ``(in, 4 size)``: input, forget, candidate and output gates side by side.
        recurrent_weight: shape ``(size, 4 size)``.
        bias: shape ``(4 size,)``.

    Returns:
        The hidden states of all steps, shape ``(batch, time, size)``.
    """
    operands = [as_tensor(operand).data for operand in (x, weight, recurrent_weight, bias)]
    a, w, u, b = map(contiguous, operands)
    xp = alike("lstm", a, w, u, b)
    size = u.shape[0]
    if a.ndim != 3 or w.shape != (a.shape[2], 4 * size) or u.shape != (size, 4 * size) or b.shape != (4 * size,):
        raise misshapen("lstm", "(batch, time, in), (in, 4 size), (size, 4 size) and (4 size,)", a, w, u, b)
    batch, time, features = a.shape
    compute = kernels_for("networks", a)
    both = features + size
    inputs, gates = empty((time + 1, batch, both), a.dtype, xp), empty((time, batch, 4 * size), a.dtype, xp)
    cells, out = empty((time + 1, batch, size), a.dtype, xp), empty((batch, time, size), a.dtype, xp)
    weights = empty((both, 4 * size + _PADDING), a.dtype, xp)[:, : 4 * size]
    product = empty((batch, 4 * size), a.dtype, xp)  # reused by every step, so that it stays in the cache

    def again(place: Array) -> list[Call]:
        calls = [call for pair in zip((a, w, u, b), operands, strict=True) for call in refreshed(*pair)]
        if time > 1:
            calls += [(weights[:features].__setitem__, (..., w)), (weights[features:].__setitem__, (..., u))]
        calls += [
            (inputs[:time, :, :features].__setitem__, (..., a.swapaxes(0, 1))),
            (inputs[0, :, features:].__setitem__, (..., 0)),
            (cells[0].__setitem__, (..., 0)),
        ]
        for t in range(time):
            factors = (inputs[t], weights) if t else (inputs[0, :, :features], w)
            calls += [(multiply, (*factors, product)), (compute.lstm_step, (b, product, t, gates, cells, inputs))]
        return [*calls, (place.__setitem__, (..., inputs[1:, :, features:].swapaxes(0, 1)))]

    called(again(out))

    def pullback(
        gy: Array, dx: Gradient | None, dweight: Gradient | None, drecurrent: Gradient | None, dbias: Gradient | None
    ) -> None:
        g = contiguous(gy)
        dgates, dinputs = empty(gates.shape, a.dtype, xp), empty(inputs.shape, a.dtype, xp)
        dcell, sums = (xp.zeros(shape, dtype=a.dtype) for shape in ((batch, size), b.shape))
        dinputs[time] = 0
        for t in range(time - 1, -1, -1):
            compute.lstm_step_gradients(g, dinputs, dcell, t, gates, cells, dgates, sums)
            if t:
                multiply(dgates[t], weights.T, dinputs[t])
        if dbias is not None:
            dbias.add(sums)
        if dweight is not None or drecurrent is not None:
            rows = inputs[:time].reshape(time * batch, both)
            products = empty((both, 4 * size), a.dtype, xp)
            multiply(rows.T, dgates.reshape(time * batch, 4 * size), products)
            if dweight is not None:
                dweight.add(products[:features])
            if drecurrent is not None:
                drecurrent.add(products[features:])
        if dx is not None:
            if time:
                multiply(dgates[0], w.T, dinputs[0, :, :features])
            place = dx.empty()
            place[...] = dinputs[:time, :, :features].swapaxes(0, 1)
            dx.add(place)

    return on_tape(out, (x, weight, recurrent_weight, bias), pullback, again)


class LSTM(Module):
    """Long short-term memory (LSTM) layer, from zero state in each batch.

    Parameters are ``weight`` of shape ``(in_features, 4 size)``, ``recurrent_weight`` of shape ``(size, 4 size)`` and
    ``bias`` of shape ``(4 size,)``, with the gates in the order input, forget, candidate, output. The bias of the
    forget gate starts at 1 (Jozefowicz, Zaremba and Sutskever 2015, section 2.2), the others at 0.

    Args:
        in_features: length of the input's last axis; None takes it from the first input.
        size: length of the hidden state.
        weight_init: initializer, called for the weights of each gate; by default `init.Xavier`.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, in_features: int | None, size: int, weight_init: Initialiser | None = None) -> None:
        whole_numbers("LSTM", 1, in_features=1 if in_features is None else in_features, size=size)
        initial = weight_init or Xavier()
        module.require_draw(initial)

        def gates(shape: tuple[int, ...]) -> np.ndarray:
            return np.concatenate([module.drawn(initial, (shape[0], size)) for _ in range(4)], axis=1)

        self.weight = module.parameter((in_features, 4 * size), gates, initial)
        self.recurrent_weight = Parameter(gates((size, 4 * size)))
        self.bias = Parameter(np.repeat(np.array([0, 1, 0, 0], np.float32), size))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, in_features)`` to the hidden states ``(batch, time, size)``."""
        if x.ndim == 3:
            module.settle(self.weight, x.shape[2])
        features = self.weight.shape[0]
        if x.ndim != 3 or x.shape[2] != features:
            raise refused_input(self, f"(batch, time, {features})", x)
        return lstm(x, self.weight, self.recurrent_weight, self.bias)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        return f"{module.shape_of(self.weight)[0]}, {self.recurrent_weight.shape[0]}"


@operator("embedding", ("tokens", "weight"))
@in_float32()
def embedding(tokens: Any, weight: Any) -> Tensor:
    """Return the row of ``weight`` for each token.

    Args:
        tokens: integers from 0 to ``number - 1``, any shape; in the namespace of ``weight`` or NumPy's.
        weight: shape ``(number, features)``.

    Returns:
        Shape ``(*tokens.shape, features)``.

    Raises:
        UnsupportedError: tokens that are not integers, or a weight that is not 2-D.
        DataError: a token is out of range.
    """
    w, numbers = as_tensor(weight).data, as_tensor(tokens).data
    xp = alike("embedding", w)
    if w.ndim != 2:
        raise UnsupportedError("embedding", expected="a weight (number, features)", got=tuple(w.shape))
    if numbers.dtype.kind not in "iu":
        raise UnsupportedError("embedding", expected="integer tokens", got=numbers.dtype)
    rows = xp.empty(math.prod(numbers.shape), dtype=xp.int64)
    out = empty((rows.shape[0], w.shape[1]), w.dtype, xp)

    def checked() -> Array:
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < w.shape[0]:
            raise DataError(
                "embedding", where="tokens", expected=f"0 to {w.shape[0] - 1}",
                got=f"{int(numbers.min())} to {int(numbers.max())}",
            )  # fmt: skip
        return numbers.reshape(-1)

    def look_up(place: Array) -> None:
        if is_host(numbers):
            fill(rows, checked)
        else:
            rows[...] = numbers.reshape(-1)
        xp.take(w, rows, axis=0, out=place)

    look_up(out)

    def pullback(gy: Array, _: None, dweight: Gradient | None) -> None:
        if dweight is not None:
            place = dweight.empty()
            place[...] = 0
            values = contiguous(gy).reshape(out.shape)
            kernels_for("networks", w).add_rows(place, rows, values)
            dweight.add(place)

    return on_tape(
        out.reshape(*numbers.shape, w.shape[1]), (None, weight), pullback,
        lambda place: [(look_up, (place.reshape(out.shape),))],
    )  # fmt: skip


@operator("layer_norm", ("x", "scale", "shift"))
@in_float32()
def layer_norm(x: Any, scale: Any, shift: Any, eps: float) -> Tensor:
    """Compute ``scale * (x - mean) / sqrt(variance + eps) + shift`` over the last axis.

    Args:
        x: shape ``(..., features)``.
        scale: shape ``(features,)``.
        shift: shape ``(features,)``.
        eps: number added to the variance.

    Returns:
        The shape of ``x``.
    """
    operands = [as_tensor(x_).data for x_ in (x, scale, shift)]
    a, gamma, beta = map(contiguous, operands)
    xp = alike("layer_norm", a, gamma, beta)
    if a.ndim < 2 or gamma.shape != a.shape[-1:] or beta.shape != gamma.shape:
        raise misshapen("layer_norm", "(..., features), (features,) and (features,)", a, gamma, beta)
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    compute = kernels_for("networks", a)
    out = empty(rows.shape, a.dtype, xp)
    saved = xp.empty(rows.shape[0], dtype=a.dtype), xp.empty(rows.shape[0], dtype=a.dtype)
    compute.layer_norm(rows, gamma, beta, out, saved, eps)

    def again(place: Array) -> list[Call]:
        copies = [call for pair in zip((a, gamma, beta), operands, strict=True) for call in refreshed(*pair)]
        return [*copies, (compute.layer_norm, (rows, gamma, beta, place.reshape(rows.shape), saved, eps))]

    def pullback(gy: Array, *gradients: Gradient | None) -> None:
        places = [xp.empty(gamma.shape, dtype=gamma.dtype) if x_ is None else x_.empty() for x_ in gradients[1:]]
        dx = empty(rows.shape, a.dtype, xp)
        compute.layer_norm_gradients(contiguous(gy).reshape(rows.shape), rows, gamma, saved, (dx, *places))
        for gradient, place in zip(gradients, (dx.reshape(a.shape), *places), strict=True):
            if gradient is not None:
                gradient.add(place)

    return on_tape(out.reshape(a.shape), (x, scale, shift), pullback, again)


@operator("gelu")
@in_float32()
def gelu(x: Any) -> Tensor:
    """Compute ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`` (Hendrycks and Gimpel 2016, section 2)."""
    data = as_tensor(x).data
    a = contiguous(data)
    xp = alike("gelu", a)
    compute = kernels_for("networks", a)
    out = empty(a.shape, a.dtype, xp)
    compute.gelu(a, out)

    def pullback(gy: Array, dx: Gradient | None) -> None:
        if dx is not None:
            place = dx.empty()
            compute.gelu_gradient(contiguous(gy), a, place)
            dx.add(place)

    return on_tape(out, (x,), pullback, lambda place: [*refreshed(a, data), (compute.gelu, (a, place))])


@operator("causal_attention", ("parts",))
@in_float32()
def causal_attention(parts: Any, heads: int) -> Tensor:
    """Compute causal multi-head self-attention (Vaswani et al. 2017, sections 3.2.1 to 3.2.3).

    For each head it is ``softmax(q @ k.T / sqrt(width / heads)) @ v``, where each position attends to itself and
    earlier ones.

    Args:
        parts: queries, keys and values side by side, shape ``(batch, time, 3 width)``.
        heads: number of heads, which divides ``width``.

    Returns:
        The heads side by side, shape ``(batch, time, width)``.
    """
    data = as_tensor(parts).data
    a = contiguous(data)
    xp = alike("causal_attention", a)
    if a.ndim != 3 or heads < 1 or a.shape[2] % (3 * heads) or not a.shape[2]:
        expected = f"shape (batch, time, 3 width) with a width > 0 divisible by {heads} heads"
        raise UnsupportedError("causal_attention", expected=expected, got=tuple(a.shape))
    batch, time, width = a.shape[0], a.shape[1], a.shape[2] // 3
    depth = width // heads
    compute = kernels_for("networks", a)
    matmul = matmul_of(xp)
    factor = 1 / math.sqrt(depth)

    def split(x: Array, count: int) -> tuple[Array, ...]:
        wide = x.reshape(batch, time, count, heads, depth).transpose(2, 0, 3, 1, 4)
        return tuple(wide[i] for i in range(count))

    queries, keys, values = split(a, 3)
    chances = empty((batch, heads, time, time), a.dtype, xp)
    flat = chances.reshape(batch * heads, time, time)
    out = empty((batch, time, width), a.dtype, xp)

    def again(place: Array) -> list[Call]:
        (into,) = split(place, 1)
        return [
            *refreshed(a, data),
            (partial(matmul, out=chances), (queries, keys.swapaxes(-1, -2))),
            (compute.causal_shift, (flat, factor)),
            (partial(xp.exp, out=flat), (flat,)),
            (compute.normalize_rows, (flat,)),
            (lambda: into.__setitem__(..., matmul(chances, values)), ()),
        ]

    called(again(out))

    def pullback(gy: Array, dparts: Gradient | None) -> None:
        if dparts is None:
            return
        (g,) = split(contiguous(gy), 1)
        place = dparts.empty()
        dqueries, dkeys, dvalues = split(place, 3)
        dvalues[...] = matmul(chances.swapaxes(-1, -2), g)
        scores = matmul(g, values.swapaxes(-1, -2), out=empty(chances.shape, a.dtype, xp))
        compute.softmax_gradient(flat, scores.reshape(flat.shape), factor)
        dqueries[...] = matmul(scores, keys)
        dkeys[...] = matmul(scores.swapaxes(-1, -2), queries)
        dparts.add(place)

    return on_tape(out, (parts,), pullback, again)


class Embedding(Module):
    """Lookup table: a row of ``weight``, shape ``(num_tokens, features)``, for each token.

    Args:
        num_tokens: number of tokens.
        features: length of a row.
        weight_init: initializer of the weight, by default ``init.Normal(0.02)``.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, num_tokens: int, features: int, weight_init: Initialiser | None = None) -> None:
        whole_numbers("Embedding", 1, num_tokens=num_tokens, features=features)
        self.weight = module.parameter((num_tokens, features), weight_init or Normal(0.02))

    def forward(self, x: Tensor) -> Tensor:
        """Map integer tokens of any shape to ``(*x.shape, features)``."""
        return embedding(x, self.weight)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        return ", ".join(str(n) for n in self.weight.shape)


class LayerNorm(Module):
    """Layer normalization over the last axis (Ba, Kiros and Hinton 2016).

    Parameters ``gamma``, from 1, and ``beta``, from 0, have shape ``(features,)`` and stay float32 in 16-bit networks.

    Args:
        features: length of the last axis; None takes it from the first input.
        eps: number added to the variance.

    Raises:
        ConfigError: ``features`` below 1, or ``eps`` below 0.
    """

    keeps_float32 = True

    def __init__(self, features: int | None, eps: float = 1e-5) -> None:
        whole_numbers("LayerNorm", 1, features=1 if features is None else features)
        self.eps = number("LayerNorm", "eps", eps, least=0)
        self.gamma, self.beta = module.parameter((features,), Ones()), module.parameter((features,), Zeros())

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``(..., features)``; the result has the same shape."""
        for param in (self.gamma, self.beta):
            module.settle(param, x.shape[-1])
        return layer_norm(x, self.gamma, self.beta, self.eps)

    def describe(self) -> str:
        """Return the arguments shown in ``repr``."""
        return f"{module.shape_of(self.gamma)[0]}, eps={self.eps}"


class GELU(Module):
    """Elementwise GELU activation, by its tanh approximation (Hendrycks and Gimpel 2016, section 2)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``."""
        return gelu(x)


class CausalSelfAttention(Module):
    """Multi-head self-attention of each position to itself and earlier ones, with dense layers before and after.

    Args:
        width: length of the input's and output's last axis.
        heads: number of heads, which divides ``width``.
        weight_init: initializer of both dense layers, by default `init.Xavier`.

    Raises:
        ConfigError: a number below 1, or ``heads`` does not divide ``width``.
    """

    def __init__(self, width: int, heads: int, weight_init: Initialiser | None = None) -> None:
        whole_numbers("CausalSelfAttention", 1, width=width, heads=heads)
        if width % heads:
            raise ConfigError("CausalSelfAttention", where="heads", expected=f"a divisor of width {width}", got=heads)
        self.project = Dense(width, 3 * width, weight_init=weight_init)
        self.merge = Dense(width, width, weight_init=weight_init)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to ``(batch, time, width)``."""
        return self.merge(causal_attention(self.project(x), self.heads))

    def describe(self) -> str:
        """Return the argument shown in ``repr``."""
        return f"heads={self.heads}"
