"""The tensors of a trainer's state: of the optimizer, and of what compression has not sent yet.

Each rank has parts of them, which checkpoints save and restore on any number of ranks, any owner and any bucket size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import join_parts
from ..compression import Compression
from ..core.arrays import Array, from_host, to_host
from ..core.state import Cut, Part, Sharded, cut_of
from .buckets import Slot
from .reducer import Reducer
from .sharded_update import UpdateStrategy

RESIDUAL = "residual"
"""The name of what compression has not sent yet, beside those of the optimizer's state."""


def gather_residuals(reducer: Reducer, number: int) -> np.ndarray:
    """What every node has not sent yet of bucket ``number``; every rank must call.

    Returns:
        On rank 0 shape ``(nodes, elements)``, elsewhere ``(0, elements)``.
    """
    world, bucket, coder = reducer.world, reducer.buckets[number], reducer.coder
    nodes = max(world.comm.allgather_json(1 if coder is None else coder.comm.size))
    rows = []
    for node in range(nodes):  # one after another: together they are as many models as there are nodes
        row = np.zeros(bucket.mine.shape[0], bucket.mine.dtype)
        if coder is not None and coder.feedback and coder.comm.rank == node:
            row[slice(*coder.columns(number))] = to_host(coder.feedback[number].residual)
        world.comm.native_reduce(row.view(f"u{row.dtype.itemsize}"), "sum", 0)
        if world.rank == 0:
            rows.append(row)
    return np.array(rows, bucket.mine.dtype).reshape(len(rows), bucket.mine.shape[0])


def give_residuals(reducer: Reducer, saved: Mapping[str, np.ndarray | None]) -> None:
    """Let nodes send what was ``saved``: as it was, or with another number of nodes the same share of the sum each.

    Args:
        saved: by parameter, shape ``(nodes, *shape)``; None: nothing.
    """
    coder = reducer.coder
    if coder is None or not coder.feedback:
        if reducer.world.rank == 0 and any(each is not None and each.any() for each in saved.values()):
            warnings.warn("what compression had not sent yet is lost: nothing is compressed here", stacklevel=4)
        return
    size = coder.comm.size
    for bucket, feedback in zip(reducer.buckets, coder.feedback, strict=True):
        whole = np.zeros(bucket.mine.shape[0], bucket.mine.dtype)
        for slot in bucket.slots:
            each = saved.get(slot.name)
            if each is not None:
                own = each[coder.comm.rank] if len(each) == size else each.sum(axis=0) / size
                whole[slot.offset : slot.offset + slot.count] = own.reshape(-1)
        feedback.residual[...] = from_host(whole[slice(*coder.columns(bucket.number))], feedback.residual)


def optimizer_states(owner: UpdateStrategy, reducer: Reducer) -> dict[str, dict[str, Sharded]]:
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


def joined(tensor: Sharded, world: World) -> np.ndarray:
    """Return a whole tensor, on the host, from the parts of the ranks of ``world``, which must all call."""
    whole = np.zeros(math.prod(tensor.shape), tensor.dtype)
    copies = tensor.copies if world.part_comm is None else tensor.copies // world.part_comm.size
    holds_all = copies == world.size
    if holds_all or tensor.copy % copies == 0:
        for part in tensor.parts:
            whole[part.first : part.first + part.values.shape[0]] = to_host(part.values)
    if whole.size and not holds_all:
        join_parts(whole, world.comm)
    return whole.reshape(tensor.shape)


def regrouped(rows: np.ndarray, nodes: int) -> np.ndarray:
    """Return what nodes have not sent, as that of so many ``nodes``: of another number each has the same share.

    Args:
        rows: shape ``(nodes, *shape)``.
        nodes: the number of rows of the result.
    """
    return rows if len(rows) == nodes else np.broadcast_to(rows.sum(axis=0) / nodes, (nodes, *rows.shape[1:]))
