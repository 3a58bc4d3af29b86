"""Floor 3: data, batches brought to a GPU while it computes on earlier ones. Imports: streams, devices."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..devices import Device
from ..streams import Event, Streams
from .datasets import Batch


class _Slot:
    """Pinned memory of one batch under way, and the events before and behind its copy."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory: list[np.ndarray] = []
        """For each array: CuPy's pool takes the next power of two, which images often are, and with labels are not."""
        self.begun, self.come = streams.event(), streams.event()

    def stage(self, batch: Batch) -> list[np.ndarray]:
        """Copies of the arrays of ``batch`` in pinned memory, once it is free; more is taken when more is needed."""
        self._streams.synchronize(self.come)
        staged = []
        for number, x in enumerate(batch):
            if number == len(self._memory):
                self._memory.append(self._streams.pinned(max(1, x.nbytes)))
            elif x.nbytes > self._memory[number].nbytes:
                self._memory[number] = self._streams.pinned(x.nbytes)
            there = self._memory[number][: x.nbytes].view(x.dtype).reshape(x.shape)
            there[...] = x
            staged.append(there)
        return staged


class Brought(NamedTuple):
    """A batch on its way to the GPU: its arrays there, and the event behind the copies."""

    arrays: tuple[Array, ...]
    come: Event


class Delivery:
    """What brings the batches of one loop to ``device``, a GPU; made by the loop's thread, on the stream that computes.

    Args:
        under_way: so many are brought at most and not yet taken.

    Raises:
        DeviceError: the machine does not have the device.
    """

    def __init__(self, device: Device, under_way: int) -> None:
        device.check()
        self._streams = streams = Streams(device)
        self._copies, self._compute = streams.stream(), streams.current()
        self._slots = [_Slot(streams) for _ in range(under_way + 1)]
        self._next = itertools.cycle(self._slots)

    def bring(self, batch: Batch) -> Brought:
        """Begin to copy ``batch``, arrays in host memory; on any thread, but one batch after another."""
        streams, slot = self._streams, next(self._next)
        staged = slot.stage(batch)
        arrays = tuple(streams.empty(x.shape, x.dtype, self._compute) for x in staged)
        # Memory of theirs may be read yet by what was computed before on arrays that are no more.
        streams.record(slot.begun, self._compute)
        streams.wait_event(self._copies, slot.begun)
        for target, x in zip(arrays, staged, strict=True):
            streams.copy_async(target, x, self._copies)
        streams.record(slot.come, self._copies)
        return Brought(arrays, slot.come)

    def take(self, brought: Brought) -> tuple[Array, ...]:
        """The arrays of a batch, for what the loop's stream is given from now on."""
        self._streams.wait_event(self._compute, brought.come)
        return brought.arrays

    def close(self) -> None:
        """Wait until nothing is copied any more, from memory or to arrays that somebody else may have next."""
        for slot in self._slots:
            self._streams.synchronize(slot.come)
