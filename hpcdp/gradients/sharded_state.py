"""What this rank holds of the optimizer's state and of what compression has not sent, parameter by parameter."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..compression import Compression
from ..state import Part, Sharded
from .buckets import Slot
from .owners import Owner
from .reducer import Reducer


def optimizer_states(owner: Owner, reducer: Reducer) -> dict[str, dict[str, Sharded]]:
    """The optimizer's state by parameter and name; nothing where the rule keeps none.

    Parts are views of what the owner has. Waits for updates under way.
    """
    rail, world = reducer.rail, reducer.world
    copies, copy = (1, 0) if rail is None else (rail.comm.size, rail.comm.rank)
    if owner.holds_all:
        copies, copy = world.size, world.rank
    found: dict[str, dict[str, Sharded]] = {}
    for bucket, state in zip(reducer.buckets, owner.states, strict=True):
        span = owner.span(bucket)
        for slot in bucket.slots if state else ():
            found[slot.name] = {
                name: Sharded(slot.shape, np.dtype(array.dtype), _parts(slot, array, span), copies, copy)
                for name, array in state.items()
            }
    return {slot.name: found[slot.name] for slot in reducer.layout.slots if slot.name in found}


def residuals(reducer: Reducer, compression: Compression | None) -> dict[str, Sharded]:
    """What compression has not sent yet by parameter, shape ``(nodes, *shape)``; nothing where none sends codes.

    Parts are views of what the rail has.
    """
    rail = reducer.rail
    nodes, node = (reducer.world.num_nodes, 0) if rail is None else (rail.comm.size, rail.comm.rank)
    if compression is None or nodes == 1:
        return {}
    found = {}
    for slot in reducer.layout.slots:
        bucket = reducer.buckets[slot.bucket]
        parts = [] if rail is None else _parts(slot, rail.feedback[slot.bucket].residual, bucket.shard)
        parts = [Part(node * slot.count + part.first, part.values) for part in parts]
        found[slot.name] = Sharded((nodes, *slot.shape), np.dtype(bucket.mine.dtype), parts, shares=True)
    return found


def _parts(slot: Slot, columns: Array, span: tuple[int, int]) -> list[Part]:
    """The part of a parameter in ``columns``, which are those of its bucket from ``span[0]`` to ``span[1]``."""
    first, last = span
    begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
    return [Part(begin - slot.offset, columns[begin - first : end - first])] if begin < end else []
