"""Work shared out by weights, measured and adapted after each epoch.

Who computes how much of a batch: shares that are given, or found by what ranks have been seen to do.

The samples of a step are the same whatever the shares, so they decide how fast a run is and, but for rounding, not what
it computes.

Work handed out over ranks as they come to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..comm import World, init
from ..data import ShardedSampler
from ..errors import ConfigError, type_named
from ..kvstore.asynchronous import AsyncStore
from .callbacks import Callback
from .metrics import Record

if TYPE_CHECKING:
    from .runs.config import TrainConfig


MEASURED = "measured"
"""Shares that follow the speed of ranks."""

_PARTS = 1000
"""Shares that were measured are so many whole parts of a batch, which files keep exactly."""


def parse_work_load(text: str | None, ranks: int | None) -> list[float] | None:
    """The shares that a setting gives, one a rank; None where it gives none, or they are to be measured.

    Args:
        text: numbers between commas, `MEASURED` or None.
        ranks: how many shares there must be; None: any number.

    Raises:
        ConfigError: neither of these, or another number of shares.
    """
    if text in (None, MEASURED):
        return None
    try:
        shares = [float(each) for each in str(text).split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < each < float("inf") for each in shares) or len(shares) != (ranks or len(shares)):
        count = "a positive number a rank" if ranks is None else f"{ranks} positive numbers"
        raise ConfigError("setting work_load", expected=f"{count} between commas, or: {MEASURED}", got=repr(text))
    return shares


def check_work_load(config: TrainConfig) -> None:
    """Raises `ConfigError` for a ``work_load`` of other settings, or one that `parse_work_load` does not take."""
    parse_work_load(config.work_load, config.ranks)
    if config.reproducible or config.kv_store == "dist_async":
        got = "reproducible" if config.reproducible else f"kv_store={config.kv_store}"
        raise ConfigError("setting work_load", expected="ranks that step together, on shares of a batch", got=got)


class KeepWorkLoad(Callback):
    """Where a run goes on it has the shares of this start, not those that are in the state of its loader.

    Args:
        sampler: that of this rank's loader, with the shares of this start.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler, self.weights = sampler, sampler.weights

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self.sampler.set_weights(self.weights)


class AdaptWorkLoad(Callback):
    """After each epoch gives ranks shares of a batch in proportion to their speed in it. Give it to every rank.

    A rank's speed is its share over the time of its own work, without what it waited for others, as the epoch's record
    has it for all ranks; the new share is the mean of the old one and that of the speed. Nothing is exchanged for it.
    The record gets ``work_load``, what was used in its epoch; put it before callbacks that keep records.

    Args:
        sampler: that of this rank's loader; its weights are changed, and are part of its state.

    Raises:
        ConfigError: another sampler than a `ShardedSampler`; in `fit`, than that of its loader.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        if not isinstance(sampler, ShardedSampler):
            got = type_named(sampler)
            raise ConfigError("AdaptWorkLoad", where="sampler", expected="a ShardedSampler, which has shares", got=got)
        self.sampler = sampler
        self.history: list[tuple[int, list[float]]] = []
        """Epoch and shares, as they were used."""

    def alike(self) -> str:
        """See `Callback.alike`."""
        return "AdaptWorkLoad"

    def on_record(self, record: Record) -> None:
        """See `Callback.on_record`."""
        if record["kind"] != "epoch":
            return
        used = list(self.sampler.weights or [1.0] * self.sampler.num_parts)
        record["work_load"] = used
        self.history.append((record["epoch"], used))
        if "by_rank" in record:
            times = record["by_rank"]
            seconds = [a + b for a, b in zip(times["compute_s"], times["data_s"], strict=True)]
            self.sampler.set_weights(adapted(used, seconds, self.sampler.batch_size))


def adapted(used: Sequence[float], seconds: Sequence[float], batch_size: int) -> list[float]:
    """The next shares, whole numbers that are about 1000 together, each enough for a sample of a batch.

    Args:
        used: the shares of an epoch.
        seconds: what each rank has worked for in it; shares stay as they are where one has not been seen to work.
    """
    total = sum(used)
    if min(seconds) <= 0:
        return list(used)
    speeds = [share / spent for share, spent in zip(used, seconds, strict=True)]
    least = max(1.0, _PARTS / batch_size)
    mean = [(share / total + speed / sum(speeds)) / 2 for share, speed in zip(used, speeds, strict=True)]
    return [float(round(max(least, _PARTS * each))) for each in mean]


_KEY = "given out"
_FAR = 1 << 40
"""More than are given out in one iteration."""


class SharedCount:
    """0, 1, 2, ..., each given to one rank alone; for a `data.SharedSampler`.

    Every rank must make it. An iteration begins at 0, when the last rank has begun it.

    Args:
        world: the ranks; default `hpcdp.init()`.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = init() if world is None else world
        self._store = AsyncStore("dist_async", self._world)
        self._store.init(_KEY, np.zeros((), np.int64))
        self._given = 0

    def __iter__(self) -> Iterator[int]:
        self._store.barrier()  # nobody takes from the last iteration any more
        first = int(self._store.pull(_KEY).wait())
        self._store.barrier()
        self._given = 0
        return self._numbers(first)

    def given(self) -> int:
        """How many were given out in this iteration, to all ranks together; every rank must call."""
        return max(self._world.comm.allgather_json(self._given))

    def close(self) -> None:
        """Give out no more in this iteration, to any rank; one rank calls, or several."""
        self._store.take(_KEY, _FAR)

    def _numbers(self, first: int) -> Iterator[int]:
        while (number := self._store.take(_KEY) - first) < _FAR:
            self._given = number + 1
            yield number
