"""The update rules SGD, Adam, AdamW and others, and LARS.

The update rules: SGD, Adam, AdamW.

Their numbers are those of ``torch.optim`` with the same arguments; the arithmetic is `kernels.reference.update`.

Rates that differ by layer: LARS, and the linear scaling rule.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from .. import kernels
from ..core.arrays import Array, array_namespace, is_host, words
from ..core.checks import number
from ..errors import ConfigError, whole_number
from .optimizer import Optimizer, require_alike


@dataclasses.dataclass
class SGD(Optimizer):
    """Stochastic gradient descent.

    Args:
        lr: learning rate, a number >= 0 or a `Schedule`.
        momentum: in [0, 1); 0 keeps no state.
        nesterov: Nesterov's momentum, needs ``momentum`` > 0.
        weight_decay: added to the gradient as ``weight_decay * param`` (L2 penalty).

    Raises:
        ConfigError: a value outside of that.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    name = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.momentum = number("argument", f"{self.name} momentum", self.momentum, least=0, below=1)
        self.weight_decay = number("argument", f"{self.name} weight_decay", self.weight_decay, least=0)
        if not isinstance(self.nesterov, bool) or (self.nesterov and self.momentum == 0.0):
            raise ConfigError(
                "argument", where="sgd nesterov", expected="true with momentum > 0, or false", got=repr(self.nesterov)
            )

    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        settings = (self.learning_rate(step), self.weight_decay, float(scale))
        if not self.momentum:
            return "sgd", settings
        return "sgd_nesterov" if self.nesterov else "sgd_momentum", (*settings, self.momentum)


@dataclasses.dataclass
class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1).

    Args:
        lr: learning rate, a number >= 0 or a `Schedule`.
        beta1: decay of the first moment 'm', in [0, 1).
        beta2: decay of the second moment 'v', in [0, 1).
        eps: added to the root of the corrected second moment.
        weight_decay: added to the gradient as ``weight_decay * param`` (L2 penalty).

    Raises:
        ConfigError: a value outside of that.
    """

    lr: float = 1e-3  # type: ignore[assignment]
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    name = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.beta1 = number("argument", f"{self.name} beta1", self.beta1, least=0, below=1)
        self.beta2 = number("argument", f"{self.name} beta2", self.beta2, least=0, below=1)
        self.eps = number("argument", f"{self.name} eps", self.eps, least=0)
        self.weight_decay = number("argument", f"{self.name} weight_decay", self.weight_decay, least=0)

    def state_names(self) -> tuple[str, ...]:
        return ("m", "v")

    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        return "adam", self._coefficients(step, scale, self.weight_decay, shrink=1.0)

    def _coefficients(self, step: int, scale: float, weight_decay: float, shrink: float) -> tuple[float, ...]:
        step_size = self.learning_rate(step) / (1.0 - self.beta1**step)
        root_scale = 1.0 / math.sqrt(1.0 - self.beta2**step)
        moments = (1.0 - self.beta1, self.beta2, 1.0 - self.beta2)
        return (step_size, weight_decay, float(scale), shrink, *moments, root_scale, self.eps)


@dataclasses.dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay: ``param *= 1 - lr * weight_decay`` (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        weight_decay: as above; the others as `Adam`.
    """

    weight_decay: float = 1e-2
    name = "adamw"

    def kernel(self, step: int, scale: float) -> tuple[str, tuple[float, ...]]:
        shrink = 1.0 - self.learning_rate(step) * self.weight_decay
        return "adam", self._coefficients(step, scale, 0.0, shrink)


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
        self.trust = number("argument", "lars trust", self.trust, above=0)

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
        update = kernels.kernels_for("update", param, plain_on_host=True)
        getattr(update, f"lars_{name}")(*arrays, of_layer, (*coefficients, self.trust))


def segment_squares(params: Array, grads: Array, bounds: Array) -> Array:
    """What `reference.reduce.segment_squares` finds, on the device of flat ``params``; waits for nothing."""
    out = array_namespace(params).empty((bounds.size - 1, 2), dtype=np.float64)
    norms = kernels.kernels_for("reduce", params)
    norms.segment_squares(words(params), words(grads), bounds, out)
    return out


def squares(xs: Sequence[Array]) -> list[float]:
    """The squared norms of flat arrays, all on one device, summed in float64; for a GPU the host waits once."""
    if not xs:
        return []
    return kernels.kernels_for("reduce", xs[0]).sums_of_squares(map(words, xs))  # type: ignore[no-any-return]


def linear_scaling(lr: float, batch_size: int, base_batch_size: int = 256) -> float:
    """``lr``, which suits batches of ``base_batch_size``, for a global batch of ``batch_size``: in proportion.

    With a `WarmupSchedule` for the first epochs (Goyal et al., "Accurate, large minibatch SGD", 2017, 2.1 and 2.2).

    Raises:
        ConfigError: a negative rate, or a size below 1.
    """
    sizes = (
        whole_number("argument", "linear_scaling batch_size", batch_size, 1),
        whole_number("argument", "linear_scaling base_batch_size", base_batch_size, 1),
    )
    return number("argument", "linear_scaling lr", lr, least=0) * sizes[0] / sizes[1]
