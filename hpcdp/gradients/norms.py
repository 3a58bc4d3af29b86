"""Norms of summed gradients: of a whole model, and of its layers for rules that need them (`hpcdp.optim.LARS`).

A layer lies in the shards of several ranks. Where several ranks have parts of one model together, not copies of it,
what is cut into parts counts in each of them, and what is whole counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import kernels
from ..arrays import Array, array_namespace, from_host, is_host, to_host, words
from ..collectives import allreduce
from ..collectives.progress import Progress
from ..comm import Communicator
from ..comm.watchdog import nobody
from ..optim.lars import segment_squares, squares
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


def squares_of_model(reducer: Reducer) -> float:
    """The squared norm of the summed gradients, the same on all ranks, which must call; the shards must be reduced.

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
    return float(total)


def clipped_scale_on_gpu(reducer: Reducer, scale: float | Array, most: float) -> Array:
    """`reference.norms.clipped_scale` of all sums, which the rank has on its GPU: float64, shape ``(1,)``, there.

    Nothing waits for it.
    """
    sums = [words(bucket.mine) for bucket in reducer.buckets]
    kernel = kernels.kernels_for("norms", sums[0])
    return kernel.clipped_scale(kernel.all_squares(sums), scale, most)


class Layers:
    """The norms of the parameters of two axes or more, which are layers for a rule that needs norms.

    Args:
        reducer: of their gradients.
        flats: the parameters of each bucket.
    """

    def __init__(self, reducer: Reducer, flats: Sequence[Array]) -> None:
        self._reducer, self._flats = reducer, flats
        self._slots = [slot for slot in reducer.layout.slots if len(slot.shape) > 1]
        self._cut = [number for number, slot in enumerate(self._slots) if cut_of(reducer.params[slot.name]) is not None]
        self._segments: dict[tuple[tuple[int, int], ...], list[_Segments]] = {}

    def squares(self, span: Callable[[Bucket], tuple[int, int]]) -> dict[str, Squares | Array]:
        """By the name of each layer, alike on all ranks, which must call once gradients are summed.

        Where every rank holds all sums each adds up for itself, in an order that does not depend on the number of
        ranks; on a GPU they stay there, shape ``(2,)``, and nothing waits, if no other rank has more of a layer.

        Args:
            span: the columns of a bucket whose sums this rank has, where it has not all.
        """
        reducer, holds_sums = self._reducer, self._reducer.holds_sums
        columns = [(0, bucket.mine.shape[0]) if holds_sums else span(bucket) for bucket in reducer.buckets]
        if not (holds_sums or reducer.is_counted):
            columns = [(0, 0)] * len(columns)
        segments = self._in(tuple(columns))
        found = [
            segment_squares(self._flats[each.bucket], reducer.buckets[each.bucket].mine, each.bounds)[::2]
            for each in segments
        ]
        layers = [number for each in segments for number in each.layers]
        if holds_sums and not self._cut and not all(map(is_host, found)):
            rows = [row for each in found for row in each]
            return {self._slots[number].name: row for number, row in zip(layers, rows, strict=True)}
        squares = np.zeros((len(self._slots), 2))
        if found:
            squares[layers] = to_host(array_namespace(*found).concatenate(found))
        if holds_sums:
            reducer.gate.barrier()  # before others update what this rank has read
        else:
            allreduce(squares.reshape(-1), "sum", reducer.world)
        if self._cut:
            whole = _told_by(reducer.world.part_comm, reducer, squares[self._cut].tolist())
            squares[self._cut] = np.sum(whole, axis=0)
        return {slot.name: (row[0], row[1]) for row, slot in zip(squares.tolist(), self._slots, strict=True)}

    def _in(self, columns: tuple[tuple[int, int], ...]) -> list[_Segments]:
        """What lies in these columns of the buckets; kept, for a GPU has it in its memory."""
        if columns not in self._segments:
            every = (self._of_bucket(number, first, last) for number, (first, last) in enumerate(columns))
            self._segments[columns] = [each for each in every if each is not None]
        return self._segments[columns]

    def _of_bucket(self, bucket: int, first: int, last: int) -> _Segments | None:
        slots = [(number, slot) for number, slot in enumerate(self._slots) if slot.bucket == bucket]
        layers, bounds = [], []
        for number, slot in sorted(slots, key=lambda each: each[1].offset):
            begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
            if begin < end:
                layers.append(number)
                bounds += [begin, end]
        return _Segments(bucket, layers, from_host(np.array(bounds), self._flats[bucket])) if layers else None


@dataclass
class _Segments:
    """Layers of a bucket: every other one of the segments within `bounds`, between which other things lie."""

    bucket: int
    layers: list[int]
    bounds: Array


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
