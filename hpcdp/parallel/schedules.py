"""In which order one stage of a pipeline computes the forwards and backwards of its micro-batches.

All schedules give the same gradients: a stage's backwards are always in the order of the micro-batches. They differ in
how many activations a stage must keep at a time. Each leaves a stage without work for ``num_stages - 1`` forwards and
backwards of one micro-batch, so that the share of time lost is ``(s - 1) / (m + s - 1)`` with ``s`` stages, as slow as
each other, and ``m`` micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple


class Action(NamedTuple):
    """What a stage does next: the forward or the backward of a micro-batch, which are counted from 0."""

    is_forward: bool
    micro: int


def gpipe(stage: int, num_stages: int, num_micro: int) -> list[Action]:
    """All forwards, then all backwards: a stage keeps the activations of all micro-batches.

    Source: Huang et al., "GPipe", 2019, section 2.2, but backwards in the order of the forwards.
    """
    return [Action(is_forward, micro) for is_forward in (True, False) for micro in range(num_micro)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro: int) -> list[Action]:
    """A backward as soon as there is one: a stage keeps those of at most ``num_stages - stage`` micro-batches.

    Source: Narayanan et al., "PipeDream", 2019, section 3.2, with a flush at the end of each batch as in Narayanan et
    al., "Efficient large-scale language model training", 2021, section 2.2.1.
    """
    ahead = min(num_micro, num_stages - stage - 1)
    actions = [Action(True, micro) for micro in range(ahead)]
    for micro in range(ahead, num_micro):
        actions += [Action(True, micro), Action(False, micro - ahead)]
    return actions + [Action(False, micro) for micro in range(num_micro - ahead, num_micro)]


def pieces(count: int, number: int) -> list[tuple[int, int]]:
    """Where the micro-batches of ``count`` samples begin and end: at most ``number``, none of them empty, the first
    ones longer by a sample where it does not divide."""
    number = min(count, number)
    ends = [0]
    for piece in range(number):
        ends.append(ends[-1] + count // number + (piece < count % number))
    return list(itertools.pairwise(ends))


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""By the value of a `Pipeline` 's ``schedule``; each takes stage, number of stages and number of micro-batches."""
