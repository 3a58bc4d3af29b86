"""The protocol of servers: placement of keys, messages, and values in shared memory.

- `Placement` depends only on the order in which keys are made. A small key is kept by the server with the fewest bytes.
  A large key is split into equal parts, one for each server, to balance their load (Li et al., "Scaling distributed
  machine learning with the parameter server", 2014, section 4.2, which places by hashes, less evenly).
- `Message`: a header of fixed length, little-endian, then the bytes of an array, codes or text. Messages are checked
  before use, and nothing is unpickled. A payload longer than a message follows in pieces: on TCP, two long messages in
  opposite directions on one link would block each other's rendezvous.
- `ShmValue`: a part of a key in a node's memory, which every rank there changes under a lock. A counter is odd during a
  change: the kernel frees the lock of a rank that dies, and the next rank sees that the value is incomplete.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ..comm.communicator import bounds
from ..comm.shared_memory import NodeLocks, NodeMemory
from ..comm.tasks import MESSAGE_NBYTES, segments
from ..errors import HpcdpError, MismatchError
from ..optim import Optimizer
from .arguments import STORABLE
from .updaters import apply_rule, new_state

SPLIT_NBYTES = 4 << 20
"""Least bytes of a key that is split: for smaller ones, ordering operations among servers costs more than it saves."""

MOST_NBYTES = 512 << 20
"""Most bytes of a part, so that 32 bits count the bytes of its message."""


class ValuePart(NamedTuple):
    """The elements ``first`` (included) to ``last`` (excluded) of a flat key, and their server."""

    server: int
    first: int
    last: int


class Placement:
    """The assignment of keys to servers, in the order in which keys are made.

    Args:
        servers: ranks of the servers.
        splits: whether large keys are split; on one node they are not, because all ranks share their memory.
    """

    def __init__(self, servers: Sequence[int], splits: bool) -> None:
        self._servers, self._splits = list(servers), splits
        self.nbytes = dict.fromkeys(servers, 0)
        """Bytes that each server keeps."""

    def place(self, count: int, itemsize: int, width: int = 1) -> list[ValuePart]:
        """Return the parts of the next key in order, at least one, split between rows of ``width`` elements."""
        num_parts = -(-count * itemsize // MOST_NBYTES) or 1
        if self._splits and count * itemsize >= SPLIT_NBYTES:
            num_parts = -(-num_parts // len(self._servers)) * len(self._servers)
        num_rows = count // width
        ends = [width * end for end in bounds(num_rows, min(num_parts, max(num_rows, 1)))]
        parts = []
        for first, last in itertools.pairwise(ends):
            server = min(self._servers, key=self.nbytes.__getitem__)
            self.nbytes[server] += (last - first) * itemsize
            parts.append(ValuePart(server, first, last))
        return parts


VERSION = 1
_HEADER = struct.Struct("<4sBBBBHHIQqqdIQ4x")
HEADER_NBYTES = _HEADER.size
_MAGIC = b"hkvs"
DTYPES = STORABLE
"""Dtypes of payloads; text and codes are uint8."""


NO_STATE = 2**32 - 1
"""`Message.which` of a message about the number of updates alone."""
VALUE = 2**32 - 2
"""`Message.which` of a message that writes the value."""


class MessageKind(IntEnum):
    """A kind of request or answer."""

    PUSH = 1
    PULL = 2
    PUSHPULL = 3
    TICKET = 4
    TAKE = 5
    READ_STATE = 6
    WRITE_STATE = 7
    CLOCK = 8
    GONE = 9
    COMMAND = 10
    DONE = 11
    """The answer to a request that was executed."""
    FAILED = 12
    """The answer to a request that failed, with a text that gives the reason."""
    SCHEDULE = 13
    """A request that sets the sender's learning rate schedule, as JSON."""
    HELD = 14
    """An answer to a push before the final one: the workers for which it waits."""
    LEAVE = 15
    """The sender sends no more requests for a store, whose keys are dropped after all workers have left."""
    PASS = 16
    """The sender skips a push of a key, and counts it for the staleness bound."""


@dataclass
class Message:
    """A message between a worker and a server."""

    kind: MessageKind
    store: int = 0
    key: int = 0
    """Number of the key, in the order of `init`."""
    part: int = 0
    request: int = 0
    """Number that the sender gives to a request, and that its answer repeats."""
    ticket: int = -1
    """Position among the operations on a key of several parts; -1 for a key of one part."""
    number: int = 0
    """Version, or another number that depends on ``kind``."""
    rate: float = float("nan")
    """Learning rate of a push, NaN for a schedule's; in the answer to a push, the seconds that it waited."""
    which: int = 0
    """Number of an optimizer state, in the order of their names."""
    coded: bool = False
    """True if ``payload`` holds a codec's codes."""
    payload: np.ndarray | None = None
    """A contiguous array of one of `DTYPES`."""

    def encode(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the message as bytes, dtype uint8, and the pieces that follow it, views of a long payload."""
        body = np.empty(0, np.uint8) if self.payload is None else self.payload
        data = body.reshape(-1).view(np.uint8)
        follows = HEADER_NBYTES + data.size > MESSAGE_NBYTES
        message = np.empty(HEADER_NBYTES + (0 if follows else data.size), np.uint8)
        _HEADER.pack_into(
            message.data, 0, _MAGIC, VERSION, self.kind, DTYPES.index(body.dtype), self.coded, self.store, self.part,
            self.key, self.request, self.ticket, self.number, self.rate, self.which, data.size if follows else 0,
        )  # fmt: skip
        if follows:
            return message, pieces(data)
        message[HEADER_NBYTES:] = data
        return message, []

    def text(self) -> str:
        """Return the payload as text."""
        return "" if self.payload is None else self.payload.tobytes().decode(errors="replace")

    @classmethod
    def of_text(cls, kind: MessageKind, text: str, **fields: int) -> Message:
        """Return a message with text; halves of surrogate pairs, as in some file names, are escaped."""
        return cls(kind, payload=np.frombuffer(text.encode(errors="backslashreplace"), np.uint8), **fields)  # type: ignore[arg-type]


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """Return views of a long payload's bytes in sending order."""
    return segments(data, MESSAGE_NBYTES)


def following_nbytes(message: np.ndarray) -> int:
    """Return the number of bytes that follow a message in `pieces`; 0 for none, and for an invalid message."""
    if message.size != HEADER_NBYTES or bytes(message[:4]) != _MAGIC:
        return 0
    nbytes: int = _HEADER.unpack_from(message.data)[-1]
    return nbytes if MESSAGE_NBYTES - HEADER_NBYTES < nbytes <= MOST_NBYTES else 0


def decode(message: np.ndarray, rest: np.ndarray | None = None) -> Message:
    """Decode a message from its bytes, dtype uint8, and those that followed; the payload is a view of them.

    Raises:
        MismatchError: the bytes are not those of `Message.encode` in this version.
    """
    if message.size < HEADER_NBYTES:
        raise MismatchError(
            "key-value store message", expected=f"{HEADER_NBYTES} bytes or more", got=f"{message.size} bytes"
        )
    magic, version, kind, dtype, coded, store, part, *fields, follow = _HEADER.unpack_from(message.data)
    if magic != _MAGIC or version != VERSION:
        got = f"{bytes(magic)!r}, version {version}"
        raise MismatchError("key-value store message", expected=f"{_MAGIC!r}, version {VERSION}", got=got)
    if kind not in set(MessageKind) or dtype >= len(DTYPES) or coded > 1:
        got = f"kind {kind}, dtype {dtype}, coded {coded}"
        raise MismatchError("key-value store message", expected="a known kind and dtype", got=got)
    body = message[HEADER_NBYTES:] if rest is None else rest
    if follow != (0 if rest is None else rest.size):
        expected, got = f"{0 if rest is None else rest.size} following bytes", f"a length of {follow}"
        raise MismatchError("key-value store message", expected=expected, got=got)
    if body.size % DTYPES[dtype].itemsize:
        got = f"{body.size} bytes"
        raise MismatchError("key-value store message", expected=f"whole elements of {DTYPES[dtype]}", got=got)
    payload = np.frombuffer(body, DTYPES[dtype]) if body.size else np.empty(0, DTYPES[dtype])
    key, request, ticket, number, rate, which = fields
    return Message(MessageKind(kind), store, key, part, request, ticket, number, rate, which, bool(coded), payload)


_COUNT, _HOLDER, _STEPS, _TICKETS, _TURN, _NUMBERS = 0, 1, 2, 3, 4, 8
AWAY = np.iinfo(np.int64).max
"""Clock of a worker that is excluded from the staleness bound."""
BACK = -1
"""Clock number that restores the clock before `AWAY`."""

Change = Callable[[np.ndarray], object]
"""A function that changes a flat value in place."""


class ShmValue:
    """A part of a key in a node's shared memory; every rank of the node must make it, in the same order.

    Args:
        name: name of the key in errors.
        memory: shared memory of the node.
        locks: locks of the node.
        lock: number of this part's lock.
        count: number of elements.
        dtype: dtype of the key.
        num_workers: number of clocks.
    """

    def __init__(
        self, name: str, memory: NodeMemory, locks: NodeLocks, lock: int, count: int, dtype: np.dtype, num_workers: int
    ) -> None:
        self.name = name
        self.flat = memory.alloc((count,), dtype)
        """The value, shape ``(count,)``."""
        self.states: dict[str, np.ndarray] = {}
        """Optimizer states by name, shape ``(count,)``."""
        self.clocks = memory.alloc((num_workers,), np.int64)
        """Number of pushes of each worker, or `AWAY`."""
        self._clocks_before = memory.alloc((num_workers,), np.int64)
        self._numbers = memory.alloc((_NUMBERS,), np.int64)
        self._memory, self._locks, self._lock = memory, locks, lock

    @property
    def version(self) -> int:
        """Number of pushes that have taken effect."""
        return int(self._numbers[_COUNT]) // 2

    @property
    def steps(self) -> int:
        """Number of updates by the optimizer."""
        return int(self._numbers[_STEPS])

    @property
    def turn(self) -> int:
        """Ticket of the next operation."""
        return int(self._numbers[_TURN])

    def ticket(self) -> int:
        """Draw the next ticket, which orders the operations on a key of several parts in the same way on all parts."""
        with self._locks.hold(self._lock):
            self._numbers[_TICKETS] += 1
            return int(self._numbers[_TICKETS]) - 1

    def may_push(self, worker: int, staleness: int) -> bool:
        """Return whether a worker leads by at most ``staleness`` pushes, or was excluded."""
        clock = int(self.clocks[worker])
        return clock == AWAY or clock - int(self.clocks.min()) <= staleness

    def behind(self, worker: int, staleness: int) -> list[int]:
        """Return the workers that are more than ``staleness`` pushes behind a worker."""
        return np.flatnonzero(self.clocks < self.clocks[worker] - staleness).tolist()

    def tick(self, worker: int) -> None:
        """Count a push of a worker."""
        if self.clocks[worker] == AWAY:  # back again: continue from the slowest worker's clock
            others = self.clocks[self.clocks != AWAY]
            self.clocks[worker] = others.min() if others.size else 0
        self.clocks[worker] += 1

    def set_clock(self, worker: int, number: int) -> None:
        """Set a worker's clock to 0 or `AWAY`, or with `BACK` to its value before `AWAY`."""
        if number == BACK and self.clocks[worker] == AWAY:
            self.clocks[worker] = self._clocks_before[worker]
        elif number != BACK:
            if self.clocks[worker] != AWAY:
                self._clocks_before[worker] = self.clocks[worker]
            self.clocks[worker] = number

    def change(self, change: Change, rank: int, ticketed: bool = False) -> int:
        """Apply a push under the lock, and return the new version.

        Raises:
            HpcdpError: a rank died during an earlier change.
        """
        numbers = self._numbers
        with self._locks.hold(self._lock):
            try:
                self._check()
                numbers[_HOLDER] = rank
                numbers[_COUNT] += 1
                try:
                    change(self.flat)
                except BaseException:
                    numbers[_COUNT] -= 1
                    raise
                numbers[_COUNT] += 1
            finally:
                numbers[_TURN] += ticketed
            return int(numbers[_COUNT]) // 2

    def update(self, rule: Optimizer, received: np.ndarray, flat: np.ndarray) -> None:
        """Apply an optimizer's rule; to be called within `change`."""
        self._numbers[_STEPS] += 1
        try:
            apply_rule(rule, flat, received, self.states, int(self._numbers[_STEPS]))
        except BaseException:
            self._numbers[_STEPS] -= 1
            raise

    def read(self, take: Change, ticketed: bool = False) -> int:
        """Call ``take(flat)``, which only reads, under the shared lock, and return the version that it sees.

        Raises:
            HpcdpError: as `change`.
        """
        with self._locks.hold(self._lock, shared=not ticketed):
            try:
                self._check()
                take(self.flat)
                return int(self._numbers[_COUNT]) // 2
            finally:
                self._numbers[_TURN] += ticketed

    def assign(self, value: np.ndarray) -> None:
        """Set the value without a new version."""
        with self._locks.hold(self._lock):
            self.flat[:] = value

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set an optimizer state."""
        with self._locks.hold(self._lock):
            self.states[name][:] = value

    def set_steps(self, steps: int) -> None:
        """Set the number of updates."""
        with self._locks.hold(self._lock):
            self._numbers[_STEPS] = steps

    def keep_states_of(self, rule: Optimizer) -> None:
        """Allocate a rule's state, which is initially zero; every rank of the node must call."""
        self._numbers[_STEPS] = 0
        like = new_state(rule, self.flat[:0])
        self.states = {name: self._memory.alloc((self.flat.size,), like[name].dtype) for name in rule.state_names()}

    def _check(self) -> None:
        if self._numbers[_COUNT] % 2:
            raise HpcdpError(
                "key-value store", where=self.name, expected="a complete value",
                got=f"a partly changed value: rank {self._numbers[_HOLDER]} died during its push",
                remedy="start again from the last checkpoint",
            )  # fmt: skip
