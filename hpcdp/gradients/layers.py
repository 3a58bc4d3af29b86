"""Norms of whole layers, which lie in the shards of several ranks, for rules that need them (`hpcdp.optim.LARS`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import Array
from ..collectives import allreduce
from ..optim.lars import squares as squares_of
from .bucket import Bucket
from .reducer import Reducer

Squares = tuple[float, float]
"""Of the norms of a layer's weights and of its summed gradient."""


def squares(reducer: Reducer, flats: Sequence[Array], span: Callable[[Bucket], tuple[int, int]]) -> dict[str, Squares]:
    """By the name of each parameter of two axes or more, alike on all ranks, which must call; gradients are summed.

    Where every rank holds all sums each adds up for itself, in an order that does not depend on the number of ranks.

    Args:
        flats: the parameters of each bucket.
        span: the columns of a bucket whose sums this rank has, where it has not all.
    """
    slots = [slot for slot in reducer.layout.slots if len(slot.shape) > 1]
    found = np.zeros((len(slots), 2))
    for row, slot in zip(found, slots, strict=True):
        bucket = reducer.buckets[slot.bucket]
        first, last = (0, bucket.mine.shape[0]) if reducer.holds_sums else span(bucket)
        part = slice(max(first, slot.offset), min(last, slot.offset + slot.count))
        if part.start < part.stop and (reducer.holds_sums or reducer.is_counted):
            row[:] = squares_of(flats[slot.bucket][part]), squares_of(bucket.mine[part])
    if reducer.holds_sums:
        reducer.gate.barrier()  # before others update what this rank has read
    else:
        allreduce(found.reshape(-1), "sum", reducer.world)
    reducer.add_up_parts(found, [slot.name for slot in slots])
    return {slot.name: (row[0], row[1]) for row, slot in zip(found.tolist(), slots, strict=True)}
