"""The optimizer's state as a file: one array a parameter and name, whoever owned it.

A NumPy .npz archive, read with pickles refused. Names are ``"<parameter>/<state>"``, so any number of ranks, any owner
and any bucket size can read it. With compression there is what each node has not sent yet, too, as
``"<parameter>/residual"`` of shape ``(nodes, *shape)``; with another number of nodes each gets the same share of it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import archive
from ..arrays import from_host, to_host
from ..comm.agreement import on_every_rank, on_rank_0
from ..comm.communicator import join_parts
from ..errors import DataError
from ..gradients.residuals import gather_residuals, give_residuals
from .reproducible import arithmetic

if TYPE_CHECKING:
    from .bucket_trainer import BucketTrainer

_HEADER = "hpcdp/trainer"
_RESIDUAL = "residual"


def save(trainer: BucketTrainer, path: Path) -> None:
    """See `Trainer.save_states`."""
    arrays: dict[str, np.ndarray] = {}
    for number, bucket in enumerate(trainer.reducer.buckets):
        flat = {name: _gather(trainer, number, name) for name in trainer.optimizer.state_names()}
        if trainer.compression is not None:
            flat[_RESIDUAL] = gather_residuals(trainer.reducer, number)
        for name, whole in flat.items():
            for slot in bucket.slots:
                part = whole[..., slot.offset : slot.offset + slot.count]
                arrays[f"{slot.name}/{name}"] = part.reshape(*whole.shape[:-1], *slot.shape)
    header = {"version": 1, "step_count": trainer.step_count, "optimizer": trainer.optimizer.config()["name"]}
    if trainer.virtual_shards is not None:
        header |= {"virtual_shards": trainer.virtual_shards, "arithmetic": arithmetic()}

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
    for number, bucket in enumerate(trainer.reducer.buckets):
        first, last = trainer.owner.span(bucket)
        for name, state in trainer.owner.states[number].items():
            whole = np.zeros(bucket.mine.shape[0], bucket.mine.dtype)
            for slot in bucket.slots:
                whole[slot.offset : slot.offset + slot.count] = arrays[f"{slot.name}/{name}"].reshape(-1)
            state[...] = from_host(whole[first:last], state)
    give_residuals(trainer.reducer, {name: arrays.get(f"{name}/{_RESIDUAL}") for name in trainer.reducer.params})
    trainer.step_count = header["step_count"]
    saved_by = header.get("arithmetic", "")
    if trainer.virtual_shards is not None and saved_by not in ("", arithmetic()) and trainer.world.rank == 0:
        warnings.warn(
            f"{path}: saved where arithmetic was {saved_by}, and here it is {arithmetic()}: last bits may differ from "
            "here on",
            stacklevel=3,
        )


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
        for name in trainer.optimizer.state_names()
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
