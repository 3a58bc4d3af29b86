"""Virtual shards: the context that makes layers compute the same on any number of ranks.

A reproducible trainer enters its virtual shards one after the other. Layers that draw random numbers use a generator
that depends only on the shard. Layers with running statistics record them in the shard, to be combined over all shards.
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
    """Piece of the global batch of one step, the same on any number of ranks.

    Args:
        owner: the object that enters the shard; the shard is valid while it lives.
        step: number of the step.
        number: number of the shard in the step.
    """

    def __init__(self, owner: object, step: int, number: int) -> None:
        self._owner = weakref.ref(owner)
        self.step, self.number = step, number
        self.statistics: list[tuple[Tensor, np.ndarray]] = []
        """Statistics recorded by layers, in the order of the calls: the buffer, and the shard's value."""
        self._drawn = 0

    def is_of(self, owner: object) -> bool:
        """Return whether ``owner`` has entered the shard."""
        return self._owner() is owner

    def generator(self, seed: int) -> np.random.Generator:
        """Return the generator for one call of one layer, derived from ``seed``, step, shard and call index.

        It is counter-based (Philox; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so no state
        passes from one shard to the next.
        """
        self._drawn += 1
        sequence = np.random.SeedSequence([seed, self.step, self.number, self._drawn])
        return np.random.Generator(np.random.Philox(sequence))

    def note(self, buffer: Tensor, value: Array) -> None:
        """Record a statistic of this shard; ``buffer`` is updated when the step ends."""
        self.statistics.append((buffer, np.array(to_host(value), np.float64)))


class KeepsStatistics:
    """Mixin for layers with running statistics, registered so that `layers_of` finds them, copies included."""

    momentum: float

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Register the new layer."""
        layer = super().__new__(cls)
        with _listing:
            _layers[next(_numbers)] = layer
        return layer

    def statistics(self) -> tuple[Tensor, ...]:
        """Return the running statistics."""
        return ()


def layers_of(params: Sequence[Any]) -> list[KeepsStatistics]:
    """Return the layers with running statistics that hold one of ``params``, in the order of ``params``."""
    positions = {id(param): position for position, param in enumerate(params)}
    with _listing:
        living = list(_layers.items())
    layers = []
    for number, layer in living:
        held = [positions[id(value)] for value in vars(layer).values() if id(value) in positions]
        if held:
            layers.append((min(held), number, layer))
    return [layer for _, _, layer in sorted(layers, key=lambda entry: entry[:2])]


def move(buffer: Tensor, momentum: float, value: Array) -> None:
    """Update a running statistic in place: ``momentum * buffer + (1 - momentum) * value``."""
    buffer.data *= momentum
    buffer.data += (1 - momentum) * from_host(value, buffer.data)


def entered_shard() -> VirtualShard | None:
    """Return the virtual shard that this thread computes, or None outside a reproducible trainer."""
    shard: VirtualShard | None = getattr(_here, "shard", None)
    return None if shard is None or shard.is_of(None) else shard


def enter_shard(shard: VirtualShard | None) -> None:
    """Set the virtual shard that this thread computes."""
    _here.shard = shard
