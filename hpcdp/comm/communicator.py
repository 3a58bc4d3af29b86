"""What a communicator can do: the protocol that MPI ranks and thread ranks both follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedError

OPS = ("sum", "mean", "min", "max", "prod")
"""The names of the reductions."""


class Request(Protocol):
    """A message under way."""

    def test(self) -> bool:
        """Whether it is complete; never blocks."""
        ...

    def wait(self) -> None:
        """Block until it is complete; Ctrl-C ends the wait."""
        ...


class Communicator(Protocol):
    """A group of ranks that exchange messages. Arrays are contiguous NumPy arrays."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Block until every rank has called it."""
        ...

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> Request:
        """Send ``x`` to ``dest``; ``x`` must not change before the request is complete."""
        ...

    def irecv(self, x: np.ndarray, source: int, tag: int = 0) -> Request:
        """Receive into ``x`` from ``source``, which must have sent as many bytes."""
        ...

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        """Reduce ``x`` in place over all ranks with the library's own collective; every rank must call."""
        ...

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        """Overwrite ``x`` on all ranks with that of ``root``; every rank must call."""
        ...

    def allgather_json(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (what JSON can carry; nothing is pickled), by rank; every rank must call."""
        ...

    def abort(self, code: int) -> None:
        """End every rank of the job at once with this exit code."""
        ...


@dataclass
class Traffic:
    """What a rank has sent through a communicator of thread ranks."""

    messages: int = 0
    nbytes: int = 0


_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def reduce_in_order(inputs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """The reduction of one array from every rank, in the order of the ranks; float16 is accumulated in float32.

    The result has the accumulator's dtype.
    """
    total = inputs[0].astype(np.float32 if inputs[0].dtype == np.float16 else inputs[0].dtype)
    for other in inputs[1:]:
        _UFUNCS[op](total, other, out=total)
    if op == "mean":
        total /= total.dtype.type(len(inputs))
    return total


def check_op(operation: str, op: str, dtype: np.dtype) -> None:
    """Refuse an unknown reduction, and a mean of integers, which would not be an integer.

    Raises:
        UnsupportedError: it names what is valid.
    """
    if op not in OPS:
        raise UnsupportedError(operation, where="op", expected=" or ".join(OPS), got=repr(op))
    if op == "mean" and dtype.kind not in "fc":
        raise UnsupportedError(
            operation, where="op", expected="a float dtype for op='mean'", got=dtype.name, remedy="use op='sum'"
        )
