"""What this rank holds of the optimizer's state and of what compression has not sent, parameter by parameter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..comm import Communicator
from ..compression import Compression
from ..state import Cut, Part, Sharded, cut_of
from .buckets import Slot
from .owners import Owner
from .reducer import Reducer


def optimizer_states(owner: Owner, reducer: Reducer) -> dict[str, dict[str, Sharded]]:
    """The optimizer's state by parameter and name; nothing where the rule keeps none.

    Parts are views of what the owner has. Waits for updates under way.
    """
    world = reducer.world
    copies, copy = reducer.copies
    if owner.holds_all:
        copies, copy = world.size, world.rank
    found: dict[str, dict[str, Sharded]] = {}
    for bucket, state in zip(reducer.buckets, owner.states, strict=True):
        span = owner.span(bucket)
        for slot in bucket.slots if state else ():
            cut = cut_of(reducer.params[slot.name])
            own = {
                name: Sharded(slot.shape, np.dtype(array.dtype), _parts(slot, array, span), copies, copy)
                for name, array in state.items()
            }
            found[slot.name] = {name: _of_whole(each, cut, world.part_comm) for name, each in own.items()}
    return {slot.name: found[slot.name] for slot in reducer.layout.slots if slot.name in found}


def residuals(reducer: Reducer, compression: Compression | None) -> dict[str, Sharded]:
    """What compression has not sent yet by parameter, shape ``(nodes, *shape)``; nothing where none sends codes.

    Parts are views of what the `Coder` has.
    """
    coder = reducer.coder
    nodes, node = (reducer.world.num_nodes, 0) if coder is None else (coder.comm.size, coder.comm.rank)
    if compression is None or nodes == 1:
        return {}
    found = {}
    for slot in reducer.layout.slots:
        bucket = reducer.buckets[slot.bucket]
        parts = []
        if coder is not None:
            parts = _parts(slot, coder.feedback[slot.bucket].residual, coder.columns(slot.bucket))
        parts = [Part(node * slot.count + part.first, part.values) for part in parts]
        own = Sharded((nodes, *slot.shape), np.dtype(bucket.mine.dtype), parts, shares=True)
        cut = cut_of(reducer.params[slot.name])
        shifted = None if cut is None else replace(cut, axis=cut.axis + 1)
        found[slot.name] = _of_whole(own, shifted, reducer.world.part_comm)
    return found


def _of_whole(own: Sharded, cut: Cut | None, part_comm: Communicator | None) -> Sharded:
    """What this rank holds of the whole tensor, of which it has ``own``, its part, or what each part has."""
    if cut is not None:
        parts = [
            Part(place, part.values[begin - part.first : begin - part.first + count])
            for part in own.parts
            for begin, place, count in cut.runs(own.shape, part.first, part.first + part.values.shape[0])
        ]
        return replace(own, shape=cut.whole(own.shape), parts=parts)
    if part_comm is None:
        return own
    return replace(own, copies=own.copies * part_comm.size, copy=own.copy + own.copies * part_comm.rank)


def _parts(slot: Slot, columns: Array, span: tuple[int, int]) -> list[Part]:
    """The part of a parameter in ``columns``, which are those of its bucket from ``span[0]`` to ``span[1]``."""
    first, last = span
    begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
    return [Part(begin - slot.offset, columns[begin - first : end - first])] if begin < end else []
