"""Whether all ranks hold the same, and the same error on every rank where they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ..errors import MismatchError
from .communicator import Communicator


def require_same(comm: Communicator, operation: str, items: Sequence[str]) -> None:
    """Check that every rank passes the same ``items``; every rank must call.

    One hash a rank is exchanged; the items themselves only where hashes differ.

    Args:
        comm: the ranks to compare.
        operation: what the error says was attempted.
        items: one line each, e.g. ``"0.weight (20, 1, 3, 3) float32"``.

    Raises:
        MismatchError: on every rank alike; it names the ranks and the first difference.
    """
    digest = hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()
    digests = comm.allgather_json(digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not odd:
        return
    everything = comm.allgather_json(list(items) if comm.rank in (0, odd[0]) else None)
    first, other = everything[0], everything[odd[0]]
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    alike = [rank for rank in odd if digests[rank] == digests[odd[0]]]
    raise MismatchError(
        operation,
        where=f"item {at + 1} of {len(first)} on rank 0",
        expected=f"{_item(first, at)} as on rank 0",
        got=f"{_item(other, at)} on rank{'s' if len(alike) > 1 else ''} {_listed(alike)}",
        remedy="build the same model with the same options on every rank",
    )


def _item(items: Sequence[str], at: int) -> str:
    return items[at] if at < len(items) else "nothing more"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
