"""Load balancing: the shares of ranks in a batch, given or measured after each epoch, and a shared work counter.

The samples of a step do not depend on the shares. Shares change the speed of a run, and its results only by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..comm import World, init
from ..core.checks import instance
from ..data import ShardedSampler
from ..errors import ConfigError
from ..kvstore.asynchronous import AsyncStore
from .callbacks import Callback
from .metrics import Record

if TYPE_CHECKING:
    from .runs.config import TrainConfig


MEASURED = "measured"
"""The setting for shares that follow the speed of ranks."""

_PARTS = 1000
"""The sum of measured shares, which are integers so that files keep them exactly."""


def parse_work_load(text: str | None, ranks: int | None) -> list[float] | None:
    """Return the shares of a setting, one per rank; None if they are equal or measured.

    Args:
        text: comma-separated numbers, `MEASURED` or None.
        ranks: the number of shares; None: any number.

    Raises:
        ConfigError: the text is invalid, or has another number of shares.
    """
    if text in (None, MEASURED):
        return None
    try:
        shares = [float(share) for share in str(text).split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < float("inf") for share in shares) or len(shares) != (ranks or len(shares)):
        count = "a positive number per rank" if ranks is None else f"{ranks} positive numbers"
        raise ConfigError("setting work_load", expected=f"{count}, comma-separated, or {MEASURED!r}", got=repr(text))
    return shares


def check_work_load(config: TrainConfig) -> None:
    """Raise `ConfigError` if ``work_load`` is invalid or conflicts with another setting."""
    parse_work_load(config.work_load, config.ranks)
    if config.reproducible or config.kv_store == "dist_async":
        got = "reproducible" if config.reproducible else f"kv_store={config.kv_store}"
        raise ConfigError("setting work_load", expected="ranks that step together, on shares of a batch", got=got)


class KeepWorkLoad(Callback):
    """A callback that keeps the shares of this start when a run resumes, instead of those in the loader's state.

    Args:
        sampler: the sampler of this rank's loader, with the shares of this start.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler, self.weights = sampler, sampler.weights

    def on_resume(self, epochs: int, steps: int) -> None:
        """See `Callback.on_resume`."""
        self.sampler.set_weights(self.weights)


class AdaptWorkLoad(Callback):
    """A callback that adapts the shares of ranks to their speed after each epoch. Give it to every rank.

    A rank's speed is its share divided by the time of its own work, without waiting for others. The epoch's record has
    these times for all ranks, so the callback needs no communication. The new share is the mean of the old share and
    the relative speed. The callback adds the shares used in an epoch to its record as ``work_load``; put it before
    callbacks that keep records.

    Args:
        sampler: the sampler of this rank's loader. Its weights change, and are part of its state.

    Raises:
        ConfigError: the sampler is not a `ShardedSampler`; in `fit`: it is not the sampler of the loader.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler = instance("AdaptWorkLoad", "sampler", sampler, ShardedSampler, "a ShardedSampler")
        self.history: list[tuple[int, list[float]]] = []
        """The epochs and the shares used in them."""

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
    """Return the next shares: integers with a sum of about 1000, each large enough for one sample of a batch.

    Args:
        used: the shares of an epoch.
        seconds: the working time of each rank in the epoch. Shares stay the same if one of them is 0.
        batch_size: samples of the global batch.
    """
    total = sum(used)
    if min(seconds) <= 0:
        return list(used)
    speeds = [share / spent for share, spent in zip(used, seconds, strict=True)]
    least = max(1.0, _PARTS / batch_size)
    mean = [(share / total + speed / sum(speeds)) / 2 for share, speed in zip(used, speeds, strict=True)]
    return [float(round(max(least, _PARTS * share))) for share in mean]


_KEY = "given out"
_FAR = 1 << 40
"""More numbers than an iteration yields."""


class SharedCount:
    """An iterable counter 0, 1, 2, ... that yields each number on only one rank; for a `data.SharedSampler`.

    Every rank must create it. An iteration starts at 0 after all ranks have begun it.

    Args:
        world: the ranks; default `hpcdp.init()`.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = init() if world is None else world
        self._store = AsyncStore("dist_async", self._world)
        self._store.init(_KEY, np.zeros((), np.int64))
        self._given = 0

    def __iter__(self) -> Iterator[int]:
        self._store.barrier()  # all ranks have finished the previous iteration
        first = int(self._store.pull(_KEY).wait())
        self._store.barrier()
        self._given = 0
        return self._numbers(first)

    def given(self) -> int:
        """Return the count of numbers yielded on all ranks in this iteration; every rank must call."""
        return max(self._world.comm.allgather_json(self._given))

    def close(self) -> None:
        """End this iteration on all ranks; one rank or several may call."""
        self._store.take(_KEY, _FAR)

    def _numbers(self, first: int) -> Iterator[int]:
        while (number := self._store.take(_KEY) - first) < _FAR:
            self._given = number + 1
            yield number
