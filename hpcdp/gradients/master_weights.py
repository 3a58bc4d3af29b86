"""Parameters of 16 bits: the float32 copies that are updated in their place, and rounded to them after each update.

An update of less than half a unit in the last place of a weight would be lost in 16 bits (Micikevicius et al., "Mixed
precision training", 2018, section 3.1). The copies are part of the optimizer's state: of each element whoever updates
it has one, and checkpoints have them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import kernels
from ..arrays import Array, array_namespace, is_half, words
from ..kernels.buffers import empty
from ..optim import Optimizer

MASTER = "master"
"""Their name in the state."""
Rule = Callable[[Array, Array, dict[str, Array]], None]
"""An optimizer's update of a flat parameter by its gradient and state, with all that it depends on besides."""


def init_state(optimizer: Optimizer, param: Array) -> dict[str, Array]:
    """`Optimizer.init_state` for a flat array; of 16 bits that of its float32 copy, which is in it, too."""
    if not is_half(param):
        return optimizer.init_state(param)
    master = widened(param)
    return {MASTER: master, **optimizer.init_state(master)}


def update(rule: Rule, param: Array, grad: Array, state: dict[str, Array]) -> None:
    """``rule`` with the state of `init_state`; changes ``param`` and the arrays of ``state`` in place."""
    if MASTER not in state:
        rule(param, grad, state)
        return
    follow(param, state[MASTER])
    rule(state[MASTER], widened(grad), state)
    round_to(param, state[MASTER])


def follow(param: Array, master: Array) -> None:
    """Let a copy be what a program has set its parameter to, flat; where that is the copy, rounded, it stays exact."""
    _casts(param).follow(master, words(param))


def widened(x: Array) -> Array:
    """A copy of 16-bit floats, flat and contiguous, in float32."""
    xp = array_namespace(x)
    wide = empty(x.shape, xp.float32, xp)
    getattr(_casts(x), f"from_{x.dtype.name}")(x.view(xp.uint16), wide)
    return wide


def round_to(param: Array, master: Array) -> None:
    """Write float32 values to a flat array of 16 bits, to nearest, ties to even; what is too large becomes infinite."""
    getattr(_casts(param), f"to_{param.dtype.name}")(master, param.view(array_namespace(param).uint16))


def _casts(x: Array) -> Any:
    return kernels.kernels_for("cast", x)
