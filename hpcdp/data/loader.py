"""The data loader, and delivery to GPUs.

Batches read ahead of their use.

Batches brought to a GPU while it computes on earlier ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array
from ..core.checks import function, instance, whole_number
from ..core.devices import Device, Event, Streams
from ..core.state import require_state
from ..engine import Engine, Variable, default_engine
from ..errors import ConfigError, type_named
from .datasets import ArrayDataset, Batch, Dataset, require_dataset
from .images import Augmentation
from .samplers import BatchIndices, Resumable, SamplerPosition, SharedSampler


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


Transform = Callable[..., Batch]
_QUICK_S = 100e-6
"""Another thread that reads takes about as much of the loop's time, since one interpreter runs both."""


class _Read:
    """One batch on its way: filled on the engine's lane, taken by the loop.

    The error is kept here and not in the engine: that of a batch that nobody takes any more must not surface elsewhere.
    """

    def __init__(self, fill: Callable[[], Any], variable: Variable) -> None:
        self.fill, self.variable = fill, variable
        self.batch: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.thread: int | None = None
        self.lock, self.done = threading.RLock(), threading.Event()

    def run(self) -> None:
        with self.lock:
            if self.abandoned:
                return
            self.thread = threading.get_ident()
        try:
            self.batch = self.fill()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def abandon(self) -> None:
        """It will not begin any more."""
        with self.lock:
            self.abandoned = True

    def wait_if_begun(self) -> None:
        """Returns when an abandoned read does not run.

        A loop that was left in a reference cycle ends wherever the garbage collector happens to run: on the lane's
        thread, or inside of the engine. So this neither waits for its own thread nor calls the engine.
        """
        if self.thread not in (None, threading.get_ident()):
            self.done.wait()


def _pair(where: str, expected: str, batch: Any) -> Batch:
    """``batch``, unless it is something else: an array of two rows can be unpacked, too."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = type_named(batch) + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise ConfigError("DataLoader", where=where, expected=expected, got=got)
    return batch[0], batch[1]


class DataLoader:
    """Iterates over ``(x, y)`` batches as NumPy arrays, reading up to ``prefetch`` of them ahead.

    One iteration is one epoch; what it yields depends on the sampler alone, not on timing. Every batch is made of fresh
    arrays that belong to the loop: they may be kept and changed, and are freed like any array. When the loop is left
    early, reads that have begun are waited for and the others are dropped, so nothing runs on. An exception of the data
    set or of the transform is raised where the loop asks for that batch, with its traceback; the epoch ends there.
    Batches of an `ArrayDataset` that are there at once are read by the loop's own thread, which takes less.

    Args:
        dataset: indexed with int64 arrays, on the engine's "io" thread; a loader that it iterates itself needs
            ``prefetch=0`` or an engine of its own.
        sampler: a `BatchSampler` or `ShardedSampler`; its batches may be empty (then ``len(x)`` is 0).
        prefetch: batches that are read ahead; 0 reads each one when it is asked for, in the loop's own thread.
        transform: ``transform(x, y) -> (x, y)`` of a batch, in the same thread as the reading; not for what is random.
        augment: random changes of each ``x``, before the ``transform``.
        engine: the engine on whose "io" lane is read; None for the process's own.
        device: a GPU: batches are CuPy arrays there, brought by the thread that reads, on a stream of their own, while
            the loop computes on the stream that was current when it began. None or ``cpu(i)``: they are NumPy's.

    Raises:
        ConfigError: ``prefetch`` is no integer >= 0, ``augment`` no `Augmentation`, ``device`` no `Device`, or there is
            no data set or sampler; in a loop, the data set or the transform gives no pair.
        DeviceError: in a loop, the machine does not have the device.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: BatchIndices,
        prefetch: int = 2,
        transform: Transform | None = None,
        augment: Augmentation | None = None,
        engine: Engine | None = None,
        device: Device | None = None,
    ) -> None:
        whole_number("DataLoader", "prefetch", prefetch, 0)
        require_dataset("DataLoader", dataset)
        if not hasattr(sampler, "__iter__"):
            expected = "a sampler of batches, such as a ShardedSampler"
            raise ConfigError("DataLoader", where="sampler", expected=expected, got=type_named(sampler))
        if transform is not None:
            function("DataLoader", "transform", transform, "a function of a batch's x and y")
        instance("DataLoader", "augment", augment, (Augmentation, NoneType), "an Augmentation")
        instance("DataLoader", "device", device, (Device, NoneType), "hpcdp.gpu(i) or hpcdp.cpu(i)")
        self.device = device
        self.dataset, self.sampler, self.prefetch = dataset, sampler, prefetch
        self.transform, self.augment, self._engine = transform, augment, engine
        self._position = SamplerPosition()

    @property
    def epoch(self) -> int:
        """That of `set_epoch`, or the one that was restored."""
        return self._position.epoch

    def __len__(self) -> int:
        """The number of batches an epoch."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the sampler, for the next iteration: a whole one, except of the epoch that was restored."""
        epoch = whole_number("DataLoader", "epoch", epoch, 0)
        self.sampler.set_epoch(epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is; alike on all ranks, all of which must call it after as many batches.

        Returns:
            ``epoch``; ``done``, how many global batches of it the loop has had (those that are read ahead do not
            count); ``begun`` and ``ended``: whether an iteration has begun, and whether it has come to its end;
            ``sampler``, that of the sampler.

        Raises:
            ConfigError: the loop is between virtual shards of a global batch.
        """
        loop, sampler = self._position.loop, self.sampler
        done, ended, inner = loop.before + loop.used, loop.ended, None
        if isinstance(sampler, Resumable):
            inner = sampler.state_dict()
            if loop.begun:
                done, ended = sampler.place(loop.before, loop.used, ended)
        return self._position.state(done, ended) | {"sampler": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a `state_dict` says, on any number of ranks: the next iteration yields what is left of its epoch.

        Those after it are whole, and so is the next one after `set_epoch` of another epoch. Of an epoch whose iteration
        had ended nothing is left if it is named by `set_epoch`; without that a whole iteration follows.

        Raises:
            ConfigError: it is no state of a loader, or the sampler's order is another one; says which argument differs.
                Nothing is changed.
        """
        require_state("a DataLoader", state, "epoch", "done", "begun", "ended", "sampler")
        done = state["done"]
        if isinstance(self.sampler, Resumable):
            self.sampler.load_state_dict(state["sampler"])
            done = self.sampler.taken_over(state["sampler"], done)
        else:
            self.sampler.set_epoch(state["epoch"])
        self._position.restore({**state, "done": done})

    def read(self, numbers: np.ndarray) -> Batch:
        """The batch of the samples with these ``numbers``, int64 of shape ``(count,)``, as in a loop of this epoch."""
        x, y = self._read(numbers, self.epoch)
        gpu = self._gpu
        return (x, y) if gpu is None else (gpu.put(x), gpu.put(y))

    @property
    def _gpu(self) -> Device | None:
        return None if self.device is None or self.device.kind == "cpu" else self.device

    def _read(self, numbers: np.ndarray, epoch: int) -> Batch:
        x, y = _pair("dataset", "one that gives (x, y) for an array of numbers", self.dataset[numbers])
        if self.augment is not None:
            x = self.augment(x, numbers, epoch)
        if self.transform is None:
            return x, y
        return _pair("transform", "a function that returns (x, y)", self.transform(x, y))

    def __iter__(self) -> Iterator[Batch]:
        batches = self._indices(self._position.begin())
        loop, epoch = self._position.loop, self.epoch
        with self._delivery() as delivery:

            def read(numbers: np.ndarray) -> Any:
                batch = self._read(numbers, epoch)
                return batch if delivery is None else delivery.bring(batch)

            with contextlib.closing(self._reads(batches, read, may_be_here=delivery is None)) as reads:
                for batch in reads:
                    loop.used += 1
                    yield batch if delivery is None else delivery.take(batch)
        loop.ended = True

    def _delivery(self) -> AbstractContextManager[Delivery | None]:
        gpu = self._gpu
        return contextlib.nullcontext() if gpu is None else contextlib.closing(Delivery(gpu, self.prefetch + 1))

    def _indices(self, done: int | None) -> Iterator[Any]:
        if isinstance(self.sampler, Resumable):
            return self.sampler.batches(done)
        return islice(self.sampler, done, None)

    def _reads(self, batches: Iterator[Any], read: Callable[[np.ndarray], Any], may_be_here: bool) -> Generator[Any]:
        if self.prefetch == 0:
            for numbers in batches:  # no map(), which a StopIteration of the data set would end like the epoch
                yield read(numbers)
            return
        in_memory = type(self.dataset) is ArrayDataset and self.transform is None
        # When a batch is taken that ranks share decides who gets it: that must not depend on how long one takes.
        if may_be_here and in_memory and not isinstance(self.sampler, SharedSampler):
            yield from self._read_while_quick(batches, read)
        yield from self._read_ahead(batches, read)

    def _read_while_quick(self, batches: Iterator[Any], read: Callable[[np.ndarray], Any]) -> Generator[Any]:
        """Read in the loop's own thread until two in a row, as the first may wait for a page, are not quick."""
        slow = 0
        for numbers in batches:
            began = time.perf_counter()
            batch = read(numbers)
            slow = slow + 1 if time.perf_counter() - began > _QUICK_S else 0
            yield batch
            if slow == 2:
                return

    def _read_ahead(self, batches: Iterator[Any], how: Callable[[np.ndarray], Any]) -> Generator[Any]:
        engine = default_engine() if self._engine is None else self._engine
        ahead: deque[_Read] = deque()
        process = os.getpid()
        try:
            while True:
                more = islice(batches, self.prefetch + 1 - len(ahead))
                ahead.extend(self._push(engine, numbers, how) for numbers in more)
                if not ahead:
                    return
                engine.wait_to_read(ahead[0].variable)
                read = ahead.popleft()
                if read.error is not None:
                    raise read.error
                yield read.batch
        finally:
            if process == os.getpid():  # a child made by fork has not the thread that reads
                for read in ahead:
                    read.abandon()
                for read in ahead:
                    read.wait_if_begun()

    def _push(self, engine: Engine, numbers: np.ndarray, how: Callable[[np.ndarray], Any]) -> _Read:
        read = _Read(lambda: how(numbers), engine.variable("batch"))
        engine.push(read.run, writes=(read.variable,), lane="io", name="batch")
        return read
