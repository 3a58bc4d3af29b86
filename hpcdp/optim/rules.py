"""Floor 3: optim, the update rules: SGD, Adam, AdamW. Imports: errors.

Their numbers are those of ``torch.optim`` with the same arguments; the arithmetic is `kernels.reference.update`.
"""

from __future__ import annotations

import dataclasses
import math

from ..errors import ConfigError
from .optimizer import Optimizer
from .settings import number


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
        self.momentum = number(f"{self.name} momentum", self.momentum, high=1.0)
        self.weight_decay = number(f"{self.name} weight_decay", self.weight_decay)
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
        self.beta1 = number(f"{self.name} beta1", self.beta1, high=1.0)
        self.beta2 = number(f"{self.name} beta2", self.beta2, high=1.0)
        self.eps = number(f"{self.name} eps", self.eps)
        self.weight_decay = number(f"{self.name} weight_decay", self.weight_decay)

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
