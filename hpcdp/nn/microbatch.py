"""What a layer must know, beside its input, to do the same on any number of ranks: which virtual shard this is.

A reproducible trainer enters one after the other. Layers that draw numbers take a generator that depends on the shard
and not on what was drawn before; layers that keep statistics leave them with it, to be joined over all shards.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ..autograd import Tensor
from ..core.arrays import Array, from_host, to_host

_here = threading.local()
_layers: weakref.WeakValueDictionary[int, KeepsStatistics] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_listing = threading.Lock()


class VirtualShard:
    """One piece of the global batch of one step, the same on any number of ranks.

    Args:
        owner: who has entered it, and lives as long as it counts.
        step: number of the step.
        number: of the shard in the step.
    """

    def __init__(self, owner: object, step: int, number: int) -> None:
        self._owner = weakref.ref(owner)
        self.step, self.number = step, number
        self.statistics: list[tuple[Tensor, np.ndarray]] = []
        """What layers have noted, in the order of the calls: the buffer, and the shard's value."""
        self._drawn = 0

    def is_of(self, owner: object) -> bool:
        """Whether ``owner`` has entered it."""
        return self._owner() is owner

    def generator(self, seed: int) -> np.random.Generator:
        """Random numbers for one call of one layer, by its ``seed``, the step, the shard and the calls before in it.

        Counter-based (Philox; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): nothing is carried
        from one shard to the next.
        """
        self._drawn += 1
        sequence = np.random.SeedSequence([seed, self.step, self.number, self._drawn])
        return np.random.Generator(np.random.Philox(sequence))

    def note(self, buffer: Tensor, value: Array) -> None:
        """Leave a statistic of this shard; ``buffer`` moves when the step ends."""
        self.statistics.append((buffer, np.array(to_host(value), np.float64)))


class KeepsStatistics:
    """A layer with running statistics, which `layers_of` finds by its parameters, also if it is a copy of another."""

    momentum: float

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        layer = super().__new__(cls)
        with _listing:
            _layers[next(_numbers)] = layer
        return layer

    def statistics(self) -> tuple[Tensor, ...]:
        """The running statistics."""
        return ()


def layers_of(params: Sequence[Any]) -> list[KeepsStatistics]:
    """The layers with running statistics that one of ``params`` is an attribute of, in the order of those."""
    places = {id(param): place for place, param in enumerate(params)}
    with _listing:
        living = list(_layers.items())
    found = []
    for number, layer in living:
        own = [places[id(each)] for each in vars(layer).values() if id(each) in places]
        if own:
            found.append((min(own), number, layer))
    return [layer for _, _, layer in sorted(found, key=lambda each: each[:2])]


def move(buffer: Tensor, momentum: float, value: Array) -> None:
    """Make a running statistic, in place, ``momentum * buffer + (1 - momentum) * value``."""
    buffer.data *= momentum
    buffer.data += (1 - momentum) * from_host(value, buffer.data)


def entered_shard() -> VirtualShard | None:
    """The virtual shard that this thread computes; None where no reproducible trainer has entered one."""
    shard: VirtualShard | None = getattr(_here, "shard", None)
    return None if shard is None or shard.is_of(None) else shard


def enter_shard(shard: VirtualShard | None) -> None:
    """From now on this thread computes ``shard``."""
    _here.shard = shard
