"""Losses that are means already, which a step would divide by the number of samples once more."""

from __future__ import annotations

import math
import warnings

from ...arrays import Array
from ...autograd.modes import modes
from ...autograd.tape import NumberHeads

_NEAR = 1e-3


class MeanLosses:
    """A look at how a program's first backwards begin, which warns where that is with a mean over samples.

    Losses are per sample, and `Trainer.step` divides the sum of their gradients by the global count. A single number is
    right where it is the sum of the losses, or where each stands for one sample; the gradients of a mean would be
    divided twice. What a single number is the tape says: by the weight of each operand of the operation that made it.

    Args:
        warns: whether this rank does; one says it for all.
    """

    def __init__(self, warns: bool) -> None:
        self._warns = warns
        self._met: list[NumberHeads] = []
        """Of the backwards since the last step."""
        self._met_others = False
        """Whether another one was among them, which began with several losses."""

    def note(self) -> None:
        """Note the backward that this thread is in."""
        heads = modes.number_heads
        if heads is None:
            self._met_others = True
        elif not self._met or self._met[-1] is not heads:
            self._met.append(heads)

    def forget(self) -> None:
        """Forget the backwards since the last step."""
        self._met, self._met_others = [], False

    def look(self, operation: str, count: int, loss_scale: float, stacklevel: int) -> bool:
        """Warn where the backwards before a step of ``count`` samples began with means.

        Returns:
            Whether it has seen enough; a program does the same in each step.
        """
        met, others = self._met, self._met_others
        self.forget()
        num_heads = sum(heads.count for heads in met)
        if others or not met or count <= num_heads:  # each number may be the loss of one sample
            return others
        size = _averaged([each for heads in met for each in heads.reductions], count / num_heads, loss_scale)
        if size and self._warns:
            scale = "" if loss_scale == 1 else " * trainer.loss_scale"
            warnings.warn(
                f"{operation}({count}): backward began with a single number, the mean over {size} losses, and "
                f"{operation}() divides by the number of samples again, so the update is {size} times too small; call "
                f"backward() on the losses, one a sample, or loss.backward(len(y){scale}), which is exact for uneven "
                "batches, too",
                stacklevel=stacklevel,
            )
        return True


def _averaged(reductions: list[tuple[Array, tuple[int, ...]]], count: float, loss_scale: float) -> int:
    """Return over how many elements, of ``count`` samples, a mean was taken; 0 where none was, or a sum, too."""
    found = 0
    for weight, shape in reductions:
        size, factor = math.prod(shape), float(weight.item())
        if size % count and count % size:
            continue  # not of samples, as a penalty on weights
        if _is_near(factor, 1) or _is_near(factor, loss_scale):
            return 0
        if any(_is_near(factor * each, scale) for each in (size, count) for scale in (1, loss_scale)):
            found = size
    return found


def _is_near(value: float, expected: float) -> bool:
    return abs(value - expected) <= _NEAR * expected
