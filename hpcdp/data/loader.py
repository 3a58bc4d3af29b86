"""Floor 3: data, batches read ahead of their use. Imports: engine, errors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from ..engine import Engine, Variable, default_engine
from ..errors import ConfigError
from .datasets import Batch, Dataset
from .samplers import BatchIndices

Transform = Callable[..., Batch]


class _Read:
    """One batch on its way: filled on the engine's lane, taken by the loop.

    The error is kept here and not in the engine: that of a batch that nobody takes any more must not surface elsewhere.
    """

    def __init__(self, fill: Callable[[], Batch], variable: Variable) -> None:
        self.fill, self.variable = fill, variable
        self.batch: Batch | None = None
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


class DataLoader:
    """Iterates over ``(x, y)`` batches as NumPy arrays, reading up to ``prefetch`` of them ahead.

    One iteration is one epoch; what it yields depends on the sampler alone, not on timing. Every batch is made of fresh
    arrays that belong to the loop: they may be kept and changed, and are freed like any array. When the loop is left
    early, reads that have begun are waited for and the others are dropped, so nothing runs on. An exception of the data
    set or of the transform is raised where the loop asks for that batch, with its traceback; the epoch ends there.

    Args:
        dataset: indexed with int64 arrays, on the engine's "io" thread; a loader that it iterates itself needs
            ``prefetch=0`` or an engine of its own.
        sampler: a `BatchSampler` or `ShardedSampler`; its batches may be empty (then ``len(x)`` is 0).
        prefetch: batches that are read ahead; 0 reads each one when it is asked for, in the loop's own thread.
        transform: ``transform(x, y) -> (x, y)`` of a batch, in the same thread as the reading.
        engine: the engine on whose "io" lane is read; None for the process's own.

    Raises:
        ConfigError: ``prefetch`` is no integer >= 0.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: BatchIndices,
        prefetch: int = 2,
        transform: Transform | None = None,
        engine: Engine | None = None,
    ) -> None:
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ConfigError("DataLoader", where="prefetch", expected="an integer >= 0", got=repr(prefetch))
        self.dataset, self.sampler, self.prefetch, self.transform = dataset, sampler, prefetch, transform
        self._engine = engine

    def __len__(self) -> int:
        """The number of batches an epoch."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the sampler, for the next iteration."""
        self.sampler.set_epoch(epoch)

    def _read(self, indices: object) -> Batch:
        x, y = self.dataset[indices]  # type: ignore[index]
        return (x, y) if self.transform is None else self.transform(x, y)

    def __iter__(self) -> Iterator[Batch]:
        if self.prefetch == 0:
            for indices in self.sampler:
                yield self._read(indices)
            return
        engine = default_engine() if self._engine is None else self._engine
        batches = iter(self.sampler)
        ahead: deque[_Read] = deque()
        try:
            while True:
                ahead.extend(self._push(engine, indices) for indices in islice(batches, self.prefetch + 1 - len(ahead)))
                if not ahead:
                    return
                engine.wait_to_read(ahead[0].variable)
                read = ahead.popleft()
                if read.error is not None:
                    raise read.error
                assert read.batch is not None
                yield read.batch
        finally:
            for read in ahead:
                read.abandon()
            for read in ahead:
                read.wait_if_begun()

    def _push(self, engine: Engine, indices: object) -> _Read:
        read = _Read(lambda: self._read(indices), engine.variable("batch"))
        engine.push(read.run, writes=(read.variable,), lane="io", name="batch")
        return read
