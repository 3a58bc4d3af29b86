"""What a communicator can do: the protocol that MPI ranks and thread ranks both follow."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import Array
from ..errors import MismatchError

LANE_BITS, OPERATION_BITS = 6, 9
"""A tag is ``signature << 15 | operation << 6 | lane``; MPI guarantees the lower 15 bits, most libraries have 31."""


def make_tag(signature: int, operation: int, lane: int = 0) -> int:
    """The tag of one lane of the messages of one operation.

    Args:
        signature: what all ranks must agree on, hashed: messages of ranks that do not agree never meet, since a message
            that is longer than its receiver expects may overwrite memory (Open MPI 5 between processes of one machine).
        operation: a number that tells operations under way from each other, below ``2 ** OPERATION_BITS``.
        lane: below ``2 ** LANE_BITS``.
    """
    return (signature << OPERATION_BITS | operation) << LANE_BITS | lane


def disagree(expected: int, got: int, users: Set[int] = frozenset()) -> bool:
    """Whether two tags are of one operation, called by ranks that do not agree about it.

    Args:
        expected, got: the tags.
        users: see `Communicator.users`.
    """
    signatures = LANE_BITS + OPERATION_BITS
    same_operation = (expected ^ got) >> LANE_BITS & (1 << OPERATION_BITS) - 1 == 0
    return same_operation and expected >> signatures != got >> signatures and got >> signatures not in users


def disagreement(source: int) -> MismatchError:
    """What is raised where rank ``source`` sent something of the same operation, but with another signature."""
    return MismatchError(
        "receive",
        where=f"from rank {source} of this communicator",
        expected="a message of the same collective, size, dtype, op and algorithm",
        got="one that differs in some of them",
        remedy="call collectives alike, and in the same order, on all ranks",
    )


class Request(Protocol):
    """A message under way."""

    def test(self) -> bool:
        """Whether it is complete; never blocks."""
        ...

    def wait(self) -> None:
        """Block until it is complete; Ctrl-C ends the wait."""
        ...


class Messages(Protocol):
    """What algorithms of collectives need: messages between some ranks. Arrays are contiguous."""

    rank: int
    size: int

    def isend(self, x: Array, dest: int, tag: int = 0) -> Request:
        """Send ``x`` to ``dest``; ``x`` must not change before the request is complete."""
        ...

    def irecv(self, x: Array, source: int, tag: int = 0) -> Request:
        """Receive into ``x`` from ``source``, which must have sent as many bytes.

        Waiting raises MismatchError where it sent something else of this operation: see `make_tag`.
        """
        ...


class Communicator(Messages, Protocol):
    """A group of ranks that exchange messages.

    Arrays are NumPy's; where `cuda_aware.agreed` says so `isend` and `irecv` take CuPy's, too. No work on the GPU may
    then still write to what is sent, or use what is to be received into, and what comes is there when the request is
    complete.
    """

    signatures: int
    """How many different signatures its tags can carry."""
    lost: set[int]
    """Ranks of which the library has told that they have died; always empty where it ends the job instead."""
    users: set[int]
    """Signatures of those who share it, each with operations of its own under way; empty where there is one user. A
    message of another one's is not taken for one of an operation that its sender has called differently."""

    def barrier(self) -> None:
        """Block until every rank has called it."""
        ...

    def isend_whole(self, x: np.ndarray, dest: int, tag: int) -> Request:
        """Send ``x``, dtype uint8, to ``dest`` in one message, as `irecv_up_to` receives it."""
        ...

    def irecv_up_to(self, x: np.ndarray, source: int, tag: int) -> Request:
        """Receive into ``x``, dtype uint8, from ``source``, which may have sent fewer bytes."""
        ...

    def swap(self, x: np.ndarray, received: np.ndarray, peer: int, tag: int) -> None:
        """Send ``x`` to ``peer``, which calls it as well, and receive at most ``received`` from it; dtype uint8."""
        ...

    def takes_note(self, error: Exception) -> bool:
        """Whether an error of the library's tells that ranks have died; they are among the `lost` then."""
        ...

    def irecv_any(self, tag: int) -> tuple[int, np.ndarray, Request] | None:
        """Begin to receive the next message of a tag, whoever has sent it; None where none has come; never blocks.

        Returns:
            Its sender, where its bytes go (dtype uint8), and the request. One rank's messages come in their order.
        """
        ...

    def native_allreduce(self, x: np.ndarray, op: str) -> None:
        """Reduce ``x`` in place over all ranks with the library's own collective; every rank must call."""
        ...

    def native_iallreduce(self, x: np.ndarray, op: str) -> Request:
        """Start the library's own allreduce of ``x`` in place; all ranks must start theirs in one order.

        No mean, nothing of 16 bits and no integers of 8; whether a NaN wins a minimum is the library's affair.
        """
        ...

    def native_reduce_scatter(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce ``x`` over all ranks, rank r's part of it (see `split`) into its ``out``; every rank must call."""
        ...

    def native_reduce(self, x: np.ndarray, op: str, root: int) -> None:
        """Reduce ``x`` over all ranks, in place on ``root`` and nowhere else; every rank must call."""
        ...

    def native_allgather(self, out: np.ndarray) -> None:
        """Complete ``out``, in which every rank has written its part (see `split`); every rank must call."""
        ...

    def native_broadcast(self, x: np.ndarray, root: int) -> None:
        """Overwrite ``x`` on all ranks with that of ``root``; every rank must call."""
        ...

    def duplicate(self) -> Communicator:
        """The same ranks, whose messages never meet those of this communicator; every rank must call."""
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


def exchange_of(comm: Communicator) -> Callable[[Any], list[Any]]:
    """Return ``comm.allgather_json`` as it is now, to be wrapped by another one; it does not keep ``comm`` alive."""
    own = vars(comm).get("allgather_json")
    return own or type(comm).allgather_json.__get__(weakref.proxy(comm))  # type: ignore[no-any-return]


def join_parts(x: np.ndarray, comm: Communicator) -> None:
    """Complete ``x``, contiguous, in place, of which each rank has written other elements and left the rest zero.

    Every rank must call. To the bit: taken for whole numbers, of which all but one are 0, they have an exact sum.
    """
    comm.native_allreduce(x.view(f"u{x.dtype.itemsize}"), "sum")


def bounds(count: int, n: int) -> list[int]:
    """Where ``n`` nearly equal parts of ``count`` elements begin, and where the last ends: ``n + 1`` numbers."""
    return [count * part // n for part in range(n + 1)]


def split(flat: Array, n: int) -> list[Array]:
    """``n`` nearly equal parts of ``flat``, shape ``(count,)``: views."""
    ends = bounds(flat.size, n)
    return [flat[first:last] for first, last in itertools.pairwise(ends)]
