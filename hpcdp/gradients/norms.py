"""Norms of summed gradients: of a whole model, and of its layers for rules that need them (`hpcdp.optim.LARS`).

A layer lies in the shards of several ranks. Where several ranks have parts of one model together, not copies of it,
what is cut into parts counts in each of them, and what is whole counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays import Array
from ..collectives import allreduce
from ..collectives.progress import Progress
from ..comm import Communicator
from ..comm.watchdog import nobody
from ..optim.lars import squares
from ..state import cut_of
from .bucket import Bucket
from .reducer import Reducer

Squares = tuple[float, float]
"""Of the norms of a layer's weights and of its summed gradient."""


def of_shards(reducer: Reducer) -> float:
    """This rank's part of the summed gradients' squared norm; the parts of all ranks add up to it.

    The shards must be reduced. Accumulated in float64; it is not finite where some gradient is not.
    """
    if not reducer.is_counted:
        return 0.0
    return sum(squares([run for bucket in reducer.buckets for run in _counted(reducer, bucket, *bucket.shard)]))


def of_model(reducer: Reducer) -> float:
    """The norm of the summed gradients, the same on all ranks, all of which must call; the shards must be reduced.

    It is that of a whole model, also where this rank has a part of one (`World.model_comm`, `World.part_comm`). It is
    not finite where some gradient is not.
    """
    if reducer.virtual_shards is not None and reducer.holds_sums:  # by shards its bits would depend on their number
        runs = [run for bucket in reducer.buckets for run in _counted(reducer, bucket, 0, bucket.mine.size)]
        total = sum(squares(runs))
    else:
        total = reducer.closing.tally(of_shards(reducer))[0]
    for comm in (reducer.world.part_comm, reducer.world.model_comm):
        total = sum(_told_by(comm, reducer, total))
    return float(total**0.5)


def of_layers(
    reducer: Reducer, flats: Sequence[Array], span: Callable[[Bucket], tuple[int, int]]
) -> dict[str, Squares]:
    """By the name of each parameter of two axes or more, alike on all ranks, which must call once gradients are summed.

    Where every rank holds all sums each adds up for itself, in an order that does not depend on the number of ranks.

    Args:
        flats: the parameters of each bucket.
        span: the columns of a bucket whose sums this rank has, where it has not all.
    """
    slots = [slot for slot in reducer.layout.slots if len(slot.shape) > 1]
    found = np.zeros((len(slots), 2))
    had: list[int] = []
    runs: list[Array] = []
    for number, slot in enumerate(slots):
        bucket = reducer.buckets[slot.bucket]
        first, last = (0, bucket.mine.shape[0]) if reducer.holds_sums else span(bucket)
        part = slice(max(first, slot.offset), min(last, slot.offset + slot.count))
        if part.start < part.stop and (reducer.holds_sums or reducer.is_counted):
            had.append(number)
            runs += [flats[slot.bucket][part], bucket.mine[part]]
    found[had] = np.reshape(squares(runs), (-1, 2))
    if reducer.holds_sums:
        reducer.gate.barrier()  # before others update what this rank has read
    else:
        allreduce(found.reshape(-1), "sum", reducer.world)
    cut = [number for number, slot in enumerate(slots) if cut_of(reducer.params[slot.name]) is not None]
    if cut:
        found[cut] = np.sum(_told_by(reducer.world.part_comm, reducer, found[cut].tolist()), axis=0)
    return {slot.name: (row[0], row[1]) for row, slot in zip(found.tolist(), slots, strict=True)}


def _counted(reducer: Reducer, bucket: Bucket, first: int, last: int) -> Iterator[Array]:
    """What counts in sums over a model among these columns: all of it on the first part, elsewhere what is cut."""
    part_comm = reducer.world.part_comm
    if part_comm is None or part_comm.rank == 0:
        yield bucket.mine[first:last]
        return
    for slot in bucket.slots:
        begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
        if begin < end and cut_of(reducer.params[slot.name]) is not None:
            yield bucket.mine[begin:end]


def _told_by(comm: Communicator | None, reducer: Reducer, value: Any) -> list[Any]:
    """Every rank's ``value``, by rank, where other ranks have more of the model; all must call."""
    if comm is None:
        return [value]
    watchdog = Progress.of(reducer.world).watchdog
    with watchdog.watching("norms of a model that several ranks have", behind=nobody):
        return comm.allgather_json(value)
