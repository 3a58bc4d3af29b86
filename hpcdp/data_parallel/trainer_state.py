"""The saved state of a trainer: the optimizer's state, and the residuals, which compression has not sent yet.

Each rank has parts of both. Checkpoints save and restore them on any number of ranks, with any owner and any bucket
size; `read_states` reads the files of `Trainer.save_states`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import join_parts
from ..core import files
from ..core.arrays import Array, to_host
from ..core.state import Cut, Part, Sharded, cut_of, take
from ..errors import DataError, warn
from .bucket_layout import Bucket, Slot
from .reducer import Reducer
from .sharded_update import UpdateStrategy

RESIDUAL = "residual"
"""Name of a parameter's residual, beside the names of the optimizer's state."""
FILE_HEADER = "hpcdp/trainer"
"""Kind of the files of `Trainer.save_states`."""


def warn_of_lost_residuals() -> None:
    """Warn that residuals of a saved state have no use here."""
    warn("what compression had not sent yet is lost: nothing is compressed here")


def gather_residuals(reducer: Reducer, bucket: Bucket) -> np.ndarray:
    """Return the residuals of a bucket of all nodes on rank 0; every rank must call.

    Returns:
        On rank 0 an array of shape ``(nodes, elements)``, on other ranks ``(0, elements)``.
    """
    world, own, rows = reducer.world, reducer.residual(bucket), []
    nodes, count = own.shape
    for node in range(nodes):  # one node at a time: all residuals together are one model a node
        row = np.zeros(count, own.dtype)
        for part in own.parts if own.parts and own.parts[0].first // count == node else ():
            first = part.first - node * count
            row[first : first + part.values.shape[0]] = to_host(part.values)
        world.comm.native_reduce(row.view(f"u{row.dtype.itemsize}"), "sum", 0)
        if world.rank == 0:
            rows.append(row)
    return np.array(rows, own.dtype).reshape(len(rows), count)


def optimizer_states(owner: UpdateStrategy, reducer: Reducer) -> dict[str, dict[str, Sharded]]:
    """Return the optimizer's state by parameter and name; empty where the rule keeps none.

    Parts are views of the owner's arrays. Waits for updates under way.
    """
    world = reducer.world
    copies, copy = reducer.copies
    if owner.holds_all:
        copies, copy = world.size, world.rank
    states: dict[str, dict[str, Sharded]] = {}
    for bucket, state in zip(reducer.buckets, owner.states, strict=True):
        span = owner.span(bucket)
        for slot in bucket.slots if state else ():
            cut = cut_of(reducer.params[slot.name])
            own = {
                name: Sharded(slot.shape, np.dtype(array.dtype), _parts(slot, array, span), copies, copy)
                for name, array in state.items()
            }
            states[slot.name] = {name: _of_whole(tensor, cut, world.part_comm) for name, tensor in own.items()}
    return {slot.name: states[slot.name] for slot in reducer.layout.slots if slot.name in states}


def residuals(reducer: Reducer) -> dict[str, Sharded]:
    """Return the residuals by parameter, of shape ``(nodes, *shape)``; empty where nothing is compressed.

    Parts are views.
    """
    tensors: dict[str, Sharded] = {}
    for slot in reducer.layout.slots if reducer.keeps_unsent else ():
        residual = reducer.residual(reducer.buckets[slot.bucket])
        nodes, count = residual.shape
        if nodes == 1:
            return {}
        parts = []
        for part in residual.parts:
            node, first = divmod(part.first, count)
            of_slot = _parts(slot, part.values, (first, first + part.values.shape[0]))
            parts += [Part(node * slot.count + own.first, own.values) for own in of_slot]
        tensor = Sharded((nodes, *slot.shape), residual.dtype, parts, shares=True)
        cut = cut_of(reducer.params[slot.name])
        shifted = None if cut is None else replace(cut, axis=cut.axis + 1)
        tensors[slot.name] = _of_whole(tensor, shifted, reducer.world.part_comm)
    return tensors


def _of_whole(own: Sharded, cut: Cut | None, part_comm: Communicator | None) -> Sharded:
    """Return this rank's share of a whole tensor of a cut model, where ``own`` is its part, or an uncut tensor."""
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
    """Return the part of a parameter in ``columns``, which are the columns ``span`` of its bucket."""
    first, last = span
    begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
    return [Part(begin - slot.offset, columns[begin - first : end - first])] if begin < end else []


def joined(tensor: Sharded, world: World) -> np.ndarray:
    """Return a whole tensor, on the host, from the parts of all ranks of ``world``; every rank must call."""
    flat = np.zeros(math.prod(tensor.shape), tensor.dtype)
    copies = tensor.copies if world.part_comm is None else tensor.copies // world.part_comm.size
    holds_all = copies == world.size
    if holds_all or tensor.copy % copies == 0:
        for part in tensor.parts:
            flat[part.first : part.first + part.values.shape[0]] = to_host(part.values)
    if flat.size and not holds_all:
        join_parts(flat, world.comm)
    return flat.reshape(tensor.shape)


def regrouped(reducer: Reducer, saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return residuals for the reducer's number of nodes, each with an equal share where the number was another.

    Args:
        reducer: the trainer's reducer.
        saved: residuals by parameter, of shape ``(saved nodes, *shape)``; those that are zero are left out.
    """
    nodes = max((reducer.residual(bucket).shape[0] for bucket in reducer.buckets), default=1)
    return {
        name: rows if len(rows) == nodes else np.broadcast_to(rows.sum(axis=0) / nodes, (nodes, *rows.shape[1:]))
        for name, rows in saved.items()
        if rows.any()
    }


def take_states(own: Mapping[str, Mapping[str, Sharded]], saved: Mapping[str, Any]) -> None:
    """Fill this rank's parts of the optimizer's state in place from saved tensors, both by parameter and name."""
    for name, tensors in own.items():
        for key, tensor in tensors.items():
            take(f"{name}/{key}", tensor, saved[name][key])


def take_residuals(reducer: Reducer, saved: Mapping[str, Any]) -> None:
    """Fill this rank's parts of the residuals in place.

    Args:
        reducer: the trainer's reducer.
        saved: saved residuals by parameter, of shape ``(nodes, *shape)`` for this number of nodes; others are zero.
    """
    own = residuals(reducer)
    for name, tensor in own.items():
        if name in saved:
            take(f"{name}/{RESIDUAL}", tensor, saved[name])
            continue
        for part in tensor.parts:  # nothing was left unsent
            part.values[...] = 0
    if saved and not own and reducer.world.rank == 0:
        warn_of_lost_residuals()


def read_states(
    path: Path,
    optimizer: str,
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[str, Iterable[str]],
    virtual_shards: int | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return header and arrays of a file of `Trainer.save_states`.

    Args:
        path: the file.
        optimizer: the name of the trainer's rule.
        shapes: the shapes of the trainer's parameters.
        states: the names of the optimizer's state by parameter.
        virtual_shards: their number; None where the trainer is not reproducible.

    Raises:
        DataError: the file is missing, damaged or of another model or optimizer.
    """
    fields = {"step_count": int, "optimizer": str}
    header, arrays = files.read("load_states", path, FILE_HEADER, fields, "save_states")
    num_shards = header.get("virtual_shards", virtual_shards)
    if header["optimizer"] != optimizer:
        got = f"states of {header['optimizer']}"
        raise DataError("load_states", where=path, expected=f"states of {optimizer}", got=got)
    if virtual_shards not in (None, num_shards):
        raise DataError(
            "load_states", where=path, expected=f"states of {virtual_shards} virtual shards",
            got=f"states of {num_shards}", remedy=f"Trainer(reproducible=True, virtual_shards={num_shards})",
        )  # fmt: skip
    expected = {f"{name}/{key}": shape for name, shape in shapes.items() for key in states.get(name, ())}
    for name, array in arrays.items():  # residuals of any number of nodes
        param, _, key = name.rpartition("/")
        if key == RESIDUAL and param in shapes and array.ndim:
            expected[name] = (len(array), *shapes[param])
    actual = {name: array.shape for name, array in arrays.items()}
    if actual != expected:
        odd = next(name for name in [*expected, *actual] if actual.get(name) != expected.get(name))
        raise DataError(
            "load_states", where=f"{path}, {odd}", expected=expected.get(odd, "no such array"),
            got=actual.get(odd, "no such array"), remedy="build the model and optimizer of the saved states",
        )  # fmt: skip
    return header, arrays
