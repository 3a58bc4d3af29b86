"""The data loader, which reads batches ahead of their use; augmentation; asynchronous copies of batches to a GPU."""

from __future__ import annotations

import abc
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
from numpy.lib.stride_tricks import as_strided

from ..core.arrays import Array, Device, Event, Streams
from ..core.checks import function, instance, whole_number
from ..core.state import require_state
from ..engine import Engine, Variable, default_engine
from ..errors import ConfigError, type_named
from ..kernels import empty
from .datasets import ArrayDataset, Batch, Dataset, require_dataset
from .samplers import BatchIndices, BatchSampler, Ordered, Resumable, SamplerPosition, SharedSampler


class _PinnedBatch:
    """Pinned memory of one batch in flight, and the events before and after its copy."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory: list[np.ndarray] = []
        """One buffer an array: CuPy's pool rounds up to a power of two, which image arrays often have but pairs do
        not."""
        self.ready, self.copied = streams.event(), streams.event()

    def stage(self, batch: Batch) -> list[np.ndarray]:
        """Copy the arrays of ``batch`` to pinned memory once it is free; it grows as needed."""
        self._streams.synchronize(self.copied)
        staged = []
        for number, x in enumerate(batch):
            if number == len(self._memory):
                self._memory.append(self._streams.pinned(max(1, x.nbytes)))
            elif x.nbytes > self._memory[number].nbytes:
                self._memory[number] = self._streams.pinned(x.nbytes)
            pinned = self._memory[number][: x.nbytes].view(x.dtype).reshape(x.shape)
            pinned[...] = x
            staged.append(pinned)
        return staged


class DeviceBatch(NamedTuple):
    """Batch in flight to the GPU: its arrays there, and the event after the copies."""

    arrays: tuple[Array, ...]
    copied: Event


class Delivery:
    """Copies of one loop's batches to a GPU. It is created on the loop's thread, on the stream that computes.

    Args:
        device: the GPU.
        under_way: the most batches that are copied and not yet taken.

    Raises:
        DeviceError: the machine lacks the device.
    """

    def __init__(self, device: Device, under_way: int) -> None:
        device.check()
        self._streams = streams = Streams(device)
        self._copies, self._compute = streams.stream(), streams.current()
        self._slots = [_PinnedBatch(streams) for _ in range(under_way + 1)]
        self._next = itertools.cycle(self._slots)

    def start(self, batch: Batch) -> DeviceBatch:
        """Start to copy ``batch``, arrays in host memory; callable on any thread, but only for one batch at a time."""
        streams, slot = self._streams, next(self._next)
        staged = slot.stage(batch)
        arrays = tuple(streams.empty(x.shape, x.dtype, self._compute) for x in staged)
        # Earlier work on the compute stream may still read this memory, as that of arrays since freed.
        streams.record(slot.ready, self._compute)
        streams.wait_event(self._copies, slot.ready)
        for target, x in zip(arrays, staged, strict=True):
            streams.copy_async(target, x, self._copies)
        streams.record(slot.copied, self._copies)
        return DeviceBatch(arrays, slot.copied)

    def take(self, batch: DeviceBatch) -> tuple[Array, ...]:
        """Return the arrays of a batch, for later work on the loop's stream."""
        self._streams.wait_event(self._compute, batch.copied)
        return batch.arrays

    def close(self) -> None:
        """Wait until no copy is in flight, because its memory and arrays may be reused next."""
        for slot in self._slots:
            self._streams.synchronize(slot.copied)


Transform = Callable[..., Batch]
_QUICK_S = 100e-6
"""Seconds of a read below which a second thread would not help, since one interpreter runs both."""


class _BatchRead:
    """Read of one batch in flight: filled on the engine's lane, consumed by the loop.

    The error is kept here and not in the engine, so that errors of abandoned batches do not surface elsewhere.
    """

    def __init__(self, fill: Callable[[], Any], variable: Variable) -> None:
        self.fill, self.variable = fill, variable
        self.batch: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.thread: int | None = None
        self.lock, self.done = threading.RLock(), threading.Event()

    def run(self) -> None:
        """Read the batch unless it was abandoned."""
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
        """Keep the read from starting."""
        with self.lock:
            self.abandoned = True

    def wait_if_begun(self) -> None:
        """Wait until an abandoned read is not running.

        A loop left in a reference cycle is closed wherever the garbage collector runs: on the lane's thread, or inside
        the engine. So this neither waits for its own thread nor calls the engine.
        """
        if self.thread not in (None, threading.get_ident()):
            self.done.wait()


def _pair(where: str, expected: str, batch: Any) -> Batch:
    """Return ``batch`` if it is a tuple or list of two; an array of two rows would unpack, too."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = type_named(batch) + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise ConfigError("DataLoader", where=where, expected=expected, got=got)
    return batch[0], batch[1]


def _too_many(size: int, got: str) -> ConfigError:
    return ConfigError(
        "DataLoader", where="sampler", expected=f"sample numbers below {size}, the length of the data set", got=got,
        remedy="create the sampler with n=len(dataset)",
    )  # fmt: skip


class DataLoader:
    """Iterable over ``(x, y)`` batches as NumPy arrays, reading up to ``prefetch`` of them ahead.

    One iteration is one epoch. Its batches depend only on the sampler, not on timing. Every batch consists of new
    arrays owned by the loop. If the loop is left early, running reads are waited for and the others dropped. An
    exception of the data set or the transform is raised where the loop asks for that batch, with its traceback, and
    ends the epoch. Quick reads of an `ArrayDataset` run on the loop's own thread, which has less overhead.

    Args:
        dataset: indexed with int64 arrays on the engine's "io" thread. If it iterates a loader itself, that loader
            needs ``prefetch=0`` or its own engine.
        sampler: a `BatchSampler` or `ShardedSampler`; its batches may be empty (then ``len(x)`` is 0).
        prefetch: number of batches read ahead; 0 reads each batch on demand, on the loop's own thread.
        transform: ``transform(x, y) -> (x, y)`` of a batch, on the reading thread; use ``augment`` for random changes.
        augment: random changes of each ``x``, before the ``transform``.
        engine: the engine whose "io" lane reads; None for the process's own.
        device: a GPU, for CuPy arrays there. The reading thread copies them on a stream of its own, while the loop
            computes on the stream that was current when it started. None or ``cpu(i)``: NumPy arrays.

    Raises:
        ConfigError: an argument is out of range or of another type; in a loop, the data set or the transform does not
            return a pair.
        DeviceError: in a loop, the machine lacks the device.
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
        known = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
        if isinstance(known, Ordered) and (n := getattr(known, "n", 0)) > len(dataset):
            raise _too_many(len(dataset), f"a {type(known).__name__} of n={n}")
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
        """The epoch of `set_epoch`, or the one that was restored."""
        return self._position.epoch

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which is complete unless this epoch was restored partway."""
        epoch = whole_number("DataLoader", "epoch", epoch, 0)
        self.sampler.set_epoch(epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop.

        It is the same on all ranks, all of which must call it after equally many batches.

        Returns:
            ``epoch``; ``done``, the global batches of it that the loop has used (not those read ahead); ``begun`` and
            ``ended``, whether an iteration has started and ended; ``sampler``, the sampler's state.

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
        """Continue from a `state_dict`, on any number of ranks: the next iteration yields the rest of its epoch.

        Later iterations are complete, as is the next one after `set_epoch` of another epoch. If the saved iteration had
        ended, `set_epoch` of its epoch yields nothing; without `set_epoch` a complete iteration follows.

        Args:
            state: a `state_dict`.

        Raises:
            ConfigError: ``state`` is not a loader's, or belongs to another order. The error names the argument that
                differs. Nothing is changed.
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
        """Read the samples ``numbers``, int64 of shape ``(count,)``, as a loop of this epoch would."""
        x, y = self._read(numbers, self.epoch)
        gpu = self._gpu
        return (x, y) if gpu is None else (gpu.put(x), gpu.put(y))

    @property
    def _gpu(self) -> Device | None:
        return None if self.device is None or self.device.kind == "cpu" else self.device

    def _read(self, numbers: np.ndarray, epoch: int) -> Batch:
        try:
            batch = self.dataset[numbers]
        except IndexError as error:
            size = len(self.dataset)
            if len(numbers) and int(np.max(numbers)) >= size:
                raise _too_many(size, f"the number {np.max(numbers)}") from error
            raise
        x, y = _pair("dataset", "a data set that returns (x, y) for an array of numbers", batch)
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
                return batch if delivery is None else delivery.start(batch)

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
            for numbers in batches:  # not map(): a StopIteration of the data set would end the epoch silently
                yield read(numbers)
            return
        in_memory = type(self.dataset) is ArrayDataset and self.transform is None
        # With a SharedSampler, timing decides which rank gets a batch, so prefetching must not vary.
        if may_be_here and in_memory and not isinstance(self.sampler, SharedSampler):
            yield from self._read_while_quick(batches, read)
        yield from self._read_ahead(batches, read)

    def _read_while_quick(self, batches: Iterator[Any], read: Callable[[np.ndarray], Any]) -> Generator[Any]:
        """Read on the loop's own thread until two reads in a row are slow; one may be a page fault."""
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
        ahead: deque[_BatchRead] = deque()
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
            if process == os.getpid():  # a forked child lacks the reading thread
                for read in ahead:
                    read.abandon()
                for read in ahead:
                    read.wait_if_begun()

    def _push(self, engine: Engine, numbers: np.ndarray, how: Callable[[np.ndarray], Any]) -> _BatchRead:
        read = _BatchRead(lambda: how(numbers), engine.variable("batch"))
        engine.push(read.run, writes=(read.variable,), lane="io", name="batch")
        return read


Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
_BLOCK = 4096
"""Samples for which random numbers are drawn at once."""
_LOW = np.uint64(0xFFFFFFFF)


class Augmentation:
    """Random changes that a `DataLoader` applies to samples as it reads them, different in each epoch.

    The random numbers of a sample depend only on ``seed``, the epoch and the sample's index. A run therefore sees the
    same samples on any number of ranks, with any prefetch depth, and after a restart.

    Args:
        changes: applied in order: `RandomCrop` and `RandomFlip`, which change batches, or user functions. A function is
            called as ``change(sample, rng)`` with a sample without batch axis. It draws only from ``rng`` and returns a
            new sample. The final shape must not depend on ``rng``.
        seed: an integer >= 0, the same on all ranks.

    Raises:
        ConfigError: the seed is not an integer >= 0, or a change is not callable.
    """

    def __init__(self, *changes: Change, seed: int = 0) -> None:
        whole_number("Augmentation", "seed", seed, 0)
        for change in changes:
            if not callable(change) or isinstance(change, type):
                expected = "functions of a sample and a generator"
                raise ConfigError("Augmentation", where="changes", expected=expected, got=repr(change))
        self.changes, self.seed = changes, seed
        self._draws: dict[int, _Draws] = {}
        """Random numbers by epoch, for the last two epochs, since a loop may still be in the previous one."""

    def __call__(self, x: np.ndarray, numbers: np.ndarray, epoch: int) -> np.ndarray:
        """Return the samples as changed in ``epoch``, in a new array.

        Args:
            x: samples, shape ``(count, ...)``.
            numbers: their indices in the data set, shape ``(count,)``.
            epoch: number of the epoch.

        Raises:
            ConfigError: a change does not support this shape, does not return an array, or returns shapes that differ
                between samples.
        """
        if not len(x):
            zeros = np.zeros((1, *x.shape[1:]), x.dtype)
            return self(zeros, np.zeros(1, np.int64), epoch)[:0]
        draws = self._of_epoch(epoch)
        samples: np.ndarray | list[np.ndarray] = np.array(x) if not self.changes else x
        for place, change in enumerate(self.changes):
            if isinstance(change, _OfBatch):
                samples = _in_batches(change, samples, draws.words(place, numbers))
            else:
                pairs = zip(samples, draws.generators(place, numbers), strict=True)
                samples = _together([_changed(change, sample, rng) for sample, rng in pairs])
        if isinstance(samples, list):
            shapes = sorted({sample.shape for sample in samples})
            raise ConfigError("Augmentation", expected="samples of one shape", got=f"{shapes[0]} and {shapes[1]}")
        return samples

    def _of_epoch(self, epoch: int) -> _Draws:
        draws = self._draws.get(epoch)
        if draws is None:
            last = list(self._draws.items())[-1:]
            draws = _Draws(self.seed, epoch)
            self._draws = {**dict(last), epoch: draws}
        return draws


class _OfBatch(abc.ABC):
    """Change of whole batches that needs at most 64 random bits a sample."""

    @abc.abstractmethod
    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return the samples ``x``, shape ``(count, ...)``, changed by ``words``, uint64 of shape ``(count,)``."""

    def __call__(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return one changed sample, shape ``(channels, height, width)``."""
        return self.of_batch(sample[None], rng.integers(1 << 64, size=1, dtype=np.uint64))[0]


def _in_batches(
    change: _OfBatch, samples: np.ndarray | list[np.ndarray], words: np.ndarray
) -> np.ndarray | list[np.ndarray]:
    if isinstance(samples, np.ndarray):
        return change.of_batch(samples, words)
    return _together([change.of_batch(sample[None], words[i : i + 1])[0] for i, sample in enumerate(samples)])


def _changed(change: Change, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    sample = change(sample, rng)
    if not isinstance(sample, np.ndarray):
        name = getattr(change, "__name__", type(change).__name__)
        raise ConfigError("Augmentation", where=name, expected="an array as its result", got=type_named(sample))
    return sample


def _together(samples: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """Stack the samples if they have the same shape."""
    return np.stack(samples) if len({sample.shape for sample in samples}) == 1 else samples


class _Draws:
    """Random numbers of an epoch, by change and sample.

    Philox (Salmon et al. 2011) computes its numbers from a key and a counter, so it can start anywhere. Samples are
    2**128 numbers apart, as are blocks of samples; the last counter word of blocks is odd.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64)
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def generators(self, place: int, numbers: np.ndarray) -> Iterator[np.random.Generator]:
        """Yield one generator, repositioned for each sample: ten times faster than creating another."""
        philox = np.random.Philox(key=self._key)
        rng, start = np.random.Generator(philox), philox.state
        for number in numbers:
            start["state"]["counter"][2:] = number, 2 * place
            philox.state = start
            yield rng

    def words(self, place: int, numbers: np.ndarray) -> np.ndarray:
        """Return 64 random bits for each of these samples."""
        blocks, within = np.divmod(numbers, _BLOCK)
        words = np.empty(len(numbers), np.uint64)
        for block in set(blocks.tolist()):
            members = blocks == block
            words[members] = self._block(place, block)[within[members]]
        return words

    def _block(self, place: int, block: int) -> np.ndarray:
        words = self._blocks.get((place, block))
        if words is None:
            philox = np.random.Philox(key=self._key, counter=[0, 0, block, 2 * place + 1])
            words = self._blocks[place, block] = philox.random_raw(_BLOCK)
        return words


def _below(bits: np.ndarray, count: int) -> np.ndarray:
    """Return a number below ``count`` for 32 random bits each, uniform up to one in 2**32 / ``count``."""
    return (bits * np.uint64(count)) >> np.uint64(32)


class RandomCrop(_OfBatch):
    """Random crop of images, shape ``(channels, height, width)``, uniform over all positions.

    Args:
        size: height and width of the crop; None keeps those of the image, which ``padding`` then shifts.
        padding: rows and columns of zeros added around the image first; less than its height and width.

    Raises:
        ConfigError: ``size`` below 1 or ``padding`` below 0; in a call, images that are too small.
    """

    def __init__(self, size: int | None = None, padding: int = 0) -> None:
        self.size = None if size is None else whole_number("RandomCrop", "size", size, 1)
        self.padding = whole_number("RandomCrop", "padding", padding, 0)

    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return crops of images ``(count, channels, height, width)``, in a new array."""
        channels, height, width = _image_shape("RandomCrop", x)
        pixels = self.padding
        if pixels >= min(height, width):
            raise ConfigError("RandomCrop", expected=f"images larger than {pixels} pixels", got=_described(x))
        rows, columns = (height, width) if self.size is None else (self.size, self.size)
        down, right = height + 2 * pixels - rows, width + 2 * pixels - columns
        if min(down, right) < 0:
            expected = f"images of at least {rows - 2 * pixels} pixels"
            raise ConfigError("RandomCrop", where="size", expected=expected, got=_described(x))
        if pixels:
            padded = empty((len(x), channels, height + 2 * pixels, width + 2 * pixels), x.dtype)
            padded[...] = 0
            padded[:, :, pixels : pixels + height, pixels : pixels + width] = x
            x = padded
        top, left = _below(words & _LOW, down + 1), _below(words >> np.uint64(32), right + 1)
        shape = (len(x), channels, down + 1, right + 1, rows, columns)
        windows = as_strided(x, shape, (*x.strides, *x.strides[2:]), writeable=False)
        return windows[np.arange(len(x)), :, top, left]


class RandomFlip(_OfBatch):
    """Random flip of images, shape ``(channels, height, width)``, with probability 1/2.

    Args:
        axis: -1 flips left and right, -2 top and bottom.

    Raises:
        ConfigError: another axis.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = whole_number("RandomFlip", "axis", axis, -2, -1, expected="-1 or -2")

    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return images ``(count, channels, height, width)``, randomly flipped, in a new array."""
        _image_shape("RandomFlip", x)
        mirrored = _below(words & _LOW, 2).astype(bool)
        x = np.array(x)
        x[mirrored] = np.flip(x[mirrored], self.axis)
        return x


def _image_shape(operation: str, x: np.ndarray) -> tuple[int, ...]:
    if x.ndim != 4:
        raise ConfigError(operation, expected="images (channels, height, width)", got=_described(x))
    return x.shape[1:]


def _described(x: np.ndarray) -> str:
    return f"samples of shape {x.shape[1:]}"
