"""Floor 3: optim, rates that differ by layer: LARS, and the linear scaling rule. Imports: arrays, errors, kernels."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from .. import kernels
from ..arrays import Array, array_namespace, is_host, words
from .optimizer import require_alike
from .rules import SGD
from .settings import count, number


@dataclasses.dataclass
class LARS(SGD):
    """`SGD` for large batches: each layer moves by a part of its own weights' length.

    Gradient and decay of a layer are multiplied by ``trust * |w| / (|g| + weight_decay * |w|)``, with norms over the
    whole layer and ``g`` the mean gradient; the factor is 1 where either is zero. Layers are the parameters of two axes
    or more: biases, scales and shifts are updated as `SGD` does. So it is no rule by elements: a `Trainer` exchanges
    the norms, key-value stores, which hold parts, refuse it.

    Args:
        lr: the global rate, the paper's gamma.
        trust: the paper's eta, above 0.
        momentum, nesterov, weight_decay: as `SGD`.

    Raises:
        ConfigError: a value outside of that.

    Source: You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1, with the rate
    outside of the momentum, as in ``torch.optim.SGD``.
    """

    momentum: float = 0.9
    trust: float = 0.001
    name = "lars"
    by_layer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trust = number("lars trust", self.trust, low=math.ulp(0.0))

    def of_layer(self, step: int, scale: float, squares: tuple[float, float] | Array | None) -> tuple[SGD, float]:
        if squares is not None and not isinstance(squares, tuple):
            rule = copy.copy(self)
            rule._squares = squares
            return rule, scale
        factor = 1.0
        if squares is not None:
            weights, gradient = (math.sqrt(each) for each in squares)
            length = gradient * scale + self.weight_decay * weights
            factor = self.trust * weights / length if weights and gradient else 1.0
        sgd = SGD(self.learning_rate(step), self.momentum, self.nesterov)
        sgd.weight_decay = self.weight_decay * factor  # not as a setting, which may not be NaN: this is where a norm is
        return sgd, scale * factor

    _squares = None
    """Of the norms of the layer that it is for, on a device; those of the arrays that it is given otherwise."""

    def update(self, param: Array, grad: Array, state: dict[str, Array], *, step: int, scale: float = 1.0) -> None:
        """As `Optimizer.update`, of ``param`` as one whole layer; for a GPU's norms the host does not wait."""
        if param.ndim != 1 or grad.shape != param.shape:  # norms are taken before the rule looks at them
            require_alike("lars update", (param, grad))
        if is_host(param):
            weights, gradient = squares((param, grad))
            rule, scale = self.of_layer(step, scale, (weights, gradient))
            rule.update(param, grad, state, step=step, scale=scale)
            return
        of_layer = self._squares
        if of_layer is None:
            ends = array_namespace(param).asarray(np.array([0, param.size]))
            of_layer = segment_squares(param, grad, ends)[0]
        arrays = (param, grad, *self.arrays_of(state))
        require_alike("lars.update", arrays)
        name, coefficients = self.kernel(step, scale)
        lars = kernels.kernels_for("lars", param)
        getattr(lars, name)(*arrays, of_layer, (*coefficients, self.trust))


def segment_squares(params: Array, grads: Array, bounds: Array) -> Array:
    """What `reference.norms.segment_squares` finds, on the device of flat ``params``; waits for nothing."""
    out = array_namespace(params).empty((bounds.size - 1, 2), dtype=np.float64)
    norms = kernels.kernels_for("norms", params)
    norms.segment_squares(words(params), words(grads), bounds, out)
    return out


def squares(xs: Sequence[Array]) -> list[float]:
    """The squared norms of flat arrays, all on one device, summed in float64; for a GPU the host waits once."""
    if not xs:
        return []
    return kernels.kernels_for("norms", xs[0]).sums_of_squares(map(words, xs))  # type: ignore[no-any-return]


def linear_scaling(lr: float, batch_size: int, base_batch_size: int = 256) -> float:
    """``lr``, which suits batches of ``base_batch_size``, for a global batch of ``batch_size``: in proportion.

    With a `WarmupSchedule` for the first epochs (Goyal et al., "Accurate, large minibatch SGD", 2017, 2.1 and 2.2).

    Raises:
        ConfigError: a negative rate, or a size below 1.
    """
    sizes = count("linear_scaling batch_size", batch_size), count("linear_scaling base_batch_size", base_batch_size)
    return number("linear_scaling lr", lr) * sizes[0] / sizes[1]
