"""Norms of a model that several ranks have together: what is cut into parts counts in each, what is whole once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array
from ..comm import Communicator
from ..comm.watchdog import Watchdog, nobody
from ..state import cut_of
from .bucket import Bucket, Parameter


def counted(
    bucket: Bucket, first: int, last: int, params: Mapping[str, Parameter], part_comm: Communicator | None
) -> Iterator[Array]:
    """What counts in sums over a model among these columns: all of it on the first part, elsewhere what is cut."""
    if part_comm is None or part_comm.rank == 0:
        yield bucket.mine[first:last]
        return
    for slot in bucket.slots:
        begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
        if begin < end and cut_of(params[slot.name]) is not None:
            yield bucket.mine[begin:end]


def add_up(
    squares: np.ndarray, params: Sequence[Parameter], part_comm: Communicator | None, watchdog: Watchdog
) -> None:
    """Add to the squared norms of ``params``, in place, those of their other parts; every rank must call."""
    cut = [number for number, param in enumerate(params) if cut_of(param) is not None]
    if part_comm is not None and cut:
        squares[cut] = np.sum(told_by(part_comm, watchdog, squares[cut].tolist()), axis=0)


def told_by(comm: Communicator | None, watchdog: Watchdog, value: Any) -> list[Any]:
    """Every rank's ``value``, by rank, where other ranks have more of the model; all must call."""
    if comm is None:
        return [value]
    with watchdog.watching("norms of a model that several ranks have", behind=nobody):
        return comm.allgather_json(value)
