"""The state of a trainer on buckets: saved, and restored at any number of ranks.

What compression has not sent yet, as part of a state: from all nodes to one, and back to any number of them.

What this rank holds of the optimizer's state and of what compression has not sent, parameter by parameter.

A trainer's state: for checkpoints, of which each rank has its parts, and as a file of the optimizer's state alone.

The file has one array a parameter and name, whoever owned it. It is a NumPy .npz archive, read with pickles refused.
Names are ``"<parameter>/<state>"``, so any number of ranks, any owner and any bucket size can read it. With compression
there is what each node has not sent yet, too, as ``"<parameter>/residual"`` of shape ``(nodes, *shape)``; with another
number of nodes each gets the same share of it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import join_parts
from ..comm.consistency import on_every_rank, on_rank_0
from ..compression import Compression
from ..core import archive
from ..core.arrays import Array, from_host, to_host
from ..core.state import Cut, Part, Sharded, cut_of, require_state, take
from ..errors import ConfigError, DataError
from .buckets import Slot
from .deterministic import arithmetic
from .reducer import Reducer
from .sharded_update import MASTER, UpdateStrategy
from .trainer import completed, require_same_parameters

if TYPE_CHECKING:
    from .bucket_trainer import BucketTrainer


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


_HEADER = "hpcdp/trainer"
_RESIDUAL = "residual"
_NAMES = ("step_count", "loss_scale", "num_nonfinite", "optimizer", "states", "virtual_shards", "arithmetic", "layout")


def state_of(trainer: BucketTrainer) -> dict[str, Any]:
    """See `Trainer.state_dict`."""
    layout, reproducible = trainer.reducer.layout, trainer.virtual_shards is not None
    state = {
        "step_count": trainer.step_count,
        "loss_scale": trainer.loss_scale,
        "good_steps": trainer.good_steps,
        "num_nonfinite": trainer.num_nonfinite,
        "optimizer": json.dumps(trainer.optimizer.config()),
        "states": optimizer_states(trainer.owner, trainer.reducer),
        "passed_over": dict(trainer.owner.passed_over),
        "virtual_shards": trainer.virtual_shards,
        "arithmetic": arithmetic() if reproducible else None,
        "layout": _of_first_part(trainer.world, {
            "digest": layout.digest,
            "counts": list(layout.counts),
            "slots": {slot.name: {"bucket": slot.bucket, "offset": slot.offset} for slot in layout.slots},
        }),
    }  # fmt: skip
    own = residuals(trainer.reducer, trainer.compression)
    return state | ({"residuals": own} if own else {})


def fitted(form: Any) -> Any:
    """See `FitsSaved.fitted`: states of version 0.1.0 had no updates that were passed over, and first no good steps."""
    return completed(form, {"good_steps": 0, "passed_over": {"dict": []}})


def _of_first_part(world: World, layout: dict[str, Any]) -> dict[str, Any]:
    """Where ranks have parts of different sizes their buckets differ, and a state says one thing for all."""
    return layout if world.part_comm is None else world.part_comm.allgather_json(layout)[0]


def take_over(trainer: BucketTrainer, state: dict[str, Any]) -> None:
    """See `Trainer.load_state_dict`."""
    require_state("a Trainer", state, *_NAMES)
    num_shards = state["virtual_shards"] or trainer.virtual_shards
    if trainer.virtual_shards not in (None, num_shards):
        raise ConfigError(
            "load_state_dict", where="virtual_shards", expected=trainer.virtual_shards, got=num_shards,
            remedy=f"Trainer(reproducible=True, virtual_shards={num_shards})",
        )  # fmt: skip
    own = optimizer_states(trainer.owner, trainer.reducer)
    require_same_parameters(own, state["states"])
    for param, states in own.items():
        if (MASTER in states) != (MASTER in state["states"][param]):
            had, has = ("16 bits", "another dtype")[:: 1 if MASTER not in states else -1]
            raise ConfigError(
                "load_state_dict", where=param, expected=f"parameters of {has}", got=f"the state of those of {had}",
                remedy="make the network in the dtype that it had then",
            )  # fmt: skip
    trainer.optimizer.take_config(json.loads(state["optimizer"]))
    for param, states in own.items():
        for name, mine in states.items():
            take(f"{param}/{name}", mine, state["states"][param][name])
    trainer.owner.take_passed_over(state.get("passed_over", {}))
    _take_residuals(trainer, state.get("residuals", {}))
    trainer.step_count = state["step_count"]
    trainer.take_loss_scale(state["loss_scale"], state.get("good_steps", 0))
    trainer.num_nonfinite = state["num_nonfinite"]
    if trainer.world.rank or (trainer.world.part_comm is not None and trainer.world.part_comm.rank):
        return
    _warn_of_arithmetic(trainer, "load_state_dict", state["arithmetic"] or "")
    if trainer.virtual_shards is None and state["layout"]["digest"] != trainer.reducer.layout.digest:
        warnings.warn(
            "load_state_dict: buckets were laid out in another way when this was saved (bucket_cap_mb, or parts): last "
            "bits may differ from here on",
            stacklevel=4,
        )


def _take_residuals(trainer: BucketTrainer, given: dict[str, Any]) -> None:
    own = residuals(trainer.reducer, trainer.compression)
    for name, mine in own.items():
        if name in given:
            take(f"{name}/{_RESIDUAL}", mine, given[name])
        else:
            for part in mine.parts:
                part.values[...] = 0
    if given and not own and trainer.world.rank == 0:
        warnings.warn(
            "load_state_dict: what compression had not sent yet is lost: nothing is compressed here", stacklevel=5
        )


def _warn_of_arithmetic(trainer: BucketTrainer, where: object, saved_by: str) -> None:
    """On rank 0: say that the last bits of a reproducible trainer may differ from those of another processor."""
    if trainer.virtual_shards is not None and saved_by not in ("", arithmetic()):
        warnings.warn(
            f"{where}: saved where arithmetic was {saved_by}, and here it is {arithmetic()}: last bits may differ from "
            "here on",
            stacklevel=5,
        )


def save(trainer: BucketTrainer, path: Path) -> None:
    """See `Trainer.save_states`."""
    arrays: dict[str, np.ndarray] = {}
    for number, bucket in enumerate(trainer.reducer.buckets):
        flat = {name: _gather(trainer, number, name) for name in trainer.owner.states[number]}
        if trainer.compression is not None:
            flat[_RESIDUAL] = gather_residuals(trainer.reducer, number)
        for name, whole in flat.items():
            for slot in bucket.slots:
                part = whole[..., slot.offset : slot.offset + slot.count]
                arrays[f"{slot.name}/{name}"] = part.reshape((*whole.shape[:-1], *slot.shape))
    header = {"version": 1, "step_count": trainer.step_count, "optimizer": trainer.optimizer.config()["name"]}
    if trainer.virtual_shards is not None:
        header |= {"virtual_shards": trainer.virtual_shards, "arithmetic": arithmetic()}
    if trainer.owner.passed_over:
        header["passed_over"] = trainer.owner.passed_over
    if trainer.is_scaling:
        header |= {"loss_scale": trainer.loss_scale, "good_steps": trainer.good_steps}

    on_rank_0(trainer.world.comm, lambda: archive.write("save_states", path, _HEADER, header, arrays))


def _gather(trainer: BucketTrainer, number: int, name: str) -> np.ndarray:
    """The whole flat state of a bucket on every rank."""
    bucket = trainer.reducer.buckets[number]
    first, last = trainer.owner.span(bucket)
    part = to_host(trainer.owner.states[number][name])
    if trainer.owner.holds_all:
        return part
    whole = np.zeros(bucket.mine.shape[0], part.dtype)
    if trainer.reducer.is_counted:
        whole[first:last] = part
    join_parts(whole, trainer.world.comm)
    return whole


def load(trainer: BucketTrainer, path: Path) -> None:
    """See `Trainer.load_states`."""
    header, arrays = on_every_rank(trainer.world.comm, lambda: _read(trainer, path))
    for param, states in optimizer_states(trainer.owner, trainer.reducer).items():
        for name, own in states.items():
            take(f"{param}/{name}", own, arrays[f"{param}/{name}"])
    give_residuals(trainer.reducer, {name: arrays.get(f"{name}/{_RESIDUAL}") for name in trainer.reducer.params})
    trainer.owner.take_passed_over(header.get("passed_over", {}))
    trainer.step_count = header["step_count"]
    if trainer.is_scaling and "loss_scale" in header:
        trainer.take_loss_scale(header["loss_scale"], header["good_steps"])
    if trainer.world.rank == 0:
        _warn_of_arithmetic(trainer, path, header.get("arithmetic", ""))


def _read(trainer: BucketTrainer, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    fields = {"step_count": int, "optimizer": str}
    header, arrays = archive.read("load_states", path, _HEADER, fields, "save_states")
    mine, num_shards = trainer.optimizer.config()["name"], header.get("virtual_shards", trainer.virtual_shards)
    if header["optimizer"] != mine:
        got = f"states of {header['optimizer']}"
        raise DataError("load_states", where=path, expected=f"states of {mine}", got=got)
    if trainer.virtual_shards not in (None, num_shards):
        raise DataError(
            "load_states", where=path, expected=f"states of {trainer.virtual_shards} virtual shards",
            got=f"states of {num_shards}", remedy=f"Trainer(reproducible=True, virtual_shards={num_shards})",
        )  # fmt: skip
    expected = {
        f"{slot.name}/{name}": slot.shape
        for slot in trainer.reducer.layout.slots
        for name in trainer.owner.states[slot.bucket]
    }
    shapes = {slot.name: slot.shape for slot in trainer.reducer.layout.slots}
    for name, array in arrays.items():
        param, _, state = name.rpartition("/")
        if state == _RESIDUAL and param in shapes and array.ndim:
            expected[name] = (len(array), *shapes[param])
    found = {name: array.shape for name, array in arrays.items()}
    if found != expected:
        odd = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
        raise DataError(
            "load_states",
            where=f"{path}, {odd}",
            expected=expected.get(odd, "no such array"),
            got=found.get(odd, "no such array"),
            remedy="build the model and optimizer that the states were saved from",
        )
    return header, arrays
