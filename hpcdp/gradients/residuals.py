"""What compression has not sent yet, as part of a state: from all nodes to one, and back to any number of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np

from ..arrays import from_host, to_host
from .reducer import Reducer


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
